"""Nulls keep what they say and destroy the rest; planted patterns are found."""

import numpy as np
import pytest
import torch

from attnlib import (
    InputError,
    phase_randomized,
    planted_fields,
    pod,
    scale_gram,
    scalogram,
    shuffled_tokens,
    spectrum,
)


def test_shuffled_windows_hold_the_same_tokens():
    tokens = torch.arange(60).view(3, 20) % 7
    mixed = shuffled_tokens(tokens, seed=1)
    assert (mixed.sort(1).values == tokens.sort(1).values).all()
    assert (mixed != tokens).any(1).all()
    assert (shuffled_tokens(tokens, seed=1) == mixed).all()
    assert (shuffled_tokens(tokens, seed=2) != mixed).any()
    with pytest.raises(InputError, match="snapshot, position"):
        shuffled_tokens(tokens[0])


def test_phase_randomisation_keeps_spectra_sums_and_the_mask(make_fields):
    fields = make_fields(n=8, t=13)
    surrogate = phase_randomized(fields, seed=3)
    assert surrogate.dims == fields.dims
    assert float(np.abs(np.triu(surrogate.values, 1)).max()) == 0
    np.testing.assert_allclose(surrogate.sum("key"), 1, atol=1e-5)
    u = (fields - fields.mean("snapshot")).values
    v = (surrogate - fields.mean("snapshot")).values
    for i in (0, 5, 6, 12):
        power = [np.abs(np.fft.rfft(x[:, :, i, : i + 1])) for x in (u, v)]
        np.testing.assert_allclose(power[0], power[1], atol=1e-5)
    assert np.abs(u - v).max() > 0.05
    tensor = phase_randomized(torch.from_numpy(fields.values), seed=3)
    np.testing.assert_array_equal(tensor.numpy(), surrogate.values)


def test_phase_randomisation_flattens_the_spectrum_of_a_shared_pattern():
    fields = planted_fields(n=40, t=32, noise=0.1)
    of_fields, of_null = (
        spectrum(scale_gram(f, [np.inf])) for f in (fields, phase_randomized(fields))
    )
    share = [float(s.isel(mode=0).sum() / s.sum()) for s in (of_fields, of_null)]
    assert share[0] > 3 * share[1]


@pytest.mark.parametrize("lag", [5, 12, 20])
def test_a_planted_pattern_is_found_at_its_lag(lag):
    fields = planted_fields(n=40, t=64, lag=lag)
    modes = pod(fields, [np.inf], 1).isel(layer=0, scale=0, mode=0)
    assert abs(int(np.abs(modes["lag_profile"]).argmax("lag")) - lag) <= 1
    agreement = np.corrcoef(modes["coefficient"], fields["amplitude"])[0, 1]
    assert abs(agreement) > 0.95
    np.testing.assert_allclose(fields.sum("key"), 1, rtol=1e-5)
    assert float(np.abs(np.triu(fields.values[0], 1)).max()) == 0


def test_a_planted_period_is_found():
    fields = planted_fields(n=40, t=128, lag=32, spread=16, period=8.0, noise=0.1)
    power = scalogram(fields, np.geomspace(2, 16, 40), rows="cone")["power"]
    peak = power.isel(layer=0).sel(lag=32).dropna("scale").idxmax("scale")
    assert 1.2566 * float(peak) == pytest.approx(8, rel=0.1)


def test_the_published_reading_does_not_find_it():
    fields = planted_fields(n=40, t=64)
    modes = pod(fields, [4.0], 1, convention="published", center="zero", width=1.0)
    assert int(np.abs(modes["lag_profile"]).argmax("lag").item()) == 0


def test_a_pattern_outside_the_window_is_refused():
    with pytest.raises(InputError, match="between 0 and 31"):
        planted_fields(t=32, lag=32)


def test_surrogates_of_fields_that_look_ahead_are_refused(make_fields):
    both = make_fields() + make_fields().transpose("layer", "snapshot", "key", "query").values
    with pytest.raises(InputError, match="after the query"):
        phase_randomized(both)
    one = torch.from_numpy(make_fields().values[0])
    assert phase_randomized(one).shape == one.shape


@pytest.mark.parametrize(
    "options", [{"n": 0}, {"t": 20.0}, {"spread": 0.0}, {"decay": np.nan}, {"noise": -1.0}]
)
def test_impossible_planted_fields(options):
    with pytest.raises(InputError):
        planted_fields(**{"n": 5, "t": 32, **options})
