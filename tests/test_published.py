"""Two roads to the published analysis: plain loops, and the functions of attnlib."""

import runpy
from types import SimpleNamespace

import numpy as np
import pytest

from attnlib.runner import project_root

loops = SimpleNamespace(**runpy.run_path(str(project_root() / "benchmarks" / "published.py")))


def fields(causal, n=9, t=16, seed=4):
    """Row-stochastic float64 fields, causal or looking both ways."""
    values = np.exp(2 * np.random.default_rng(seed).standard_normal((n, t, t)))
    values = values * np.tri(t) if causal else values
    return values / values.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("forward", "causal"),
    [(True, True), (True, False), (False, True)],
    ids=["published, causal fields", "published, any fields", "causal"],
)
def test_loops_and_functions_agree(forward, causal):
    values = fields(causal)
    theirs = loops.by_loops(values, n_modes=3, forward=forward)
    ours = loops.by_attnlib(values, n_modes=3, forward=forward)
    np.testing.assert_allclose(ours["energy"], theirs["energy"], rtol=1e-9)
    np.testing.assert_array_equal(ours["chosen"], theirs["chosen"])
    rank = len(values) - 1
    np.testing.assert_allclose(ours["eigenvalues"], theirs["eigenvalues"][:, :rank], rtol=1e-9)
    assert theirs["eigenvalues"][:, rank:].max() < 1e-12 * theirs["eigenvalues"].max()
    signs = np.sign((ours["modes"] * theirs["modes"]).sum((-1, -2), keepdims=True))
    np.testing.assert_allclose(ours["modes"], signs * theirs["modes"], atol=1e-6)
    np.testing.assert_allclose(ours["beta"], theirs["beta"], rtol=1e-9)
    np.testing.assert_array_equal(ours["H"], theirs["H"])


def test_single_precision_keeps_the_eigenvalues():
    values = fields(causal=True)
    theirs = loops.by_loops(values, n_modes=3, forward=False)
    ours = loops.by_attnlib(values.astype(np.float32), n_modes=3, forward=False)
    np.testing.assert_allclose(ours["energy"], theirs["energy"], rtol=1e-4)
    np.testing.assert_allclose(ours["eigenvalues"], theirs["eigenvalues"][:, :-1], rtol=1e-5)


def test_the_published_lag_of_causal_fields_sees_the_diagonal_alone():
    found = loops.by_loops(fields(causal=True), n_modes=1)
    np.testing.assert_allclose(
        found["eigenvalues"], found["eigenvalues"][:1].repeat(4, 0), rtol=1e-9, atol=1e-15
    )
    diagonal = np.eye(16, dtype=bool)
    assert np.abs(found["modes"][:, 0][:, ~diagonal]).max() == 0


def test_width_by_hand():
    assert loops.width(np.array([6.0, 3.0, 1.0]), 0.1) == 2
    assert loops.width(np.array([6.0, 3.0, 1.0]), 0.05) == 3
    assert loops.width(np.array([6.0, 3.0, 1.0]), 0.4) == 1
