"""Morlet wavelets: scales and periods, and the transform."""

from __future__ import annotations

import math

import numpy as np
import torch

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
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"the signal is float32 or float64, not {x.dtype}")
    if not bool(torch.isfinite(x).all()):
        raise InputError("the signal holds a value that is not finite")
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
