"""Coherence against plain loops, white noise, planted patterns and all permutations."""

import itertools
import sys

import numpy as np
import pytest
import torch
from conftest import random_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import InputError, coherence, morlet_cwt

T = 24


def white(n, t, seed=0):
    """Fields whose rows are white noise up to the query."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, t, t)) * np.tri(t))


def transforms(fields, a, standardize=False):
    """W (N, T, T): document, row, lag; each row transformed by itself."""
    u = fields - fields.mean(0)
    n, t, _ = u.shape
    x = torch.zeros_like(u)
    for i in range(t):
        for tau in range(i + 1):
            x[:, i, tau] = u[:, i, i - tau]
    if standardize:
        for tau in range(t):
            x[:, :, tau] /= x[:, tau:, tau].square().mean().sqrt()
    return torch.stack(
        [torch.stack([morlet_cwt(x[s, i], [a])[0] for i in range(t)]) for s in range(n)]
    )


def direct(w, a, order=None):
    """gamma (T, T) by a loop over pairs, rows and documents."""
    n, t, _ = w.shape
    order = range(n) if order is None else order
    reach = int(np.ceil(np.sqrt(2) * a))
    w = w.numpy()
    gamma = np.full((t, t), np.nan)
    for b in range(reach, t - reach):
        for c in range(reach, b + 1):
            cross, of_b, of_c = 0j, 0.0, 0.0
            for i in range(b + reach, t):
                for s in range(n):
                    cross += w[s, i, b] * np.conj(w[order[s], i, c])
                    of_b += abs(w[s, i, b]) ** 2
                    of_c += abs(w[s, i, c]) ** 2
            gamma[b, c] = gamma[c, b] = abs(cross) / np.sqrt(of_b * of_c)
    return gamma


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("a", [2.0, 5.0])
def test_against_a_loop_over_documents_rows_and_pairs(a, standardize):
    fields = torch.from_numpy(random_fields(n=6, t=T).values[0]).double()
    result = coherence(fields, a, standardize=standardize)
    assert result["coherence"].dims == ("layer", "scale", "lag", "lag_")
    expected = direct(transforms(fields, a, standardize), a)
    np.testing.assert_allclose(result["coherence"][0, 0], expected, atol=1e-10)
    inside = np.isfinite(expected)
    np.testing.assert_array_equal(result["rows"][0] > 0, inside)
    reach = int(np.ceil(np.sqrt(2) * a))
    assert result["rows"][0].sel(lag=reach, lag_=reach).item() == T - 2 * reach
    assert not result["footprint"].values[0][~inside].any()


def published_by_loops(fields, a, omega0=5.0):
    """gamma_ij as the paper's public code has it, written anew."""
    fields = fields.numpy()
    n, t, _ = fields.shape
    omega = 2 * np.pi * np.fft.fftfreq(2 * t)
    psi_hat = np.sqrt(2 * np.pi * a) * np.exp(-((omega * a - omega0) ** 2) / 2) * (omega > 0)
    out = np.zeros((t, t))
    for i in range(t):
        w = [np.fft.ifft(np.fft.fft(field[i], n=2 * t) * np.conj(psi_hat))[:t] for field in fields]
        for j in range(t):
            cross = sum(one[i] * np.conj(one[j]) for one in w) / n
            powers = [sum(abs(one[k]) ** 2 for one in w) / n for k in (i, j)]
            out[i, j] = abs(cross) / np.sqrt(powers[0] * powers[1])
    return out


@pytest.mark.parametrize("a", [2.0, 3.5])
def test_the_published_reading_is_that_of_the_public_code(a):
    fields = torch.from_numpy(random_fields(n=6, t=T).values[0])
    result = coherence(fields, a, convention="published")
    assert result["coherence"].dims == ("layer", "scale", "query", "key")
    np.testing.assert_allclose(
        result["coherence"][0, 0], published_by_loops(fields.double(), a), atol=1e-5
    )


def test_the_published_map_is_the_wavelets_own_near_the_diagonal_whatever_the_text():
    """Rows of independent noise: the map is high at and beyond the diagonal all the same."""
    result = coherence(white(400, T), 3.0, convention="published").isel(layer=0, scale=0)
    gamma, kernel = result["coherence"].values, result["wavelet"].values
    # From 400 documents gamma is known to 1 / sqrt(400) = 0.05.
    assert np.abs(gamma - kernel)[6:].max() < 4 * 0.05
    assert np.sqrt(np.square(gamma - kernel)[6:].mean()) < 0.05
    ahead = np.triu(np.ones((T, T), bool), 1)
    ahead[:8] = False
    assert (gamma[ahead] > 0.5).mean() > 0.9
    assert result["footprint"].values[ahead].all()
    assert (gamma > result["floor"].values)[~result["footprint"].values].mean() < 0.12


