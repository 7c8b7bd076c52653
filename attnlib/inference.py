"""What few layers and few trainings allow one to say."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .errors import InputError, check_whole


def early_and_late(x, n_early: int = 2, n_late: int | None = 2):
    """Means over the first and over the last layers, in which most of the claims are put.

    Parameters
    ----------
    x : xarray.DataArray or xarray.Dataset
        ``(layer, ...)``, layers in order.
    n_early, n_late : int
        How many layers are early and late; ``n_late=None`` takes all that are not early.

    Returns
    -------
    early, late
        As `x`, without `layer`.

    Raises
    ------
    InputError
        No layers, or fewer than the early and the late together.
    """
    if "layer" not in x.dims:
        raise InputError(f"early and late are about layers, and there are none in {tuple(x.dims)}")
    n = x.sizes["layer"]
    check_whole("n_early", n_early)
    n_late = n - n_early if n_late is None else n_late
    if check_whole("n_late", n_late) + n_early > n:
        raise InputError(
            f"{n_early} early and {n_late} late layers are more than the {n} there are"
        )
    early, late = x.isel(layer=slice(n_early)), x.isel(layer=slice(n - n_late, None))
    return early.mean("layer"), late.mean("layer")


def over_texts(values: xr.DataArray, n_resamples: int = 1000, seed: int = 0) -> xr.Dataset:
    """Mean over texts with its 95% interval, from resampling texts (percentiles of a bootstrap).

    Parameters
    ----------
    values : xarray.DataArray
        ``(snapshot, ...)`` in any order, finite; at least 3 texts.
    n_resamples : int
    seed : int

    Returns
    -------
    xarray.Dataset
        ``estimate``, ``low``, ``high``, without `snapshot`.

    Raises
    ------
    InputError
        No dimension `snapshot`, fewer than 3 texts, or a value that is not finite.

    References
    ----------
    Efron & Tibshirani 1993, chapter 13; `scipy.stats.bootstrap`.
    """
    from scipy import stats

    if "snapshot" not in values.dims or values.sizes["snapshot"] < 3:
        raise InputError(f"texts to resample are 3 or more along 'snapshot', not {values.sizes}")
    if not np.isfinite(values.values).all():
        raise InputError("a value to be averaged over texts is not finite")
    by_text = values.transpose("snapshot", ...)
    middle = by_text.mean("snapshot")
    found = stats.bootstrap(
        (by_text.values,),
        np.mean,
        axis=0,
        n_resamples=check_whole("n_resamples", n_resamples, 2),
        batch=200,
        method="percentile",
        rng=np.random.default_rng(check_whole("seed", seed, 0)),
    ).confidence_interval
    return xr.Dataset(
        {
            "estimate": middle,
            "low": middle.copy(data=found.low),
            "high": middle.copy(data=found.high),
        }
    )


def rank_correlation(x, y, seed: int = 0) -> tuple[float, float]:
    """Spearman's correlation, and its p-value from permutations.

    With a handful of layers the usual approximation of the p-value fails; permutations do not. (All
    of them up to seven values, else 9,999 drawn at random.)

    Parameters
    ----------
    x, y : array-like
        ``(n,)``, finite, at least 3.
    seed : int
        Of the permutations.

    Returns
    -------
    rho, p_value : float
        Two-sided; 0 and 1 where one of the two does not vary.

    Raises
    ------
    InputError
        Different lengths, fewer than 3 values, or one that is not finite.
    """
    from scipy import stats

    x, y = _pairs(x, y)
    check_whole("seed", seed, 0)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0, 1.0
    test = stats.permutation_test(
        (x,),
        lambda x: stats.spearmanr(x, y)[0],
        permutation_type="pairings",
        vectorized=False,
        rng=np.random.default_rng(seed),
    )
    return float(test.statistic), float(test.pvalue)


def mean_interval(values, level: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of independent values.

    Parameters
    ----------
    values : array-like
        ``(n,)``, finite, at least 2: one a training, say.
    level : float

    Returns
    -------
    low, high : float

    Raises
    ------
    InputError
        Fewer than 2 values, or one that is not finite; a level outside (0, 1).
    """
    from scipy import stats

    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
        raise InputError("an interval for a mean needs two or more finite values")
    if not 0 < level < 1:
        raise InputError(f"a level lies between 0 and 1, not {level!r}")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean() - half), float(values.mean() + half)


