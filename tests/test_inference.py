"""Statistics of few layers and few trainings, against SciPy and least squares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from attnlib import (
    InputError,
    correlation_interval,
    early_and_late,
    mean_interval,
    over_texts,
    rank_correlation,
    trainings_interval,
    within_slope,
)


def table(values):
    return xr.DataArray(np.asarray(values, dtype=float), dims=("variant", "seed"))


def test_early_and_late_layers():
    x = xr.DataArray(np.arange(12.0).reshape(6, 2), dims=("layer", "draw"))
    early, late = early_and_late(x)
    np.testing.assert_allclose(early, [1, 2])
    np.testing.assert_allclose(late, [9, 10])
    np.testing.assert_allclose(early_and_late(x, 2, None)[1], [7, 8])
    with pytest.raises(InputError, match="more than the 3 there are"):
        early_and_late(x.isel(layer=slice(3)))
    with pytest.raises(InputError, match="about layers"):
        early_and_late(x.isel(layer=0))


def test_rank_correlation_counts_all_permutations():
    x, y = [3.0, 1.0, 2.0, 5.0, 4.0], [2.0, 1.0, 4.0, 5.0, 3.0]
    rho, p = rank_correlation(x, y)
    assert rho == pytest.approx(stats.spearmanr(x, y)[0])
    every = [stats.spearmanr(x, other)[0] for other in itertools.permutations(y)]
    assert p == pytest.approx(np.mean(np.abs(every) >= abs(rho) - 1e-12))
    assert rank_correlation(x, [1.0] * 5) == (0.0, 1.0)
    for bad in ([1.0, np.nan, 2.0, 3.0, 4.0], [1.0, 2.0]):
        with pytest.raises(InputError):
            rank_correlation(x, bad)


def test_two_variants_have_the_paired_t_interval():
    losses = np.random.default_rng(0).normal(size=(2, 5))
    paired = stats.ttest_rel(*losses).confidence_interval(0.9)
    half = trainings_interval(table(losses), 0.9)
    assert half == pytest.approx((paired.high - paired.low) / 2)


@given(st.integers(0, 2**31), st.integers(2, 5), st.integers(2, 6))
def test_variants_and_seeds_themselves_are_no_noise(seed, n_variants, n_seeds):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(n_variants, n_seeds))
    effects = rng.normal(size=(n_variants, 1)) + rng.normal(size=n_seeds)
    assert trainings_interval(table(noise + effects)) == pytest.approx(
        trainings_interval(table(noise))
    )
    assert trainings_interval(table(effects)) == pytest.approx(0, abs=1e-12)


def test_three_variants_have_the_interval_of_least_squares():
    losses = np.random.default_rng(3).normal(size=(3, 4))
    variant, seed = (x.ravel() for x in np.indices(losses.shape))
    design = np.c_[variant[:, None] == [0, 1, 2], seed[:, None] == [1, 2, 3]].astype(float)
    fit, rest, *_ = np.linalg.lstsq(design, losses.ravel(), rcond=None)
    freedom = losses.size - design.shape[1]
    difference = np.array([1, -1, 0, 0, 0, 0.0])
    spread = difference @ np.linalg.inv(design.T @ design) @ difference
    expected = stats.t.ppf(0.975, freedom) * np.sqrt(rest[0] / freedom * spread)
    assert trainings_interval(table(losses)) == pytest.approx(expected)
    assert fit[0] - fit[1] == pytest.approx(losses[0].mean() - losses[1].mean())


def test_nothing_is_known_from_one_training():
    assert trainings_interval(table([[1.0], [2.0]])) is None
    assert trainings_interval(table([[1.0, 2.0]])) is None
    with pytest.raises(InputError, match="not finite"):
        trainings_interval(table([[1.0, np.nan], [2.0, 1.0]]))
    with pytest.raises(InputError, match="variant, seed"):
        trainings_interval(np.ones((2, 2)))


def test_slope_within_groups_is_that_of_least_squares():
    rng = np.random.default_rng(1)
    x = xr.DataArray(rng.normal(size=(4, 3)), dims=("layer", "variant"))
    y = xr.DataArray(rng.normal(size=(4, 3, 2)), dims=("layer", "variant", "seed")) + 0.7 * x
    slope, error = within_slope(x, y, "layer")
    many_x, many_y = xr.broadcast(x, y)
    layer = np.indices(many_x.shape)[many_x.dims.index("layer")].ravel()
    design = np.c_[many_x.values.ravel(), layer[:, None] == np.arange(4)].astype(float)
    fit, rest, *_ = np.linalg.lstsq(design, many_y.values.ravel(), rcond=None)
    freedom = len(design) - 5
    variance = rest[0] / freedom * np.linalg.inv(design.T @ design)[0, 0]
    assert slope == pytest.approx(fit[0])
    assert error == pytest.approx(np.sqrt(variance))
    assert within_slope(x * 0, y, "layer") is None
    with pytest.raises(InputError, match="no dimension"):
        within_slope(x, y, "head")
    with pytest.raises(InputError, match="no slope"):
        within_slope(x.isel(variant=[0]), x.isel(variant=[0]), "layer")


def test_intervals_over_texts_are_those_of_resampled_texts():
    rng = np.random.default_rng(0)
    values = xr.DataArray(rng.normal(2.0, 1.0, size=(3, 40)), dims=("layer", "snapshot"))
    found = over_texts(values, 4000, seed=1)
    np.testing.assert_allclose(found["estimate"], values.mean("snapshot"))
    # A bootstrap of a mean has the standard error of a mean.
    error = values.std("snapshot") / np.sqrt(40)
    np.testing.assert_allclose(found["high"] - found["low"], 2 * 1.96 * error, rtol=0.1)
    xr.testing.assert_equal(found, over_texts(values, 4000, seed=1))
    for bad, message in (
        (values.rename(snapshot="text"), "snapshot"),
        (values[:, :2], "3 or more"),
        (values.where(values < 3), "not finite"),
    ):
        with pytest.raises(InputError, match=message):
            over_texts(bad)


@given(st.integers(0, 2**31), st.integers(3, 15))
def test_resampled_correlations_are_those_of_scipy(seed, n):
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, 6, (2, n)).astype(float)  # with ties
    rho, low, high = correlation_interval(x, y, n_resamples=40, seed=3)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert (rho, low, high) == (0, 0, 0)
        return
    drawn = np.random.default_rng(3).integers(n, size=(40, n))
    each = [
        0.0 if np.ptp(x[i]) == 0 or np.ptp(y[i]) == 0 else stats.spearmanr(x[i], y[i])[0]
        for i in drawn
    ]
    assert rho == pytest.approx(stats.spearmanr(x, y)[0])
    np.testing.assert_allclose([low, high], np.quantile(each, [0.025, 0.975]), atol=1e-9)
    assert correlation_interval(x, -y, n_resamples=40, seed=3)[0] == pytest.approx(-rho)


def test_the_interval_of_a_mean_is_students():
    values = [0.1, 0.4, -0.2, 0.3]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    np.testing.assert_allclose(mean_interval(values, 0.9), expected)


def test_intervals_of_nothing_are_refused():
    for values in ([1.0], [1.0, np.nan], [[1.0, 2.0]]):
        with pytest.raises(InputError, match="two or more finite"):
            mean_interval(values)
    with pytest.raises(InputError, match="3 or more pairs"):
        correlation_interval([1, 2], [1, 2])
    with pytest.raises(InputError, match="not finite"):
        correlation_interval([1, 2, np.inf], [1, 2, 3])
    with pytest.raises(InputError, match="a level lies"):
        correlation_interval([1, 2, 3], [1, 2, 3], level=1.5)
    with pytest.raises(InputError, match="n_resamples is a whole number"):
        correlation_interval([1, 2, 3], [1, 2, 3], n_resamples=1)
