"""Morlet wavelets along the lag: transform, scalogram, cone of influence."""

from __future__ import annotations

import math

import numpy as np
import torch
import xarray as xr

from .ensemble import check_convention, ensemble_size, lag_rows, map_fields, stack_leading
from .errors import InputError

OMEGA0 = 5.0
NORMS = ("L1", "L2")
CACHE_BYTES = 2**20
FOLD = math.sqrt(2)  # the wavelet's envelope falls to 1/e within sqrt(2) a


def scale_to_period(scale, omega0: float = OMEGA0, norm: str = "L1"):
    """Fourier period (tokens) at which a sine's power peaks at this scale.

    ``2 pi a / omega0`` for ``norm="L1"`` (1.257 a at omega0 = 5), ``4 pi a / (omega0 +
    sqrt(2 + omega0^2))`` for ``"L2"``, whose factor a pulls the peak to larger scales
    (Torrence & Compo 1998, table 1). Scalars and arrays alike.
    """
    _check_norm(norm, omega0)
    if norm == "L1":
        return 2 * math.pi * scale / omega0
    return 4 * math.pi * scale / (omega0 + math.sqrt(2 + omega0**2))


def period_to_scale(period, omega0: float = OMEGA0, norm: str = "L1"):
    """Inverse of :func:`scale_to_period`."""
    return period / scale_to_period(1.0, omega0, norm)


def _check_norm(norm: str, omega0: float) -> None:
    if not 0 < omega0 < math.inf:
        raise InputError(f"omega0 is a positive number, not {omega0}")
    if norm not in NORMS:
        raise InputError(f"norm is one of {NORMS}, not {norm!r}")


def check_scales(scales) -> np.ndarray:
    """Scales as a float64 vector: positive, finite, at least one."""
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    if scales.ndim != 1 or not len(scales) or not np.isfinite(scales).all() or scales.min() <= 0:
        raise InputError("scales are positive finite numbers (in tokens), at least one of them")
    return scales


def scale_grid(smallest: float, largest: float, n: int) -> np.ndarray:
    """`n` scales from `smallest` to `largest`, evenly spaced in their logarithm, at least 3."""
    if not 0 < smallest < largest < math.inf or n < 3:
        raise InputError(
            f"a grid of scales has 0 < smallest < largest and at least 3 scales, not {n} from "
            f"{smallest} to {largest}"
        )
    return np.geomspace(smallest, largest, n)


def morlet_cwt(x: torch.Tensor, scales, omega0: float = OMEGA0, norm: str = "L1") -> torch.Tensor:
    """Continuous wavelet transform with the analytic Morlet wavelet, along the last axis.

    W(a, b) = sum over tau of x(tau) psi_a*(tau - b), evaluated in Fourier space on the signal
    padded with zeros to at least twice its length, with the transform of the wavelet
    c_a exp(-(a w - omega0)^2 / 2) for w > 0, else 0.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., T)``, real, any device. float32 gives complex64, float64 complex128.
    scales : sequence of float
        a, in tokens. Below about (omega0 + 3) / pi, 2.5 at omega0 = 5, the wavelet reaches beyond
        the highest frequency that tokens can carry, and is cut off there.
    omega0 : float
        Centre frequency of the wavelet at a = 1, radians per token.
    norm : {"L1", "L2"}
        ``"L1"``: c_a = 2, so that a cosine of unit amplitude has abs(W) = 1 at its scale, whatever
        the scale. ``"L2"``: c_a = pi^(-1/4) sqrt(2 pi a), unit energy at every scale (Torrence &
        Compo 1998, eqs. 4 and 6; the paper's public code leaves out pi^(-1/4)).

    Returns
    -------
    torch.Tensor
        ``(..., S, T)``, complex, on the device of `x`.
    """
    _check_norm(norm, omega0)
    scales = check_scales(scales)
    if not x.is_floating_point():
        raise InputError(f"the signal is floating point, not {x.dtype}")
    t = x.shape[-1]
    psi_hat = wavelet_hat(t, scales, omega0, norm, x)  # (S, n_fft)
    flat = x.reshape(-1, t)
    # On a CPU some rows at a time, so that the padded transforms stay in the cache.
    at_once = CACHE_BYTES // (2 * psi_hat.nbytes) if x.device.type == "cpu" else len(flat)
    at_once = max(1, at_once)
    out = torch.empty(len(flat), len(scales), t, dtype=x.dtype.to_complex(), device=x.device)
    for start in range(0, len(flat), at_once):
        rows = slice(start, start + at_once)
        x_hat = torch.fft.fft(flat[rows], n=psi_hat.shape[-1]).unsqueeze(-2)  # (rows, 1, n_fft)
        out[rows] = torch.fft.ifft(x_hat * psi_hat)[..., :t]
    return out.view(*x.shape[:-1], len(scales), t)


