"""Modes of rows against a plain covariance, and the features of profiles that are known."""

import numpy as np
import pytest
import torch
import xarray as xr

from attnlib import InputError, lag_rows, planted_fields, profile_features, row_modes


def plain(field, most, k):
    """Leading modes over the lag, from explicit rows: values as shares, vectors as rows."""
    rows, _ = lag_rows(torch.from_numpy(field.astype(np.float64)))
    some = rows[:, most:, : most + 1].numpy()
    some = (some - some.mean(0)).reshape(-1, most + 1)
    singular, right = np.linalg.svd(some, full_matrices=False)[1:]
    return (singular**2 / (singular**2).sum())[:k], right[:k]


@pytest.mark.parametrize("most", [None, 5, 19])
def test_against_explicit_rows(make_fields, most):
    fields = make_fields(n=9, t=20)
    found = row_modes(fields, 3, max_lag=most, n_splits=2)
    most = 9 if most is None else most
    assert found["lag"].values.tolist() == list(range(most + 1))
    assert found["query"].values.tolist() == list(range(most, 20))
    for layer in range(2):
        share, modes = plain(fields.values[layer], most, 3)
        one = found.isel(layer=layer)
        np.testing.assert_allclose(one["share"], share, rtol=1e-4)
        inner = np.abs((one["profile"].values * modes).sum(1))
        np.testing.assert_allclose(inner, 1, atol=1e-4)
        top = np.abs(one["profile"].values).argmax(1)
        assert (one["profile"].values[np.arange(3), top] > 0).all()


def test_coefficients_are_those_of_each_row(make_fields):
    fields = make_fields(n=7, t=12)
    found = row_modes(fields, 2, n_splits=1)
    u = (fields - fields.mean("snapshot")).values
    for s, i in ((0, 5), (6, 11), (3, 8)):
        row = u[1, s, i, i - np.arange(6)]
        expected = found["profile"].values[1] @ row
        got = found["coefficient"].sel(query=i).values[1, :, s]
        np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(found["coefficient"].mean("snapshot"), 0, atol=1e-6)


def test_the_layout_in_memory_does_not_matter(make_fields):
    values = torch.from_numpy(make_fields(n=8, t=10).values)
    turned = values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not turned.is_contiguous()
    xr.testing.assert_allclose(row_modes(turned, 2), row_modes(values, 2), atol=1e-5)


def test_each_half_has_the_modes_of_its_own_documents(make_fields):
    fields = make_fields(n_layer=1, n=11, t=10)
    found = row_modes(fields, 2, n_splits=3, seed=4)
    rng = np.random.default_rng(4)
    for split in range(3):
        both = rng.permutation(11)[:10].reshape(2, -1)
        explicit = [plain(fields.values[0][i], 4, 2)[1] for i in both]
        for h in range(2):
            got = found["half_profile"].values[0, split, h]
            np.testing.assert_allclose(np.abs((got * explicit[h]).sum(1)), 1, atol=1e-4)
    a, b = found["half_profile"].values[0].swapaxes(0, 1)
    first = np.square((a[:, 0] * b[:, 0]).sum(-1)).mean()
    np.testing.assert_allclose(found["overlap"].values[0, 0], first, rtol=1e-6)
    np.testing.assert_allclose(  # two modes: the whole block
        found["overlap"].values[0, 1], np.square(a @ b.swapaxes(-1, -2)).sum((-2, -1)).mean() / 2
    )


def test_a_planted_lag_is_found_and_comes_back():
    found = row_modes(planted_fields(20, 64, lag=12, spread=1.5, noise=0.1), 1)
    assert abs(found["profile"].isel(layer=0, mode=0).argmax("lag").item() - 12) <= 1
    assert found["overlap"].item() > 0.95


def test_noise_does_not_come_back():
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(10, 40, 40))).tril()
    found = row_modes(x, 1)
    assert found["overlap"].item() < 0.3
    assert found["share"].item() < 0.15


