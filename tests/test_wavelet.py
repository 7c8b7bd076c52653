"""The transform against PyWavelets and sines; the scalogram against direct averages."""

import numpy as np
import pytest
import pywt
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    InputError,
    lag_rows,
    morlet_cwt,
    period_to_scale,
    scale_grid,
    scale_to_period,
    scalogram,
)

GRID = 2 ** np.linspace(1, 4, 10)
FINE = 2 ** np.linspace(1, 3.5, 8)  # fits the cone of 40 tokens


def sine(period, t=512, amplitude=1.0, phase=0.3):
    return amplitude * torch.cos(2 * np.pi * torch.arange(t, dtype=torch.float64) / period + phase)


@given(st.floats(0.1, 1e4), st.floats(2, 12), st.sampled_from(["L1", "L2"]))
def test_scale_and_period_convert_there_and_back(scale, omega0, norm):
    assert period_to_scale(scale_to_period(scale, omega0, norm), omega0, norm) == pytest.approx(
        scale
    )


def test_the_published_period():
    assert scale_to_period(1.0, 5.0, "L1") == pytest.approx(1.257, abs=5e-4)
    assert scale_to_period(1.0, 6.0, "L2") == pytest.approx(1.033, abs=5e-4)  # Torrence & Compo


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("omega0", [5.0, 6.0, 8.0])
@pytest.mark.parametrize("period", [6.0, 13.0, 37.0])
def test_a_sine_peaks_at_its_period(norm, omega0, period):
    scales = np.geomspace(2, 128, 600)
    power = morlet_cwt(sine(period), scales, omega0, norm)[:, 256].abs().square()
    found = scale_to_period(scales[int(power.argmax())], omega0, norm)
    assert found == pytest.approx(period, rel=0.01)


def test_equal_sines_have_equal_power_under_l1_and_not_under_l2():
    peaks = {}
    for norm in ("L1", "L2"):
        scales = np.geomspace(2, 64, 400)
        peaks[norm] = [
            float(morlet_cwt(sine(p, amplitude=0.7), scales, 5.0, norm)[:, 256].abs().max())
            for p in (5.0, 12.0, 30.0)
        ]
    np.testing.assert_allclose(peaks["L1"], 0.7, rtol=0.01)
    assert peaks["L2"][0] < 0.7 * peaks["L2"][1] < 0.7 * peaks["L2"][2]


@pytest.mark.parametrize("scale", [4.0, 11.0, 20.0])
def test_against_pywavelets(scale):
    """PyWavelets averages the wavelet over each sample: a sinc, and half a sample of delay."""
    pad = 300
    x = np.pad(np.random.default_rng(0).standard_normal(200), pad)
    name = f"cmor2.0-{5 / (2 * np.pi)}"
    theirs = pywt.cwt(x, [scale], name, method="conv", precision=18)[0][0]
    theirs = theirs[pad:-pad] * 2 / np.sqrt(scale)  # a^-1/2 against our 2 / a
    frequency = np.fft.fftfreq(len(x))
    averaged = np.fft.ifft(
        np.fft.fft(x) * np.sinc(frequency) * np.exp(-1j * np.pi * frequency)
    ).real
    ours = morlet_cwt(torch.from_numpy(averaged), [scale], 5.0, "L1")[0].numpy()[pad:-pad]
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


def test_against_the_sum_that_defines_it():
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(40))
    a, omega0 = 4.0, 5.0
    t = np.arange(40)
    ours = morlet_cwt(x, [a], omega0, "L1")[0].numpy()
    for b in (0, 13, 39):
        u = (t - b) / a
        psi = 2 / (a * np.sqrt(2 * np.pi)) * np.exp(1j * omega0 * u - u**2 / 2)
        direct = np.sum(x.numpy() * psi.conj())
        assert abs(ours[b] - direct) < 1e-4  # the analytic wavelet drops w <= 0


@given(st.integers(0, 10**6), st.floats(-3, 3))
def test_the_transform_is_linear(seed, factor):
    x, y = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 50)))
    together = morlet_cwt(x + factor * y, GRID)
    torch.testing.assert_close(together, morlet_cwt(x, GRID) + factor * morlet_cwt(y, GRID))


