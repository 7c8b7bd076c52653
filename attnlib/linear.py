"""Linear attention: a feature map in the place of the softmax, and a state of constant size."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .attention import SoftmaxAttention
from .errors import InputError, check_whole
from .sd import SDAttention

CHUNK = 64
# A kind of attention, and what it becomes when its exponential is replaced.
LINEAR_KIND = {"softmax": "linear", "sd": "linear-sd"}


class LinearState(NamedTuple):
    """What linear attention keeps of all earlier tokens, float32."""

    memory: torch.Tensor  # (B, H, D, D_v): sum of phi(k_j) v_j^T
    weight: torch.Tensor  # (B, H, D): sum of phi(k_j)


def _features(x: torch.Tensor) -> torch.Tensor:
    """phi(x) = ELU(x) + 1 > 0, in float32 at least: sums over a long text lose bfloat16's bits.

    Below 0 it is exp(x), which stays above 0 where (exp(x) - 1) + 1 is rounded to it.
    """
    x = x if x.dtype == torch.float64 else x.float()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention(
    q,
    k,
    v,
    *,
    own: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    chunk: int = CHUNK,
    state: LinearState | None = None,
    need_state: bool = False,
):
    """Causal linear attention with the feature map ELU + 1.

    ``out_i = sum_j<=i phi(q_i).phi(k_j) v_j / sum_j<=i phi(q_i).phi(k_j)``, phi(x) = ELU(x) + 1.
    Within a chunk of tokens by a masked product, from earlier chunks by the sum of their
    phi(k_j) v_j^T: time and memory grow with T, and no T x T tensor is made.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(B, H, T, D)``, on one device. There is no scale: a head's logits have none to soften.
    v : torch.Tensor
        ``(B, H, T, D_v)``
    own : torch.Tensor, optional
        ``(B, H, T)``, positive: a factor on the weight of each query's own key.
    seen : torch.Tensor, optional
        ``(B, T)``, false for keys of padding, which get no weight.
    chunk : int
        Tokens a chunk; the result does not depend on it.
    state : LinearState, optional
        Of the tokens before these, as an earlier call returned it.
    need_state : bool
        Return the state after these tokens as well.

    Returns
    -------
    out : torch.Tensor
        ``(B, H, T, D_v)``, dtype of `q`. Sums are in float32 (float64 for float64), under autocast
        too. Zero where a query sees no key at all.
    state : LinearState or None

    Raises
    ------
    InputError
        Shapes or types that do not fit, a factor `own` that is not positive, or a chunk that is
        not a positive whole number.

    References
    ----------
    Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 7-12.
    """
    if q.dim() != 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise InputError(
            f"queries and keys are (B, H, T, D) and values (B, H, T, D_v), not {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise InputError(
            f"queries, keys and values are floats, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if state is not None and not isinstance(state, LinearState):
        raise InputError(f"a state is what an earlier call returned, not {type(state).__name__}")
    b, h, t, d = q.shape
    fits = {
        "own": own is None or own.shape == (b, h, t),
        "seen": seen is None or (seen.shape == (b, t) and seen.dtype == torch.bool),
        "state": state is None
        or (state.memory.shape == (b, h, d, v.shape[-1]) and state.weight.shape == (b, h, d)),
    }
    if not all(fits.values()):
        wrong = ", ".join(k for k, ok in fits.items() if not ok)
        raise InputError(
            f"{wrong}: the shape or type does not fit queries of the shape {tuple(q.shape)}"
        )
    if own is not None and not bool((own > 0).all()):
        raise InputError(f"own is a positive factor; here it is as low as {float(own.min()):g}")
    return _attend(q, k, v, own, seen, check_whole("chunk", chunk), state, need_state)


def _attend(q, k, v, own=None, seen=None, chunk=CHUNK, state=None, need_state=False):
    """As `linear_attention`, of inputs that fit: looking at `own` would make a GPU wait."""
    b, h, t, _ = q.shape
    chunk = min(chunk, max(1, t))
    pad = -t % chunk
    with torch.autocast(q.device.type, enabled=False):
        phi_q, phi_k = _features(q), _features(k)
        phi_q, phi_k = (x.to(torch.promote_types(phi_q.dtype, phi_k.dtype)) for x in (phi_q, phi_k))
        # A column of ones counts the weights: (B, H, T, D_v + 1). Padding has phi_k = 0.
        value = F.pad(v.to(phi_q.dtype), (0, 1), value=1.0)
        if seen is not None:
            hidden = ~seen[:, None, :, None]
            phi_k, value = (x.masked_fill(hidden, 0.0) for x in (phi_k, value))
        phi_q, phi_k, value = (
            F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (phi_q, phi_k, value)
        )  # (B, H, C, chunk, ...)
        sums = phi_k.mT @ value  # (B, H, C, D, D_v + 1), of each chunk
        start = sums.new_zeros(b, h, 1, *sums.shape[-2:])
        if state is not None:
            start = torch.cat([state.memory, state.weight.unsqueeze(-1)], -1).to(sums).unsqueeze(2)
        total = torch.cat([start, sums], 2).cumsum(2)
        within = phi_q @ phi_k.mT
        if own is None:
            within = within.tril()
        else:
            factor = F.pad(own.to(phi_q.dtype), (0, pad)).unflatten(2, (-1, chunk))
            within = _own_scaled(within, factor)
        out = (within @ value + phi_q @ total[:, :, :-1]).flatten(2, 3)[:, :, :t]
        weight = out[..., -1:]
        result = (out[..., :-1] / torch.where(weight > 0, weight, 1.0)).to(q.dtype)
    if not need_state:
        return result, None
    last = total[:, :, -1]
    return result, LinearState(last[..., :-1], last[..., -1])


def _own_scaled(weights: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The lower triangle with its diagonal times `own`.

    Not the whole less (1 - own) of the diagonal: where that is nearly all of a row, rounding would
    be all that is left of it.
    """
    return weights.tril(-1) + torch.diag_embed(weights.diagonal(dim1=-2, dim2=-1) * own)


