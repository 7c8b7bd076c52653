"""Resampling a Gram is resampling documents; intervals cover; curves tell saturation apart."""

import numpy as np
import pytest
import torch
import xarray as xr

from attnlib import (
    InputError,
    bootstrap,
    contrast,
    effective_rank,
    extrapolate_rank,
    pod,
    rank_curve,
    scale_gram,
    spectral_concentration,
    spectrum,
)
from attnlib.resampling import _resampled_spectra


def gram_of(snapshots):
    u = snapshots - snapshots.mean(0)
    return xr.DataArray((u @ u.T)[None], {"layer": [1]}, ("layer", "snapshot", "snapshot_"))


def leading_share(values):
    return values[:, 0] / values.sum(1)


def test_a_resample_of_the_gram_is_that_of_the_documents():
    x = np.random.default_rng(0).normal(size=(9, 40))
    index = np.random.default_rng(1).integers(9, size=(4, 9))
    got = _resampled_spectra(gram_of(x).values[0], index)
    for spectra, rows in zip(got, index, strict=True):
        u = x[rows] - x[rows].mean(0)
        expected = np.linalg.svd(u, compute_uv=False)[:8] ** 2 / 9
        np.testing.assert_allclose(spectra, expected, atol=1e-12)


def test_estimate_is_that_of_the_data_and_lies_in_the_interval(make_fields):
    gram = scale_gram(make_fields(n=30), [2.0, np.inf])
    result = bootstrap(gram, leading_share, 200, seed=3)
    assert result["estimate"].dims == ("layer", "scale")
    spectra = spectrum(gram)
    np.testing.assert_allclose(
        result["estimate"], spectra.isel(mode=0) / spectra.sum("mode"), rtol=1e-9
    )
    assert (result["low"] < result["estimate"]).all()
    assert (result["estimate"] < result["high"]).all()
    assert (result["se"] > 0).all()
    xr.testing.assert_identical(result, bootstrap(gram, leading_share, 200, seed=3))
    assert not np.allclose(result["low"], bootstrap(gram, leading_share, 200, seed=4)["low"])


def test_batches_do_not_matter(make_fields):
    gram = scale_gram(make_fields(n=10), [2.0])
    a, b = (bootstrap(gram, leading_share, 50, batch=size) for size in (7, 50))
    xr.testing.assert_allclose(a, b)


def test_a_rank_is_biased_down_and_the_interval_still_holds_the_estimate():
    x = np.random.default_rng(0).normal(size=(60, 2000))
    result = bootstrap(gram_of(x), lambda v: effective_rank(v)["H"].values.astype(float), 100)
    assert result["bias"].item() < -10  # a plain percentile interval would miss it
    assert result["low"].item() <= result["estimate"].item() <= result["high"].item()


def test_coverage_of_a_smooth_statistic():
    """95% intervals for the participation ratio of an ensemble whose own is known."""
    weights = np.array([3.0, 2.0, 1.0])
    true = (weights**2).sum() ** 2 / (weights**4).sum()

    def participation(values):
        return spectral_concentration(values)["participation_ratio"].values

    hits = 0
    for seed in range(100):
        x = np.random.default_rng(seed).normal(size=(80, 3)) * weights
        interval = bootstrap(gram_of(x), participation, 100, seed)
        hits += interval["low"].item() <= true <= interval["high"].item()
    assert hits >= 89  # of 100; fewer has a chance of 0.4% if each covers 95%


def test_an_integer_statistic_that_hardly_varies_stays_in_its_interval():
    x = np.random.default_rng(0).normal(size=(40, 3)) * [30, 20, 1]
    result = bootstrap(gram_of(x), lambda v: effective_rank(v)["H"].values.astype(float), 50)
    assert result["low"].item() <= result["estimate"].item() <= result["high"].item()


def test_several_statistics_share_their_resamples(make_fields):
    gram = scale_gram(make_fields(n=12), [2.0, 4.0])
    both = bootstrap(gram, lambda v: {"lead": leading_share(v), "total": v.sum(1)}, 40, seed=2)
    assert both["low"].dims == ("layer", "scale", "statistic")
    alone = bootstrap(gram, leading_share, 40, seed=2)
    xr.testing.assert_allclose(both.sel(statistic="lead", drop=True), alone)


def test_the_level_widens_the_interval(make_fields):
    gram = scale_gram(make_fields(n=20), [2.0])
    narrow, wide = (bootstrap(gram, leading_share, 200, level=v) for v in (0.5, 0.95))
    assert (wide["low"] < narrow["low"]).all()
    assert (narrow["high"] < wide["high"]).all()
    ratio = (wide["high"] - wide["low"]) / (narrow["high"] - narrow["low"])
    assert 2 < ratio.mean().item() < 4.5  # 1.96 / 0.67 = 2.9 for a normal statistic


