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
    red_noise,
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
@pytest.mark.parametrize("r", [0.0, 0.6])
def test_red_noise_background_fits_red_noise(norm, r):
    s = scalogram(fields_of(autoregression(r)), GRID, norm=norm)
    assert s["autocorrelation"].item() == pytest.approx(r, abs=0.02)
    ratio = (global_power(s) / red_noise(s)).values
    np.testing.assert_allclose(ratio[:, GRID > 3], 1, atol=0.12)


@pytest.mark.parametrize("period", [6.0, 11.0])
def test_a_planted_period_is_dominant(period):
    def make(rng, n, t):
        phase = rng.uniform(0, 2 * np.pi, size=(n, t, 1))
        wave = np.cos(2 * np.pi * np.arange(t) / period + phase)
        return wave + autoregression(0.5)(rng, n, t)

    found = dominant_scales(scalogram(fields_of(make), GRID), 2)
    assert scale_to_period(found["dominant"].values[0, 0]) == pytest.approx(period, rel=0.1)
    assert found["excess"].values[0, 0] > 1.2


def dataset(power):
    power = np.asarray(power, dtype=float)
    return xr.Dataset(
        {
            "power": (("layer", "block", "scale", "lag"), power[None, None, :, None]),
            "block_size": ("block", [1]),
            "in_cone": (("scale", "lag"), np.ones((len(power), 1), bool)),
            "rows": (("scale", "lag"), np.ones((len(power), 1), int)),
        },
        coords={"layer": [1], "scale": np.arange(1.0, len(power) + 1)},
    )


def test_the_edge_of_the_grid_is_never_dominant():
    flat = xr.DataArray(np.ones((1, 5)), dims=("layer", "scale"))
    rising = dominant_scales(dataset([1, 2, 3, 4, 5]), 2, background=flat)
    assert np.isnan(rising["dominant"]).all()
    inner = dominant_scales(dataset([9, 2, 3, 2, 9]), 2, background=flat)
    assert inner["dominant"].values.tolist()[0][0] == 3.0
    assert np.isnan(inner["dominant"].values[0, 1])


def test_the_background_may_be_another_scalogram():
    found = dominant_scales(dataset([1, 2, 8, 2, 1]), 1, background=dataset([1, 1, 8, 1, 1]))
    assert np.isnan(found["dominant"]).all() or found["dominant"].values[0, 0] != 3.0
    found = dominant_scales(dataset([1, 2, 8, 2, 1]), 1, background=dataset([1, 1, 2, 1, 1]))
    assert found["dominant"].values[0, 0] == 3.0
    assert found["excess"].values[0, 0] == 4.0


def test_scales_whose_cone_is_empty_have_no_power(make_fields):
    power = global_power(scalogram(make_fields(t=20), [2.0, 30.0]))
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
    ratio = (shrunk["high"] - shrunk["low"]) / (interval["high"] - interval["low"])
    assert float(ratio.max()) < 0.6  # 1 / sqrt(10) in the limit
    xr.testing.assert_identical(
        bootstrap_power(wide, 50, seed=1), bootstrap_power(wide, 50, seed=1)
    )


def test_refusals(make_fields):
    s = scalogram(make_fields(t=20), [2.0])
    with pytest.raises(InputError, match="n_blocks=10"):
        bootstrap_power(s)
    with pytest.raises(InputError, match="n is at least 1"):
        dominant_scales(s, 0)
