"""Causal attention by blocks of queries: each block meets the keys that it may see, no others.

out_i = sum_{j <= i} softmax_j(s q_i . k_j + b_ij) v_j, for the queries of one block at a time. That
skips nearly half of the T x T products, and on a CPU in bfloat16 it beats the fused kernel; dropout
and a bias per query and key cost no T x T tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

BLOCK = 128  # queries
LONGEST = 1024  # tokens: the blocks' weights, T^2 / 2 a head, are kept for the backward pass


def causal_mask(q: torch.Tensor) -> torch.Tensor:
    """Boolean ``(T, T)``, true where key <= query, on the device of `q`."""
    n_tokens = q.shape[-2]
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q.device).tril()


def blocks_are_faster(q: torch.Tensor) -> bool:
    """Whether :func:`attention_by_blocks` beats the fused kernel: on a CPU, in bfloat16."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-2] <= LONGEST


def attention_by_blocks(
    q,
    k,
    v,
    *,
    scale: float,
    bias: Callable[[int, int], torch.Tensor] | None = None,
    own: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal softmax attention, exact, a block of queries at a time.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(B, H, T, D)``, on one device.
    v : torch.Tensor
        ``(B, H, T, E)``.
    scale : float
        Of the products of queries and keys.
    bias : callable, optional
        ``bias(start, stop)`` is added to the logits of the queries from start to before stop with
        the keys before stop, ``(B, H, stop - start, stop)``.
    own : torch.Tensor, optional
        ``(B, H, T)``, added to each query's logit with its own key.
    dropout : float
        On the attention weights.

    Returns
    -------
    torch.Tensor
        ``(B, H, T, E)``, dtype of `v`.
    """
    n_tokens, outputs = q.shape[-2], []
    for start in range(0, n_tokens, BLOCK):
        stop = min(start + BLOCK, n_tokens)
        products = q[..., start:stop, :] @ k[..., :stop, :].mT  # (B, H, block, stop)
        # What is added: -inf for later keys, and what the caller wants, in the products' precision.
        added = products.new_zeros(stop - start, stop)
        later = torch.ones_like(added, dtype=torch.bool).triu(start + 1)
        added = added.masked_fill(later, float("-inf"))
        if bias is not None:
            added = added + bias(start, stop).to(products.dtype)
        logits = torch.add(added, products, alpha=scale)
        if own is not None:
            diagonal = torch.diag_embed(own[..., start:stop].to(products.dtype))
            logits = logits + F.pad(diagonal, (start, 0))
        weights = F.dropout(logits.softmax(-1), dropout).to(v.dtype)
        outputs.append(weights @ v[..., :stop, :])
    return torch.cat(outputs, -2)
