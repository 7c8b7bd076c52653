"""Counts, their correlations under permutation, and what one token explains."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import spearmanr

from attnlib import InputError, count_correlations, strongest_rows, text_counts, token_share


def test_counts_of_a_text():
    counts = text_counts(["Ab c\nABC abc abc!", ""])
    assert counts.dims == ("count", "snapshot")
    found = dict(zip(counts["count"].values.tolist(), counts.values.tolist(), strict=True))
    assert found == {
        "line breaks": [1, 0],
        "capital letters": [4, 0],
        "spaces": [3, 0],
        "punctuation": [1, 0],
        "distinct characters": [9, 0],
        "repeated trigrams": [2, 0],  # "abc" and " ab" come twice
    }
    for bad in ([], ["a", 3]):
        with pytest.raises(InputError, match="one or more strings"):
            text_counts(bad)


def coefficients(values):
    return xr.DataArray(values, dims=("layer", "mode", "snapshot"))


def counts_of(values):
    names = [f"c{i}" for i in range(len(values))]
    return xr.DataArray(values, {"count": names}, ("count", "snapshot"))


def test_correlations_are_spearmans_and_a_real_one_is_found():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, size=(3, 40))  # with ties
    values = rng.normal(size=(2, 2, 40))
    values[1, 0] += counts[2]
    found = count_correlations(coefficients(values), counts_of(counts), 200)
    assert found["correlation"].dims == ("layer", "mode", "count")
    for index in np.ndindex(2, 2, 3):
        expected = spearmanr(values[index[:2]], counts[index[2]]).statistic
        assert found["correlation"].values[index] == pytest.approx(expected)
    assert found["p_value"].values[1, 0, 2] == pytest.approx(1 / 201)
    assert (found["p_value"] < 0.05).sum() == 1
    assert found.attrs["tests"] == 12


def test_any_false_alarm_is_rare():
    """The smallest of all corrected p-values is below 0.2 in about a fifth of the cases."""
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 30, size=(1, 25)) + rng.integers(0, 3, size=(4, 25))  # alike
        found = count_correlations(
            coefficients(rng.normal(size=(2, 3, 25))), counts_of(counts), 60, seed
        )
        alarms += int(found["p_value"].min() < 0.2)
    assert 8 <= alarms <= 32  # 3 standard deviations


def test_a_count_that_does_not_vary_has_no_correlation():
    found = count_correlations(
        coefficients(np.random.default_rng(0).normal(size=(1, 1, 10))),
        counts_of(np.ones((1, 10))), 20,
    )  # fmt: skip
    assert found["correlation"].item() == 0
    assert found["p_value"].item() == 1


def test_impossible_correlations():
    values, counts = coefficients(np.zeros((1, 1, 10))), counts_of(np.ones((1, 9)))
    with pytest.raises(InputError, match="the same documents"):
        count_correlations(values, counts)
    with pytest.raises(InputError, match="at least 1"):
        count_correlations(values, counts_of(np.ones((1, 10))), 0)
    with pytest.raises(InputError, match="not finite"):
        count_correlations(values * np.nan, counts_of(np.ones((1, 10))))


def rows_of(values, first=4):
    query = first + np.arange(values.shape[-1])
    return xr.DataArray(values, {"query": query}, ("mode", "snapshot", "query"))


def test_what_one_token_explains():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, size=(40, 30))
    meaning = rng.normal(size=5)
    signal = meaning[tokens[:, 2:28]]  # of the token 2 places before queries 4, 5, ...
    noise = rng.normal(size=signal.shape)
    share = token_share(rows_of(np.stack([signal, noise, 0 * noise])), tokens, [0, 1, 2, 3])
    assert share.dims == ("mode", "offset")
    assert share.sel(offset=2).values[0] == pytest.approx(1)
    np.testing.assert_allclose(share.values[0, [0, 1, 3]], 0, atol=0.05)
    assert (share.values[1] < 0.01).all()
    assert (share.values[2] == 0).all()


def test_a_token_that_was_never_seen_teaches_nothing():
    rng = np.random.default_rng(1)
    tokens = np.arange(8 * 12).reshape(8, 12)  # each token once
    share = token_share(rows_of(rng.normal(size=(1, 8, 8))), tokens, [0])
    assert -0.2 < share.item() <= 0


def test_impossible_shares():
    values, tokens = rows_of(np.zeros((1, 6, 3))), np.zeros((6, 7), int)
    with pytest.raises(InputError, match="the same documents"):
        token_share(values, tokens[:5], [0])
    with pytest.raises(InputError, match="the same documents"):
        token_share(values, tokens[:, :5], [0])
    for offsets in ([5], [-1], []):
        with pytest.raises(InputError, match="between 0 and the first query, 4"):
            token_share(values, tokens, offsets)


def test_rows_that_fire():
    table = xr.DataArray(
        [[1.0, 0, -2], [0, 5, 0], [0, -6, 3], [0, 0, 0.1]],
        {"query": [10, 11, 12]},
        ("snapshot", "query"),
    )
    assert strongest_rows(table, 3) == [(2, 11), (1, 11), (0, 12)]
    by = table.sum("query")  # -1, 5, -3, 0.1
    assert strongest_rows(table.T, 3, by) == [(1, 11), (2, 11), (0, 12)]
    assert strongest_rows(table.drop_vars("query"), 1) == [(2, 1)]
    for n, message in ((0, "at least 1"), (5, "between 1 and the 4 documents")):
        with pytest.raises(InputError, match=message):
            strongest_rows(table, n)
