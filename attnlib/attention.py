"""Attention: the pure functions, and the modules that hold their weights.

Shapes: batch B, heads H, tokens T, head size D. Queries, keys and values are ``(B, H, T, D)``;
attention weights are ``(B, H, T, T)`` with the query before the key. Each pure function takes
``need_weights``: without it the fused kernel runs and no T x T tensor is made where the
mathematics allows it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .causal import attention_by_blocks, blocks_are_faster, causal_mask
from .errors import InputError

NORMALIZE_OVER = ("sequence", "query", "key")


# ------------------------------------------------------------------ pure functions


def softmax_attention(q, k, v, *, bias=None, dropout: float = 0.0, need_weights: bool = False):
    """Causal softmax attention, ``softmax(q k^T / sqrt(D) + bias) v``.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(B, H, T, D)``, on one device.
    bias : torch.Tensor or callable, optional
        Added to the logits: ``(B, H, T)`` per key, ``(B, H, T, T)`` per query and key, or what
        gives it for a block of queries, as in ``attention_by_blocks``.
    dropout : float
        On the attention weights.
    need_weights : bool
        Return the weights as well (plain form, O(T^2) memory).

    Returns
    -------
    out : torch.Tensor
        ``(B, H, T, D)``, dtype of `q`.
    weights : torch.Tensor or None
        ``(B, H, T, T)``, before dropout; rows sum to 1, zero where key > query.

    References
    ----------
    Vaswani et al. 2017, eq. 1.
    """
    if callable(bias) and not need_weights:
        scale = 1 / math.sqrt(q.shape[-1])
        return attention_by_blocks(q, k, v, scale=scale, bias=bias, dropout=dropout), None
    if callable(bias):
        bias = bias(0, q.shape[-2])
    per_key = bias is not None and bias.dim() == 3
    if need_weights:
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        if bias is not None:
            logits = logits + (bias.unsqueeze(-2) if per_key else bias)
        weights = logits.masked_fill(~causal_mask(q), float("-inf")).softmax(-1)
        return F.dropout(weights, dropout) @ v, weights
    if bias is None:
        return _causal(q, k, v, 1 / math.sqrt(q.shape[-1]), dropout), None
    if per_key:
        return _per_key_bias_attention(q, k, v, bias, dropout), None
    mask = bias.masked_fill(~causal_mask(q), float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


def _per_key_bias_attention(q, k, v, bias, dropout):
    """Softmax attention with a bias per key, without a T x T mask.

    q.k + sqrt(D) b_j is the dot product of [q, 1] and [k, sqrt(D) b_j], so the fused causal kernel
    applies at head size D + 2 (padded to a multiple of 8, which the kernels want). The bias takes
    two columns, what k's precision holds of it and the rest, since bfloat16 would round it.
    """
    size = q.shape[-1]
    pad = -(size + 2) % 8
    bias = (bias * math.sqrt(size)).unsqueeze(-1)
    high = bias.to(k.dtype)
    low = (bias - high.to(bias.dtype)).to(k.dtype)
    q = F.pad(torch.cat([q, torch.ones_like(q[..., :2])], -1), (0, pad))
    k = F.pad(torch.cat([k, high, low], -1), (0, pad))
    v = F.pad(v, (0, pad + 2))
    return _causal(q, k, v, 1 / math.sqrt(size), dropout)[..., :size]


def _causal(q, k, v, scale, dropout):
    """Without weights, by whichever form is faster."""
    if blocks_are_faster(q):
        return attention_by_blocks(q, k, v, scale=scale, dropout=dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale)


def standardize_energy(
    energy: torch.Tensor,
    normalize_over: str = "sequence",
    *,
    queries: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Standardise token energies, z = (e - mean) / deviation.

    Parameters
    ----------
    energy : torch.Tensor
        ``(..., T)``.
    normalize_over : {"sequence", "query", "key"}
        The tokens that mean and deviation are taken over. ``"sequence"`` takes all of the window,
        as published, which lets later tokens change earlier outputs (not causal). ``"query"``
        takes the tokens up to the query, ``"key"`` those up to the key (fit for a KV cache).
    queries : (int, int), optional
        Of ``"query"``: the queries from the first to before the second alone, with the keys before
        the second.

    Returns
    -------
    torch.Tensor
        ``(..., T)``, for ``"query"`` ``(..., T_query, T_key)``. Float32. Where the deviation is 0
        (one token, equal energies) z is 0.
    """
    energy = energy.float()
    if normalize_over == "sequence":
        mean = energy.mean(-1, keepdim=True)
        variance = energy.var(-1, keepdim=True, correction=0)
        return (energy - mean) * (variance + 1e-12).rsqrt()
    if normalize_over not in NORMALIZE_OVER:
        raise InputError(f"normalize_over is one of {NORMALIZE_OVER}, not '{normalize_over}'")
    # Running moments in float64 (mps has none): differences of cumulative sums cancel.
    wide = energy.double() if energy.device.type != "mps" else energy
    count = torch.arange(1, energy.shape[-1] + 1, device=energy.device)
    mean = wide.cumsum(-1) / count
    variance = (wide.square().cumsum(-1) / count - mean.square()).clamp(min=0)
    mean, scale = mean.float(), (variance + 1e-12).rsqrt().float()
    if normalize_over == "key":
        return (energy - mean) * scale
    start, stop = queries or (0, energy.shape[-1])
    mean, scale = mean[..., start:stop, None], scale[..., start:stop, None]
    return (energy[..., None, :stop] - mean) * scale