def test_a_statistic_that_is_not_there_stays_so():
    x = np.random.default_rng(0).normal(size=(6, 3))
    result = bootstrap(gram_of(x), lambda v: np.full(len(v), np.nan), 20)
    assert np.isnan(result["low"].item())


def test_curves_tell_a_rank_from_a_count():
    rng = np.random.default_rng(0)
    few = rng.normal(size=(120, 3)) @ rng.normal(size=(3, 500)) + 1e-3 * rng.normal(size=(120, 500))
    many = rng.normal(size=(120, 5000))
    gram = xr.concat([gram_of(few), gram_of(many)], dim="layer").assign_coords(layer=[1, 2])
    curve = rank_curve(gram, [15, 30, 60, 120], n_draws=5)
    assert curve["H"].sel(layer=1).values[-1] <= 3
    assert abs(curve["growth"].sel(layer=1).item()) < 0.05
    assert curve["growth"].sel(layer=2).item() > 0.9
    assert (curve["H_low"] <= curve["H"]).all()
    full = effective_rank(spectrum(gram.expand_dims(scale=[1.0], axis=1)))["H"]
    np.testing.assert_array_equal(curve["H"].isel(size=-1), full.isel(scale=0))


@pytest.mark.parametrize("sizes", [[10], [2, 5], [5, 13], [3.7, 6.2]])
def test_impossible_sizes(make_fields, sizes):
    with pytest.raises(InputError, match="whole numbers"):
        rank_curve(scale_gram(make_fields(), [2.0]), sizes)


def test_wrong_input():
    with pytest.raises(InputError, match="from scale_gram"):
        bootstrap(np.eye(4), leading_share)
    for bad, message in ((np.nan, "not finite"), (0.3, "not symmetric")):
        gram = np.eye(4)
        gram[1, 2] = bad  # above the diagonal, where eigensolvers do not look
        for function in (spectrum, lambda g: bootstrap(g, leading_share), lambda g: pod(g, [2.0])):
            with pytest.raises(InputError, match=message):
                function(xr.DataArray(gram, dims=("snapshot", "snapshot_")))
    with pytest.raises(InputError, match="at least 20"):
        bootstrap(xr.DataArray(np.eye(4), dims=("snapshot", "snapshot_")), leading_share, 10)
    with pytest.raises(InputError, match="seed is a whole number, at least 0"):
        bootstrap(xr.DataArray(np.eye(4), dims=("snapshot", "snapshot_")), leading_share, seed=-1)
    small = xr.DataArray(np.eye(2), dims=("snapshot", "snapshot_"))
    with pytest.raises(InputError, match="at least 3"):
        bootstrap(small, leading_share)


def test_a_contrast_is_paired(make_fields):
    """The difference of two layers that share their documents' noise is known better than each."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 60, 1, 1)) * np.ones((2, 60, 6, 6))
    fields = torch.from_numpy(common + 0.01 * rng.normal(size=(2, 60, 6, 6))).tril()
    gram = scale_gram(fields, [np.inf]).isel(scale=0)
    result = bootstrap(gram, lambda v: v[:, 0], 200, draws=True)
    assert result["draw"].dims == ("layer", "resample")
    difference = contrast(result, lambda x: x.sel(layer=2) - x.sel(layer=1))
    assert float(difference["se"]) < 0.1 * float(result["se"].min())
    assert float(difference["low"]) <= float(difference["estimate"]) <= float(difference["high"])
    same = contrast(result, lambda x: x.sel(layer=1))
    for name in ("estimate", "se", "bias", "low", "high"):
        assert float(same[name]) == pytest.approx(float(result[name].sel(layer=1)), rel=1e-12)


def test_a_contrast_needs_the_draws(make_fields):
    gram = scale_gram(make_fields(), [np.inf])
    with pytest.raises(InputError, match="draws=True"):
        contrast(bootstrap(gram, lambda v: v[:, 0], 20), lambda x: x)


@pytest.mark.parametrize("rank", [5, 200])
def test_the_bracket_holds_what_more_documents_show(rank):
    """A rank that levels off, and one that still counts documents."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(160, rank)) @ rng.normal(size=(rank, 400))
    x += 0.01 * rng.normal(size=x.shape)
    curves = rank_curve(gram_of(x), [20, 40, 80, 160], n_draws=10)
    predicted = extrapolate_rank(curves.isel(size=slice(None, -1)), 160)
    measured = float(curves["H"].isel(layer=0, size=-1))
    assert predicted["low"].item() - 1 <= measured <= predicted["high"].item() + 1
    with pytest.raises(InputError, match="larger N"):
        extrapolate_rank(curves, 160)


@pytest.mark.parametrize(
    "statistic", [lambda v: v[:, :3], lambda v: 1.0, lambda v: {}, lambda v: {"a": v}]
)
def test_a_statistic_gives_one_number_a_spectrum(make_fields, statistic):
    gram = scale_gram(make_fields(), [np.inf])
    with pytest.raises(InputError, match="the statistic gave"):
        bootstrap(gram, statistic, 20)
