"""Morlet wavelets along the lag: transform, scalogram, cone of influence."""

from __future__ import annotations

import math

import numpy as np
import torch
import xarray as xr

from .errors import InputError
from .fields import check_convention, ensemble_size, lag_rows, map_fields, stack_leading

OMEGA0 = 5.0
NORMS = ("L1", "L2")
FOLD = math.sqrt(2)  # the wavelet's envelope falls to 1/e within sqrt(2) a


def scale_to_period(scale, omega0: float = OMEGA0, norm: str = "L1"):
    """Fourier period (tokens) at which a sine's power peaks at this scale.

    ``2 pi a / omega0`` for ``norm="L1"`` (1.257 a at omega0 = 5), ``4 pi a / (omega0 +
    sqrt(2 + omega0^2))`` for ``"L2"``, whose factor a pulls the peak to larger scales
    (Torrence & Compo 1998, table 1). Scalars and arrays alike.
    """
    _check_norm(norm)
    if norm == "L1":
        return 2 * math.pi * scale / omega0
    return 4 * math.pi * scale / (omega0 + math.sqrt(2 + omega0**2))


def period_to_scale(period, omega0: float = OMEGA0, norm: str = "L1"):
    """Inverse of :func:`scale_to_period`."""
    return period / scale_to_period(1.0, omega0, norm)


def _check_norm(norm: str) -> None:
    if norm not in NORMS:
        raise InputError(f"norm is one of {NORMS}, not {norm!r}")


def check_scales(scales) -> np.ndarray:
    """Scales as a float64 vector: positive, finite, at least one."""
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    if scales.ndim != 1 or not len(scales) or not np.isfinite(scales).all() or scales.min() <= 0:
        raise InputError("scales are positive finite numbers (in tokens), at least one of them")
    return scales


