"""Over how many bands of lags a mode spreads, and whether its parts belong together."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .errors import InputError


def mode_bands(weights: xr.DataArray, gram: xr.DataArray, windows: xr.DataArray) -> xr.Dataset:
    """Spread of unfiltered modes over bands of lags, from Grams alone.

    With windows w_b(lag) that add up to 1 at every lag, the energy of a mode is the sum of its
    parts sum over lags of w_b(lag) norm(phi along that lag)^2, and its coefficient on document s
    the sum of parts c_b(s) = sum over lags of w_b(lag) <phi, u_s> along that lag.

    Parameters
    ----------
    weights : xarray.DataArray
        Unfiltered modes, ``(split, half, ..., mode, snapshot)`` from :func:`attnlib.half_modes`.
    gram : xarray.DataArray
        ``(..., lag, snapshot, snapshot_)`` from :func:`attnlib.lag_gram`.
    windows : xarray.DataArray
        ``(band, lag)``, adding up to 1 at every lag: a filter bank, ``lag_window(..., bank=True)``,
        or a partition, 1 for the lags of a band and 0 for others.

    Returns
    -------
    xarray.Dataset
        ``bands`` (split, half, ..., mode)
            How many bands the mode fills, as in :func:`band_shares`.
        ``ensemble`` (...)
            How many the whole fluctuation fills.
        ``correlation`` ``(split, half, ..., mode, band, band_)``
            Of c_b and c_b' over the documents of the *other* half: near 0 for a mode that lumps
            together what has nothing in common, near 1 for one pattern that spans both bands.
            (Where windows overlap, their parts correlate in any case.)

    Raises
    ------
    InputError
        Windows that do not add up to 1, or other lags.
    """
    if {"lag"} - {*gram.dims} or {"band", "lag"} - {*windows.dims}:
        raise InputError("the Gram has a dimension lag, the windows band and lag")
    if list(weights["half"].values) != ["a", "b"]:
        raise InputError("weights of both halves are needed, as half_modes returns them")
    if not np.array_equal(gram["lag"].values, windows["lag"].values):
        raise InputError("the Gram and the windows have different lags")
    if not np.allclose(windows.sum("band"), 1):
        raise InputError("the windows do not add up to 1 at every lag: take those of a bank")
    gram = windows.dot(gram.drop_vars("rounding", errors="ignore"), dim="lag")
    gram = gram.transpose(..., "band", "snapshot", "snapshot_")
    energy = np.trace(gram.values, axis1=-2, axis2=-1)
    coords = {d: gram.coords[d] for d in gram.dims[:-2] if d in gram.coords}
    parts = weights.dot(gram, dim="snapshot").rename(snapshot_="snapshot")
    inside = (weights != 0).any("mode")
    other = parts.where(inside.roll(half=1))
    other = (other - other.mean("snapshot")).fillna(0.0)
    norm = np.sqrt((other**2).sum("snapshot"))  # 0 for a band that does not vary
    other = other.where(norm > 0, 0.0) / norm.where(norm > 0, 1.0)
    correlation = other.dot(other.rename(band="band_"), dim="snapshot")
    return xr.Dataset(
        {
            "bands": band_shares((parts * weights).sum("snapshot").clip(min=0))["bands"],
            "ensemble": band_shares(xr.DataArray(energy, coords, gram.dims[:-2]))["bands"],
            "correlation": correlation.transpose(..., "band", "band_"),
        }
    )


def band_shares(energy: xr.DataArray) -> xr.Dataset:
    """Shares of an energy in the bands of a filter bank, and how many bands it fills.

    Parameters
    ----------
    energy : xarray.DataArray
        ``(..., band)``, not negative. For windows that add up to 1 at every lag and a mode, the
        sum over lags of the window times the mode's squares along the diagonal of that lag; their
        sum over bands is the mode's energy.

    Returns
    -------
    xarray.Dataset
        ``share`` (..., band), which adds up to 1; ``bands`` (...), the exponential of its entropy:
        1 for a single band, B for equal parts of B bands. Where windows overlap, even an energy
        at a single lag fills more than one.

    Raises
    ------
    InputError
        An energy that is negative, or zero in all bands.
    """
    total = energy.sum("band")
    if not bool(np.isfinite(energy).all()):
        raise InputError("an energy is not finite")
    if bool((energy < 0).any()) or not bool((total > 0).all()):
        raise InputError("an energy is not negative, and not zero in all bands")
    share = energy / total
    logs = np.log(share.where(share > 0, 1.0))
    return xr.Dataset(
        {"share": share.transpose(..., "band"), "bands": np.exp(-(share * logs).sum("band"))}
    )
