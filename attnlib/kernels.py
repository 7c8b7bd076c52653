"""Kernels of heads: the factors W_Q and W_K of what a head asks of any two tokens."""

from __future__ import annotations

import torch

from .capture import reader_of
from .errors import InputError
from .gpt import GPT


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
