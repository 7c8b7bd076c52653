"""Nulls and fields whose answer is known: what an instrument shows where there is nothing to see.

Untrained weights are another null, in :func:`attnlib.untrained`.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .ensemble import as_fields, check_convention, each_field
from .errors import InputError, check_whole, check_windows


def shuffled_tokens(tokens: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The tokens of each window in random order: the same characters, no text.

    Parameters
    ----------
    tokens : torch.Tensor
        ``(N, T)``
    seed : int

    Returns
    -------
    torch.Tensor
        ``(N, T)``, each row a permutation of the given one.
    """
    check_windows(tokens, least=1)
    generator = torch.Generator().manual_seed(check_whole("seed", seed, 0))
    order = torch.rand(tokens.shape, generator=generator).argsort(1).to(tokens.device)
    return tokens.gather(1, order)


def phase_randomized(fields: xr.DataArray | torch.Tensor, seed: int = 0):
    """Each row with its own power spectrum along the lag, and nothing in common with the others.

    The fluctuation of every row of every document is Fourier transformed over its own causal part,
    its phases are replaced by random ones, and the mean field is added again. What rows or
    documents have in common beside their spectra is gone; what survives in an analysis is due to
    the spectra alone.

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        ``([layer, [head,]] snapshot, query, key)``, causal.
    seed : int

    Returns
    -------
    xarray.DataArray or torch.Tensor
        As given (a DataArray with `layer` first). Row sums are kept; entries may be negative.

    References
    ----------
    Theiler et al. 1992 (surrogate data).
    """
    given = fields.shape
    fields = as_fields(fields)
    rng = np.random.default_rng(check_whole("seed", seed, 0))
    out = [_phase_randomized(field, rng) for field in each_field(fields)]
    if isinstance(fields, torch.Tensor):
        return torch.stack(out).reshape(given)
    return fields.copy(data=torch.stack(out).cpu().numpy().reshape(fields.shape))


def _phase_randomized(field: torch.Tensor, rng) -> torch.Tensor:
    check_convention(field, "causal")
    t = field.shape[-1]
    mean = field.mean(0)
    u = field - mean
    surrogate = torch.zeros_like(u)
    for i in range(t):
        row = torch.fft.rfft(u[:, i, : i + 1])  # (N, i // 2 + 1)
        angle = torch.from_numpy(rng.uniform(0, 2 * np.pi, row.shape)).to(u)
        phase = torch.polar(torch.ones_like(angle), angle)
        phase[:, 0] = 1  # the row's sum stays
        if (i + 1) % 2 == 0:  # the highest frequency of an even length is real
            phase[:, -1] = torch.where(angle[:, -1] < np.pi, 1.0, -1.0).to(phase.dtype)
        surrogate[:, i, : i + 1] = torch.fft.irfft(row * phase, n=i + 1)
    return mean + surrogate


def planted_fields(
    n: int = 100,
    t: int = 128,
    *,
    lag: float = 12.0,
    spread: float = 2.0,
    period: float | None = None,
    strength: float = 0.5,
    noise: float = 0.3,
    decay: float = 8.0,
    seed: int = 0,
) -> xr.DataArray:
    """Causal fields with one pattern at a known lag, stronger in some documents than in others.

    Before each row is normalised, A_s(i, j) = exp(-tau / decay) e_ij + strength g_s b(tau) with
    tau = i - j, the bump b(tau) = exp(-(tau - lag)^2 / (2 spread^2)), e_ij lognormal noise, and
    g_s uniform from 0 to 2, one number a document. So the fluctuation has one planted mode, whose
    lag profile peaks at `lag`.

    Parameters
    ----------
    n, t : int
        Documents and tokens.
    lag, spread : float
        Where the pattern lies and how wide it is, tokens.
    period : float, optional
        Let the pattern oscillate along the lag: b(tau) is multiplied by
        (1 + cos(2 pi (tau - lag) / period)) / 2.
    strength, noise, decay : float
        Height of the pattern, deviation of log e_ij, and the reach of the background, tokens.
    seed : int

    Returns
    -------
    xarray.DataArray
        ``(layer, snapshot, query, key)`` with one layer, float32, rows sum to 1. The coordinate
        ``amplitude`` (snapshot) is g_s.
    """
    for name, value, least in (("n", n, 3), ("t", t, 2), ("seed", seed, 0)):
        check_whole(name, value, least)
    positive = [spread, decay, *([] if period is None else [period])]
    if not all(0 < x < np.inf for x in positive) or not all(0 <= x < 10 for x in (strength, noise)):
        raise InputError(
            "spread, decay and period are positive numbers of tokens, strength and noise lie "
            "between 0 and 10"
        )
    if not 0 <= lag < t:
        raise InputError(f"the pattern's lag lies between 0 and {t - 1}, not {lag}")
    rng = np.random.default_rng(seed)
    tau = np.subtract.outer(np.arange(t), np.arange(t)).astype(float)
    causal = tau >= 0
    bump = np.exp(-((tau - lag) ** 2) / (2 * spread**2))
    if period is not None:
        bump = bump * (1 + np.cos(2 * np.pi * (tau - lag) / period)) / 2
    amplitude = rng.uniform(0, 2, n)
    background = np.exp(-np.abs(tau) / decay) * np.exp(noise * rng.standard_normal((n, t, t)))
    values = (background + strength * amplitude[:, None, None] * bump) * causal
    values /= values.sum(-1, keepdims=True)
    return xr.DataArray(
        values[None].astype(np.float32),
        {"layer": [1], "amplitude": ("snapshot", amplitude)},
        ("layer", "snapshot", "query", "key"),
    )


def structureless_fields(
    n: int = 60, t: int = 128, *, diagonal: float = 0.1, seed: int = 0
) -> xr.DataArray:
    """Causal fields with a given weight on the diagonal and no structure anywhere else.

    Every query gives `diagonal` to itself and shares the rest among all earlier keys at random
    (independent exponential weights), so no lag is preferred and no two entries belong together.

    Parameters
    ----------
    n, t : int
        Documents and tokens.
    diagonal : float
        Between 0 and 1. (The first query has no other key: its weight is 1.)
    seed : int

    Returns
    -------
    xarray.DataArray
        ``(layer, snapshot, query, key)`` with one layer, float32, rows sum to 1.
    """
    for name, value, least in (("n", n, 3), ("t", t, 2), ("seed", seed, 0)):
        check_whole(name, value, least)
    if not 0 < diagonal < 1:
        raise InputError(f"the weight of the diagonal lies between 0 and 1, not {diagonal}")
    rest = np.random.default_rng(seed).exponential(size=(n, t, t)) * np.tri(t, k=-1)
    total = rest.sum(-1, keepdims=True)
    values = (1 - diagonal) * rest / np.where(total > 0, total, 1)
    values += diagonal * np.eye(t)
    values[:, 0, 0] = 1
    return xr.DataArray(
        values[None].astype(np.float32), {"layer": [1]}, ("layer", "snapshot", "query", "key")
    )
