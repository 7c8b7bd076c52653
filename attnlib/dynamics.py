"""What signals do: eigenvalues of interactions, the residual stream by depth, embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xarray as xr

from .capture import reader_of, run_in_blocks
from .errors import InputError, check_windows
from .interactions import iter_heads
from .sd import sd_logits


def largest_real(model, tokens: torch.Tensor, *, device: str | None = None) -> xr.Dataset:
    """Largest real part among the eigenvalues of every head's interaction on every text.

    Of the whole interaction, later keys too: Q K^T / sqrt(D), or S - D of S-D attention. (What the
    causal mask leaves is triangular, and its eigenvalues are its diagonal.)

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        With as many heads in each layer.
    tokens : torch.Tensor
        ``(n, T)`` windows.
    device : str, optional

    Returns
    -------
    xarray.Dataset
        On (layer, head, snapshot), float64: ``largest_real``, and ``bound``, what the theorem
        allows, -min_i d_i (infinite for standard attention, of which it says nothing).

    Raises
    ------
    InputError
        As :func:`attnlib.interaction_ranks`.

    References
    ----------
    Jamil & Kapadia 2026 (arXiv 2605.18826): Re(lambda) <= 0 for every eigenvalue of S - D.
    """
    reader = reader_of(model)
    if reader.n_head is None:
        raise InputError("the layers have different numbers of heads, which no array can hold")
    shape = (reader.n_layer, reader.n_head, len(tokens))
    found, bound = np.full(shape, np.nan), np.full(shape, np.inf)
    for layer, documents, query, key, damping in iter_heads(model, tokens, device=device):
        at = (layer - 1, slice(None), documents)
        query, key = query.double(), key.double()
        if damping is None:  # rank r: the other eigenvalues are 0
            real = torch.linalg.eigvals(key.mT @ query).real.amax(-1)
            real = real.clamp(min=0) if query.shape[-1] < query.shape[-2] else real
        else:
            # sd_logits divides by the root of the head size, which the queries hold already.
            logits = sd_logits(query * query.shape[-1] ** 0.5, key, damping)
            real = torch.linalg.eigvals(logits).real.amax(-1)
            bound[at] = -damping.amin(-1).T.cpu().numpy()
        found[at] = real.T.cpu().numpy()
    dims = ("layer", "head", "snapshot")
    coords = {k: np.arange(1, n + 1) for k, n in zip(dims[:2], shape, strict=False)}
    return xr.Dataset({"largest_real": (dims, found), "bound": (dims, bound)}, coords)


def residual_scale(model, tokens: torch.Tensor) -> xr.DataArray:
    """Root mean square of the residual stream, as it enters the first layer and leaves each.

    Parameters
    ----------
    model : GPT
    tokens : torch.Tensor
        ``(n, T)`` windows.

    Returns
    -------
    xarray.DataArray
        ``(depth, snapshot)``, float64: depth 0 are the embeddings, depth l the output of layer l.

    Raises
    ------
    InputError
        Another kind of model, or windows that do not fit it.
    """
    if not hasattr(model, "blocks"):
        raise InputError(f"the residual stream is read in an attnlib.GPT, not {type(model)}")
    check_windows(tokens, model.config.context, least=1, vocab=model.config.vocab_size)

    def run(some, mask, depths):
        def size(x):
            return x.double().square().mean((1, 2)).sqrt().cpu()

        hooks = [
            block.register_forward_hook(lambda _, inputs, out: depths.append(size(out[0])))
            for block in model.blocks
        ]
        hooks.append(
            model.blocks[0].register_forward_pre_hook(lambda _, x: depths.append(size(x[0])))
        )
        try:
            model(some)
        finally:
            for hook in hooks:
                hook.remove()

    blocks = [torch.stack(d) for _, d in run_in_blocks(model, tokens, run, None, 32, None)]
    values = torch.cat(blocks, 1).numpy()
    return xr.DataArray(values, {"depth": np.arange(len(values))}, ("depth", "snapshot"))


def embedding_shift(model, tokens: torch.Tensor) -> Callable:
    """How far embeddings of texts move when a model is changed: what an encoder has for a loss.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An encoder, as it is now; the embedding of a text is the mean of its last hidden states.
    tokens : torch.Tensor
        ``(n, T)`` windows.

    Returns
    -------
    callable
        ``shift(model)``, ``(n,)`` float64 on the CPU: cosine distances between the embeddings that
        the model gives then and those of now.

    References
    ----------
    Reimers & Gurevych 2019 (arXiv 1908.10084): mean pooling.
    """
    reader = reader_of(model)
    vocab = getattr(model.config, "vocab_size", None)
    check_windows(tokens, reader.context, least=1, vocab=vocab)

    def embed(model):
        with torch.no_grad():
            hidden = model(tokens.to(next(model.parameters()).device))[0]
        return hidden.mean(1).double().cpu()

    before = embed(model)
    return lambda model: 1 - torch.cosine_similarity(embed(model), before, -1)
