"""How complex is an ensemble: spectral decay and effective rank."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .errors import InputError

MODE = "mode"
MIN_FIT = 5  # eigenvalues that a fit of two parameters needs before its quality means anything


def _as_spectra(eigenvalues) -> xr.DataArray:
    """Spectra with `mode` last, checked: not negative, finite, descending, not all zero."""
    if not isinstance(eigenvalues, xr.DataArray):
        values = np.atleast_1d(np.asarray(eigenvalues, dtype=np.float64))
        dims = (*(f"dim_{i}" for i in range(values.ndim - 1)), MODE)
        eigenvalues = xr.DataArray(values, dims=dims)
    if MODE not in eigenvalues.dims or not eigenvalues.size:
        raise InputError(f"eigenvalues have a dimension '{MODE}' and some values")
    in_all = eigenvalues.attrs.get("modes_in_all", 0)
    if in_all > eigenvalues.sizes[MODE]:
        raise InputError(
            f"these are the first {eigenvalues.sizes[MODE]} of {in_all} eigenvalues: take all of "
            "them, spectrum(scale_gram(fields, scales))"
        )
    eigenvalues = eigenvalues.transpose(..., MODE)
    values = eigenvalues.values
    if not np.isfinite(values).all() or (values < 0).any():
        raise InputError("eigenvalues are finite and not negative")
    if (np.diff(values, axis=-1) > 1e-9 * values.max()).any():
        raise InputError("eigenvalues come in descending order along 'mode'")
    return eigenvalues


def _line(x: np.ndarray, y: np.ndarray, use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and residual sum of squares of least-squares lines along the last axis, masked."""
    n = use.sum(-1, keepdims=True)
    x, y = np.where(use, x, 0.0), np.where(use, y, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        dx = np.where(use, x - x.sum(-1, keepdims=True) / n, 0.0)
        dy = np.where(use, y - y.sum(-1, keepdims=True) / n, 0.0)
        slope = (dx * dy).sum(-1) / (dx * dx).sum(-1)
    return slope, np.square(dy - slope[..., None] * dx).sum(-1)


def participation_ratio(values: np.ndarray) -> np.ndarray:
    """(sum lambda)^2 / sum lambda^2 along the last axis; NaN for a spectrum of zeros."""
    with np.errstate(invalid="ignore"):
        return values.sum(-1) ** 2 / np.square(values).sum(-1)


def spectral_concentration(
    eigenvalues, n_fit: int = 30, *, first: int = 1, min_r_squared: float = 0.95
) -> xr.Dataset:
    """Decay of a spectrum: lambda_k ~ k^-beta, T_spec = 1 / beta, and whether to believe it.

    Parameters
    ----------
    eigenvalues : xarray.DataArray or array-like
        Descending along `mode` (the last axis of an array), not negative.
    n_fit, first : int
        The fit, least squares in log-log, takes modes `first` to `n_fit` (published: 1 to 30),
        less those at rounding level.
    min_r_squared : float
        See `fit_ok`.

    Returns
    -------
    xarray.Dataset
        ``beta``, ``T_spec``
            NaN where fewer than 5 eigenvalues can be fitted, never a default.
        ``r_squared``, ``n_fitted``
            Of the power law, in log-log.
        ``exponential_rate``, ``exponential_r_squared``
            The rival: lambda_k ~ exp(-rate k), same modes.
        ``delta_aic``
            AIC of the exponential less that of the power law: positive where the power law fits
            better (both have two parameters).
        ``fit_ok``
            R^2 >= `min_r_squared` and ``delta_aic > 0``: the power law is not rejected, which is
            not to say that it holds. White noise, whose R^2 is about 0.9, is rejected.
        ``participation_ratio``
            (sum lambda)^2 / sum lambda^2: a rank that needs no fit.
        ``entropy_rank``
            exp of the Shannon entropy of lambda / sum lambda.

    References
    ----------
    Zeris 2026: T_spec = 1 / beta. A small beta (slow decay) is a large T_spec.
    """
    from scipy.stats import entropy

    spectra = _as_spectra(eigenvalues)
    values = spectra.values
    if first < 1 or n_fit < first + MIN_FIT - 1:
        raise InputError(
            f"the fit takes modes first to n_fit, at least {MIN_FIT} of them, not {first} to "
            f"{n_fit}"
        )
    some = values[..., first - 1 : n_fit]
    k = np.arange(first, first + some.shape[-1], dtype=np.float64)
    use = some > 1e-12 * values.max(-1, keepdims=True)
    log_values = np.log(np.where(use, some, 1.0))
    n = use.sum(-1)
    power_slope, power_rss = _line(np.broadcast_to(np.log(k), some.shape), log_values, use)
    exp_slope, exp_rss = _line(np.broadcast_to(k, some.shape), log_values, use)
    enough = n >= MIN_FIT
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(use, log_values, 0).sum(-1) / n
        tss = np.where(use, np.square(log_values - mean[..., None]), 0).sum(-1)
        r_squared, exp_r_squared = 1 - power_rss / tss, 1 - exp_rss / tss
        delta_aic = n * (np.log(exp_rss) - np.log(power_rss))
        beta = -power_slope
        t_spec = 1 / beta
        total = values.sum(-1)
        participation = participation_ratio(values)
        entropy_rank = np.exp(entropy(values, axis=-1))

    def only(quantity):
        return np.where(enough, quantity, np.nan)

    dims = spectra.dims[:-1]
    coords = {c: v for c, v in spectra.coords.items() if MODE not in v.dims}
    results = {
        "beta": only(beta),
        "T_spec": only(np.where(beta > 0, t_spec, np.nan)),
        "r_squared": only(r_squared),
        "n_fitted": n,
        "exponential_rate": only(-exp_slope),
        "exponential_r_squared": only(exp_r_squared),
        "delta_aic": only(delta_aic),
        "fit_ok": enough & (only(r_squared) >= min_r_squared) & (only(delta_aic) > 0),
        "participation_ratio": participation,
        "entropy_rank": np.where(total > 0, entropy_rank, np.nan),
    }
    return xr.Dataset({name: (dims, value) for name, value in results.items()}, coords)


def effective_rank(eigenvalues, epsilon: float = 0.1, *, saturation: float = 0.5) -> xr.Dataset:
    """Smallest number of modes that leave at most a share epsilon of the variance.

    H*(epsilon) = min{ n : sum_{k > n} lambda_k / sum_k lambda_k <= epsilon }

    Parameters
    ----------
    eigenvalues : xarray.DataArray or array-like
        All N - 1 of them, descending along `mode` (:func:`attnlib.spectrum`).
    epsilon : float
        Between 0 and 1.
    saturation : float
        Flag a rank above this share of the N - 1 that N snapshots can show: it would grow with
        more snapshots, so it measures N.

    Returns
    -------
    xarray.Dataset
        ``H`` (int), ``saturated`` (bool), ``largest`` (int, the number of modes).

    References
    ----------
    Zeris 2026, H*(epsilon). The public code is off by one (its tail includes mode n), so its
    values are one higher.
    """
    if not 0 < epsilon < 1:
        raise InputError(f"epsilon lies between 0 and 1, not {epsilon}")
    spectra = _as_spectra(eigenvalues)
    values = spectra.values
    total = values.sum(-1, keepdims=True)
    if (total == 0).any():
        raise InputError("a spectrum of zeros has no effective rank: the fields do not vary")
    # Tail after n modes, for n = 0, 1, ..., summed from the small end for accuracy.
    tail = np.cumsum(values[..., ::-1], -1)[..., ::-1]
    tail = np.concatenate([tail, np.zeros_like(total)], -1)
    h = (tail > epsilon * total).sum(-1)
    largest = values.shape[-1]
    dims = spectra.dims[:-1]
    coords = {c: v for c, v in spectra.coords.items() if MODE not in v.dims}
    return xr.Dataset(
        {"H": (dims, h), "saturated": (dims, h > saturation * largest), "largest": largest},
        coords,
        {"epsilon": epsilon},
    )
