"""S-D attention: a skew routing matrix less a positive diagonal one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .attention import SoftmaxAttention
from .causal import attention_by_blocks, blocks_are_faster, causal_mask
from .errors import InputError

SHORT = 128  # tokens: up to here the plain form is quicker, and its weights are small


def sd_attention(q, k, v, damping, *, dropout: float = 0.0, need_weights: bool = False):
    """Causal attention with the logits L = S - D: S skew by construction, D diagonal and positive.

    S = (Q K^T - K Q^T) / sqrt(D_h) and D = diag(d_i). Every eigenvalue of L has a real part of at
    most 0, since x* L x has the real part -x* D x. The softmax is over the keys up to the query.

    Of more than 128 tokens, and without weights asked for, no T x T tensor is made. S_ij is the dot
    product of [q_i, -k_i] and [k_j, q_j], so the fused kernel gives the sum over earlier keys at
    twice the head size. A key of zeros in front, whose logit is 0, and two more columns of values
    count the weights:
    with Z the sum of exp(S_ij) over earlier keys they give m = 1 / (1 + Z) and c = Z / (1 + Z),
    and the query's own key, whose logit is -d_i, is put in by hand,
    out = (o + m exp(-d) v) / (c + m exp(-d)). That equals the plain form while some earlier S_ij is
    above about -70 (in float16 -10), so that exp(S_ij) counts beside 1. Shorter windows take the
    plain form, which is quicker there.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(B, H, T, D_h)``, on one device.
    damping : torch.Tensor
        d ``(B, H, T)``, not negative.
    dropout : float
        On the attention weights; the plain form then, O(T^2) memory.
    need_weights : bool
        Return the weights as well (plain form).

    Returns
    -------
    out : torch.Tensor
        ``(B, H, T, D_h)``, dtype of `q`.
    weights : torch.Tensor or None
        ``(B, H, T, T)``, before dropout.

    Raises
    ------
    InputError
        Shapes that do not fit; a damping that is negative or not a number.

    References
    ----------
    Jamil & Kapadia 2026 (arXiv 2605.18826): S, D and the theorem. The softmax over the causal part
    of L is our reading.
    """
    if damping.shape != q.shape[:-1] or q.shape != k.shape or q.shape[:-1] != v.shape[:-1]:
        raise InputError(
            f"queries and keys are (B, H, T, D) and the damping (B, H, T), not {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(damping.shape)}"
        )
    if not bool((damping >= 0).all()):
        raise InputError(
            f"the damping is the diagonal of D, which is not negative; here it is as low as "
            f"{float(damping.min()):g}. Put it through softplus, as SDAttention does"
        )
    return _attend(q, k, v, damping, dropout, need_weights)


def _attend(q, k, v, damping, dropout, need_weights):
    """As `sd_attention`, of inputs that fit: looking at the damping would make a GPU wait."""
    if not need_weights and blocks_are_faster(q):
        wide_q, wide_k = torch.cat([q, -k], -1), torch.cat([k, q], -1)
        scale = 1 / math.sqrt(q.shape[-1])
        return attention_by_blocks(
            wide_q, wide_k, v, scale=scale, own=-damping, dropout=dropout
        ), None
    if not (need_weights or dropout > 0 or q.shape[-2] <= SHORT):
        return _fused(q, k, v, damping), None
    logits = sd_logits(q, k, damping, hidden=~causal_mask(q))
    weights = logits.softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout) @ v, weights if need_weights else None


def _fused(q, k, v, damping):
    size, wide = q.shape[-1], max(2 * q.shape[-1], v.shape[-1] + 2)
    wide += -wide % 8  # the kernels want multiples of 8
    pad = (0, wide - 2 * size)
    query = F.pad(torch.cat([q, -k], -1), pad)
    key = F.pad(torch.cat([k, q], -1), pad)
    # Columns of v, then a 1 for every key, then a 1 for the one in front: (B, H, T, wide)
    ones = torch.ones_like(v[..., :1])
    value = F.pad(torch.cat([v, ones], -1), (0, wide - v.shape[-1] - 1))
    front = torch.zeros_like(value[..., :1, :])
    front[..., v.shape[-1] + 1] = 1
    # One place later: query i sees the key in front and those before its own.
    key = torch.cat([torch.zeros_like(key[..., :1, :]), key[..., :-1, :]], -2)
    value = torch.cat([front, value[..., :-1, :]], -2)
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=1 / math.sqrt(size)
    )
    summed, c, m = out.split([v.shape[-1], 1, wide - v.shape[-1] - 1], -1)
    own = m[..., :1] * torch.exp(-damping.float()).clamp(min=1e-30).unsqueeze(-1)
    return ((summed + own * v) / (c + own)).to(q.dtype)


def sd_logits(q, k, damping, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """L = S - D ``(B, H, T, T)`` of :func:`sd_attention`, with -inf where it is `hidden`."""
    product = (q / math.sqrt(q.shape[-1])) @ k.mT
    other = torch.diag_embed(damping.to(product.dtype))
    if hidden is not None:  # (T, T), so that adding it costs nothing more than the diagonal does
        other = other + product.new_zeros(hidden.shape).masked_fill(hidden, float("inf"))
    return product - product.mT - other


class SDAttention(SoftmaxAttention):
    """Multi-head S-D attention; damping d_i = softplus(w . x_i + b) > 0 per token and head.

    Parameters
    ----------
    d_model, n_head, head_size, dropout
        As in :class:`SoftmaxAttention`.
    """

    def __init__(
        self, d_model: int, n_head: int, head_size: int | None = None, dropout: float = 0.0
    ):
        super().__init__(d_model, n_head, head_size, dropout)
        self.damping = nn.Linear(d_model, n_head)

    def token_damping(self, x: torch.Tensor) -> torch.Tensor:
        """Damping ``(B, H, T)`` of the tokens of ``x`` ``(B, T, d_model)``."""
        return F.softplus(self.damping(x).float()).transpose(1, 2)

    def factors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of S, at twice the head size: [q, -k] / sqrt(D) and [k, q]."""
        q, k, _ = self.heads(x)
        return torch.cat([q, -k], -1) / math.sqrt(self.head_size), torch.cat([k, q], -1)

    def attend(self, x, q, k, v, dropout, need_weights):
        damping = self.token_damping(x)
        return _attend(q, k, v, damping, dropout, need_weights)

    def attend_cached(self, x, q, k, v, cache):
        if cache is None:
            return self.attend(x, q, k, v, 0.0, False)[0], (k, q, v)
        n, (all_k, all_q, v) = (
            q.shape[2],
            (torch.cat(pair, 2) for pair in zip(cache, (k, q, v), strict=True)),
        )
        before = all_k.shape[2] - n
        logits = (q @ all_k.mT - k @ all_q.mT) / math.sqrt(q.shape[-1])  # (B, H, n, T)
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(before)
        logits = logits.masked_fill(~seen, float("-inf"))
        # S_ii = 0: adding -d_i puts the damping on each new token's own key.
        own = torch.diag_embed(self.token_damping(x).to(logits.dtype), before)[..., :n, :]
        logits = logits - own
        return logits.softmax(-1).to(v.dtype) @ v, (all_k, all_q, v)
