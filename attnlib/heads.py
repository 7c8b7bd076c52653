"""What single heads are worth: silenced at run time, pruned greedily, compared as fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import xarray as xr

from .ensemble import as_fields, check_finite
from .errors import InputError, check_whole, check_windows
from .evaluation import window_losses
from .gpt import GPT

BLOCK_BYTES = 64 * 2**20


@contextmanager
def without_heads(
    model: GPT,
    heads: Mapping[int, Sequence[int]],
    replace: str = "zero",
    reference: torch.Tensor | None = None,
) -> Iterator[GPT]:
    """Silence heads of a model for as long as the context lasts.

    What a head hands to the output projection of its layer is replaced. No weight is touched, and
    all is as before afterwards, also after an exception. Yields the model. Contexts may be nested.

    Parameters
    ----------
    model : GPT
        On any device.
    heads : mapping of int to sequence of int
        Layer to heads, both from 1.
    replace : {"zero", "mean"}
        By zeros, or by the head's mean output at each position over `reference`, which keeps what
        the head adds in every document alike.
    reference : torch.Tensor, optional
        ``(n, T + 1)`` windows for ``"mean"``; the model may then see up to T tokens.

    Raises
    ------
    InputError
        Another kind of model; a layer or head that is not there, or given twice; ``"mean"``
        without windows to take it over, or with too short ones.

    References
    ----------
    Michel, Levy & Neubig 2019 (arXiv 1905.10650): heads masked at test time.
    """
    counts = _head_counts(model)
    if not isinstance(heads, Mapping):
        raise InputError(f"heads are given by layer, as in {{1: [2, 3]}}, not as {heads!r}")
    layers = _check_numbers(list(heads), len(counts), "layer", "the model")
    silent = {
        layer: _check_numbers(numbers, counts[layer - 1], "head", f"layer {layer}")
        for layer, numbers in zip(layers, heads.values(), strict=True)
    }
    with _silenced(model, silent, _fills(model, silent, replace, reference)):
        yield model


def _head_counts(model) -> tuple[int, ...]:
    if not isinstance(model, GPT):
        raise InputError(f"heads can be silenced in an attnlib.GPT, not in {type(model).__name__}")
    return model.config.per_layer("n_head")


def _check_numbers(numbers, largest: int, what: str, owner: str) -> list[int]:
    numbers = np.ravel(numbers).tolist()
    for number in numbers:
        if type(number) is not int or not 1 <= number <= largest:
            raise InputError(f"{owner} has {what}s 1 to {largest}, no {what} {number!r}")
    if len(set(numbers)) < len(numbers):
        raise InputError(f"a {what} of {owner} is given twice: {numbers}")
    return numbers


@contextmanager
def _hooked(model, hooks: dict):
    """Hooks by layer before the output projection, whose input is ``(B, T, H D)``."""
    with ExitStack() as stack:
        for layer, hook in hooks.items():
            proj = model.blocks[layer - 1].attention.proj
            stack.callback(proj.register_forward_pre_hook(hook).remove)
        yield


def _silenced(model, heads: dict[int, list[int]], fills: dict):
    def silence(layer, numbers):
        attention, fill = model.blocks[layer - 1].attention, fills[layer]
        silent = torch.zeros(attention.n_head, attention.head_size, dtype=torch.bool)
        silent[[n - 1 for n in numbers]] = True
        columns = silent.flatten().to(attention.proj.weight.device)

        def hook(module, inputs):
            out = inputs[0]
            if fill is None:
                return (out.masked_fill(columns, 0.0),)
            if out.shape[1] > len(fill):
                raise InputError(f"the reference has {len(fill)} positions, fewer than this window")
            return (torch.where(columns, fill[: out.shape[1]].to(out.dtype), out),)

        return hook

    return _hooked(model, {layer: silence(layer, some) for layer, some in heads.items() if some})


def _fills(model, layers, replace: str, reference) -> dict:
    """What takes the place of the outputs of each layer: None for zeros, else ``(T, H D)``."""
    if replace not in ("zero", "mean"):
        raise InputError(f"replace is 'zero' or 'mean', not {replace!r}")
    if replace == "zero":
        return dict.fromkeys(layers)
    if reference is None:
        raise InputError("replace='mean' needs reference windows to take the mean over")
    check_windows(reference, model.config.context, extra=1, least=1)
    sums = dict.fromkeys(layers, 0.0)

    def adder(layer):
        def hook(module, inputs):
            sums[layer] = sums[layer] + inputs[0].float().sum(0)

        return hook

    with _hooked(model, {layer: adder(layer) for layer in layers}):
        window_losses(model, reference, precision="float32")
    return {layer: total / len(reference) for layer, total in sums.items()}


def pruning_losses(
    model: GPT, tokens: torch.Tensor, *, replace: str = "zero", precision: str = "float32"
) -> xr.DataArray:
    """Increase of the loss when one head is silenced, for every head and window.

    Parameters
    ----------
    model : GPT
        Evaluated in evaluation mode, on its own device, and put back as it was.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows of token ids, at least 3.
    replace : {"zero", "mean"}
        As in :func:`without_heads`; the mean is over these windows.
    precision : {"float32", "auto", "bfloat16"}
        Float32 by default: bfloat16 hides what a single head matters.

    Returns
    -------
    xarray.DataArray
        ``(layer, head, window)``, float64, nats per token, on the CPU: the window's loss less that
        of the whole model, so paired. NaN where a layer has fewer heads than another.

    Raises
    ------
    InputError
        Another kind of model, fewer than 3 windows, or windows longer than the context allows.
    """
    counts, harm = _harm(model, tokens, 3, replace, precision)
    increase = np.full((len(counts), max(counts), len(tokens)), np.nan)
    for row, (layer, n) in zip(increase, enumerate(counts, start=1), strict=True):
        row[:n] = [harm(layer, [head]) for head in range(1, n + 1)]
    coords = {"layer": np.arange(1, len(counts) + 1), "head": np.arange(1, max(counts) + 1)}
    return xr.DataArray(increase, coords, ("layer", "head", "window"), name="increase")


def pruning_curve(
    model: GPT, tokens: torch.Tensor, *, replace: str = "zero", precision: str = "float32"
) -> xr.Dataset:
    """Loss against the heads that one layer keeps, pruned greedily while the others stay whole.

    Of the heads left, the least harmful to lose goes next. It is chosen on every second window,
    and the curve is that of the windows between: where it was chosen it would look too good.

    Parameters
    ----------
    model, tokens, replace, precision
        As in :func:`pruning_losses`, with its errors; at least 6 windows.

    Returns
    -------
    xarray.Dataset
        ``increase`` (layer, kept, window), float64, nats per token, over the whole model; with
        `kept` 0 the attention adds nothing but the bias of its projection. ``removed`` (layer,
        kept): the head, from 1, whose silence led there; 0 at the start. For a layer with fewer
        heads than another both are 0 until `kept` comes down to what it has.
    """
    counts, harm = _harm(model, tokens, 6, replace, precision)
    choose, measure = slice(0, None, 2), slice(1, None, 2)
    increase = np.zeros((len(counts), max(counts) + 1, len(tokens) // 2))
    removed = np.zeros(increase.shape[:2], dtype=int)
    for layer, n in enumerate(counts, start=1):
        silent, left = [], list(range(1, n + 1))
        while left:
            harms = [harm(layer, [*silent, head], choose).mean() for head in left]
            silent.append(left.pop(int(np.argmin(harms))))
            kept = max(counts) - len(left)
            increase[layer - 1, kept] = harm(layer, silent, measure)
            removed[layer - 1, kept] = silent[-1]
    on = ("layer", "kept")
    data = {"increase": ((*on, "window"), increase), "removed": (on, removed)}
    coords = {"layer": np.arange(1, len(counts) + 1), "kept": np.arange(max(counts), -1, -1)}
    return xr.Dataset(data, coords)


def _harm(model, tokens, least: int, replace: str, precision: str):
    """Heads a layer, and the function of silent heads and some windows that gives the increase."""
    counts = _head_counts(model)
    check_windows(tokens, least=least)  # of fewer there is no standard error
    whole = window_losses(model, tokens, precision=precision).numpy()
    fills = _fills(model, range(1, len(counts) + 1), replace, tokens)

    def harm(layer, heads, some=slice(None)):
        with _silenced(model, {layer: heads}, fills):
            return window_losses(model, tokens[some], precision=precision).numpy() - whole[some]

    return counts, harm


def head_overlap(fields: xr.DataArray) -> xr.Dataset:
    """How alike the fluctuations of a layer's heads are, and how many distinct heads that makes.

    Parameters
    ----------
    fields : xarray.DataArray
        ``(layer, head, snapshot, query, key)``, from ``attention_fields(heads="all")``; at least 3
        snapshots. Read a layer and some snapshots at a time, in float64.

    Returns
    -------
    xarray.Dataset
        ``correlation`` ``(layer, head, head_)``: inner products of the fluctuations u_s(i, j),
        summed over snapshots and positions, over their norms. ``effective_heads`` (layer):
        participation ratio of its eigenvalues, 1 for copies of one head, H for orthogonal ones.
        ``energy`` (layer, head): mean over snapshots of the sum of u_s^2. A head that does not vary
        has correlation 0, with itself too, and does not count.

    Raises
    ------
    InputError
        Fields without heads, fewer than 3 snapshots, a value that is not finite (naming layer
        and snapshot), or a layer of which no head varies.
    """
    if not isinstance(fields, xr.DataArray) or "head" not in fields.dims:
        raise InputError("these fields have no heads: take attention_fields(..., heads='all')")
    fields = as_fields(fields)
    n_layer, n_head, n, t, _ = fields.shape
    if n < 3:
        raise InputError(f"{n} snapshot(s): an ensemble needs at least 3")
    layers, heads = fields["layer"].values, fields["head"].values
    step = max(1, BLOCK_BYTES // (8 * n_head * t * t))
    products = np.zeros((n_layer, n_head, n_head))
    for product, one, layer in zip(products, fields.values, layers, strict=True):
        # Less the first snapshot: no cancellation, and a constant head comes out as exactly 0.
        first, total = one[:, :1].astype(np.float64), np.zeros((n_head, t * t))
        for start in range(0, n, step):
            block = one[:, start : start + step] - first  # (H, n, T, T)
            check_finite(torch.from_numpy(block).transpose(0, 1), layer, start)
            total += block.sum(1).reshape(n_head, -1)
            product += block.reshape(n_head, -1) @ block.reshape(n_head, -1).T
        product -= total @ total.T / n
    energy = np.diagonal(products, axis1=1, axis2=2)
    if not energy.any(1).all():
        raise InputError(f"no head of layer {layers[~energy.any(1)][0]} varies between snapshots")
    norm = np.sqrt(energy[:, :, None] * energy[:, None])
    correlation = np.divide(products, norm, out=np.zeros_like(products), where=norm > 0)
    count = np.trace(correlation, axis1=1, axis2=2)
    data = {
        "correlation": (("layer", "head", "head_"), correlation),
        "effective_heads": ("layer", count**2 / np.square(correlation).sum((1, 2))),
        "energy": (("layer", "head"), energy / n),
    }
    return xr.Dataset(data, {"layer": layers, "head": heads, "head_": heads})


def share_heads(weights, total: int) -> tuple[int, ...]:
    """Share `total` heads among layers in proportion to weights ``(L,)``, at least one each.

    Whole parts first, the rest to the layers furthest below their share (the earlier of equals).
    """
    weights = np.asarray(weights, dtype=np.float64)
    check_whole("total", total)
    if weights.ndim != 1 or not len(weights) or not (np.isfinite(weights) & (weights > 0)).all():
        raise InputError(f"weights are one positive number a layer, not {weights}")
    if total < len(weights):
        raise InputError(f"{total} heads are too few for {len(weights)} layers")
    weights = weights / weights.max()
    share = total * weights / weights.sum()
    heads = np.maximum(1, np.floor(share)).astype(int)
    while heads.sum() != total:
        missing = np.round(share - heads, 9)  # rounding errors must not part equal layers
        if heads.sum() < total:
            heads[missing.argmax()] += 1
        else:
            heads[np.where(heads > 1, missing, np.inf).argmin()] -= 1
    return tuple(heads.tolist())
