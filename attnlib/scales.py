"""Which scales stand out: power by scale, its red-noise background, its maxima, its intervals."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from .errors import InputError


def global_power(scalogram: xr.Dataset, weights=None) -> xr.DataArray:
    """Power by scale: mean over documents (blocks) and over the lags inside the cone.

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram`.
    weights : array-like, optional
        One weight per block, for resampling; by default the blocks' sizes.

    Returns
    -------
    xarray.DataArray
        ``(..., scale)``; NaN where the cone of that scale holds no lag.
    """
    size = scalogram["block_size"] if weights is None else scalogram["block_size"] * weights
    mean = (scalogram["power"] * size).sum("block", skipna=False) / size.sum("block")
    rows = scalogram["rows"].where(scalogram["in_cone"], 0)
    return (mean.fillna(0) * rows).sum("lag") / rows.sum("lag").where(rows.sum("lag") > 0)


def red_noise(scalogram: xr.Dataset) -> xr.DataArray:
    """Global power that red noise of the same variance and autocorrelation would have.

    A first-order autoregression with the layer's lag-one autocorrelation r has the spectrum
    (1 - r^2) / (1 + r^2 - 2 r cos w); through the wavelet it gives a power by scale, here scaled
    so that the mean over scales of its logarithm equals the layer's.

    References
    ----------
    Torrence & Compo 1998, eq. 16.
    """
    omega = np.linspace(0, math.pi, 4097)
    r = scalogram["autocorrelation"].clip(-0.999, 0.999)
    spectrum = (1 - r**2) / (1 + r**2 - 2 * r * xr.DataArray(np.cos(omega), dims="omega"))
    a = scalogram["scale"]
    factor = 4.0 if scalogram.attrs["norm"] == "L1" else 2 * math.sqrt(math.pi) * a
    shape = np.exp(-((a * xr.DataArray(omega, dims="omega") - scalogram.attrs["omega0"]) ** 2))
    red = (spectrum * factor * shape).mean("omega")
    power = global_power(scalogram)
    level = (np.log(power) - np.log(red)).mean("scale")
    return (red * np.exp(level)).transpose(*power.dims)


def dominant_scales(scalogram: xr.Dataset, n: int = 4, background=None) -> xr.Dataset:
    """Scales at which the power, relative to a background, has its highest local maxima.

    The convention fixed beforehand in this book: fluctuation field, cone masked, power relative
    to a background, local maxima inside the grid only (its edges are never a maximum).

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram`.
    n : int
        At most this many scales a layer.
    background : xarray.DataArray or xarray.Dataset, optional
        Power by scale of a null: a scalogram (say of the untrained model) or its global power;
        by default :func:`red_noise`.

    Returns
    -------
    xarray.Dataset
        ``dominant`` (..., rank): scales, strongest first, NaN where a layer has fewer maxima than
        `n`; ``excess`` (..., rank): power over background there; ``relative`` (..., scale).
    """
    if n < 1:
        raise InputError(f"n is at least 1, not {n}")
    power = global_power(scalogram)
    if background is None:
        background = red_noise(scalogram)
    elif isinstance(background, xr.Dataset):
        background = global_power(background)
    relative = (power / background).transpose(..., "scale")
    values = relative.values
    inner = values[..., 1:-1]
    peak = np.zeros(values.shape, dtype=bool)
    peak[..., 1:-1] = (inner > values[..., :-2]) & (inner > values[..., 2:])
    strength = np.where(peak, values, -np.inf)
    order = np.argsort(-strength, axis=-1, kind="stable")[..., :n]
    excess = np.take_along_axis(strength, order, -1)
    found = np.isfinite(excess)
    scale = scalogram["scale"].values[order]
    dims = (*relative.dims[:-1], "rank")
    return xr.Dataset(
        {
            "dominant": (dims, np.where(found, scale, np.nan)),
            "excess": (dims, np.where(found, excess, np.nan)),
            "relative": relative,
        },
        coords={"rank": np.arange(1, order.shape[-1] + 1)},
    )


def bootstrap_power(
    scalogram: xr.Dataset, n_resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> xr.Dataset:
    """Intervals of the global power, by resampling blocks of documents (no second pass).

    Returns
    -------
    xarray.Dataset
        ``low`` and ``high`` (..., scale), percentile interval at `level`. The mean field is that
        of all documents in every resample.
    """
    n = scalogram.sizes["block"]
    if n < 3:
        raise InputError(f"{n} block(s) of documents: call scalogram(..., n_blocks=10) or more")
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=n_resamples)
    draws = global_power(scalogram, xr.DataArray(counts, dims=("resample", "block")))
    tail = (1 - level) / 2
    low, high = draws.quantile(tail, "resample"), draws.quantile(1 - tail, "resample")
    return xr.Dataset({"low": low.drop_vars("quantile"), "high": high.drop_vars("quantile")})
