"""Intervals and curves over ensemble size, from a Gram alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xarray as xr

from .complexity import effective_rank
from .errors import InputError, check_whole
from .gram import GRAM_ONLY, check_gram


def _resampled_spectra(gram: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Spectra of resampled ensembles: rows and columns of the Gram, recentred.

    gram ``(N, N)``, index ``(R, n)`` gives ``(R, n - 1)``, descending.
    """
    n = index.shape[1]
    some = gram[index[:, :, None], index[:, None, :]]  # (R, n, n)
    rows = some.mean(-1, keepdims=True)
    centred = some - rows - rows.swapaxes(-1, -2) + rows.mean(-2, keepdims=True)
    values = torch.linalg.eigvalsh(torch.from_numpy(centred)).numpy() / n
    return values[:, :0:-1].clip(min=0)


def _each_gram(gram: xr.DataArray):
    check_gram(gram)
    flat = gram.values.reshape(-1, *gram.shape[-2:])
    coords = {c: v for c, v in gram.coords.items() if c not in GRAM_ONLY}
    return flat, gram.shape[:-2], gram.dims[:-2], coords


def bootstrap(
    gram: xr.DataArray,
    statistic: Callable[[np.ndarray], np.ndarray | dict[str, np.ndarray]],
    n_resamples: int = 1000,
    seed: int = 0,
    *,
    level: float = 0.95,
    draws: bool = False,
    batch: int = 100,
) -> xr.Dataset:
    """Bootstrap over documents of a statistic of the spectrum; no pass over the fields.

    A resample takes rows and columns of the Gram and recentres it. It holds each document several
    times or not at all, so its rank is about 0.63 N: statistics that grow with N, above all ranks,
    come out too small, and a plain percentile interval would miss the estimate. The interval is
    therefore the percentile interval moved by the bootstrap's bias, which is reported, and always
    holds the estimate. It is for the value expected of *this many* documents, not for the limit of
    many; for statistics that grow with N the two differ (:func:`rank_curve`).

    The level is approximate. In simulated ensembles of high dimension the intervals of ranks were
    several times too wide, those of exponents and leading shares about right to twice too wide,
    and those of the participation ratio of steep spectra clearly too narrow;
    differences between ensembles on the same documents (:func:`contrast`) came closest.

    Parameters
    ----------
    gram : xarray.DataArray
        ``(..., snapshot, snapshot_)`` from :func:`attnlib.scale_gram`.
    statistic : callable
        Maps spectra ``(R, N - 1)``, descending, to ``(R,)`` values, or to a dict of such: several
        statistics of the same resamples.
    n_resamples, seed, level
        Resamples (at least 20), their seed, and the level of the interval. The same documents are
        drawn for every layer and scale, so that differences between them can be compared.
    draws : bool
        Keep the statistic of every resample as ``draw`` (..., resample), for :func:`contrast`.
    batch : int
        Resamples held at a time (8 batch N^2 bytes).

    Returns
    -------
    xarray.Dataset
        ``estimate``, ``se``, ``bias``, ``low``, ``high`` on the leading dimensions, and with a
        dict on `statistic`. NaN where the statistic is.

    Raises
    ------
    InputError
        Not a Gram, or impossible numbers.

    References
    ----------
    Efron & Tibshirani 1993, chapters 6 and 10, for standard error and bias; the moved interval is
    ours.
    """
    for name, value, least in (("n_resamples", n_resamples, 20), ("batch", batch, 1)):
        check_whole(name, value, least)
    check_whole("seed", seed, 0)
    if not 0 < level < 1:
        raise InputError(f"level lies between 0 and 1, not {level}")
    flat, shape, dims, coords = _each_gram(gram)
    n = flat.shape[-1]
    index = np.random.default_rng(seed).integers(n, size=(n_resamples, n))
    parts = np.array_split(index, -(-n_resamples // batch))
    names: list[str] | None = None
    rows = []
    for one in flat:
        everything = [np.arange(n)[None], *parts]
        computed = [_checked(statistic(_resampled_spectra(one, p)), len(p)) for p in everything]
        if isinstance(computed[0], dict):
            names = list(computed[0])
            computed = [np.stack([c[name] for name in names]) for c in computed]
        else:
            computed = [np.asarray(c)[None] for c in computed]
        rows.append(np.concatenate(computed, axis=1))
    table = np.array(rows, dtype=float)  # (layers, statistics, 1 + resamples)
    if names is None:
        table = table[:, 0].reshape(*shape, -1)
    else:
        table = table.reshape(*shape, len(names), -1)
        dims, coords = (*dims, "statistic"), {**coords, "statistic": names}
    whole = xr.DataArray(table, coords, (*dims, "resample"))
    estimate, draw = whole.isel(resample=0), whole.isel(resample=slice(1, None))
    result = _interval(estimate, draw, level)
    return result.assign(draw=draw) if draws else result


def _checked(values, n: int):
    """What a statistic gave for n spectra: a number for each, or a dict of such."""
    for one in values.values() if isinstance(values, dict) else [values]:
        if np.shape(one) != (n,):
            raise InputError(
                f"the statistic gave the shape {np.shape(one)} for {n} spectra: it gives one "
                "number a spectrum"
            )
    if isinstance(values, dict) and not values:
        raise InputError("the statistic gave an empty dict")
    return values


def contrast(
    resampled: xr.Dataset, function: Callable[[xr.DataArray], xr.DataArray], level: float = 0.95
) -> xr.Dataset:
    """Interval of a combination of bootstrapped values, say a difference of layers or of models.

    The values of one resample belong to the same documents, so that what they have in common
    cancels in a difference: the interval is a paired one.

    Parameters
    ----------
    resampled : xarray.Dataset
        From :func:`bootstrap` with ``draws=True``.
    function : callable
        Maps a DataArray on (layer, ..., statistic) to the combination wanted.
    level : float

    Returns
    -------
    xarray.Dataset
        ``estimate``, ``se``, ``bias``, ``low``, ``high``, as from :func:`bootstrap`.
    """
    if not 0 < level < 1:
        raise InputError(f"level lies between 0 and 1, not {level}")
    if "draw" not in resampled:
        raise InputError("a contrast needs the draws: call bootstrap(..., draws=True)")
    return _interval(function(resampled["estimate"]), function(resampled["draw"]), level)


def _interval(estimate: xr.DataArray, draw: xr.DataArray, level: float) -> xr.Dataset:
    """Standard error, bias, and the percentile interval moved by the bias.

    NaN among the draws are left out; NaN where fewer than two are left, or the estimate is NaN.
    """
    estimate, draw = (x.where(np.isfinite(x)) for x in (estimate, draw))
    usable = (draw.notnull().sum("resample") >= 2) & estimate.notnull()
    draw = draw.where(usable, 0.0)
    bias = draw.mean("resample") - estimate.where(usable, 0.0)
    tail = (1 - level) / 2
    low, high = ((draw - bias).quantile(q, "resample", skipna=True) for q in (tail, 1 - tail))
    result = xr.Dataset(
        {
            "se": draw.std("resample", ddof=1),
            "bias": bias,
            "low": np.minimum(low.drop_vars("quantile"), estimate),
            "high": np.maximum(high.drop_vars("quantile"), estimate),
        }
    )
    return result.where(usable).assign(estimate=estimate)


def rank_curve(
    gram: xr.DataArray,
    sizes,
    epsilon: float = 0.1,
    *,
    n_draws: int = 20,
    seed: int = 0,
) -> xr.Dataset:
    """H*(epsilon; N): the effective rank against the number of snapshots.

    Parameters
    ----------
    gram : xarray.DataArray
        ``(..., snapshot, snapshot_)`` from :func:`attnlib.scale_gram`.
    sizes : sequence of int
        Ensemble sizes N, from 3 to the number of snapshots.
    n_draws : int
        Ensembles of each size, drawn without replacement (one at full size).

    Returns
    -------
    xarray.Dataset
        ``H`` (..., size), mean over draws; ``H_low`` and ``H_high``, their 2.5% and 97.5%
        quantiles (draws overlap, so near full size the spread is too small); ``growth`` (...),
        d log H / d log N between the last two sizes: 0 for a rank that has converged, 1 for one
        that only counts snapshots.
    """
    flat, shape, dims, coords = _each_gram(gram)
    n = flat.shape[-1]
    sizes = np.unique(np.asarray(sizes))
    check_whole("n_draws", n_draws)
    check_whole("seed", seed, 0)
    if sizes.dtype.kind not in "iu" or len(sizes) < 2 or sizes[0] < 3 or sizes[-1] > n:
        raise InputError(f"sizes are two or more whole numbers from 3 to the {n} snapshots")
    h = np.empty((len(flat), len(sizes), 3))
    for j, size in enumerate(sizes):
        rng = np.random.default_rng([seed, size])
        draws = n_draws if size < n else 1
        index = np.stack([np.sort(rng.choice(n, size, replace=False)) for _ in range(draws)])
        for i, one in enumerate(flat):
            some = effective_rank(_resampled_spectra(one, index), epsilon)["H"].values
            h[i, j] = some.mean(), *np.quantile(some, [0.025, 0.975])
    h = h.reshape(*shape, len(sizes), 3)
    growth = np.log(h[..., -1, 0] / h[..., -2, 0]) / np.log(sizes[-1] / sizes[-2])
    names = ("H", "H_low", "H_high")
    return xr.Dataset(
        {
            **{k: ((*dims, "size"), h[..., i]) for i, k in enumerate(names)},
            "growth": (dims, growth),
        },
        {**coords, "size": sizes},
        {"epsilon": epsilon},
    )


def extrapolate_rank(curves: xr.Dataset, size: int) -> xr.Dataset:
    """What an effective rank can be at a larger ensemble, as a bracket and never as a number.

    If the growth exponent d log H / d log N falls with N, as it does wherever a rank levels off,
    then H at `size` lies between its value at the largest N measured (no further growth) and the
    continuation of the last exponent, for which the lower end of the draws at the last size but
    one is taken. Whether the exponent has been falling is reported, not assumed.

    Parameters
    ----------
    curves : xarray.Dataset
        From :func:`rank_curve`, two sizes at least.
    size : int
        Beyond the largest of them.

    Returns
    -------
    xarray.Dataset
        ``low``, ``high`` on the leading dimensions, and ``size``; ``falling`` (...), whether the
        exponent between the last two sizes is no larger than the one before (True with two sizes).

    Raises
    ------
    InputError
        A size that was measured.
    """
    sizes = curves["size"].values
    check_whole("size", size)
    if len(sizes) < 2 or size <= sizes[-1]:
        raise InputError(f"H* was measured up to N = {sizes[-1]}: extrapolate to a larger N")
    last, before = curves.isel(size=-1), curves.isel(size=-2)
    steps = np.log(size / sizes[-1]) / np.log(sizes[-1] / sizes[-2])
    steepest = last["H"] / before["H_low"].clip(min=1)
    high = (last["H"] * steepest**steps).clip(max=size - 1)
    slopes = np.diff(np.log(curves["H"].values), axis=-1) / np.diff(np.log(sizes))
    falling = last["H"].copy(data=(np.diff(slopes, axis=-1)[..., -1:] <= 0).all(-1))
    return xr.Dataset(
        {
            "low": last["H"].drop_vars("size"),
            "high": high.drop_vars("size"),
            "falling": falling.drop_vars("size"),
            "size": size,
        }
    )