def log_energy_gate(
    energy,
    alpha,
    tau,
    mix,
    normalize_over: str = "sequence",
    *,
    queries: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Logarithm of the energy gate, log sum_m softmax(mix)_m sigmoid(alpha_m (z_m - tau_m)).

    Parameters
    ----------
    energy : torch.Tensor
        ``(B, H, n, T)``: n gate scales.
    alpha, tau, mix : torch.Tensor
        ``(H, n)``: sharpness, threshold, mixing logits.
    normalize_over, queries
        See :func:`standardize_energy`.

    Returns
    -------
    torch.Tensor
        ``(B, H, T)`` per key, or for ``"query"`` ``(B, H, T, T)``. Float32.

    References
    ----------
    Energy-gated attention (Zeris 2026): e_j energy, g_j = sigmoid(alpha (z_j - tau)).
    """
    z = standardize_energy(energy, normalize_over, queries=queries)
    ones = (1,) * (z.dim() - 3)
    alpha, tau = (p.view(*p.shape, *ones).float() for p in (alpha, tau))
    log_gates = F.logsigmoid(torch.addcmul(-alpha * tau, alpha, z))
    if mix.shape[-1] == 1:  # nothing to mix
        return log_gates.squeeze(2)
    weight = mix.float().log_softmax(-1).view(*mix.shape, *ones)
    return torch.logsumexp(weight + log_gates, dim=2)


def energy_gated_attention(q, k, v, log_gate, *, dropout: float = 0.0, need_weights: bool = False):
    """Softmax attention whose weights are gated per key and renormalised.

    ``A <- softmax(q k^T / sqrt(D)) g_j``, rows renormalised, which is the same as adding
    ``log g_j`` to the logits; that is how it is computed.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(B, H, T, D)``.
    log_gate : torch.Tensor
        ``(B, H, T)`` or ``(B, H, T, T)``, from :func:`log_energy_gate`.
    dropout, need_weights
        As in :func:`softmax_attention`, whose return value this has too. Dropout acts on the
        renormalised weights (the published code drops before it renormalises).
    """
    return softmax_attention(q, k, v, bias=log_gate, dropout=dropout, need_weights=need_weights)


# ------------------------------------------------------------------ modules


class SoftmaxAttention(nn.Module):
    """Multi-head causal softmax attention: q, k, v without bias, output projection with one.

    Parameters
    ----------
    d_model, n_head : int
    head_size : int, optional
        ``d_model // n_head`` by default.
    dropout : float
        On the attention weights.
    """

    def __init__(
        self, d_model: int, n_head: int, head_size: int | None = None, dropout: float = 0.0
    ):
        super().__init__()
        self.n_head = n_head
        self.head_size = head_size or d_model // n_head
        inner = n_head * self.head_size
        self.qkv = nn.Linear(d_model, 3 * inner, bias=False)
        self.proj = nn.Linear(inner, d_model)
        self.dropout = dropout

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of ``x`` ``(B, T, d_model)``: ``(3, B, H, T, D)``."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.n_head, self.head_size)
        return qkv.permute(2, 0, 3, 1, 4)

    def factors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors ``(B, H, T, r)`` whose product, first times second transposed, are the logits.

        Before gates, damping and the mask.
        """
        q, k, _ = self.heads(x)
        return q / math.sqrt(self.head_size), k

    def attend(self, x, q, k, v, dropout, need_weights):
        """The attention itself; what kinds of attention override."""
        return softmax_attention(q, k, v, dropout=dropout, need_weights=need_weights)

    def attend_cached(self, x, q, k, v, cache):
        """Attention of new tokens to themselves and to those in `cache`, and the new cache."""
        if cache is None:
            return self.attend(x, q, k, v, 0.0, False)[0], (k, v)
        k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), (k, v)

    def forward(self, x, need_weights: bool = False):
        """``(B, T, d_model)`` to the same shape, and the weights ``(B, H, T, T)`` or None."""
        q, k, v = self.heads(x)
        dropout = self.dropout if self.training else 0.0
        out, weights = self.attend(x, q, k, v, dropout, need_weights)
        return self.proj(out.transpose(1, 2).flatten(2)), weights

    def decode(self, x, cache=None):
        """As :meth:`forward` for tokens that follow on others, whose `cache` an earlier call gave.

        Returns
        -------
        out : torch.Tensor
            ``(B, T, d_model)``
        cache : tuple
            Keys and values of all tokens so far (S-D attention: queries as well), which grow with
            them; of linear attention a state of constant size.
        """
        out, cache = self.attend_cached(x, *self.heads(x), cache)
        return self.proj(out.transpose(1, 2).flatten(2)), cache


