"""POD against NumPy's SVD, its theorem, its signs, and what it refuses."""

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    InputError,
    lag_gram,
    lag_window,
    pod,
    reconstruct,
    scale_gram,
    spectrum,
    subspace_overlap,
)

SCALES = [2.0, 4.0, np.inf]


def filtered(fields, scale, layer=0):
    """Filtered fluctuations as rows of a matrix, ``(N, T^2)`` float64."""
    values = fields.values[layer].astype(np.float64)
    t = values.shape[-1]
    lag = np.subtract.outer(np.arange(t), np.arange(t))
    window = np.where(lag >= 0, lag_window(np.arange(t), scale)[np.abs(lag)], 0)
    return ((values - values.mean(0)) * window).reshape(len(values), -1)


@pytest.mark.parametrize(("n", "t"), [(12, 20), (40, 9), (5, 30)])
def test_against_the_singular_value_decomposition(make_fields, n, t):
    fields = make_fields(n=n, t=t)
    modes = pod(fields, [1.5, 3.0, np.inf], 4)
    for layer in range(2):
        for s, scale in enumerate(modes["scale"].values):
            u = filtered(fields, scale, layer)
            left, singular, right = np.linalg.svd(u, full_matrices=False)
            one = modes.isel(layer=layer, scale=s)
            np.testing.assert_allclose(one["eigenvalue"], singular[:4] ** 2 / n, rtol=1e-6)
            np.testing.assert_allclose(one["total_variance"], (singular**2).sum() / n, rtol=1e-6)
            phi = one["mode_field"].values.reshape(4, -1)
            np.testing.assert_allclose(np.abs((phi * right[:4]).sum(1)), 1, atol=1e-5)
            coefficient = one["coefficient"].values
            unit = coefficient / np.linalg.norm(coefficient, axis=1)[:, None]
            np.testing.assert_allclose(np.abs((unit * left.T[:4]).sum(1)), 1, atol=1e-6)
            np.testing.assert_allclose(coefficient, phi @ u.T, atol=1e-5)
            np.testing.assert_allclose((coefficient**2).mean(1), one["eigenvalue"], rtol=1e-6)


def test_lag_profiles_are_means_along_diagonals(make_fields):
    modes = pod(make_fields(), SCALES, 3)
    field, profile = modes["mode_field"].values, modes["lag_profile"].values
    for index in np.ndindex(2, 3, 3):
        expected = [np.diagonal(field[index], -tau).mean() for tau in range(20)]
        np.testing.assert_allclose(profile[index], expected, atol=1e-6)


def test_all_modes_rebuild_the_filtered_field(make_fields):
    fields = make_fields(n=8)
    modes = pod(fields, SCALES, "all")
    assert modes.sizes["mode"] == 7
    rebuilt = reconstruct(modes)
    for s, scale in enumerate(SCALES):
        got = rebuilt.isel(layer=0, scale=s).transpose("snapshot", "query", "key").values
        np.testing.assert_allclose(got.reshape(8, -1), filtered(fields, scale), atol=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(SCALES))
def test_no_basis_is_better(seed, kept, scale):
    """Theorem 1: random bases, and the Fourier basis, never leave a smaller error."""
    from conftest import random_fields

    fields = random_fields(n_layer=1, n=9, t=12, seed=3)
    u = filtered(fields, scale)
    values = spectrum(scale_gram(fields, [scale])).values[0, 0]
    best = values[kept:].sum()
    rng = np.random.default_rng(seed)
    wave = np.fft.ifft(np.eye(u.shape[1])[rng.choice(u.shape[1], kept, replace=False)], axis=1)
    bases = [
        rng.normal(size=(u.shape[1], kept)),
        u.T @ rng.normal(size=(9, kept)),
        np.concatenate([wave.real, wave.imag]).T[:, :kept],
    ]
    for basis in bases:
        q = np.linalg.qr(basis)[0][:, :kept]
        error = np.square(u - (u @ q) @ q.T).sum() / 9
        assert error >= best * (1 - 1e-9)


