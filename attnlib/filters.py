"""Filters of scale: windows over the lag."""

from __future__ import annotations

import numpy as np

from .errors import InputError
from .wavelet import OMEGA0, scale_to_period

CENTERS = ("period", "scale", "zero")


def lag_window(
    lag,
    scale,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    *,
    bank: bool = False,
) -> np.ndarray:
    """Gaussian window over the lag, w_a(lag) = exp(-(abs(lag) - c)^2 / (2 (width a)^2)).

    Windows of several octaves leave gaps: lag 0, and all lags beyond the largest scale, are in
    none of them. With ``bank=True`` the windows share out every lag instead: the first is open
    towards lag 0, the last towards the longest lag, and each is divided by the sum of all. Then
    the filtered fields of all scales add up to the field.

    Parameters
    ----------
    lag : array-like
        Lags, ``(L,)``.
    scale : float or sequence of float
        a, in tokens. An infinite scale gives w = 1: no filter (raw POD).
    width : float
        Standard deviation of the window in units of the scale.
    center : {"period", "scale", "zero"}
        c: the Fourier period of the wavelet at this scale (default), the scale, or 0. The last
        with width 1 is the published window, a low-pass rather than a band.
    omega0 : float
        Of the wavelet, for its period.
    bank : bool
        Make the finite scales a filter bank, whose windows sum to 1 at every lag. An infinite
        scale stands aside and stays unfiltered.

    Returns
    -------
    numpy.ndarray
        ``(S, L)`` float64, or ``(L,)`` for a single scale.

    Raises
    ------
    InputError
        A window that holds no lag at all, naming its scale; a bank with all centres at 0.
    """
    if bank and center == "zero":
        raise InputError("a filter bank needs a centre for each band: center='period' or 'scale'")
    if center not in CENTERS:
        raise InputError(f"center is one of {CENTERS}, not {center!r}")
    if not width > 0:
        raise InputError(f"width is positive, not {width}")
    lag = np.abs(np.asarray(lag, dtype=np.float64))
    if lag.ndim != 1 or not len(lag) or not np.isfinite(lag).all():
        raise InputError("lags are one or more finite numbers (in tokens)")
    scales = np.atleast_1d(np.asarray(scale, dtype=np.float64))
    if np.isnan(scales).any() or (scales <= 0).any():
        raise InputError("scales are positive numbers (in tokens); infinity means no filter")
    factor = {"period": scale_to_period(1.0, omega0), "scale": 1.0, "zero": 0.0}[center]
    band = np.isfinite(scales)
    centre, sigma = factor * scales[band, None], width * scales[band, None]
    offset = lag - centre  # (bands, lag)
    if bank and band.any():
        first, last = scales[band].argmin(), scales[band].argmax()
        offset[first] = offset[first].clip(min=0)
        offset[last] = offset[last].clip(max=0)
    exponent = -(offset**2) / (2 * sigma**2)
    if bank and band.any():
        exponent -= exponent.max(0)  # at least one band is 1, so the sum is safe far out
    windows = np.ones((len(scales), len(lag)))
    windows[band] = np.exp(exponent)
    if bank and band.any():
        windows[band] /= windows[band].sum(0)
    empty = np.zeros(len(scales), bool)
    empty[band] = (centre[:, 0] > lag.max()) | (windows[band].max(1) < 1e-3)
    if empty.any():
        a = scales[empty][0]
        raise InputError(
            f"scale {a:g} looks at lag {factor * a:g}, which these fields (lags up to "
            f"{lag.max():g}) do not have, or its window is narrower than a token: choose "
            "a smaller scale, longer windows of text, or a larger width"
        )
    return windows if np.ndim(scale) else windows[0]


def all_lags(t: int, convention: str) -> np.ndarray:
    """Every lag of a T x T field in a convention: 0 to T - 1, signed also -(T - 1) to -1."""
    return np.arange(-(t - 1), t) if convention == "signed" else np.arange(t)


def scale_coords(scales, omega0) -> dict:
    """The coordinate `scale` and with it `period`."""
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    if scales.ndim != 1 or len(np.unique(scales)) != len(scales) or not len(scales):
        raise InputError("scales are one or more different numbers")
    return {"scale": scales, "period": ("scale", scale_to_period(scales, omega0))}