def test_shapes_and_types():
    assert morlet_cwt(torch.rand(2, 3, 50), GRID).shape == (2, 3, 10, 50)
    assert morlet_cwt(torch.rand(50), GRID).dtype == torch.complex64
    assert morlet_cwt(torch.rand(50).double(), GRID).dtype == torch.complex128
    with pytest.raises(InputError, match="float32 or float64"):
        morlet_cwt(torch.arange(50), GRID)


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [np.nan], [np.inf], [[1.0]]])
def test_impossible_scales(bad):
    with pytest.raises(InputError, match="positive finite"):
        morlet_cwt(torch.rand(50), bad)


def test_a_constant_has_no_power_inside_the_cone():
    """At the rim of the cone, sqrt(2) a from an edge, exp(-2) of the edge's power is left."""
    t = 512
    w = morlet_cwt(torch.ones(t, dtype=torch.float64), GRID).abs()
    assert float(w[GRID > 4, t // 2].max()) < 1e-5
    assert float(w[:, t // 2].max()) < 1e-3  # scale 2 is cut off at the highest frequency
    fields = torch.ones(1, 4, 60, 60).tril().double()
    fields[:, 0] *= 1.01  # something to vary
    s = scalogram(fields, GRID)
    inside = s["power"].where(s["in_cone"])
    outside = scalogram(fields, GRID, rows="all")["power"].where(~s["in_cone"])
    assert float(inside.max()) < 1.1 * np.exp(-2) * float(outside.max())


def direct_power(field, scales, rows):
    """Transform every row, then average: all rows, or those whose cone holds the pair."""
    x, _ = lag_rows(field - field.mean(0))
    power = morlet_cwt(x.double(), scales).abs().square().numpy()  # (N, row, S, lag)
    t = x.shape[-1]
    if rows == "all":
        return power.mean((0, 1))
    out = np.full((len(scales), t), np.nan)
    for s, a in enumerate(scales):
        reach = np.ceil(np.sqrt(2) * a)
        for b in range(t):
            use = [i for i in range(t) if reach <= b <= i - reach]
            if use:
                out[s, b] = power[:, use, s, b].mean()
    return out


@pytest.mark.parametrize("rows", ["cone", "all"])
def test_scalogram_against_transforming_every_row(make_fields, rows):
    fields = make_fields(n=7, t=40)
    s = scalogram(fields, FINE, rows=rows)
    assert s["power"].dims == ("layer", "scale", "lag")
    for layer in (1, 2):
        expected = direct_power(torch.from_numpy(fields.sel(layer=layer).values), FINE, rows)
        got = s["power"].sel(layer=layer).values
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.nanmax(expected))
        if rows == "cone":
            np.testing.assert_array_equal(s["in_cone"], np.isfinite(expected))
    np.testing.assert_allclose(s["period"], scale_to_period(FINE))


def test_the_cone_is_a_mask_of_the_result(make_fields):
    s = scalogram(make_fields(t=40), [2.0, 8.0])
    # reach 3 and 12: lags reach .. 39 - reach.
    assert s["in_cone"].sum("lag").values.tolist() == [34, 16]
    assert np.isnan(s["power"].where(~s["in_cone"])).all()
    rows = s["rows"].sel(scale=8.0, lag=[11, 12, 20, 27, 28]).values.tolist()
    assert rows == [0, 16, 8, 1, 0]


def test_blocks_add_up_to_the_whole(make_fields):
    fields = make_fields(n=10, t=40)
    whole, parts = scalogram(fields, FINE), scalogram(fields, FINE, n_blocks=4)
    assert parts["block_size"].values.tolist() == [3, 3, 2, 2]
    mean = (parts["power"] * parts["block_size"]).sum("block", skipna=False) / 10
    np.testing.assert_allclose(mean, whole["power"], rtol=1e-4)
    assert "block" not in whole.dims


def test_a_planted_pattern_is_found_by_the_causal_reading_alone():
    """Attention that oscillates along the lag with period 12, with a random strength."""
    t, rng = 96, np.random.default_rng(0)
    tau = np.subtract.outer(np.arange(t), np.arange(t))
    pattern = np.where(tau >= 0, np.cos(2 * np.pi * tau / 12), 0)
    strength = rng.normal(size=(30, 1, 1))
    noise = 0.1 * rng.normal(size=(30, t, t)) * np.tri(t)
    fields = torch.from_numpy((strength * pattern + noise)[None]).float()
    grid = np.geomspace(2, 24, 60)
    causal = scalogram(fields, grid)
    peak = causal["power"].isel(layer=0).mean("lag").idxmax()
    assert scale_to_period(float(peak)) == pytest.approx(12, rel=0.05)
    published = scalogram(fields, grid, convention="published", rows="all", center=False, norm="L2")
    peak = published["power"].isel(layer=0).sum("lag").idxmax()
    assert abs(scale_to_period(float(peak), norm="L2") / 12 - 1) > 0.3


def test_standardised_lags_have_unit_variance(make_fields):
    """Scaling each lag by anything changes nothing; white noise then has its known power."""
    fields = make_fields(n=9, t=40).astype("float64")
    u = fields - fields.mean("snapshot")
    decay = 1 / (1 + np.maximum(np.subtract.outer(np.arange(40), np.arange(40)), 0)) ** 2
    a, b = (scalogram(f, FINE, standardize=True)["power"] for f in (u, u * decay))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 200, 60, 60)) * np.tri(60))
    s = scalogram(3 * noise, [2.5, 5.0, 8.0], standardize=True)
    for scale in (2.5, 5.0, 8.0):
        # |W|^2 of unit white noise: the energy of the kernel, 2 / (a sqrt(pi)) in all.
        expected = 2 / (scale * np.sqrt(np.pi))
        middle = s["power"].sel(scale=scale).where(s["in_cone"].sel(scale=scale)).mean("lag")
        assert middle.item() == pytest.approx(expected, rel=0.06), scale
    assert abs(s["autocorrelation"].item()) < 0.02