def causal_filters(x: torch.Tensor, filters) -> torch.Tensor:
    """Outputs of causal convolutions of ``x`` ``(B, T, d)``, one after the other: ``(B, O, T)``.

    One matrix product gives what every tap of every filter makes of every token, and `fold` adds up
    what arrives at each later token.
    """
    t = x.shape[1]
    # Tap k, of the token k places back, is the k-th weight from the end: (out, n, d).
    weights = [conv.weight.flip(-1).transpose(1, 2) for conv in filters]
    taps = torch.cat([w.flatten(0, 1) for w in weights]) @ x.mT  # (B, out n + ..., T)
    outputs = []
    parts = taps.split([w.shape[0] * w.shape[1] for w in weights], 1)
    for part, conv in zip(parts, filters, strict=True):
        n = conv.kernel_size[0]
        summed = F.fold(part, (1, t + n - 1), (1, n))[:, :, 0, :t]  # (B, out, T)
        outputs.append(summed + conv.bias[:, None])
    return torch.cat(outputs, 1)


class EnergyGatedAttention(SoftmaxAttention):
    """Energy-gated attention: EGA-n (n linear energies a head) or EGA-C (causal convolutions).

    Parameters
    ----------
    d_model, n_head, head_size, dropout
        As in :class:`SoftmaxAttention`.
    n_scales : int
        Gate scales per head for EGA-n; ignored when `filters` is given.
    filters : sequence of int, optional
        Lengths of the causal filters of EGA-C, one gate scale each. The energy is the squared
        modulus of a pair of filter outputs.
    normalize_over : {"sequence", "query", "key"}
        See :func:`standardize_energy`.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        head_size: int | None = None,
        dropout: float = 0.0,
        *,
        n_scales: int = 1,
        filters: tuple[int, ...] | None = None,
        normalize_over: str = "sequence",
    ):
        super().__init__(d_model, n_head, head_size, dropout)
        self.normalize_over = normalize_over
        n = len(filters) if filters else n_scales
        if filters:
            self.filters = nn.ModuleList(nn.Conv1d(d_model, 2 * n_head, size) for size in filters)
            self.energy = None
        else:
            self.filters = None
            self.energy = nn.Linear(d_model, n_head * n)
        self.alpha = nn.Parameter(torch.full((n_head, n), 2.0))
        self.tau = nn.Parameter(torch.zeros(n_head, n))
        self.mix = nn.Parameter(torch.full((n_head, n), 1.0 / n))

    def token_energy(self, x: torch.Tensor) -> torch.Tensor:
        """Energies ``(B, H, n, T)`` of the tokens of ``x`` ``(B, T, d_model)``."""
        b, t, _ = x.shape
        if self.filters is None:
            return self.energy(x).view(b, t, self.n_head, -1).permute(0, 2, 3, 1)
        pairs = causal_filters(x, self.filters).view(b, -1, self.n_head, 2, t)
        return pairs.square().sum(3).transpose(1, 2)  # (B, n, H, T) -> (B, H, n, T)

    attend_cached = None  # energies are standardised over tokens that are yet to come

    def attend(self, x, q, k, v, dropout, need_weights):
        gate = (self.token_energy(x), self.alpha, self.tau, self.mix, self.normalize_over)
        if self.normalize_over == "query":
            log_gate = lambda *queries: log_energy_gate(*gate, queries=queries)  # noqa: E731
        else:
            log_gate = log_energy_gate(*gate)
        return energy_gated_attention(q, k, v, log_gate, dropout=dropout, need_weights=need_weights)
