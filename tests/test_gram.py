"""Windows and Grams, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import InputError, lag_gram, lag_window, pod, reconstruct, scale_gram


@given(st.floats(1, 20), st.floats(0.3, 2), st.sampled_from(["period", "scale", "zero"]))
def test_windows_are_what_they_say(scale, width, center):
    lag = np.arange(40)
    window = lag_window(lag, scale, width, center)
    middle = {"period": 2 * np.pi * scale / 5, "scale": scale, "zero": 0}[center]
    np.testing.assert_allclose(window, np.exp(-((lag - middle) ** 2) / (2 * (width * scale) ** 2)))
    np.testing.assert_allclose(lag_window(-lag, scale, width, center), window)


def test_no_filter_and_the_published_window():
    lag = np.arange(10)
    assert (lag_window(lag, np.inf) == 1).all()
    published = lag_window(lag, 4.0, width=1.0, center="zero")
    np.testing.assert_allclose(published, np.exp(-(lag**2) / 32))
    assert lag_window(lag, [2.0, np.inf]).shape == (2, 10)


@pytest.mark.parametrize(
    ("scale", "options", "message"),
    [
        (40.0, {}, "looks at lag 50.2655"),
        (3.4, {"width": 0.01}, "narrower than a token"),
        (-1.0, {}, "positive"),
        (np.nan, {}, "positive"),
        (2.0, {"center": "middle"}, "center is one of"),
        (2.0, {"width": 0.0}, "width is positive"),
    ],
)
def test_no_window_is_silently_empty(scale, options, message):
    with pytest.raises(InputError, match=message):
        lag_window(np.arange(20), scale, **options)


@pytest.mark.parametrize("convention", ["causal", "published", "signed"])
def test_lag_gram_against_loops(make_fields, convention):
    fields = make_fields(n=5, t=7)
    if convention == "signed":
        fields = fields + 0.1 * make_fields(n=5, t=7, seed=1).values.swapaxes(-1, -2)
    gram = lag_gram(fields, convention=convention)
    fields = fields.astype(np.float64)
    u = (fields - fields.mean("snapshot")).values
    for layer in range(2):
        for lag in gram["lag"].values:
            offset = lag if convention == "published" else -lag
            rows = np.diagonal(u[layer], offset, 1, 2)
            np.testing.assert_allclose(gram[layer].sel(lag=lag), rows @ rows.T, atol=1e-9)


def test_a_scale_is_a_weighted_sum_of_lags(make_fields):
    fields, scales = make_fields(n=6, t=30), [2.0, 5.0, np.inf]
    direct = scale_gram(fields, scales, width=0.7)
    through = scale_gram(lag_gram(fields), scales, width=0.7)
    np.testing.assert_allclose(direct, through, rtol=1e-9, atol=1e-12)
    assert direct.dims == through.dims == ("layer", "scale", "snapshot", "snapshot_")
    fields = fields.astype(np.float64)
    u = (fields - fields.mean("snapshot")).values
    np.testing.assert_allclose(
        direct.sel(scale=np.inf)[0], np.einsum("sij,tij->st", u[0], u[0]), atol=1e-8
    )
    np.testing.assert_allclose(direct.sum("snapshot"), 0, atol=1e-9)  # centred


@pytest.mark.parametrize("lags_at_once", [1, 7, 1000])
def test_lags_that_weigh_nothing_are_passed_over(make_fields, monkeypatch, lags_at_once):
    """Narrow windows, scales in no order: most weights are beyond rounding, one is everywhere."""
    n, scales, width = 5, [30.0, 2.0, np.inf, 9.0], 0.2
    monkeypatch.setattr("attnlib.gram.BLOCK_BYTES", 1)
    monkeypatch.setattr("attnlib.gram.GRAM_BYTES", 8 * n * n * lags_at_once)
    fields = make_fields(n=n, t=90)
    gram = lag_gram(fields)
    weights = lag_window(gram["lag"].values, np.array(scales), width=width) ** 2
    assert (weights < 1e-32).mean() > 0.4
    plain = np.einsum("al,lst->ast", weights, gram.values[0])
    direct = scale_gram(fields, scales, width=width).values[0]
    np.testing.assert_allclose(direct, plain, rtol=0, atol=1e-14 * abs(plain).max())
    small = scale_gram(fields, [2.0, 2.01], width=width).values[0, 0]
    np.testing.assert_allclose(small, plain[1], rtol=0, atol=1e-14 * abs(plain[1]).max())


def test_published_scales_are_all_the_same(make_fields):
    """Under a causal mask the forward reading leaves the diagonal, where every window is 1."""
    gram = scale_gram(
        make_fields(), [2.0, 8.0, 15.0], width=1.0, center="zero", convention="published"
    )
    for other in gram["scale"].values[1:]:
        np.testing.assert_allclose(gram.sel(scale=other), gram.sel(scale=2.0), atol=1e-12)


def test_tensors_on_a_device_give_the_same(make_fields):
    fields = make_fields()
    np.testing.assert_array_equal(
        scale_gram(torch.from_numpy(fields.values), [3.0]), scale_gram(fields, [3.0], device="cpu")
    )


@pytest.mark.parametrize("width", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("center", ["period", "scale"])
def test_a_bank_shares_out_every_lag(width, center):
    lag = np.arange(128)
    windows = lag_window(lag, [2.0, 4.0, 8.0, 16.0], width, center, bank=True)
    np.testing.assert_allclose(windows.sum(0), 1, rtol=1e-12)
    assert (windows >= 0).all()
    assert (windows.max(1) > 0.25).all()  # no band is empty
    assert windows[0, 0] == windows[:, 0].max()
    assert windows[-1, -1] == windows[:, -1].max()
    assert windows[-1, -1] > 0.9


def test_a_bank_leaves_the_unfiltered_scale_alone_and_does_not_mind_order():
    lag = np.arange(64)
    windows = lag_window(lag, [8.0, np.inf, 2.0], bank=True)
    assert (windows[1] == 1).all()
    np.testing.assert_allclose(windows[[2, 0]], lag_window(lag, [2.0, 8.0], bank=True))
    assert (lag_window(lag, [4.0], bank=True) == 1).all()
    with pytest.raises(InputError, match="a centre for each band"):
        lag_window(lag, [2.0, 4.0], center="zero", bank=True)
    with pytest.raises(InputError, match="scale 100 looks at lag"):
        lag_window(lag, [2.0, 100.0], bank=True)


def test_the_bands_of_a_bank_add_up_to_the_field(make_fields):
    fields = make_fields(n=8, t=40)
    modes = pod(fields, [2.0, 4.0, 8.0], "all", bank=True)
    u = fields - fields.mean("snapshot")
    whole = reconstruct(modes).sum("scale").transpose(*u.dims)
    np.testing.assert_allclose(whole, u, atol=2e-6)
