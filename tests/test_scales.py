"""Dominant scales: found where planted, never at the edge of the grid, with intervals."""

import numpy as np
import pytest
import torch
import xarray as xr

from attnlib import (
    InputError,
    bootstrap_power,
    dominant_scales,
    global_power,
    mean_period,
    red_noise,
    scale_grid,
    scale_to_period,
    scalogram,
)

GRID = np.geomspace(2, 16, 25)


def fields_of(signal, n=40, t=80, seed=0):
    """Fields whose rows are signal(lag, rng), independent from row to row and document."""
    rng = np.random.default_rng(seed)
    tau = np.subtract.outer(np.arange(t), np.arange(t))
    rows = signal(rng, n, t)  # (n, row, lag)
    out = np.take_along_axis(rows, np.broadcast_to(np.maximum(tau, 0), (n, t, t)), 2) * (tau >= 0)
    return torch.from_numpy(out[None].astype(np.float32))


def autoregression(r):
    def make(rng, n, t):
        from scipy.signal import lfilter

        return lfilter([1], [1, -r], rng.normal(size=(n, t, t + 200)))[..., 200:]

    return make


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("r", [0.0, 0.6, 0.9])
def test_red_noise_has_the_background_of_red_noise_and_no_dominant_scale(norm, r):
    fields = fields_of(autoregression(r), n=60)
    s = scalogram(fields, GRID, norm=norm, standardize=True, n_blocks=15)
    assert s["autocorrelation"].item() == pytest.approx(r, abs=0.03)
    ratio = (global_power(s) / red_noise(s)).values
    np.testing.assert_allclose(ratio, 1, atol=0.06)
    assert dominant_scales(s, 3)["dominant"].notnull().any()  # bare maxima, of noise alone
    found = dominant_scales(s, 3, interval=bootstrap_power(s))
    assert found["dominant"].isnull().all()


def test_the_level_is_fitted_where_lags_differ():
    s = scalogram(fields_of(autoregression(0.5)), GRID)
    ratio = np.log(global_power(s) / red_noise(s))
    assert ratio.mean().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("period", [6.0, 11.0])
def test_a_planted_period_is_dominant(period):
    def make(rng, n, t):
        phase = rng.uniform(0, 2 * np.pi, size=(n, t, 1))
        wave = np.cos(2 * np.pi * np.arange(t) / period + phase)
        return wave + autoregression(0.5)(rng, n, t)

    s = scalogram(fields_of(make), GRID, standardize=True, n_blocks=10)
    found = dominant_scales(s, 2, interval=bootstrap_power(s))
    assert scale_to_period(found["dominant"].values[0, 0]) == pytest.approx(period, rel=0.1)
    assert found["excess"].values[0, 0] > 1.2


def dataset(power, scale=None):
    power = np.asarray(power, dtype=float)
    return xr.Dataset(
        {
            "power": (("layer", "scale", "lag"), power[None, :, None]),
            "in_cone": (("scale", "lag"), np.ones((len(power), 1), bool)),
            "rows": (("scale", "lag"), np.ones((len(power), 1), int)),
        },
        coords={"layer": [1], "scale": np.arange(1.0, len(power) + 1) if scale is None else scale},
    )


FLAT = dataset([1, 1, 1, 1, 1])


def dominant(power, **options):
    return dominant_scales(dataset(power), 2, background=FLAT, **options)["dominant"].values[0]


def interval(low, high):
    scale = {"scale": np.arange(1.0, 6), "layer": [1]}
    return xr.Dataset(
        {"low": (("layer", "scale"), [low]), "high": (("layer", "scale"), [high])}, scale
    )


def test_the_edge_of_the_grid_is_never_dominant():
    assert np.isnan(dominant([1, 2, 3, 4, 5])).all()
    np.testing.assert_array_equal(dominant([9, 2, 3, 2, 9]), [3.0, np.nan])


def test_less_power_than_the_background_is_not_dominant():
    assert np.isnan(dominant([0.1, 0.2, 0.9, 0.2, 0.1])).all()


def test_a_maximum_within_its_interval_is_not_dominant():
    shallow = [2.0, 2.1, 2.2, 2.1, 2.0]
    low, high = [v * 0.8 for v in shallow], [v * 1.25 for v in shallow]
    assert np.isnan(dominant(shallow, interval=interval(low, high))).all()
    low, high = [v * 0.99 for v in shallow], [v * 1.01 for v in shallow]
    np.testing.assert_array_equal(dominant(shallow, interval=interval(low, high)), [3.0, np.nan])
    low = [0.9] * 5  # below the background
    assert np.isnan(dominant(shallow, interval=interval(low, [v * 1.01 for v in shallow]))).all()


