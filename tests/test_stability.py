"""Modes of halves against explicit ones; planted patterns come back, and noise does not."""

import numpy as np
import pytest
import xarray as xr
from scipy.linalg import subspace_angles

from attnlib import InputError, half_modes, scale_gram, split_half
from attnlib.stability import _halves


def gram_of(x):
    u = x - x.mean(0)
    return xr.DataArray(u @ u.T, dims=("snapshot", "snapshot_"))


def planted(n=60, size=400, noise=0.05, seed=0):
    """Three patterns of different strength in a little noise."""
    rng = np.random.default_rng(seed)
    amounts = rng.normal(size=(n, 3)) * [3.0, 2.0, 1.0]
    patterns = np.linalg.qr(rng.normal(size=(size, 3)))[0].T
    return amounts @ patterns + noise * rng.normal(size=(n, size))


def explicit(x, k):
    """Modes of an ensemble as rows, by singular values."""
    return np.linalg.svd(x - x.mean(0), full_matrices=False)[2][:k]


@pytest.mark.parametrize("n", [14, 15])
def test_the_gram_alone_gives_the_principal_angles(n):
    x = np.random.default_rng(n).normal(size=(n, 50)) * np.linspace(3, 1, 50)
    found = split_half(gram_of(x), 4, n_splits=3, seed=1)
    for (a, b), draw in zip(_halves(n, 3, 1), found["overlap_draws"], strict=True):
        assert len(a) == len(b) == n // 2
        assert not set(a.tolist()) & set(b.tolist())
        modes = explicit(x[a], 5), explicit(x[b], 5)
        for k in range(1, 5):
            angles = subspace_angles(modes[0][:k].T, modes[1][:k].T)
            np.testing.assert_allclose(draw.sel(mode=k), np.mean(np.cos(angles) ** 2), atol=1e-6)


def test_single_pair_and_smallest_cosine_of_one_split():
    x = np.random.default_rng(0).normal(size=(20, 30)) * np.linspace(4, 1, 30)
    found = split_half(gram_of(x), 3, n_splits=1, seed=5)
    ((a, b),) = _halves(20, 1, 5)
    first, second = explicit(x[a], 4), explicit(x[b], 4)
    inner = (first @ second.T) ** 2
    np.testing.assert_allclose(found["single"], np.diagonal(inner)[:3], atol=1e-9)
    for k in range(1, 4):
        cosines = np.cos(subspace_angles(first[:k].T, second[:k].T))
        np.testing.assert_allclose(found["smallest_cosine"].sel(mode=k), cosines.min(), atol=1e-6)
        pair = inner[k - 1 : k + 1, k - 1 : k + 1].sum() / 2
        np.testing.assert_allclose(found["pair"].sel(mode=k), pair, atol=1e-9)


def test_weights_make_unit_modes_of_one_half_each(make_fields):
    fields = make_fields(n=13)
    gram = scale_gram(fields, [2.0, np.inf])
    weights = half_modes(gram, 3, n_splits=2)
    assert weights.dims == ("split", "half", "layer", "scale", "mode", "snapshot")
    inside = (weights != 0).any(("layer", "scale", "mode"))
    assert (inside.sum("snapshot") == 6).all()
    assert not (inside.sel(half="a") & inside.sel(half="b")).any()
    np.testing.assert_allclose(weights.sum("snapshot"), 0, atol=1e-12)
    inner = weights.dot(gram, dim="snapshot").rename(snapshot_="snapshot")
    inner = inner.dot(weights.rename(mode="mode_"), dim="snapshot")
    np.testing.assert_allclose(inner, np.broadcast_to(np.eye(3), inner.shape), atol=1e-6)
    u = fields.values[1].astype(float).reshape(13, -1)  # layer 2, no filter
    mode = weights.isel(split=1, half=0, layer=1, scale=1).values @ u
    known = np.flatnonzero(inside.isel(split=1, half=0))
    np.testing.assert_allclose(np.abs((mode * explicit(u[known], 3)).sum(1)), 1, atol=1e-5)


def test_planted_patterns_come_back():
    found = split_half(gram_of(planted()), 5)
    assert found["overlap"].sel(mode=3) > 0.95
    assert found["smallest_cosine"].sel(mode=3) > 0.9
    assert found["overlap"].sel(mode=5) < 0.8  # the last two are noise
    assert (found["low"] <= found["overlap"]).all()
    assert (found["overlap"] <= found["high"]).all()


def test_a_planted_pattern_comes_back_from_fields():
    from attnlib import planted_fields

    gram = scale_gram(planted_fields(60, 24, lag=6, noise=0.1), [np.inf])
    assert split_half(gram, 1)["overlap"].item() > 0.9