@pytest.mark.parametrize("a", [3.0, 6.0])
def test_white_noise_has_the_coherence_of_the_wavelet(a):
    result = coherence(white(400, 64), a).isel(layer=0, scale=0)
    kernel, gamma = result["wavelet"], result["coherence"]
    b = kernel["lag"].astype(float)
    gauss = np.exp(-((b - b.rename(lag="lag_")) ** 2) / (4 * a**2))
    assert float(abs(kernel - gauss).where(result["rows"] >= 8).max()) < 0.04  # edges of the rows
    many = result["rows"] >= 8
    assert float(np.sqrt(((gamma - kernel) ** 2).where(many).mean())) < 0.02
    half_width = 2 * a * np.sqrt(np.log(1 / 0.05))
    width = result["footprint"].sum("lag_").sel(lag=31).item()
    assert width == pytest.approx(2 * half_width + 1, abs=3)


def test_the_null_is_that_of_all_permutations():
    """Mean square of gamma over all 5! pairings of documents, and the floor from some."""
    from attnlib.coherence import _causal_maps, _wavelets

    fields, a = white(5, 16, seed=3), 2.0
    w = transforms(fields, a)
    every = [direct(w, a, order) for order in itertools.permutations(range(5))]
    rms = np.sqrt(np.mean(np.square(every), 0))
    orders = torch.tensor([range(5), *itertools.permutations(range(5))])
    psi = _wavelets(16, a, 5.0, published=False)[3:13]
    x = torch.zeros_like(fields)
    u = fields - fields.mean(0)
    for i in range(16):
        x[:, i, : i + 1] = u[:, i, : i + 1].flip(1)
    maps = _causal_maps(x, psi, 3, torch.zeros(10, 10), 0.5, orders, 0.95)
    inside = np.isfinite(rms)
    ratio = maps["floor"][inside] / rms[inside]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)  # one shape for all pairs
    lower = np.tril(inside)
    passed = [(gamma > maps["floor"])[lower].mean() for gamma in every]
    assert np.mean(passed) == pytest.approx(0.05, abs=0.005)


def planted(n=40, t=64, lags=(14, 44)):
    """Noise, and wave packets at two lags that have one random size per row and document."""
    rng = np.random.default_rng(0)
    tau = np.arange(t)
    rows, size = rng.normal(size=(n, t, t)), rng.normal(size=(n, t, 1))
    for b in lags:
        rows += 2 * size * np.cos(5 / 3 * (tau - b)) * np.exp(-((tau - b) ** 2) / 8)
    fields = np.zeros((n, t, t))
    for i in range(t):
        fields[:, i, : i + 1] = rows[:, i, : i + 1][:, ::-1]
    return torch.from_numpy(fields)


def test_a_planted_pattern_is_found_where_it_is():
    result = coherence(planted(), 3.0).isel(layer=0, scale=0)
    assert result["p_value"].item() == pytest.approx(1 / 21)
    assert result["share"] > result["share_by_chance"]
    assert abs(result["peak_lag"].item() - 44) <= 1
    assert abs(result["peak_lag_"].item() - 14) <= 1
    assert 20 < result["peak_documents"].item() < 40
    significant = result["significant"].values
    lag, lag_ = np.meshgrid(range(64), range(64), indexing="ij")
    distance = [np.minimum(abs(x - 14), abs(x - 44)) for x in (lag, lag_)]
    far = np.maximum(*distance) > 10  # packet and wavelet together reach some 8 lags
    assert significant[~far].sum() > 100
    assert not significant[far].any()
    assert not (significant & result["footprint"].values).any()


def test_a_pattern_of_a_single_document_is_known_as_one():
    fields = 1e-3 * white(30, T)
    fields[4] = planted(3, T, (5, 17))[0]
    result = coherence(fields, 2.0, standardize=False)
    assert 1 <= result["peak_documents"].item() < 1.5


def test_what_nobody_planted_is_not_found():
    """A false finding anywhere in a map in 1 of 20 maps, and 1 in 20 pairs above the floor."""
    found, shares, often = [], [], []
    for seed in range(60):
        result = coherence(white(12, T, seed), 2.5, seed=seed, n_permutations=19)
        found.append(bool(result["significant"].any()))
        shares.append(result["share"].item())
        often.append(bool((result["share"] > result["share_by_chance"]).item()))
    assert np.mean(found) <= 0.12  # 0.05, and two standard errors
    assert np.mean(often) <= 0.12
    assert np.mean(shares) == pytest.approx(0.05, abs=0.025)


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(3, 8), st.sampled_from([2.0, 3.3]), st.booleans())
def test_coherence_is_a_symmetric_correlation(seed, n, a, standardize):
    fields = torch.from_numpy(random_fields(1, n, 16, seed).values[0])
    result = coherence(fields, a, standardize=standardize).isel(layer=0, scale=0)
    gamma = result["coherence"].values
    inside = np.isfinite(gamma)
    assert gamma[inside].min() >= 0
    assert gamma[inside].max() <= 1
    np.testing.assert_array_equal(gamma, gamma.T)
    reach = int(np.ceil(np.sqrt(2) * a))
    np.testing.assert_allclose(np.diagonal(gamma)[reach : 16 - reach], 1, atol=1e-5)
    for name in ("floor", "threshold"):
        np.testing.assert_array_equal(np.isfinite(result[name]), inside)


