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
    reader = reader_of(model)
    vocab = getattr(model.config, "vocab_size", None)
    check_windows(tokens, reader.context, least=1, vocab=vocab)
    if block is None:
        width = getattr(model.config, "d_model", None) or model.config.hidden_size
        block = max(1, BLOCK_BYTES // (8 * reader.n_layer * tokens.shape[1] * width))

    def run(some, mask, layers):
        def keep(layer, *factors):
            factors = [x.float() for x in factors]
            if mask is not None:
                factors = [x * mask[:, None, :, None] for x in factors]
            layers.append(factors)

        reader.run_factors(some, mask, keep)

    for documents, layers in run_in_blocks(model, tokens, run, attention_mask, block, device):
        for layer, factors in enumerate(layers, start=1):
            for factor in factors:
                check_finite(factor, layer, first=documents.start)
            yield layer, documents, *factors


def interaction_ranks(
    model, tokens: torch.Tensor, *, share: float = 0.9, progress: bool = False, **options
) -> xr.Dataset:
    """Energies and ranks of routing and filtering in every head, on every text.

    Parameters
    ----------
    model, tokens, options
        As in :func:`iter_interactions`.
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
        On (rank_by, layer, head, snapshot): ``routing_rank``, ``filtering_rank``, and
        ``cyclic_rank``, that of the routing without its potential. NaN where a part is zero.

    Raises
    ------
    InputError
        As :func:`iter_interactions`; layers with different numbers of heads.
    """
    from tqdm import tqdm

    reader = reader_of(model)
    if reader.n_head is None:
        raise InputError("the layers have different numbers of heads, which no array can hold")
    shape = (reader.n_layer, reader.n_head, len(tokens))
    dims = ("layer", "head", "snapshot")
    single = {k: np.full(shape, np.nan) for k in ("routing", "filtering", "cyclic")}
    ranks = {k: np.full((len(METHODS), *shape), np.nan) for k in single}
    with tqdm(total=shape[0] * shape[2], desc="interactions", disable=not progress) as bar:
        for layer, documents, query, key in iter_interactions(model, tokens, **options):
            of_parts = _parts(query, key)
            for name, values in of_parts.items():
                energy = values.square().sum(-1)
                at = (layer - 1, slice(None), documents)
                single[name][at] = energy.T.cpu().numpy()
                for i, method in enumerate(METHODS):
                    rank = singular_rank(values, method, share)
                    rank = torch.where(energy > 0, rank, np.nan)
                    ranks[name][i][at] = rank.T.cpu().numpy()
            bar.update(len(query))
    routing, filtering = single["routing"], single["filtering"]
    total = routing + filtering
    with np.errstate(divide="ignore", invalid="ignore"):
        data = {
            "routing_energy": (dims, routing),
            "filtering_energy": (dims, filtering),
            "routing_share": (dims, np.where(total > 0, routing / total, np.nan)),
            "potential_share": (
                dims,
                1 - single["cyclic"] / np.where(routing > 0, routing, np.nan),
            ),
        }
    data |= {f"{k}_rank": (("rank_by", *dims), v) for k, v in ranks.items()}
    coords = {
        "rank_by": list(METHODS),
        "layer": np.arange(1, shape[0] + 1),
        "head": np.arange(1, shape[1] + 1),
    }
    return xr.Dataset(data, coords, {"share": share})


def _parts(query: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """Singular values ``(b, H, R)`` of the routing, of the filtering, and of the cyclic routing.

    The cyclic part of Q K^T - K Q^T is that of queries and keys less their means over tokens.
    """
    query, key = query.double(), key.double()
    skew, symmetric = small_parts(query, key)
    query, key = (x - x.mean(-2, keepdim=True) for x in (query, key))
    return {
        "routing": torch.linalg.svdvals(skew),
        "filtering": torch.linalg.eigvalsh(symmetric).abs(),
        "cyclic": torch.linalg.svdvals(small_parts(query, key)[0]),
    }
