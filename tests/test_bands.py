"""Bands that modes fill, and whether their parts move together, where both are known."""

import numpy as np
import pytest
import torch
import xarray as xr

from attnlib import (
    InputError,
    band_shares,
    fluctuation,
    half_modes,
    lag_gram,
    lag_window,
    mode_bands,
    scale_gram,
)

SCALES = [2.0, 6.0]
T = 24


def bank_of(t=T):
    windows = lag_window(np.arange(t), SCALES, bank=True)
    return xr.DataArray(windows, {"band": SCALES, "lag": np.arange(t)}, ("band", "lag"))


def test_shares_and_their_number():
    energy = xr.DataArray([[4.0, 0, 0], [1, 1, 1], [2, 2, 0]], dims=("mode", "band"))
    found = band_shares(energy)
    np.testing.assert_allclose(found["share"].sum("band"), 1)
    np.testing.assert_allclose(found["bands"], [1, 3, 2])
    for bad in (energy - 1, 0 * energy):
        with pytest.raises(InputError, match="not negative, and not zero"):
            band_shares(bad)


def test_from_grams_as_from_the_modes_themselves(make_fields):
    fields = make_fields(n=12, t=T)
    windows = bank_of()
    gram = scale_gram(fields, [np.inf]).isel(scale=0, drop=True)
    weights = half_modes(gram, 2, n_splits=2)
    found = mode_bands(weights, lag_gram(fields), windows)
    u = fluctuation(fields).values.astype(float)
    lag = np.subtract.outer(np.arange(T), np.arange(T)).clip(min=0)
    table = windows.values[:, lag] * np.tri(T)  # (band, query, key)
    modes = np.einsum("shlkn,lnij->shlkij", weights.values, u)
    energy = np.einsum("bij,shlkij->shlkb", table, modes**2)
    expected = band_shares(xr.DataArray(energy, dims=(*weights.dims[:-1], "band")))
    np.testing.assert_allclose(found["bands"], expected["bands"], rtol=1e-6)
    whole = np.einsum("bij,lnij->lb", table, u**2)
    expected = band_shares(xr.DataArray(whole, dims=("layer", "band")))
    np.testing.assert_allclose(found["ensemble"], expected["bands"], rtol=1e-6)
    parts = np.einsum("bij,shlkij,lnij->shlkbn", table, modes, u)
    other = (weights.isel(split=1, half=0, layer=0) != 0).any("mode").values
    got = found["correlation"].isel(split=1, half=1, layer=1, mode=0).values
    np.testing.assert_allclose(got, np.corrcoef(parts[1, 1, 1, 0][:, other]), atol=1e-6)


def patterned(amounts, noise=0.02):
    """Fields with one pattern at lag 2 and one at lag 18, of the given amounts ``(n, 2)``."""
    rng = np.random.default_rng(0)
    lag = np.subtract.outer(np.arange(T), np.arange(T))
    places = np.stack([lag == 2, lag == 18]) / np.sqrt([[[T - 2]], [[T - 18]]])
    fields = np.einsum("nk,kij->nij", amounts, places)
    return torch.from_numpy(fields + noise * np.tril(rng.normal(size=fields.shape)))


def of_first_mode(fields):
    gram = scale_gram(fields, [np.inf]).isel(scale=0, drop=True)
    found = mode_bands(half_modes(gram, 1, 5), lag_gram(fields), bank_of())
    over = ("split", "half", "layer", "mode")
    return float(found["bands"].mean(over)), float(found["correlation"][..., 0, 1].mean(over))


def test_one_scale_a_pattern_over_both_and_a_chance_mixture():
    rng = np.random.default_rng(1)
    amount = rng.normal(size=(60, 1))
    bands, _ = of_first_mode(patterned(amount * [[2.0, 0.0]]))
    assert bands == pytest.approx(float(band_shares(bank_of().sel(lag=2))["bands"]), abs=0.02)
    bands, together = of_first_mode(patterned(amount * [[1.0, 1.0]]))
    assert bands > 1.7
    assert together > 0.9
    mixed = rng.normal(size=(60, 2)) @ np.array([[1.0, 0], [0, 1.05]])
    _, together = of_first_mode(patterned(mixed))
    assert abs(together) < 0.5


def test_windows_that_are_no_bank(make_fields):
    fields = make_fields(n=8, t=T)
    gram = lag_gram(fields)
    weights = half_modes(scale_gram(fields, [np.inf]).isel(scale=0, drop=True), 1)
    with pytest.raises(InputError, match="do not add up to 1"):
        mode_bands(weights, gram, 0.5 * bank_of())
    with pytest.raises(InputError, match="different lags"):
        mode_bands(weights, gram, bank_of(T - 1))
