"""S-D attention: its two forms, its theorem, its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import InputError, SDAttention, sd_attention
from attnlib.sd import SHORT, _fused, sd_logits

SEEDS = st.integers(0, 2**31)


def draw(seed=0, t=9, size=4, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 3, t, size, generator=generator, dtype=dtype)
    damping = torch.rand(2, 3, t, generator=generator, dtype=dtype) * 3
    return scale * q, scale * k, v, damping


def by_loops(q, k, v, damping):
    """One query at a time, from the definition."""
    out = torch.zeros_like(v)
    for b, h, i in np.ndindex(*q.shape[:3]):
        logits = [
            (q[b, h, i] @ k[b, h, j] - k[b, h, i] @ q[b, h, j]) / np.sqrt(q.shape[-1])
            for j in range(i + 1)
        ]
        logits[i] = -damping[b, h, i]
        out[b, h, i] = torch.stack(logits).softmax(0) @ v[b, h, : i + 1]
    return out


@settings(deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.sampled_from([0.0, 0.3, 3.0]))
def test_both_forms_equal_the_loop(seed, t, size, scale):
    q, k, v, damping = draw(seed, t, size, scale)
    expected = by_loops(q, k, v, damping)
    plain, weights = sd_attention(q, k, v, damping, need_weights=True)
    short, none = sd_attention(q, k, v, damping)
    assert none is None
    assert torch.equal(short, plain)
    torch.testing.assert_close(_fused(q, k, v, damping), expected)
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(damping))
    assert not bool(weights.triu(1).any())


def test_gradients_of_both_forms_agree():
    tensors = [x.requires_grad_() for x in draw(3)]
    grads = []
    for form in (_fused, lambda *x: sd_attention(*x)[0]):
        out = form(*tensors)
        grads.append(torch.autograd.grad((out * torch.arange(4)).sum(), tensors))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_precision_over_a_long_window(dtype, tolerance):
    q, k, v, damping = draw(1, t=300, size=16)
    exact, _ = sd_attention(q, k, v, damping, need_weights=True)
    found, _ = sd_attention(*(x.to(dtype) for x in (q, k, v)), damping.to(torch.float32))
    assert found.dtype == dtype
    assert float((found.double() - exact).abs().max()) < tolerance


def test_strong_damping_and_small_weights_keep_their_precision():
    """The query's own weight and all others tiny, so that 1 - m would be nothing but rounding."""
    q, k, v, _ = draw(2, t=5, dtype=torch.float32)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = torch.arange(5.0) * -12, 1.0  # S_ij = -6 (i - j)
    damping = torch.full(q.shape[:3], 30.0)
    exact = by_loops(*(x.double() for x in (q, k, v, damping)))
    for found in (_fused(q, k, v, damping), sd_attention(q, k, v, damping)[0]):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("t", [SHORT, SHORT + 1])
def test_windows_of_either_length_give_the_same_to_a_module(t):
    torch.manual_seed(0)
    module = SDAttention(12, 3).double()
    x = torch.randn(1, t, 12, dtype=torch.float64)
    q, k, v = module.heads(x)
    assert (t <= SHORT) == torch.equal(
        module.attend(x, q, k, v, 0.0, False)[0], module.attend(x, q, k, v, 0.0, True)[0]
    )
    torch.testing.assert_close(module(x)[0], module(x, need_weights=True)[0], rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 12))
def test_no_eigenvalue_has_a_positive_real_part(seed, t):
    q, k, _, damping = draw(seed, t)
    real = torch.linalg.eigvals(sd_logits(q, k, damping)).real
    assert float(real.max()) <= -float(damping.min()) + 1e-9  # more than the theorem asks for


def test_the_module_returns_the_same_with_and_without_weights():
    torch.manual_seed(0)
    module = SDAttention(12, 3, head_size=5).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    damping = module.token_damping(x)
    assert damping.shape == (2, 3, 7)
    assert bool((damping > 0).all())
    fused, plain = module(x)[0], module(x, need_weights=True)[0]
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def test_shapes_that_do_not_fit():
    q, k, v, damping = draw()
    with pytest.raises(InputError, match="damping"):
        sd_attention(q, k, v, damping[..., :-1])


def test_a_negative_diagonal_is_refused():
    q, k, v, damping = draw()
    for bad, message in ((-0.5, "as low as -0.5"), (float("nan"), "as low as nan")):
        damping[0, 1, 2] = bad
        with pytest.raises(InputError, match=message):
            sd_attention(q, k, v, damping)