def morlet_cwt(x: torch.Tensor, scales, omega0: float = OMEGA0, norm: str = "L1") -> torch.Tensor:
    """Continuous wavelet transform with the analytic Morlet wavelet, along the last axis.

    W(a, b) = sum over tau of x(tau) psi_a*(tau - b), evaluated in Fourier space on the signal
    padded with zeros to more than twice its length, with the transform of the wavelet
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
    _check_norm(norm)
    scales = check_scales(scales)
    if not x.is_floating_point():
        raise InputError(f"the signal is floating point, not {x.dtype}")
    t = x.shape[-1]
    n_fft = 2 ** math.ceil(math.log2(2 * t))
    omega = 2 * math.pi * torch.fft.fftfreq(n_fft, dtype=x.dtype, device=x.device)
    a = torch.as_tensor(scales, dtype=x.dtype, device=x.device)[:, None]
    factor = 2.0 if norm == "L1" else math.pi**-0.25 * (2 * math.pi * a).sqrt()
    psi_hat = factor * torch.exp(-0.5 * (a * omega - omega0) ** 2) * (omega > 0)  # (S, n_fft)
    x_hat = torch.fft.fft(x, n=n_fft).unsqueeze(-2)  # (..., 1, n_fft)
    return torch.fft.ifft(x_hat * psi_hat)[..., :t]


def _wavelet_matrix(t: int, scales, omega0, norm, like: torch.Tensor) -> torch.Tensor:
    """Real and imaginary rows of the transform as a matrix, ``(S, T_b, 2, T_tau)``.

    The transform of a unit impulse at tau is the column of the (linear) transform for tau.
    """
    impulse = torch.eye(t, dtype=torch.float64, device=like.device)
    w = morlet_cwt(impulse, scales, omega0, norm)  # (tau, S, b)
    return torch.view_as_real(w.permute(1, 2, 0)).movedim(-1, 2).to(like.dtype)


def _power_of_all_rows(x: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """Mean over rows and documents of abs(W(a, b))^2: ``(N, R, T)`` rows -> ``(S, T)``.

    With C the lag covariance it is the quadratic form psi C psi*, two matrix products in all.
    """
    flat = x.flatten(0, 1)  # (N R, T)
    covariance = flat.T @ flat / len(flat)
    return ((psi @ covariance) * psi).sum((-1, -2))


def _power_in_cone(x: torch.Tensor, psi: torch.Tensor, reach: np.ndarray) -> torch.Tensor:
    """As above, but each (a, b) averages only the rows whose cone holds it.

    Row i has lags 0..i, so its cone holds (a, b) if reach_a <= b <= i - reach_a: the rows
    i >= b + reach_a. Going down in i, the covariance of the rows so far is the one that the
    pairs with b + reach_a = i need; no row is transformed.
    """
    n, t, _ = x.shape
    n_scales = len(reach)
    power = x.new_full((n_scales, t), float("nan"))
    covariance = x.new_zeros(t, t)
    scale_index = np.arange(n_scales)
    for i in range(t - 1, -1, -1):
        row = x[:, i, : i + 1]  # (N, i + 1): zero beyond
        covariance[: i + 1, : i + 1].addmm_(row.T, row)
        b = i - reach
        inside = b >= reach
        if inside.any():
            s, at = scale_index[inside], b[inside]
            some = psi[s, at]  # (pairs, 2, T)
            energy = ((some @ covariance) * some).sum((-1, -2))
            power[s, at] = energy / (n * (t - i))
    return power


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
        Keep the power of this many blocks of documents, so that :func:`bootstrap_power` can
        resample them without a second pass.
    device : str, optional
        Where to compute; by default where the data are.

    Returns
    -------
    xarray.Dataset
        ``power`` (..., block, scale, lag), float64: mean of abs(W)^2; ``block_size`` (block);
        ``in_cone`` (scale, lag), true where the power can be trusted; ``rows`` (scale, lag), how
        many rows were averaged; ``autocorrelation`` (...), at lag distance 1, for the red-noise
        background. `scale` has the second coordinate `period`.

    References
    ----------
    Zeris 2026 (scalogram of attention, omega0 = 5, 20 scales); Torrence & Compo 1998 (cone of
    influence: sqrt(2) a). The average of abs(W)^2 as a quadratic form of the covariance is ours.
    """
    scales = check_scales(scales)
    if rows not in ("cone", "all"):
        raise InputError(f"rows is 'cone' or 'all', not {rows!r}")
    if rows == "cone" and convention != "causal":
        raise InputError(f"convention={convention!r} has no cone of each row: use rows='all'")
    reach = np.ceil(FOLD * scales).astype(int)
    lag = None

    def one(field: torch.Tensor):
        nonlocal lag
        check_convention(field, convention)
        if not 1 <= n_blocks <= len(field):
            raise InputError(f"n_blocks lies between 1 and the {len(field)} snapshots")
        if center:
            field = field - field.mean(0)
        x, lag = lag_rows(field, convention)
        if standardize:
            x = _unit_variance(x, convention)
        psi = _wavelet_matrix(len(lag), scales, omega0, norm, x)
        parts = [
            _power_in_cone(part, psi, reach) if rows == "cone" else _power_of_all_rows(part, psi)
            for part in x.tensor_split(n_blocks)
        ]
        return torch.stack(parts).double(), _lag_one_autocorrelation(x)

    results, dims, coords = map_fields(fields, one, device)
    lead = tuple(len(coords[d]) for d in dims)
    n, t = ensemble_size(fields)
    if convention == "signed":
        left, right, n_rows = lag + t - 1, t - 1 - lag, np.full((len(scales), len(lag)), t)
    else:
        left, right, n_rows = lag, t - 1 - lag, np.full((len(scales), len(lag)), t)
    in_cone = (left >= reach[:, None]) & (right >= reach[:, None])
    if rows == "cone":
        n_rows = np.where(in_cone, t - (lag + reach[:, None]), 0)
    sizes = [len(part) for part in np.array_split(np.arange(n), n_blocks)]
    data = xr.Dataset(
        {
            "power": (
                (*dims, "block", "scale", "lag"),
                stack_leading([r[0] for r in results], lead),
            ),
            "block_size": ("block", np.array(sizes)),
            "in_cone": (("scale", "lag"), in_cone),
            "rows": (("scale", "lag"), n_rows),
            "autocorrelation": (dims, stack_leading([r[1] for r in results], lead)),
        },
        coords={
            **coords,
            "scale": scales,
            "period": ("scale", scale_to_period(scales, omega0, norm)),
            "lag": lag,
        },
        attrs={
            "omega0": omega0,
            "norm": norm,
            "convention": convention,
            "row_average": rows,
            "standardized": int(standardize),
        },
    )
    data["scale"].attrs["units"] = data["period"].attrs["units"] = "tokens"
    data["lag"].attrs["units"] = "tokens"
    return data


def _unit_variance(x: torch.Tensor, convention: str) -> torch.Tensor:
    """Rows ``(N, R, L)`` over their rms at each lag, counting only rows that have the lag."""
    n_rows = x.shape[1]
    ones = torch.ones(1, n_rows, n_rows, device=x.device)
    has = lag_rows(ones.tril() if convention == "causal" else ones, convention)[0][0]
    rms = (x.square().sum((0, 1)) / (len(x) * has.sum(0).clamp(min=1))).sqrt()
    floor = torch.finfo(x.dtype).eps * rms.max()
    return torch.where(rms > floor, x / rms.clamp(min=floor), 0.0)


def _lag_one_autocorrelation(x: torch.Tensor) -> torch.Tensor:
    """Autocorrelation between neighbouring lags, over all rows and documents."""
    first, second = x[..., :-1].double(), x[..., 1:].double()
    norm = (first.square().sum() * second.square().sum()).sqrt()
    return (first * second).sum() / norm if norm > 0 else norm