def test_the_background_may_be_another_scalogram_on_the_same_scales():
    found = dominant_scales(dataset([1, 2, 8, 2, 1]), 1, background=dataset([1, 1, 2, 1, 1]))
    assert found["dominant"].values[0, 0] == 3.0
    assert found["excess"].values[0, 0] == 4.0
    with pytest.raises(InputError, match="other scales"):
        dominant_scales(dataset([1, 2, 8]), 1, background=dataset([1, 1, 1], [2.0, 3.0, 4.0]))


def test_scales_whose_cone_is_empty_are_refused_or_blank(make_fields):
    with pytest.raises(InputError, match=r"scale 30 has no lag inside the cone.*is 6\.4"):
        scalogram(make_fields(t=20), [2.0, 30.0])
    power = global_power(scalogram(make_fields(t=20), [2.0, 30.0], rows="all"))
    assert np.isfinite(power.sel(scale=2.0)).all()
    assert np.isnan(power.sel(scale=30.0)).all()


def test_intervals_hold_the_estimate_and_shrink(make_fields):
    wide = scalogram(make_fields(n=12, t=30), [2.0, 4.0], n_blocks=12)
    interval = bootstrap_power(wide, 400)
    power = global_power(wide)
    assert (interval["low"] < power).all()
    assert (power < interval["high"]).all()
    narrow = scalogram(make_fields(n=120, t=30), [2.0, 4.0], n_blocks=120)
    shrunk = bootstrap_power(narrow, 400)
    inner = bootstrap_power(wide, 400, level=0.5)
    assert (inner["low"] > interval["low"]).all()
    assert (inner["high"] < interval["high"]).all()
    ratio = (shrunk["high"] - shrunk["low"]) / (interval["high"] - interval["low"])
    assert float(ratio.max()) < 0.6  # 1 / sqrt(10) in the limit
    xr.testing.assert_identical(
        bootstrap_power(wide, 50, seed=1), bootstrap_power(wide, 50, seed=1)
    )


def test_blocks_count_by_their_size():
    power = np.array([[1.0], [4.0]])[:, :, None]
    s = xr.Dataset(
        {
            "power": (("block", "scale", "lag"), power),
            "block_size": ("block", [3, 1]),
            "in_cone": (("scale", "lag"), [[True]]),
            "rows": (("scale", "lag"), [[1]]),
        },
        coords={"scale": [1.0]},
    )
    assert global_power(s).item() == pytest.approx(7 / 4)
    twice = xr.DataArray([0, 2], dims="block")
    assert global_power(s, twice).item() == pytest.approx(4)
    both = xr.DataArray([1, 1], dims="block")
    assert global_power(s, both).item() == pytest.approx(7 / 4)


def test_refusals(make_fields):
    s = scalogram(make_fields(t=20), [2.0])
    with pytest.raises(InputError, match="n_blocks=10"):
        bootstrap_power(s)
    with pytest.raises(InputError, match="n is at least 1"):
        dominant_scales(s, 0)


def ordered_fields(r, t=128, n=30, seed=0):
    """Causal fields whose rows along the lag are a first-order autoregression."""
    from scipy.signal import lfilter

    noise = np.random.default_rng(seed).standard_normal((n, t, t))
    along = lfilter([np.sqrt(1 - r**2)], [1, -r], noise)
    fields = np.zeros((n, t, t))
    for i in range(t):
        fields[:, i, : i + 1] = along[:, i, : i + 1][:, ::-1]
    return torch.from_numpy(fields).float()


@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_the_mean_period_tells_smooth_from_rough(norm):
    """White noise has that of its grid; smoother rows a longer one, more than twice as long."""
    scales = scale_grid(2, 32, 20)
    stack = torch.stack([ordered_fields(r) for r in (0.0, 0.9, 0.97)])
    power = global_power(scalogram(stack, scales, norm=norm, standardize=True))
    white, smooth, smoother = mean_period(power, norm).values
    middle = scale_to_period(np.sqrt(2 * 32), norm=norm)
    assert white == pytest.approx(middle, rel=0.12)
    assert smoother > smooth > 1.5 * white
    assert smoother > 2 * white