def wavelet_hat(t: int, scales, omega0: float, norm: str, like: torch.Tensor) -> torch.Tensor:
    """Fourier transform of the wavelets on a grid for signals of length t: ``(S, n_fft)``."""
    n_fft = 2 ** math.ceil(math.log2(2 * t))
    omega = 2 * math.pi * torch.fft.fftfreq(n_fft, dtype=like.dtype, device=like.device)
    a = torch.as_tensor(scales, dtype=like.dtype, device=like.device)[:, None]
    factor = 2.0 if norm == "L1" else math.pi**-0.25 * (2 * math.pi * a).sqrt()
    return factor * torch.exp(-0.5 * (a * omega - omega0) ** 2) * (omega > 0)


def _kernel(t: int, scales, omega0: float, norm: str, like: torch.Tensor) -> torch.Tensor:
    """The transform as a convolution, W(a, b) = sum_tau k_a(b - tau) x(tau).

    Real and imaginary part of k at the offsets -(t - 1) to t - 1: ``(S, 2, 2 t - 1)``.
    """
    k = torch.fft.ifft(wavelet_hat(t, scales, omega0, norm, like[:0].double()))  # (S, n_fft)
    offsets = torch.arange(1 - t, t, device=like.device) % k.shape[-1]
    return torch.view_as_real(k[:, offsets]).movedim(-1, 1).to(like)


def _power_of_all_rows(x: torch.Tensor, kernel: torch.Tensor, causal: bool) -> tuple:
    """Mean over rows and documents of abs(W(a, b))^2, ``(N, R, T)`` rows -> ``(S, T)``; and C.

    With C the lag covariance it is the quadratic form psi C psi*, two matrix products in all.
    """
    n, rows, t = x.shape
    if causal:  # row i is zero past lag i: a third of the work
        covariance = x.new_zeros(t, t)
        for i in range(t):
            row = x[:, i, : i + 1]
            covariance[: i + 1, : i + 1].addmm_(row.T, row)
    else:
        flat = x.flatten(0, 1)  # (N R, T)
        covariance = flat.T @ flat
    covariance /= n * rows
    position = torch.arange(t, device=x.device)
    offset = position[:, None] - position + t - 1  # (b, tau): where k(b - tau) stands
    power = []
    for one in kernel:  # a scale at a time: T x T, not S x T x T
        psi = one[:, offset]  # (2, b, tau)
        power.append(((psi @ covariance) * psi).sum((0, 2)))
    return torch.stack(power), covariance


