"""Interactions Q K^T of a model on texts: their factors, as the model computes them, and ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr

from .capture import reader_of, run_in_blocks
from .ensemble import check_finite
from .errors import InputError, check_windows
from .routing import METHODS, singular_rank, small_parts

BLOCK_BYTES = 64 * 2**20


def iter_interactions(
    model,
    tokens: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    block: int | None = None,
    device: str | None = None,
) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
    """Stream the factors of interactions, one layer and one block of documents at a time.

    Their product ``query @ key.mT`` is the model's logits before the mask: scale, biases and rotary
    positions are in it, grouped keys stand once for each head that uses them. No ``(N, N)`` matrix
    is made.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Causal or bidirectional; put into evaluation mode for the time being.
    tokens : torch.Tensor
        Document windows ``(n, T)``, whole numbers.
    attention_mask : torch.Tensor, optional
        ``(n, T)``, 0 for padding (transformers models): queries and keys of padding are zeros.
    block : int, optional
        Documents a block; by default so many that the factors of all layers take about 64 MiB.
    device : str, optional
        Where to run the model; by default where it is.

    Yields
    ------
    (layer, documents, query, key)
        `layer` counts from 1; ``(b, H, T, r)`` with r the head size (twice that for S-D
        attention, whose S is this product), float32, on the device that the model ran on.

    Raises
    ------
    InputError
        No windows, windows longer than the context or of another vocabulary, a model whose
        attention cannot be captured, or a value that is not finite (naming layer and snapshot).
    """
    for layer, documents, query, key, damping in iter_heads(
        model, tokens, attention_mask, block, device
    ):
        if damping is not None:
            query, key = torch.cat([query, -key], -1), torch.cat([key, query], -1)
        yield layer, documents, query, key


def iter_heads(model, tokens, attention_mask=None, block=None, device=None) -> Iterator[tuple]:
    """(layer, documents, query, key, damping), the last three as the readers of `capture` say."""
    reader = reader_of(model)
    vocab = getattr(model.config, "vocab_size", None)
    check_windows(tokens, reader.context, least=1, vocab=vocab)
    if block is None:
        width = getattr(model.config, "d_model", None) or model.config.hidden_size
        block = max(1, BLOCK_BYTES // (8 * reader.n_layer * tokens.shape[1] * width))

    def run(some, mask, layers):
        def keep(layer, query, key, damping):
            heads = [query.float(), key.float()]
            if mask is not None:
                heads = [x * mask[:, None, :, None] for x in heads]
            layers.append((*heads, damping))

        reader.run_heads(some, mask, keep)

    for documents, layers in run_in_blocks(model, tokens, run, attention_mask, block, device):
        for layer, heads in enumerate(layers, start=1):
            for x in heads:
                if x is not None:
                    check_finite(x, layer, first=documents.start)
            yield layer, documents, *heads


def interaction_ranks(
    model,
    tokens: torch.Tensor,
    *,
    reference: torch.Tensor | None = None,
    share: float = 0.9,
    progress: bool = False,
    **options,
) -> xr.Dataset:
    """Energies and ranks of routing and filtering in every head, on every text.

    Parameters
    ----------
    model, tokens, options
        As in :func:`iter_interactions`. Of S-D attention routing is S and filtering -D.
    reference : torch.Tensor, optional
        ``(n, T)`` windows, other texts: adds ``mean_share``, the part of the routing energy that
        their mean query and mean key make (in our models, the mean of the residual stream).
    share : float
        For the energy rank, as in :func:`attnlib.singular_rank`.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.Dataset
        On (layer, head, snapshot), float64: ``routing_energy`` and ``filtering_energy``, the sums
        of squares of the two parts; ``routing_share``, the first over both; ``potential_share``,
        the part of the routing energy in differences of a potential u_i - u_j
        (:func:`attnlib.hodge`).
        On (rank_by, layer, head, snapshot): ``routing_rank``, ``filtering_rank``; ``cyclic_rank``,
        that of the routing without its potential; ``gauged_rank``, that of the routing without the
        mean of each row, which a softmax over keys does not see. NaN where a part is zero.

    Raises
    ------
    InputError
        As :func:`iter_interactions`; layers with different numbers of heads.
    """
    from tqdm import tqdm

    reader = reader_of(model)
    if reader.n_head is None:
        raise InputError("the layers have different numbers of heads, which no array can hold")
    means = {} if reference is None else _mean_heads(model, reference, options.get("device"), False)
    mask = options.get("attention_mask")
    shape = (reader.n_layer, reader.n_head, len(tokens))
    dims = ("layer", "head", "snapshot")
    energies = {k: np.full(shape, np.nan) for k in ("routing", "filtering", "cyclic", "beside")}
    parts = ("routing", "filtering", "cyclic", "gauged")
    ranks = {k: np.full((len(METHODS), *shape), np.nan) for k in parts}
    with tqdm(total=shape[0] * shape[2], desc="interactions", disable=not progress) as bar:
        for layer, documents, query, key, damping in iter_heads(model, tokens, **options):
            at = (layer - 1, slice(None), documents)
            query, key = query.double(), key.double()
            real = None
            if mask is not None:  # (b, 1, T, 1); of padding, queries and keys are zeros already
                real = mask[documents].to(query)[:, None, :, None]
            if damping is not None:
                query = 2 * query  # S is q k^T - k q^T, twice the skew part of q k^T
            for name, values in _parts(query, key, damping, real).items():
                energy = values.square().sum(-1)
                if name in energies:
                    energies[name][at] = energy.T.cpu().numpy()
                for i, method in enumerate(METHODS):
                    rank = singular_rank(values, method, share)
                    rank = torch.where(energy > 0, rank, np.nan)
                    ranks[name][i][at] = rank.T.cpu().numpy()
            if reference is not None:
                mean_query, mean_key = means[layer]
                twice = 1 if damping is None else 2
                left, right = query - twice * mean_query, key - mean_key
                if real is not None:
                    left, right = left * real, right * real
                beside = small_parts(left, right)[0]
                energies["beside"][at] = beside.square().sum((-2, -1)).T.cpu().numpy()
            bar.update(len(query))
    routing, filtering = energies["routing"], energies["filtering"]
    total = np.where(routing + filtering > 0, routing + filtering, np.nan)
    of_routing = np.where(routing > 0, routing, np.nan)
    data = {
        "routing_energy": routing,
        "filtering_energy": filtering,
        "routing_share": routing / total,
        "potential_share": 1 - energies["cyclic"] / of_routing,
    }
    if reference is not None:
        data["mean_share"] = 1 - energies["beside"] / of_routing
    data = {k: (dims, v) for k, v in data.items()}
    data |= {f"{k}_rank": (("rank_by", *dims), v) for k, v in ranks.items()}
    coords = {
        "rank_by": list(METHODS),
        "layer": np.arange(1, shape[0] + 1),
        "head": np.arange(1, shape[1] + 1),
    }
    return xr.Dataset(data, coords, {"share": share})


def _parts(query: torch.Tensor, key: torch.Tensor, damping, real) -> dict[str, torch.Tensor]:
    """Singular values ``(b, H, R)`` of the parts of Q K^T; the filtering is -D if there is a D.

    The cyclic part of Q K^T - K Q^T is that of queries and keys less their means over tokens, and
    without the mean of each row it is [Q, -K] [K', Q']^T with K' and Q' less theirs. `real`, 1 for
    tokens and 0 for padding, whose queries and keys are 0 and stay so.
    """
    skew, symmetric = small_parts(query, key)
    if real is None:
        mid_query, mid_key = (x - x.mean(-2, keepdim=True) for x in (query, key))
    else:
        n = real.sum(-2, keepdim=True).clamp(min=1)
        mid_query, mid_key = ((x - x.sum(-2, keepdim=True) / n) * real for x in (query, key))
    left, right = (
        torch.linalg.qr(torch.cat(pair, -1), mode="r").R
        for pair in ((query / 2, -key / 2), (mid_key, mid_query))
    )
    return {
        "routing": torch.linalg.svdvals(skew),
        "filtering": (
            torch.linalg.eigvalsh(symmetric).abs() if damping is None else damping.double()
        ),
        "cyclic": torch.linalg.svdvals(small_parts(mid_query, mid_key)[0]),
        "gauged": torch.linalg.svdvals(left @ right.mT),
    }


def position_shares(model, tokens: torch.Tensor, *, device: str | None = None) -> xr.Dataset:
    """What positions alone, and what the text alone, put into routing and filtering.

    A query is the mean over texts of the queries at its position, and what its text adds; so is a
    key. Their product has a part of positions alone, one of texts alone, and a mixed one.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
    tokens : torch.Tensor
        ``(n, T)`` windows of different texts, at least 4.
    device : str, optional

    Returns
    -------
    xarray.Dataset
        On (part, layer, head), `part` being routing and filtering: ``position``, ``content`` and
        ``mixed``, which add up to 1, of the mean over texts of the sum of squares. Free of the bias
        that a mean over few texts has: the first is the product of two halves of the texts (so it
        may come out below 0), the second is scaled by (n / (n - 1))^2. NaN for the filtering of S-D
        attention, which has no keys.

    Raises
    ------
    InputError
        As :func:`interaction_ranks`; fewer than 4 windows.
    """
    reader = reader_of(model)
    if reader.n_head is None:
        raise InputError("the layers have different numbers of heads, which no array can hold")
    check_windows(tokens, least=4)
    n, half = len(tokens), len(tokens) // 2
    halves = [_mean_heads(model, x, device, True) for x in (tokens[:half], tokens[half:])]
    means = {
        layer: [
            (half * a + (n - half) * b) / n for a, b in zip(first, halves[1][layer], strict=True)
        ]
        for layer, first in halves[0].items()
    }
    shape = (2, reader.n_layer, reader.n_head)
    total, content, position = (np.zeros(shape) for _ in range(3))

    for layer, _, query, key, damping in iter_heads(model, tokens, device=device):
        mean, at = means[layer], (slice(None), layer - 1)
        heads = [x.double() for x in (query, key)]
        rest = [x - m for x, m in zip(heads, mean, strict=True)]
        total[at] += _products(*heads, *heads).sum(1).cpu().numpy() / n
        content[at] += _products(*rest, *rest).sum(1).cpu().numpy() * n / (n - 1) ** 2
        if damping is not None:
            total[1, layer - 1] = np.nan
    for layer in means:
        both = _products(*halves[0][layer], *halves[1][layer])
        position[:, layer - 1] = both.cpu().numpy()
    total = np.where(total > 0, total, np.nan)
    dims = ("part", "layer", "head")
    data = {"position": position / total, "content": content / total}
    data["mixed"] = 1 - data["position"] - data["content"]
    coords = {
        "part": ["routing", "filtering"],
        "layer": np.arange(1, shape[1] + 1),
        "head": np.arange(1, shape[2] + 1),
    }
    return xr.Dataset({k: (dims, v) for k, v in data.items()}, coords)


def _products(query, key, query_, key_) -> torch.Tensor:
    """Inner products of the routing, and of the filtering, of two interactions: ``(2, ...)``.

    From <M, M'> and <M, M'^T>, which the factors give without either matrix.
    """
    straight = ((query.mT @ query_) * (key.mT @ key_)).sum((-2, -1))
    crossed = ((key.mT @ query_) * (query.mT @ key_)).sum((-2, -1))
    return torch.stack([straight - crossed, straight + crossed]) / 2


def _mean_heads(model, tokens, device, by_position: bool) -> dict[int, tuple]:
    """Mean query and mean key over some windows by layer, float64: ``(H, T, r)``, or ``(H, 1, r)``.

    At each position, or over all of them.
    """
    sums: dict[int, list] = {}
    for layer, _, *heads, _ in iter_heads(model, tokens, device=device):
        new = [x.double().sum(0) for x in heads]
        new = new if by_position else [x.mean(-2, keepdim=True) for x in new]
        sums[layer] = [a + b for a, b in zip(sums.get(layer, [0, 0]), new, strict=True)]
    return {layer: tuple(x / len(tokens) for x in both) for layer, both in sums.items()}
