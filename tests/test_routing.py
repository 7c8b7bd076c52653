"""Routing and filtering against NumPy on full matrices, closed forms and properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    InputError,
    hodge,
    kernel_spectrum,
    routing_rank,
    singular_rank,
    split_interaction,
)

SEEDS = st.integers(0, 2**31)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skew(n, seed=0):
    return split_interaction(random(n, n, seed=seed))[0]


@given(SEEDS, st.integers(1, 9))
def test_the_split_is_orthogonal_and_complete(seed, n):
    m = random(2, n, n, seed=seed)
    routing, filtering = split_interaction(m)
    torch.testing.assert_close(routing + filtering, m)
    assert torch.equal(routing, -routing.mT)
    assert torch.equal(filtering, filtering.mT)
    energy = routing.square().sum((1, 2)) + filtering.square().sum((1, 2))
    torch.testing.assert_close(energy, m.square().sum((1, 2)))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ranks_of_equal_values(n):
    values = torch.full((n,), 1e-30)
    for method in ("participation", "entropy"):
        assert float(singular_rank(values, method)) == pytest.approx(n)
    assert float(singular_rank(values, "energy")) == np.ceil(0.9 * n - 1e-9)
    assert float(singular_rank(torch.zeros(n))) == 0


def test_ranks_against_their_definitions():
    s = torch.tensor([4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0])
    p = np.array([4, 4, 2, 2, 1, 1]) / 14
    assert float(singular_rank(s, "participation")) == pytest.approx(42**2 / (2 * (256 + 16 + 1)))
    assert float(singular_rank(s, "entropy")) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert float(singular_rank(s, "energy")) == 4  # 40 of 42, and 36 are not enough
    assert float(singular_rank(s.flip(0), "energy", 0.5)) == 2


@given(SEEDS, st.integers(2, 9))
def test_one_plane_of_rotation_has_rank_two(seed, n):
    a, b = random(2, n, seed=seed)
    plane = torch.outer(a, b) - torch.outer(b, a)
    for method in ("participation", "entropy"):
        assert float(routing_rank(plane, method)) == pytest.approx(2, rel=1e-6)


@given(SEEDS, st.integers(1, 12), st.integers(1, 5))
def test_factored_spectra_are_those_of_the_full_matrix(seed, n, r):
    a, b = random(2, 3, n, r, seed=seed)
    m = (a @ b.mT).numpy()
    found = kernel_spectrum(a, b)
    for i, full in enumerate(m):
        routing, filtering = (full - full.T) / 2, (full + full.T) / 2
        size = np.abs(full).max() * n
        expected = np.linalg.svd(routing, compute_uv=False)[: 2 * r]
        np.testing.assert_allclose(found.routing[i], expected, atol=1e-11 * size)
        # The full matrix has more eigenvalues, all 0.
        of_filtering = found.filtering[i].numpy()
        padded = np.sort(np.r_[of_filtering, np.zeros(n - len(of_filtering))])
        np.testing.assert_allclose(padded, np.linalg.eigvalsh(filtering), atol=1e-11 * size)
        eigenvalues = found.eigenvalues[i].numpy()
        for power in (1, 2, 3):  # their order is not unique, sums of powers are
            trace = np.trace(np.linalg.matrix_power(full, power))
            np.testing.assert_allclose((eigenvalues**power).sum(), trace, atol=1e-10 * size**power)


@given(SEEDS, st.integers(1, 9))
def test_hodge_parts(seed, n):
    s = skew(n, seed)
    potential, cyclic = hodge(s)
    gradient = potential[:, None] - potential[None]
    torch.testing.assert_close(gradient + cyclic, s)
    assert float(potential.sum().abs()) < 1e-12 * n
    assert float(cyclic.sum(1).abs().max()) < 1e-12 * n
    assert float((gradient * cyclic).sum().abs()) < 1e-10 * n * n
    again, rest = hodge(gradient)
    torch.testing.assert_close(again, potential)
    assert float(rest.abs().max()) < 1e-12 * n


def test_the_potential_is_the_least_squares_one():
    s = skew(6)
    i, j = np.triu_indices(6, 1)
    design = np.eye(6)[i] - np.eye(6)[j]
    best = np.linalg.lstsq(design, s.numpy()[i, j], rcond=None)[0]
    np.testing.assert_allclose(hodge(s)[0], best - best.mean(), atol=1e-12)


def test_the_potential_is_made_by_mean_query_and_mean_key():
    q, k = random(2, 7, 3, seed=5)
    s = q @ k.mT - k @ q.mT
    potential, cyclic = hodge(s)
    torch.testing.assert_close(potential, q @ k.mean(0) - k @ q.mean(0))
    q, k = q - q.mean(0), k - k.mean(0)
    torch.testing.assert_close(cyclic, q @ k.mT - k @ q.mT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_interaction(torch.rand(3, 4)), "square"),
        (lambda: split_interaction(torch.full((3, 3), np.nan)), "not finite"),
        (lambda: split_interaction(torch.ones(3, 3, dtype=torch.int64)), "floating point"),
        (lambda: routing_rank(torch.ones(3, 3)), "is skew"),
        (lambda: hodge(torch.ones(3, 3)), "is skew"),
        (lambda: singular_rank(torch.tensor([-1.0])), "not negative"),
        (lambda: singular_rank(torch.ones(2), "stable"), "participation"),
        (lambda: singular_rank(torch.ones(2), "energy", 1.0), "share"),
        (lambda: kernel_spectrum(torch.rand(3, 2), torch.rand(3, 1)), "one shape"),
        (lambda: kernel_spectrum(torch.rand(3, 2) / 0, torch.rand(3, 2)), "not finite"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call()