def correlation_interval(
    x, y, *, n_resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Spearman's correlation, with an interval from resampled pairs (percentiles).

    Parameters
    ----------
    x, y : array-like
        ``(n,)``, finite, at least 3.
    n_resamples : int
    level : float
    seed : int
        Of the resamples. Those in which one of the two does not vary count as 0.

    Returns
    -------
    rho, low, high : float
        All 0 where one of the two does not vary.

    Raises
    ------
    InputError
        As :func:`rank_correlation`; fewer than 2 resamples, a level outside (0, 1).
    """
    from scipy import stats

    x, y = _pairs(x, y)
    check_whole("n_resamples", n_resamples, 2)
    check_whole("seed", seed, 0)
    if not 0 < level < 1:
        raise InputError(f"a level lies between 0 and 1, not {level!r}")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0, 0.0, 0.0
    drawn = np.random.default_rng(seed).integers(len(x), size=(n_resamples, len(x)))
    # Pearson's correlation of the ranks within each resample: (resample, n)
    ranks = [stats.rankdata(values[drawn], axis=1) for values in (x, y)]
    a, b = (r - r.mean(1, keepdims=True) for r in ranks)
    size = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    rho = np.divide((a * b).sum(1), size, out=np.zeros(n_resamples), where=size > 0)
    low, high = np.quantile(rho, [(1 - level) / 2, (1 + level) / 2])
    return float(stats.spearmanr(x, y)[0]), float(low), float(high)


def _pairs(x, y):
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise InputError(f"3 or more pairs of values are correlated, not {x.shape} with {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("a value to be correlated is not finite")
    return x, y


def trainings_interval(losses: xr.DataArray, level: float = 0.95) -> float | None:
    """Half the width of the interval of a difference between two variants, over trainings.

    Trainings of one variant differ from seed to seed, and that is the noise that a difference
    between variants has to stand out from. What a table of losses leaves after its row and column
    means measures it (a two-way analysis of variance without replication), the noise being taken
    to be the same for all variants. With two variants it is the paired t-interval.

    Parameters
    ----------
    losses : xarray.DataArray
        ``(variant, seed)``, finite.
    level : float

    Returns
    -------
    float or None
        None with one seed or one variant: nothing is known about the others.

    Raises
    ------
    InputError
        Other dimensions, or a loss that is not finite.
    """
    from scipy import stats

    if not isinstance(losses, xr.DataArray) or set(losses.dims) != {"variant", "seed"}:
        raise InputError("losses are a DataArray (variant, seed)")
    if not np.isfinite(losses.values).all():
        raise InputError("a loss is not finite")
    if not 0 < level < 1:
        raise InputError(f"level lies between 0 and 1, not {level}")
    n_seeds = losses.sizes["seed"]
    freedom = (losses.sizes["variant"] - 1) * (n_seeds - 1)
    if not freedom:
        return None
    left_over = losses - losses.mean("seed") - losses.mean("variant") + losses.mean()
    noise = float(np.square(left_over).sum()) / freedom
    return float(stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(2 * noise / n_seeds))


def within_slope(x: xr.DataArray, y: xr.DataArray, group: str) -> tuple[float, float] | None:
    """Slope of y on x within groups, and its standard error: one line a group, all parallel.

    Parameters
    ----------
    x, y : xarray.DataArray
        With the dimension `group` and others over which both vary (they are broadcast).
    group : str

    Returns
    -------
    slope, standard_error : float, or None
        None where x does not vary within any group.

    Raises
    ------
    InputError
        No such dimension, a value that is not finite, or as many groups as values.
    """
    x, y = xr.broadcast(x, y)
    if group not in x.dims:
        raise InputError(f"there is no dimension {group!r} in {x.dims}")
    if not (np.isfinite(x.values).all() and np.isfinite(y.values).all()):
        raise InputError("a value is not finite")
    freedom = x.size - x.sizes[group] - 1
    if freedom < 1:
        raise InputError(f"{x.size} values in {x.sizes[group]} groups leave no slope to estimate")
    others = [d for d in x.dims if d != group]
    x, y = x - x.mean(others), y - y.mean(others)
    square = float((x**2).sum())
    if square == 0:
        return None
    slope = float((x * y).sum()) / square
    error = float(((y - slope * x) ** 2).sum()) / freedom / square
    return slope, float(np.sqrt(error))