def test_a_gram_gives_what_the_fields_give(make_fields):
    fields = make_fields()
    modes = pod(fields, SCALES, 3, fields_of_modes=False)
    assert "mode_field" not in modes
    for gram in (lag_gram(fields), scale_gram(fields, SCALES)):
        again = pod(gram, SCALES, 3)
        for name in ("eigenvalue", "coefficient", "total_variance", "rank", "multiplet"):
            np.testing.assert_allclose(again[name], modes[name], rtol=1e-7, atol=1e-9)


def test_signs_do_not_depend_on_order_or_layout(make_fields):
    fields = make_fields(rank=4)
    modes = pod(fields, SCALES, 3)
    order = np.random.default_rng(0).permutation(12)
    shuffled = pod(fields.isel(snapshot=order), SCALES, 3)
    np.testing.assert_allclose(
        shuffled["coefficient"], modes["coefficient"].isel(snapshot=order), atol=1e-6
    )
    turned = fields.transpose("key", "layer", "snapshot", "query")
    np.testing.assert_allclose(pod(turned, SCALES, 3)["mode_field"], modes["mode_field"], atol=1e-6)
    mirrored = pod(2 * fields.mean("snapshot") - fields, SCALES, 3)  # every excursion reversed
    np.testing.assert_allclose(mirrored["coefficient"], modes["coefficient"], atol=1e-5)
    np.testing.assert_allclose(mirrored["mode_field"], -modes["mode_field"], atol=1e-4)
    assert ((modes["coefficient"] ** 3).sum("snapshot") > 0).all()


def test_a_symmetric_ensemble_has_a_sign_too():
    pattern = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)).tril()
    amounts = torch.tensor([-2.0, -1.0, 1.0, 2.0])
    modes = pod((amounts[:, None, None] * pattern)[None], [np.inf], 1)
    assert modes["coefficient"].values[0, 0, 0, 0] > 0  # the first of at least half the size


