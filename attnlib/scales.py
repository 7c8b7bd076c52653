"""Which scales stand out: power by scale, its red-noise background, its maxima, its intervals."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from .errors import InputError, check_whole


def global_power(scalogram: xr.Dataset, weights=None) -> xr.DataArray:
    """Power by scale: mean over documents (blocks) and over the lags inside the cone.

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram`.
    weights : xarray.DataArray, optional
        How often each block counts (block, ...), for resampling; by default once.

    Returns
    -------
    xarray.DataArray
        ``(..., scale)``; NaN where the cone of that scale holds no lag.
    """
    rows = scalogram["rows"].where(scalogram["in_cone"], 0)
    power = (scalogram["power"].fillna(0) * rows).sum("lag")
    power = power / rows.sum("lag").where(rows.sum("lag") > 0)
    if "block" in power.dims:
        size = scalogram["block_size"] if weights is None else scalogram["block_size"] * weights
        power = power.dot(size / size.sum("block"), dim="block")
    return power


def red_noise(scalogram: xr.Dataset) -> xr.DataArray:
    """Global power that red noise with the layer's own autocorrelation would have.

    A first-order autoregression with the layer's lag-one autocorrelation r and unit variance has
    the spectrum (1 - r^2) / (1 + r^2 - 2 r cos w); through the wavelet it gives a power by scale.
    For standardised lags, whose variance is one, that is the level too. Otherwise the variance
    depends on the lag and there is no level: it is fitted, so that the mean over scales of the
    logarithm equals the layer's, and power above it somewhere is then a matter of course.

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram`.

    Returns
    -------
    xarray.DataArray
        ``(..., scale)``

    References
    ----------
    Torrence & Compo 1998, eq. 16.
    """
    omega = xr.DataArray(np.linspace(0, math.pi, 4097), dims="omega")
    r = scalogram["autocorrelation"].clip(-0.999, 0.999)
    spectrum = (1 - r**2) / (1 + r**2 - 2 * r * np.cos(omega))
    a, attrs = scalogram["scale"], scalogram.attrs
    factor = 4.0 if attrs["norm"] == "L1" else 2 * math.sqrt(math.pi) * a
    shape = np.exp(-((a * omega - attrs["omega0"]) ** 2))
    # The wavelet is zero at negative frequencies, half of the circle.
    red = (spectrum * factor * shape).mean("omega") / 2
    power = global_power(scalogram)
    if not attrs["standardized"]:
        red = red * np.exp((np.log(power) - np.log(red)).mean("scale"))
    return red.transpose(*power.dims)


def mean_period(power: xr.DataArray, norm: str = "L1") -> xr.DataArray:
    """Mean period of a power by scale, beside white noise, whose power is the same everywhere.

    A geometric mean over an evenly spaced grid of log scales, weighted by the power relative to
    that of white noise: 1/a under L1, the same at all scales under L2. One background serves all
    layers, so that a smoother layer has a longer period. (Relative to red noise with each layer's
    own autocorrelation smoothness would cancel.)

    Parameters
    ----------
    power : xarray.DataArray
        ``(..., scale, ...)`` with the coordinate `period`, from :func:`global_power`, of lags of
        unit variance.
    norm : {"L1", "L2"}
        That of the scalogram.

    Returns
    -------
    xarray.DataArray
        Without `scale`, tokens: between the periods at the ends of the grid.
    """
    weight = power * power["scale"] if norm == "L1" else power
    weight = weight / weight.sum("scale")
    return np.exp((weight * np.log(power["period"])).sum("scale"))


def resampled_power(scalogram: xr.Dataset, n_resamples: int = 1000, seed: int = 0) -> xr.DataArray:
    """Global power of resampled ensembles: blocks of documents, without a second pass.

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram` with 3 blocks or more. The mean field and, if lags were
        standardised, their rms are those of all documents in every resample.
    n_resamples, seed : int
        Scalograms with the same number of blocks are resampled alike, so that layers and models
        on the same documents can be compared resample by resample.

    Returns
    -------
    xarray.DataArray
        ``(..., scale, resample)``

    Raises
    ------
    InputError
        Fewer than 3 blocks.
    """
    n = scalogram.sizes.get("block", 1)
    if n < 3:
        raise InputError(f"{n} block(s) of documents: call scalogram(..., n_blocks=10) or more")
    check_whole("n_resamples", n_resamples)
    counts = np.random.default_rng(check_whole("seed", seed, 0)).multinomial(
        n, np.full(n, 1 / n), size=n_resamples
    )
    return global_power(scalogram, xr.DataArray(counts, dims=("resample", "block")))


def bootstrap_power(
    scalogram: xr.Dataset, n_resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> xr.Dataset:
    """Percentile intervals of the global power over :func:`resampled_power`.

    Parameters
    ----------
    scalogram, n_resamples, seed
        As there.
    level : float

    Returns
    -------
    xarray.Dataset
        ``low`` and ``high`` (..., scale).
    """
    draws = resampled_power(scalogram, n_resamples, seed)
    tail = (1 - level) / 2
    low, high = draws.quantile(tail, "resample"), draws.quantile(1 - tail, "resample")
    return xr.Dataset({"low": low.drop_vars("quantile"), "high": high.drop_vars("quantile")})


def dominant_scales(
    scalogram: xr.Dataset,
    n: int = 4,
    background=None,
    interval: xr.Dataset | None = None,
    *,
    margin: float = 0.05,
) -> xr.Dataset:
    """Scales at which the power stands out from a background.

    The convention of this book: fluctuation field, unit variance at every lag, cone masked, power
    relative to a background. A scale is dominant if the relative power has a local maximum there,
    inside the grid (its edges are never one), and above 1. With an interval, the maximum has to
    stand out twice: its lower bound lies above 1 by the margin, and the peak above the valleys
    beside it by more than the whole width of the interval (in logarithms).

    Parameters
    ----------
    scalogram : xarray.Dataset
        From :func:`scalogram`.
    n : int
        At most this many scales a layer.
    background : xarray.DataArray or xarray.Dataset, optional
        Power by scale of a null, on the same scales: a scalogram (say of the untrained model) or
        its global power; by default :func:`red_noise`.
    interval : xarray.Dataset, optional
        ``low`` and ``high`` of the power, from :func:`bootstrap_power`. Without it maxima that
        noise makes are counted too.

    margin : float
        With an interval, by how much the lower bound has to exceed the background. Red noise
        itself comes within a few per cent of its background, and there are many scales at which
        to err.

    Returns
    -------
    xarray.Dataset
        ``dominant`` (..., rank): scales, strongest first, NaN where a layer has fewer than `n`;
        ``excess`` (..., rank): power over background there; ``relative`` (..., scale).

    Raises
    ------
    InputError
        A background on other scales, or `n` below 1.

    References
    ----------
    Torrence & Compo 1998, section 4 (significance against a background).
    """
    from scipy.signal import find_peaks

    if n < 1:
        raise InputError(f"n is at least 1, not {n}")
    power = global_power(scalogram)
    if background is None:
        background = red_noise(scalogram)
    elif isinstance(background, xr.Dataset):
        background = global_power(background)
    if not np.array_equal(background["scale"], power["scale"]):
        raise InputError("the background was computed at other scales: use the same grid")
    relative = (power / background).transpose(..., "scale")
    scale, values = scalogram["scale"].values, relative.values
    if interval is None:
        low, width, margin = values, np.zeros_like(values), 0.0
    else:
        low = (interval["low"] / background).transpose(*relative.dims).values
        width = np.log(interval["high"]) - np.log(interval["low"])
        width = width.transpose(*relative.dims).values
    dominant = np.full((*values.shape[:-1], n), np.nan)
    excess = dominant.copy()
    for index in np.ndindex(values.shape[:-1]):
        y = np.nan_to_num(np.log(values[index]), nan=-np.inf)
        peaks, found = find_peaks(y, prominence=0)
        keep = (low[index][peaks] > 1 + margin) & (found["prominences"] > width[index][peaks])
        peaks = peaks[keep]
        peaks = peaks[np.argsort(-y[peaks], kind="stable")][:n]
        dominant[index][: len(peaks)] = scale[peaks]
        excess[index][: len(peaks)] = values[index][peaks]
    dims = (*relative.dims[:-1], "rank")
    return xr.Dataset(
        {"dominant": (dims, dominant), "excess": (dims, excess), "relative": relative},
        coords={"rank": np.arange(1, n + 1)},
    )