def _power_in_cone(x: torch.Tensor, kernel: torch.Tensor, reach: np.ndarray) -> tuple:
    """As above for blocks of documents: ``(B, n, T, T)`` rows to ``(B, S, T)``; C, ``(B, T, T)``.

    Each (a, b) averages only the rows whose cone holds it.

    Row i has lags 0..i, so its cone holds (a, b) if reach_a <= b <= i - reach_a: the rows
    i >= b + reach_a. Going down in i, the covariance of the rows so far is the one that the
    pairs with b + reach_a = i need; no row is transformed.
    """
    blocks, n, t, _ = x.shape
    power = x.new_full((blocks, len(reach), t), float("nan"))
    covariance = x.new_zeros(blocks, t, t)
    kernel = kernel.movedim(1, 0)  # (2, S, 2 t - 1)
    scale_index = np.arange(len(reach))
    back = np.arange(t - 1, -1, -1)  # tau = 0.. stands at b + t - 1 - tau
    for i in range(t - 1, -1, -1):
        row = x[:, :, i, : i + 1]  # (B, n, i + 1): zero beyond
        covariance[:, : i + 1, : i + 1].baddbmm_(row.mT, row)
        b = i - reach
        inside = b >= reach
        if inside.any():
            s, at = scale_index[inside], b[inside]
            psi = kernel[:, s[:, None], at[:, None] + back].flatten(0, 1)  # (2 pairs, T)
            energy = ((psi @ covariance) * psi).sum(-1)  # (B, 2 pairs)
            power[:, s, at] = energy.unflatten(1, (2, -1)).sum(1) / (n * (t - i))
    return power, covariance


