"""Theorem 1: on their own ensemble no basis beats the modes; and what a basis may look like."""

import numpy as np
import pytest
import torch
import xarray as xr
from conftest import random_fields
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attnlib import (
    InputError,
    cosine_basis,
    fluctuation,
    pod,
    projection_error,
    scale_gram,
    spectrum,
)

FIELDS = random_fields(n_layer=1, n=9, t=6, seed=3)
U = fluctuation(FIELDS)
K = 4
BEST = projection_error(U, pod(FIELDS, [np.inf], K)["mode_field"].isel(scale=0))


def basis_of(values):
    return xr.DataArray(values, dims=("mode", "query", "key"))


def test_the_error_of_the_modes_is_the_tail_of_the_eigenvalues(make_fields):
    fields = make_fields(n=11)
    modes = pod(fields, [np.inf], "all")["mode_field"].isel(scale=0)
    values = spectrum(scale_gram(fields, [np.inf])).isel(scale=0)
    tail = 1 - values.cumsum("mode") / values.sum("mode")
    error = projection_error(fluctuation(fields), modes)
    assert error.dims == ("layer", "kept")
    np.testing.assert_allclose(error, tail, atol=1e-6)
    assert (error.isel(kept=-1) < 1e-6).all()


def test_against_least_squares():
    rng = np.random.default_rng(0)
    u, basis = rng.normal(size=(7, 12)), rng.normal(size=(5, 12))
    error = projection_error(torch.from_numpy(u), torch.from_numpy(basis))
    for k in range(1, 6):
        rest = u.T - basis[:k].T @ np.linalg.lstsq(basis[:k].T, u.T, rcond=None)[0]
        assert error[k - 1].item() == pytest.approx(np.square(rest).sum() / np.square(u).sum())


def beaten_by(basis) -> bool:
    """Whether a basis leaves less than the modes at some K."""
    return bool((projection_error(U, basis) < BEST * (1 - 1e-5) - 1e-9).any())


@given(arrays(np.float64, (K, 6, 6), elements=st.floats(-1, 1, width=32)))
def test_no_basis_beats_the_modes(values):
    little = np.random.default_rng(0).normal(size=values.shape)  # zeros and copies are no basis
    assert not beaten_by(basis_of(values + 1e-3 * little))


@given(st.integers(0, 10**6), st.floats(1e-6, 1))
def test_not_even_a_basis_next_to_them(seed, size):
    modes = pod(FIELDS, [np.inf], K)["mode_field"].isel(layer=0, scale=0, drop=True)
    shift = np.random.default_rng(seed).normal(size=modes.shape)
    assert not beaten_by(modes + size * shift)


def test_documents_cosines_and_noise_do_not_beat_them():
    rng = np.random.default_rng(0)
    u = U.isel(layer=0, drop=True)
    assert not beaten_by(u.isel(snapshot=[3, 1, 4, 6]).rename(snapshot="mode"))
    assert not beaten_by(cosine_basis(6, K))
    assert not beaten_by(cosine_basis(6, K, u))
    assert not beaten_by(basis_of(np.tril(rng.normal(size=(K, 6, 6)))))


def test_on_other_documents_they_are_beaten():
    """The theorem is about its own ensemble; and the tests above could fail."""
    other = random_fields(n_layer=1, n=9, t=6, seed=8)
    modes = (pod(f, [np.inf], K)["mode_field"].isel(scale=0) for f in (FIELDS, other))
    ours, theirs = (projection_error(fluctuation(other), m) for m in modes)
    assert (theirs < 0.95 * ours).all()


def test_scaling_and_order_within_the_first_k_do_not_matter():
    rng = np.random.default_rng(0)
    u = torch.from_numpy(rng.normal(size=(6, 4, 5)))
    basis = torch.from_numpy(rng.normal(size=(3, 4, 5)))
    error = projection_error(u, basis)
    scaled = projection_error(u, basis * torch.tensor([1e-6, -3.0, 1e8])[:, None, None])
    np.testing.assert_allclose(scaled, error)
    assert projection_error(u, basis.flip(0))[-1].item() == pytest.approx(error[-1].item())
    assert (error.diff() < 0).all()
    assert error.dtype == torch.float64


def test_layouts_and_one_basis_for_all_layers(make_fields):
    u = fluctuation(make_fields(n=8, t=7))
    waves = cosine_basis(7, 5)
    error = projection_error(u, waves)
    turned = projection_error(u.transpose("key", "snapshot", "layer", "query"), waves.T)
    xr.testing.assert_allclose(error, turned)
    each = projection_error(u, waves.expand_dims(layer=u["layer"]))
    xr.testing.assert_allclose(error, each)
    xr.testing.assert_allclose(error.sel(layer=2, drop=True), projection_error(u[1], waves))


@pytest.mark.parametrize("t", [2, 5, 6])
def test_cosines_span_all_causal_fields(t):
    n = t * (t + 1) // 2
    waves = cosine_basis(t, n).values
    assert not np.triu(waves, 1).any()
    flat = waves.reshape(n, -1)
    assert np.linalg.matrix_rank(flat) == n
    np.testing.assert_allclose(waves[0], np.tri(t) * waves[0, 0, 0])  # the mean comes first


def test_cosines_with_most_energy_come_first():
    t = 16
    i, j = np.indices((t, t))
    wave = np.cos(np.pi * 3 * (i + 0.5) / t) * np.cos(np.pi * 5 * (j + 0.5) / t)
    pattern = np.tril(wave + wave.T)
    u = np.array([1.0, -2.0, 1.0])[:, None, None] * pattern
    u = xr.DataArray(u, dims=("snapshot", "query", "key"))
    assert projection_error(u, cosine_basis(t, 1, u)).item() < 1e-9
    assert projection_error(u, cosine_basis(t, 1)).item() > 0.9
    with pytest.raises(InputError, match="between 1 and the 136"):
        cosine_basis(t, 137)


@pytest.mark.parametrize(
    ("basis", "message"),
    [
        (torch.zeros(2, 4, 5), "vector 1 of the basis lies in the span"),
        (torch.ones(2, 4, 5), "vector 2 of the basis lies in the span"),
        (torch.ones(2, 5, 4), "no basis of vectors of shape"),
        (torch.ones(2, 4, 5) * torch.nan, "not finite"),
        (torch.ones(2, 4, 5) * 1j, "are real"),
        (torch.randn(21, 4, 5), "21 vectors in 20 dimensions"),
        (np.ones((2, 4, 5)), "both DataArrays, or both tensors"),
    ],
)
def test_what_is_no_basis(basis, message):
    u = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 4, 5)))
    with pytest.raises(InputError, match=message):
        projection_error(u, basis)


def test_wrong_ensembles(make_fields):
    waves = cosine_basis(6, 2)
    with pytest.raises(InputError, match="nothing but zeros"):
        projection_error(0 * U, waves)
    with pytest.raises(InputError, match="snapshot, query, key, and a basis mode"):
        projection_error(waves, waves)
    with pytest.raises(InputError, match="that the fluctuation has not"):
        projection_error(U[0], waves.expand_dims(layer=2))