def linear_weights(q, k, own: torch.Tensor | None = None, seen=None) -> torch.Tensor:
    """The weights ``(B, H, T, T)`` that :func:`linear_attention` never makes; rows sum to 1.

    `seen`, of queries and keys, is by default the causal mask; without `own` it may be any.
    """
    with torch.autocast(q.device.type, enabled=False):
        weights = _features(q) @ _features(k).mT
        if own is not None:
            weights = _own_scaled(weights, own.to(weights.dtype))
        weights = weights.tril() if seen is None else weights.masked_fill(~seen, 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


class LinearAttention(SoftmaxAttention):
    """Multi-head causal linear attention, ELU + 1, with the weights of softmax attention.

    Parameters
    ----------
    d_model, n_head, head_size, dropout
        As in :class:`SoftmaxAttention`; dropout is not applied, there are no weights to drop.
    """

    is_linear = True

    def attend(self, x, q, k, v, dropout, need_weights):
        out, _ = _attend(q, k, v)
        return out, linear_weights(q, k).to(q.dtype) if need_weights else None

    def attend_cached(self, x, q, k, v, cache):
        return _attend(q, k, v, state=cache, need_state=True)


class LinearSDAttention(SDAttention):
    """S-D attention with ELU + 1 in the place of the exponential, and the same weights.

    exp(S_ij) becomes phi([q_i, -k_i]) . phi([k_j, q_j]), of the factors of S; the damping keeps its
    exp(-d_i), as a factor on a query's own key.

    Parameters
    ----------
    d_model, n_head, head_size, dropout
        As in :class:`LinearAttention`.
    """

    is_linear = True

    def _inputs(self, x, q, k):
        own = (-self.token_damping(x)).exp().clamp(min=1e-30)  # a first query has no other key
        return torch.cat([q, -k], -1), torch.cat([k, q], -1), own

    def attend(self, x, q, k, v, dropout, need_weights):
        query, key, own = self._inputs(x, q, k)
        out, _ = _attend(query, key, v, own)
        return out, linear_weights(query, key, own).to(q.dtype) if need_weights else None

    def attend_cached(self, x, q, k, v, cache):
        query, key, own = self._inputs(x, q, k)
        return _attend(query, key, v, own, state=cache, need_state=True)