def test_heads_and_repeatability(make_fields):
    fields = make_fields(n=8, t=10).expand_dims(head=[1, 2], axis=1)
    found = row_modes(fields, 2, n_splits=3)
    assert found["profile"].dims == ("layer", "head", "mode", "lag")
    assert found["half_profile"].dims == ("layer", "head", "split", "half", "mode", "lag")
    xr.testing.assert_identical(found, row_modes(fields, 2, n_splits=3))
    one = row_modes(fields.isel(head=1, drop=True), 2, n_splits=3)
    xr.testing.assert_identical(one, found.isel(head=1, drop=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_modes": 6}, "between 1 and the 5 lags"),
        ({"n_modes": 0}, "n_modes is a whole number"),
        ({"max_lag": 10}, "lags up to 9"),
        ({"n_splits": 0}, "n_splits is a whole number"),
    ],
)
def test_impossible_row_modes(make_fields, options, message):
    with pytest.raises(InputError, match=message):
        row_modes(make_fields(n=6, t=10), **{"n_modes": 1, **options})


def test_row_modes_of_unfit_fields(make_fields):
    with pytest.raises(InputError, match="take at least 6"):
        row_modes(make_fields(n=5), 1)
    fields = make_fields(n=8)
    with pytest.raises(InputError, match="after the query"):
        row_modes(fields + fields.values.swapaxes(-1, -2), 1)
    fields[1, 3, 5, 2] = np.nan
    with pytest.raises(InputError, match="layer 2, snapshot 3"):
        row_modes(fields, 1)


def profile(*values):
    return xr.DataArray(np.array(values, float), {"lag": np.arange(len(values))}, ("lag",))


@pytest.mark.parametrize(
    ("values", "peak", "extrema", "changes"),
    [
        ([0, 1, 4, 1, 0, 0], 2, 1, 0),
        ([0, 1, -4, 1, 0, 0], 2, 3, 2),
        ([4, -3, 2, -2, 3, -4], 0, 6, 5),  # alternates while its size hardly changes
        ([0, 4, 2, 3, 0, 0], 1, 2, 0),  # two peaks on one side
        ([4, 2, 1, 2, 4, 4], 0, 2, 0),  # a flat top counts once, a valley above 0 not at all
        ([0, 8, 0, -1, 0, 8], 1, 2, 0),  # the dip is below the fraction
        ([5, 4, 3, 2, 1, 0], 0, 1, 0),
        ([-5, 4, 3, 2, 1, 0], 0, 2, 1),
    ],
)
def test_features_of_known_profiles(values, peak, extrema, changes):
    found = profile_features(profile(*values), 0, 5)
    assert [int(found[k]) for k in ("peak_lag", "extrema", "sign_changes")] == [
        peak, extrema, changes,
    ]  # fmt: skip
    mirrored = profile_features(-profile(*values), 0, 5)
    xr.testing.assert_identical(found, mirrored)


def test_features_in_a_range_and_in_bulk():
    wave = np.cos(2 * np.pi * np.arange(40) / 8)
    both = xr.DataArray([wave, -wave], {"lag": np.arange(40), "mode": [1, 2]}, ("mode", "lag")).T
    found = profile_features(both, 3, 17)
    assert found["extrema"].values.tolist() == [4, 4]  # at 4, 8, 12 and 16
    assert found["sign_changes"].values.tolist() == [3, 3]
    assert profile_features(both, 5, 7)["extrema"].values.tolist() == [0, 0]
    for low, high in ((40, 50), (6, 5), (4, 4)):
        with pytest.raises(InputError, match="no lags"):
            profile_features(both, low, high)
    with pytest.raises(InputError, match="fraction"):
        profile_features(both, 3, 17, fraction=0)


def test_rows_that_do_not_vary_have_no_modes(make_fields):
    same = make_fields(n=1, t=12).isel(snapshot=[0] * 8)
    with pytest.raises(InputError, match="vary in 0 directions"):
        row_modes(same, 2)
