"""Attention fields of a model: attention matrices over an ensemble of document windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr

from .capture import reader_of, run_in_blocks
from .ensemble import check_finite
from .errors import InputError, check_windows

BLOCK_BYTES = 256 * 2**20


def count_layers(model) -> int:
    """Number of attention layers of a model whose attention can be read."""
    return reader_of(model).n_layer


def _check_heads(reader, heads: str) -> None:
    if heads not in ("mean", "all"):
        raise InputError(f"heads is 'mean' or 'all', not {heads!r}")
    if heads == "all" and reader.n_head is None:
        raise InputError("the layers have different numbers of heads: take heads='mean'")


def iter_fields(
    model,
    tokens: torch.Tensor,
    heads: str = "mean",
    *,
    attention_mask: torch.Tensor | None = None,
    block: int | None = None,
    device: str | None = None,
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Stream attention fields, one layer and one block of documents at a time.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Causal or bidirectional; put into evaluation mode for the time being.
    tokens : torch.Tensor
        Document windows ``(N, T)``, whole numbers.
    heads : {"mean", "all"}
        Average over heads (as published), or keep them.
    attention_mask : torch.Tensor, optional
        ``(N, T)``, 0 for padding (transformers models). Rows of padded queries come out as zeros.
    block : int, optional
        Documents a block; by default so many that they take about 256 MiB at a time.
    device : str, optional
        Where to run the model; by default where it is.

    Yields
    ------
    (layer, documents, weights)
        `layer` counts from 1; `weights` is ``(n, T, T)`` or ``(n, H, T, T)``, float32, on the
        device that the model ran on.

    Raises
    ------
    InputError
        Fewer than 3 windows, windows longer than the context, a model whose attention cannot be
        captured, or a value that is not finite (naming layer and snapshot).
    """
    reader = reader_of(model)
    _check_heads(reader, heads)
    check_windows(tokens, reader.context, vocab=getattr(model.config, "vocab_size", None))
    if block is None:
        kept = reader.n_head if heads == "all" else 1
        # What is kept of all layers, or what a layer works with: logits and weights of each head.
        held = max(reader.n_layer * kept, 4 * reader.most_heads)
        block = max(1, BLOCK_BYTES // (4 * held * tokens.shape[1] ** 2))

    def run(some, mask, layers):
        def keep(layer, weights):
            weights = weights.float()
            if mask is not None:
                weights = weights * mask[:, None, :, None]
            layers.append(weights.mean(1) if heads == "mean" else weights)

        reader.run(some, mask, keep)

    for documents, layers in run_in_blocks(model, tokens, run, attention_mask, block, device):
        for layer, weights in enumerate(layers, start=1):
            check_finite(weights, layer, first=documents.start)
            yield layer, documents, weights


def attention_fields(
    model,
    tokens: torch.Tensor,
    heads: str = "mean",
    *,
    attention_mask: torch.Tensor | None = None,
    block: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> xr.DataArray:
    """Attention fields A_s(i, j) of every layer on every document window.

    Parameters
    ----------
    model, tokens, heads, attention_mask, block, device
        As in :func:`iter_fields`, which streams what this gathers.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.DataArray
        ``(layer, [head,] snapshot, query, key)``, float32, in main memory: 4 L N T^2 bytes
        (236 MB for 6 layers, 150 windows of 256 tokens). `layer` and `head` count from 1.

    References
    ----------
    Zeris 2026 (arXiv 2606.06573): A_s^(l)(i, j), averaged over heads.
    """
    from tqdm import tqdm

    reader = reader_of(model)
    _check_heads(reader, heads)
    check_windows(tokens, reader.context, vocab=getattr(model.config, "vocab_size", None))
    n, t = tokens.shape
    kept = (reader.n_head,) if heads == "all" else ()
    values = np.empty((reader.n_layer, *kept, n, t, t), dtype=np.float32)
    stream = iter_fields(
        model, tokens, heads, attention_mask=attention_mask, block=block, device=device
    )
    with tqdm(total=n * reader.n_layer, desc="fields", disable=not progress) as bar:
        for layer, documents, weights in stream:
            weights = weights.cpu().numpy()
            if kept:
                values[layer - 1][:, documents] = weights.swapaxes(0, 1)
            else:
                values[layer - 1][documents] = weights
            bar.update(len(weights))
    dims = ("layer", *(("head",) if kept else ()), "snapshot", "query", "key")
    coords = {"layer": np.arange(1, reader.n_layer + 1)}
    if kept:
        coords["head"] = np.arange(1, reader.n_head + 1)
    return xr.DataArray(values, coords, dims, name="attention", attrs={"heads": heads})