def test_heads_pass_through(make_fields):
    fields = make_fields().expand_dims(head=[1, 2, 3], axis=1)
    s = scalogram(fields, [2.0])
    assert s["power"].dims == ("layer", "head", "scale", "lag")
    one = scalogram(fields.isel(head=0), [2.0])["power"]
    np.testing.assert_array_equal(s["power"].isel(head=2), one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "some"}, "'cone' or 'all'"),
        ({"convention": "published"}, "use rows='all'"),
        ({"convention": "forward"}, "use rows='all'"),
        ({"convention": "forward", "rows": "all"}, "convention is one of"),
        ({"norm": "L3"}, "norm is one of"),
        ({"n_blocks": 13}, "between 1 and the 12"),
        ({"omega0": -5.0}, "omega0 is a positive number"),
    ],
)
def test_refusals(make_fields, options, message):
    with pytest.raises(InputError, match=message):
        scalogram(make_fields(), [2.0], **options)


def test_scales_ascend_and_grids_have_three(make_fields):
    with pytest.raises(InputError, match="ascend"):
        scalogram(make_fields(), [4.0, 2.0])
    np.testing.assert_allclose(scale_grid(2, 32, 5), [2, 4, 8, 16, 32])
    for bad in ((2, 32, 2), (0, 32, 5), (32, 2, 5), (2, np.inf, 5)):
        with pytest.raises(InputError, match="0 < smallest < largest"):
            scale_grid(*bad)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e15, 1e30])
@pytest.mark.parametrize("standardize", [False, True])
def test_the_size_of_the_numbers_does_not_matter(make_fields, size, standardize):
    fields = make_fields(t=30)
    options = {"standardize": standardize}
    small = scalogram(fields * np.float32(size), [2.0, 4.0], **options)["power"]
    expected = scalogram(fields, [2.0, 4.0], **options)["power"]
    factor = 1.0 if standardize else size**2
    np.testing.assert_allclose(small / factor, expected, rtol=1e-3)