def test_near_equal_modes_are_one_multiplet_and_one_subspace():
    t, rng = 10, np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(t * (t + 1) // 2, 3)))[0].T
    where = np.tril_indices(t)

    def ensemble(mixing, n=200):
        amounts = np.linalg.qr(np.random.default_rng(1).normal(size=(n, 3)))[0]
        amounts = (amounts - amounts.mean(0)) * np.sqrt(n) * [2.0, 2.0 + 1e-9, 0.5] @ mixing
        fields = np.zeros((1, n, t, t))
        fields[0][(slice(None), *where)] = amounts @ basis
        return torch.from_numpy(fields)

    angle = 0.7
    turn = np.eye(3)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    a, b = (pod(ensemble(m), [np.inf], 3).isel(layer=0, scale=0) for m in (np.eye(3), turn))
    assert a["multiplet"].values.tolist() == [1, 1, 2]
    assert not a["multiplet_open"]  # nothing but rounding follows
    cut = pod(ensemble(np.eye(3)), [np.inf], 1).isel(layer=0, scale=0)
    assert cut["multiplet_open"]
    assert (a["eigenvalue_error"] > 0).all()
    pair = [m["mode_field"].isel(mode=slice(0, 2)) for m in (a, b)]
    assert subspace_overlap(*pair) == pytest.approx(1, abs=1e-3)
    single = subspace_overlap(*(m["mode_field"].isel(mode=[0]) for m in (a, b)))
    assert single < 0.9  # one vector of the pair alone is not determined
    assert subspace_overlap(
        a["mode_field"].isel(mode=[0]), a["mode_field"].isel(mode=[2])
    ) == pytest.approx(0, abs=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_overlap_is_that_of_the_principal_angles(seed, k):
    from scipy.linalg import subspace_angles

    a, b = np.random.default_rng(seed).normal(size=(2, k, 4, 5))
    expected = np.mean(np.cos(subspace_angles(a.reshape(k, -1).T, b.reshape(k, -1).T)) ** 2)
    got = subspace_overlap(*(xr.DataArray(x, dims=("mode", "query", "key")) for x in (a, b)))
    assert got == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_modes_than_the_rank_names_the_rank(rank, dtype):
    rng = np.random.default_rng(0)
    fields = np.einsum("nr,rij->nij", rng.normal(size=(20, rank)), rng.normal(size=(rank, 30, 30)))
    fields = torch.from_numpy((fields[None] + 5) * np.tri(30)).to(dtype)
    with pytest.raises(InputError, match=f"have rank {rank} at layer 1, scale inf.*'all'"):
        pod(fields, [np.inf], rank + 1)
    assert pod(fields, [np.inf], "all").sizes["mode"] == rank


def test_fewer_rows_than_snapshots(make_fields):
    modes = pod(make_fields(n_layer=1, n=30, t=4), [np.inf], "all")
    assert modes.sizes["mode"] == 6  # 10 causal entries, less one a row, whose sum is 1


def test_constants_and_snapshots_without_variance(make_fields):
    fields = make_fields(n=8)
    fields[:, :, 0] = fields[:, 0, 0]  # a constant feature
    fields[:, 3] = fields.mean("snapshot")  # a snapshot without fluctuation (nearly)
    modes = pod(fields, SCALES, 3)
    assert np.isfinite(modes["mode_field"].values).all()
    np.testing.assert_allclose(modes["coefficient"].mean("snapshot"), 0, atol=1e-9)


def test_fields_that_do_not_vary():
    with pytest.raises(InputError, match="rank 0 at layer 1, scale inf"):
        pod(torch.ones(1, 4, 5, 5).tril(), [np.inf], 1)
    with pytest.raises(InputError, match="rank 0"):
        pod(torch.ones(1, 4, 5, 5).tril(), [np.inf], "all")


def test_one_nan_names_layer_and_snapshot(make_fields):
    fields = make_fields()
    fields[1, 5, 4, 2] = np.nan
    with pytest.raises(InputError, match="layer 2, snapshot 5"):
        pod(fields, SCALES, 2)


def test_bidirectional_fields(make_fields):
    fields = make_fields(n=9, t=8)
    both = fields + 0.5 * make_fields(n=9, t=8, seed=5).values.swapaxes(-1, -2)
    modes = pod(both, [1.5, np.inf], 3, convention="signed")
    assert modes["lag"].values.tolist() == list(range(-7, 8))
    both = both.astype(np.float64)
    u = (both - both.mean("snapshot")).values[0].reshape(9, -1)
    expected = np.linalg.svd(u, compute_uv=False)[:3] ** 2 / 9
    np.testing.assert_allclose(modes["eigenvalue"].isel(layer=0, scale=1), expected, rtol=1e-6)
    field, profile = modes["mode_field"].values, modes["lag_profile"].values
    for m, tau in enumerate(modes["lag"].values):
        np.testing.assert_allclose(
            profile[1, 0, 2, m], np.diagonal(field[1, 0, 2], -tau).mean(), atol=1e-6
        )


@pytest.mark.parametrize("n_modes", [0, -1, 2.0, True, "some"])
def test_impossible_numbers_of_modes(make_fields, n_modes):
    with pytest.raises(InputError, match="whole number from 1"):
        pod(make_fields(), [2.0], n_modes)


def test_reconstruct_needs_mode_fields_and_a_number_that_is_there(make_fields):
    with pytest.raises(InputError, match="no mode fields"):
        reconstruct(pod(make_fields(), [2.0], 2, fields_of_modes=False))
    with pytest.raises(InputError, match="between 1 and the 2"):
        reconstruct(pod(make_fields(), [2.0], 2), 3)


def test_the_function_is_not_hidden_by_its_room():
    import importlib

    importlib.import_module("attnlib.pod")
    import attnlib

    assert callable(attnlib.pod)