def scalogram(
    fields,
    scales,
    omega0: float = OMEGA0,
    *,
    norm: str = "L1",
    convention: str = "causal",
    rows: str = "cone",
    center: bool = True,
    standardize: bool = False,
    n_blocks: int = 1,
    device: str | None = None,
) -> xr.Dataset:
    """Wavelet power of attention rows along the lag, averaged over rows and documents.

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        ``(layer, [head,] snapshot, query, key)``.
    scales : sequence of float
        a, in tokens.
    omega0, norm
        As in :func:`morlet_cwt`.
    convention : {"causal", "published", "signed"}
        What the lag is; see :func:`attnlib.lag_rows`.
    rows : {"cone", "all"}
        ``"cone"``: each (a, b) averages the rows whose own cone of influence holds it; NaN where
        none does. ``"all"``: all rows, as published; edges of short rows then count as signal.
        Only ``"all"`` for the other two conventions.
    center : bool
        Subtract the mean field first (harmless for fluctuations).
    standardize : bool
        Divide each lag by its rms over rows and documents. Attention falls by orders of magnitude
        along the lag, so a plain average over lags sees little beyond the shortest lag that the
        cone of each scale still holds, and those differ; with unit variance at every lag scales
        can be compared.
    n_blocks : int
        Keep the power of this many blocks of documents (dimension `block`), so that
        :func:`bootstrap_power` can resample them without a second pass.
    device : str, optional
        Where to compute; by default where the data are.

    Returns
    -------
    xarray.Dataset
        ``power`` (..., [block,] scale, lag), float64: mean of abs(W)^2; ``block_size``;
        ``in_cone`` (scale, lag), true where the power can be trusted; ``rows`` (scale, lag), how
        many rows were averaged; ``autocorrelation`` (...), at lag distance 1, for the red-noise
        background. `scale` has the second coordinate `period`.

    References
    ----------
    Zeris 2026 (scalogram of attention, omega0 = 5, 20 scales); Torrence & Compo 1998 (cone of
    influence: sqrt(2) a). The average of abs(W)^2 as a quadratic form of the covariance is ours.
    """
    scales = check_scales(scales)
    if (np.diff(scales) <= 0).any():
        raise InputError("scales of a scalogram ascend")
    if rows not in ("cone", "all"):
        raise InputError(f"rows is 'cone' or 'all', not {rows!r}")
    if rows == "cone" and convention != "causal":
        raise InputError(f"convention={convention!r} has no cone of each row: use rows='all'")
    n, t = ensemble_size(fields)
    if not 1 <= n_blocks <= n:
        raise InputError(f"n_blocks lies between 1 and the {n} snapshots, not {n_blocks}")
    reach = np.ceil(FOLD * scales).astype(int)
    if rows == "cone" and (2 * reach > t - 1).any():
        raise InputError(
            f"scale {scales[2 * reach > t - 1][0]:g} has no lag inside the cone of influence of "
            f"windows of {t} tokens: the largest that has is {(t - 1) // 2 / FOLD:.1f}"
        )
    kernel = None
    block_size = torch.tensor([len(b) for b in np.array_split(np.arange(n), n_blocks)])

    def one(field: torch.Tensor):
        nonlocal kernel
        check_convention(field, convention)
        x, lag = lag_rows(field, convention)  # a copy, so what follows can be in place
        if center:
            x -= x.mean(0)
        count = rows_with_lag(x.shape[1], convention).to(x)
        # Squares of float32 under- and overflow: the transform is linear, so scale there and back.
        low, high = x.aminmax()
        size = torch.maximum(-low, high).clamp(min=torch.finfo(x.dtype).tiny)
        x /= size
        if standardize:
            x, size = unit_variance(x, count), 1.0
        if kernel is None:
            kernel = _kernel(len(lag), scales, omega0, norm, x)
        if rows == "cone":
            # Short blocks are filled up with zeros, which add nothing; the mean is put right after.
            parts = torch.nn.utils.rnn.pad_sequence(x.tensor_split(n_blocks), batch_first=True)
            power, covariance = _power_in_cone(parts, kernel, reach)
            power *= (parts.shape[1] / block_size.to(power))[:, None, None]
            covariance = covariance.sum(0)
        else:
            causal = convention == "causal"
            both = [_power_of_all_rows(part, kernel, causal) for part in x.tensor_split(n_blocks)]
            power = torch.stack([p for p, _ in both])
            covariance = sum(c for _, c in both)
        return power.double() * float(size) ** 2, _autocorrelation(covariance, count), lag

    results, dims, coords = map_fields(fields, one, device)
    lead, lag = tuple(len(coords[d]) for d in dims), results[0][2]
    left, right = (lag + t - 1 if convention == "signed" else lag), t - 1 - lag
    in_cone = (left >= reach[:, None]) & (right >= reach[:, None])
    n_rows = np.full(in_cone.shape, t)
    if rows == "cone":
        n_rows = np.where(in_cone, t - (lag + reach[:, None]), 0)
    data = xr.Dataset(
        {
            "power": (
                (*dims, "block", "scale", "lag"),
                stack_leading([r[0] for r in results], lead),
            ),
            "block_size": ("block", block_size.numpy()),
            "in_cone": (("scale", "lag"), in_cone),
            "rows": (("scale", "lag"), n_rows),
            "autocorrelation": (dims, stack_leading([r[1] for r in results], lead)),
        },
        coords={
            **coords,
            "scale": ("scale", scales, {"units": "tokens"}),
            "period": ("scale", scale_to_period(scales, omega0, norm), {"units": "tokens"}),
            "lag": ("lag", lag, {"units": "tokens"}),
        },
        attrs={
            "omega0": omega0,
            "norm": norm,
            "convention": convention,
            "row_average": rows,
            "standardized": int(standardize),
        },
    )
    return data if n_blocks > 1 else data.isel(block=0)


def rows_with_lag(t: int, convention: str) -> torch.Tensor:
    """How many of the T rows have each lag ``(L,)``."""
    ones = torch.ones(1, t, t)
    return lag_rows(ones.tril() if convention == "causal" else ones, convention)[0][0].sum(0)


def unit_variance(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Rows ``(N, R, L)`` over their rms at each lag, of the rows that have the lag."""
    rms = (x.square().sum((0, 1)) / (len(x) * count)).sqrt()
    floor = torch.finfo(x.dtype).eps * rms.max()
    return torch.where(rms > floor, x / rms.clamp(min=floor), 0.0)


def _autocorrelation(covariance: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Correlation between neighbouring lags, from their covariance ``(L, L)`` over all rows.

    Rows that have a lag but not its neighbour count in the variance alone, so each variance is
    taken for the rows that have both.
    """
    variance = covariance.diagonal().double() / count  # each over the rows that have the lag
    both = torch.minimum(count[1:], count[:-1]).double()
    norm = ((variance[1:] * both).sum() * (variance[:-1] * both).sum()).sqrt()
    together = covariance.diagonal(1).double().sum()
    return together / norm if norm > 0 else norm
