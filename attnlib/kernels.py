"""Kernels of heads: the factors W_Q and W_K of what a head asks of any two tokens."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .capture import reader_of
from .errors import InputError
from .gpt import GPT
from .routing import METHODS, kernel_spectrum, singular_rank


def head_kernels(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key weights of every head, whose product W_Q W_K^T is the head's kernel.

    Weights alone: without biases, without the gains of a normalisation before them, and, where a
    model rotates queries and keys by their positions, at lag 0. With the scale of the logits.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Ours, GPT-2, BERT, GPT-NeoX or Llama by architecture.

    Returns
    -------
    w_q, w_k : torch.Tensor
        ``(layer, head, d_model, head_size)``, float32, on the CPU. Grouped keys stand once for
        each head that uses them. Of S-D attention, whose S has the kernel
        W_Q W_K^T - W_K W_Q^T, the factors are those of S, at twice the head size.

    Raises
    ------
    InputError
        An architecture whose weights we cannot name, or layers of different shapes.
    """
    reader_of(model)
    layers = [_of_layer(module) for module in _attention_modules(model)]
    if len({w.shape for pair in layers for w in pair}) > 1:
        raise InputError("the layers have heads of different number or size, which no array holds")
    w_q, w_k = (torch.stack(w).detach().float().cpu() for w in zip(*layers, strict=True))
    return w_q, w_k


def kernel_ranks(w_q: torch.Tensor, w_k: torch.Tensor, *, share: float = 0.9) -> xr.Dataset:
    """Energies, ranks and eigenvalues of the kernels of all heads.

    Parameters
    ----------
    w_q, w_k : torch.Tensor
        ``(layer, head, d_model, head_size)`` from :func:`head_kernels`.
    share : float
        For the energy rank, as in :func:`attnlib.singular_rank`.

    Returns
    -------
    xarray.Dataset
        On (layer, head), float64: ``routing_share``, the routing's part of the kernel's sum of
        squares (that of random factors is (d - 1) / 2 d on average); ``largest_real``, the largest
        real part among the eigenvalues over the largest modulus; ``unstable_share``, the part of
        the eigenvalues that have a positive real part. On (rank_by, layer, head):
        ``routing_rank`` and ``filtering_rank``. ``eigenvalue`` (layer, head, `eigenvalue_`),
        complex. The attribute `capacity` is the highest rank that either part can have.

    Raises
    ------
    InputError
        Factors of another shape, or not finite; a kernel of zeros.
    """
    if w_q.dim() != 4:
        raise InputError(f"factors are (layer, head, d_model, r), not {tuple(w_q.shape)}")
    found = kernel_spectrum(w_q, w_k)
    filtering = found.filtering.abs()
    routing_energy, filtering_energy = (x.square().sum(-1) for x in (found.routing, filtering))
    if not bool((routing_energy + filtering_energy > 0).all()):
        raise InputError("a kernel is zero: it has neither routing nor filtering")
    dims = ("layer", "head")
    real, size = found.eigenvalues.real, found.eigenvalues.abs().amax(-1)
    data = {
        "routing_share": routing_energy / (routing_energy + filtering_energy),
        "largest_real": real.amax(-1) / torch.where(size > 0, size, 1.0),
        "unstable_share": (real > 0).double().mean(-1),
    }
    data = {k: (dims, v.numpy()) for k, v in data.items()}
    for name, values in (("routing_rank", found.routing), ("filtering_rank", filtering)):
        ranks = [singular_rank(values, method, share).numpy() for method in METHODS]
        data[name] = (("rank_by", *dims), np.stack(ranks))
    data["eigenvalue"] = ((*dims, "eigenvalue_"), found.eigenvalues.numpy())
    coords = {
        "rank_by": list(METHODS),
        "layer": np.arange(1, w_q.shape[0] + 1),
        "head": np.arange(1, w_q.shape[1] + 1),
    }
    return xr.Dataset(data, coords, {"share": share, "capacity": found.routing.shape[-1]})


def _attention_modules(model) -> list:
    if isinstance(model, GPT):
        return [block.attention for block in model.blocks]
    for module in model.modules():
        for name in ("h", "layers", "layer"):  # the list of blocks, by its names in transformers
            blocks = getattr(module, name, None)
            if isinstance(blocks, torch.nn.ModuleList):
                return [_attention_of(block) for block in blocks]
    raise InputError(f"{type(model).__name__} has no list of layers that we can name")


def _attention_of(block):
    attention = next(
        (getattr(block, n) for n in ("attn", "self_attn", "attention") if hasattr(block, n)), None
    )
    if attention is None:
        raise InputError(f"{type(block).__name__} has no attention that we can name")
    return getattr(attention, "self", attention)  # BERT keeps it one level deeper


def _of_layer(module) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors ``(H, d, r)`` of one layer."""
    if hasattr(module, "factors"):  # ours
        width = module.qkv.weight.shape[1]
        # The map is linear in x: its matrix is what it makes of the unit vectors, as tokens.
        with torch.no_grad():
            unit = torch.eye(width, device=module.qkv.weight.device)
            q, k = module.factors(unit[None])
        return q[0], k[0]
    scale = getattr(module, "scaling", None)
    if hasattr(module, "c_attn"):  # GPT-2: (d, 3 d), queries first
        size = module.head_dim
        q, k, _ = module.c_attn.weight.T.split(module.embed_dim)
    elif hasattr(module, "query_key_value"):  # GPT-NeoX: by head, then query, key and value
        size = module.head_size
        weight = module.query_key_value.weight
        q, k, _ = weight.view(-1, 3, size, weight.shape[1]).unbind(1)
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    elif hasattr(module, "q_proj") and hasattr(module, "k_proj"):  # Llama and its kin
        size, q, k = module.head_dim, module.q_proj.weight, module.k_proj.weight
    elif hasattr(module, "query") and hasattr(module, "key"):  # BERT
        size, q, k = module.attention_head_size, module.query.weight, module.key.weight
    else:
        raise InputError(f"{type(module).__name__} has no query and key weights that we can name")
    q, k = (w.view(-1, size, w.shape[1]).mT for w in (q, k))  # (H, d, r)
    scale = size**-0.5 if scale is None else scale
    return q * scale, k.repeat_interleave(len(q) // len(k), 0)
