"""Attention fields of a model: attention matrices over an ensemble of document windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr

from .device import pick_device
from .ensemble import check_finite
from .errors import InputError, check_whole, check_windows

BLOCK_BYTES = 256 * 2**20


class _OurModel:
    """How to read the attention weights of a `GPT`."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        heads = set(model.config.per_layer("n_head"))
        # Layers with different numbers of heads make no rectangular array of heads.
        self.most_heads = max(heads)
        self.n_head = heads.pop() if len(heads) == 1 else None
        self.n_layer, self.context = model.config.n_layer, model.config.context

    def run(self, tokens, mask, on_attention):
        if mask is not None and not bool(mask.all()):
            raise InputError("our GPT has no padding: pass windows of equal length and no mask")
        self.model(tokens, on_attention=on_attention)


class _HuggingFaceModel:
    """How to read those of a transformers model: through its attention interface.

    The model's own eager attention function computes the weights, so scale, biases, rotary
    positions, grouped keys and masks are the model's; one layer is held at a time.
    """

    NAME = "attnlib_capture"

    def __init__(self, model):
        self.model = model
        config = model.config.get_text_config()
        self.n_layer, self.n_head = config.num_hidden_layers, config.num_attention_heads
        self.most_heads = self.n_head
        self.context = getattr(config, "max_position_embeddings", None)

    def run(self, tokens, mask, on_attention):
        import sys

        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        seen = []

        def capture(module, query, key, value, attention_mask, **kwargs):
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            if eager is None:
                raise InputError(
                    f"{type(module).__name__} has no eager attention function, so its weights "
                    "cannot be captured"
                )
            out, weights = eager(module, query, key, value, attention_mask, **kwargs)
            on_attention(len(seen), weights)
            seen.append(type(module).__name__)
            return out, None

        AttentionInterface.register(self.NAME, capture)
        AttentionMaskInterface.register(self.NAME, eager_mask)
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(self.NAME)
            self.model(
                input_ids=tokens,
                attention_mask=mask if mask is not None else tokens.new_ones(tokens.shape),
            )
        finally:
            self.model.set_attn_implementation(before)
        if len(seen) != self.n_layer:
            raise InputError(
                f"{type(self.model).__name__} used transformers' attention interface in "
                f"{len(seen)} of its {self.n_layer} layers: its attention cannot be captured"
            )


def _reader(model):
    if (
        hasattr(model, "blocks")
        and hasattr(model, "generate")
        and not hasattr(model, "name_or_path")
    ):
        return _OurModel(model)
    if hasattr(model, "set_attn_implementation"):
        return _HuggingFaceModel(model)
    raise InputError(
        f"{type(model).__name__} is neither an attnlib.GPT nor a transformers model: its attention "
        "cannot be captured"
    )


def count_layers(model) -> int:
    """Number of attention layers of a model whose attention can be read."""
    return _reader(model).n_layer


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
    reader = _reader(model)
    _check_heads(reader, heads)
    check_windows(tokens, reader.context, vocab=getattr(model.config, "vocab_size", None))
    where = pick_device(device) if device else next(model.parameters()).device
    model = model.to(where)
    if attention_mask is not None and attention_mask.shape != tokens.shape:
        raise InputError(
            f"the mask has the shape {tuple(attention_mask.shape)}, the tokens "
            f"{tuple(tokens.shape)}"
        )
    if block is not None:
        check_whole("block", block)
    else:
        kept = reader.n_head if heads == "all" else 1
        # What is kept of all layers, or what a layer works with: logits and weights of each head.
        held = max(reader.n_layer * kept, 4 * reader.most_heads)
        block = max(1, BLOCK_BYTES // (4 * held * tokens.shape[1] ** 2))
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(tokens), block):
            documents = slice(start, min(start + block, len(tokens)))
            mask = attention_mask[documents].to(where) if attention_mask is not None else None
            layers: list[torch.Tensor] = []

            def keep(layer, weights, layers=layers, mask=mask):
                weights = weights.float()
                if mask is not None:
                    weights = weights * mask[:, None, :, None]
                layers.append(weights.mean(1) if heads == "mean" else weights)

            with torch.no_grad():
                reader.run(tokens[documents].to(where), mask, keep)
            for layer, weights in enumerate(layers, start=1):
                check_finite(weights, layer, first=documents.start)
                yield layer, documents, weights
    finally:
        model.train(was_training)


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

    reader = _reader(model)
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