def test_noise_is_near_the_null():
    x = np.random.default_rng(0).normal(size=(80, 1000))
    found = split_half(gram_of(x), 5)
    assert found["dimension"].item() == pytest.approx(1000, rel=0.05)
    np.testing.assert_allclose(found["null"], np.arange(1, 6) / found["dimension"].item())
    assert (np.abs(found["overlap"] - found["null"]) < 0.006).all()


def test_the_dimension_is_that_of_the_covariance():
    scale = np.linspace(3, 0.5, 40)
    exact = (scale**2).sum() ** 2 / (scale**4).sum()
    # Far from normal, few documents: no distribution is assumed.
    draws = [
        1 / split_half(gram_of(rng.exponential(size=(12, 40)) * scale), 1, 10)["dimension"].item()
        for rng in map(np.random.default_rng, range(60))
    ]
    assert 1 / np.mean(draws) == pytest.approx(exact, rel=0.06)


def test_a_near_equal_pair_comes_back_together_and_not_alone():
    rng = np.random.default_rng(0)
    patterns = np.linalg.qr(rng.normal(size=(300, 2)))[0].T
    x = 3 * rng.normal(size=(200, 2)) @ patterns + 0.05 * rng.normal(size=(200, 300))
    found = split_half(gram_of(x), 2, 40)
    assert found["pair"].sel(mode=1) > 0.98
    assert found["single"].sel(mode=1) < 0.85


def test_the_same_splits_for_every_layer_and_scale(make_fields):
    gram = scale_gram(make_fields(n=12), [2.0, np.inf])
    whole = split_half(gram, 2, 4, seed=3)
    part = split_half(gram.isel(layer=[1], scale=[1]), 2, 4, seed=3)
    for name in whole.data_vars:
        np.testing.assert_allclose(
            whole[name].isel(layer=[1], scale=[1]), part[name], rtol=1e-9, err_msg=name
        )
    xr.testing.assert_identical(whole, split_half(gram, 2, 4, seed=3))
    assert whole["overlap"].dims == ("layer", "scale", "mode")
    assert {"period", "layer", "scale", "mode"} <= set(whole.coords)


def test_heads_are_kept():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 12, 40))
    x -= x.mean(2, keepdims=True)
    gram = xr.DataArray(x @ x.swapaxes(-1, -2), dims=("layer", "head", "snapshot", "snapshot_"))
    assert split_half(gram, 2, 3)["overlap"].shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("n", "modes", "message"),
    [
        (3, 1, "halves of 3 documents have 1, and so at most 0 modes"),
        (8, 3, "at most 3 modes, not 4"),
        (8, 0, "whole numbers from 1"),
        (8, 1.5, "whole numbers from 1"),
    ],
)
def test_too_few_documents_or_too_many_modes(n, modes, message):
    x = np.random.default_rng(0).normal(size=(n, 20))
    function = split_half if modes != 0 else half_modes
    with pytest.raises(InputError, match=message):
        function(gram_of(x), modes)


def test_more_modes_than_the_rank_says_where():
    x = np.random.default_rng(0).normal(size=(20, 2)) @ np.ones((2, 30)) * [1.0] * 30
    gram = xr.concat([gram_of(np.random.default_rng(1).normal(size=(20, 30))), gram_of(x)], "layer")
    with pytest.raises(InputError, match="half of the documents have rank 1 at layer 2: ask"):
        split_half(gram.assign_coords(layer=[1, 2]), 1)
    with pytest.raises(InputError, match="rank 0"):
        half_modes(gram_of(np.ones((8, 5))), 1)


def test_rounding_is_no_mode():
    """Fields of few directions in single precision have rounding beyond them, and no more modes."""
    from conftest import random_fields

    fields = random_fields(n_layer=1, n=20, t=12)
    few = fields.copy(data=np.repeat(fields.values[:, :2], 10, axis=1))
    with pytest.raises(InputError, match="have rank 1 at layer 1, scale inf"):
        split_half(scale_gram(few, [np.inf]), 1)


@pytest.mark.parametrize("bad", ["nan", "asymmetric", "shape", "seed", "splits"])
def test_wrong_input(bad):
    gram = gram_of(np.random.default_rng(0).normal(size=(10, 20)))
    options, message = {}, "from scale_gram"
    if bad == "nan":
        gram[2, 3], message = np.nan, "not finite"
    elif bad == "asymmetric":
        gram[2, 3], message = 5.0, "not symmetric"
    elif bad == "shape":
        gram = gram.values
    else:
        options = {"seed": -1} if bad == "seed" else {"n_splits": 0}
        message = "seed is not negative"
    with pytest.raises(InputError, match=message):
        split_half(gram, 2, **options)