@pytest.mark.parametrize("convention", ["causal", "published"])
def test_size_and_order_of_the_documents_do_not_matter(convention):
    fields = torch.from_numpy(random_fields(1, 8, T).values[0])
    options = {"convention": convention, "standardize": False}
    expected = coherence(fields, 3.0, **options)["coherence"]
    for size in (1e-30, 1e-12, 1e20):
        got = coherence(fields * size, 3.0, **options)["coherence"]
        np.testing.assert_allclose(got, expected, atol=1e-4)
    got = coherence(fields[torch.randperm(8)], 3.0, **options)["coherence"]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_several_scales_layers_and_heads(make_fields):
    fields = make_fields(n=5, t=T).expand_dims(head=[1, 2, 3], axis=1)
    result = coherence(fields, [2.0, 4.0])
    assert result["coherence"].dims == ("layer", "head", "scale", "lag", "lag_")
    assert result["share"].dims == ("layer", "head", "scale")
    assert result["coherence"].dtype == np.float32
    np.testing.assert_allclose(result["period"], 2 * np.pi / 5 * result["scale"])
    one = coherence(fields.isel(head=1, layer=[1]), 4.0)
    for name in ("coherence", "floor", "threshold"):
        np.testing.assert_array_equal(
            result[name].isel(head=1, layer=1).sel(scale=4.0), one[name].isel(layer=0, scale=0)
        )


def test_permuted_maps_in_parts_are_the_same(make_fields, monkeypatch):
    fields = make_fields(n=5, t=T)
    whole = coherence(fields, 2.0)
    monkeypatch.setattr(sys.modules["attnlib.coherence"], "CHUNK_BYTES", 1)
    np.testing.assert_allclose(coherence(fields, 2.0)["floor"], whole["floor"], rtol=1e-5)


def test_documents_that_are_all_the_same(make_fields):
    fields = make_fields(n=4, t=T)
    fields[:] = fields.isel(snapshot=0)
    result = coherence(fields, 2.0)
    assert float(result["coherence"].max()) == 0
    assert not result["significant"].any()
    assert np.isfinite(result["threshold"].where(result["rows"] > 0, 0)).all()


def test_a_footprint_that_is_the_whole_map(make_fields):
    result = coherence(make_fields(n=5, t=16), 4.5)  # reach 7: the lags 7 and 8
    assert (result["rows"] > 0).sum() == 4
    assert result["pairs"].item() == 0
    assert np.isnan(result["p_value"]).all()
    assert not result["significant"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 9.0}, "no lag inside the cone of influence of windows of 20"),
        ({"scale": [4.0, 2.0]}, "ascend"),
        ({"scale": -1.0}, "positive finite"),
        ({"convention": "signed"}, "two edges each"),
        ({"convention": "forward"}, "has the conventions"),
        ({"n_permutations": 18}, "take at least 19"),
        ({"level": 0.99}, "take at least 99"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"footprint_level": 0.0}, "between 0 and 1"),
        ({"omega0": 0.0}, "omega0 is a positive number"),
    ],
)
def test_refusals(make_fields, options, message):
    with pytest.raises(InputError, match=message):
        coherence(make_fields(n=4), **{"scale": 2.0, **options})


def test_fields_that_cannot_be_read(make_fields):
    fields = make_fields(n=4)
    with pytest.raises(InputError, match="at least 3"):
        coherence(fields.isel(snapshot=slice(2)), 2.0)
    bad = fields.copy()
    bad[1, 2, 5, 3] = np.nan
    with pytest.raises(InputError, match="layer 2, snapshot 2"):
        coherence(bad, 2.0)
    with pytest.raises(InputError, match="keys after the query"):
        coherence(torch.rand(4, 20, 20), 2.0)


@pytest.mark.parametrize("convention", ["causal", "published"])
def test_maps_are_drawn(make_fields, convention):
    import matplotlib.pyplot as plt

    from attnlib import by_model, plots

    result = coherence(make_fields(n=5, t=T), [2.0, 3.0], convention=convention)
    figure = plots.coherence_maps(result)
    assert len([axis for axis in figure.axes if axis.images]) == 4
    if convention == "causal":
        both = by_model({"BASE": result[["share", "share_by_chance"]]})
        figure = plots.coherence_shares({"text": both, "shuffled": both})
        assert [axis.get_title() for axis in figure.axes] == ["text", "shuffled"]
    plt.close("all")
