"""Linear attention: chunks, the quadratic form, the recurrence, long and short precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    LinearAttention,
    LinearSDAttention,
    linear_attention,
)
from attnlib.linear import _features, linear_weights

SEEDS = st.integers(0, 2**31)


def draw(seed=0, t=13, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 3, t, size, generator=generator, dtype=dtype)


def quadratic(q, k, v):
    """The masked form, with all weights."""
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 25))
def test_chunks_equal_the_masked_quadratic_form(seed, t, chunk):
    q, k, v = draw(seed, t)
    found, state = linear_attention(q, k, v, chunk=chunk)
    torch.testing.assert_close(found, quadratic(q, k, v))
    assert state is None


def test_gradients_are_those_of_the_quadratic_form():
    inputs = draw().requires_grad_()
    target = draw(1)[0]
    grads = [
        torch.autograd.grad((form(*inputs) * target).sum(), inputs)[0]
        for form in (lambda *x: linear_attention(*x, chunk=5)[0], quadratic)
    ]
    torch.testing.assert_close(*grads)
    q, k, v = (x.detach().requires_grad_() for x in draw(2, t=5, size=2))
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, chunk=2)[0], (q, k, v))


@pytest.mark.parametrize("step", [1, 4])
def test_the_recurrence_gives_the_same_with_a_state_of_constant_size(step):
    q, k, v = draw(t=12)
    whole, last = linear_attention(q, k, v, need_state=True)
    state, parts = None, []
    for x in zip(*(y.split(step, 2) for y in (q, k, v)), strict=True):
        out, state = linear_attention(*x, state=state, need_state=True)
        assert state.memory.shape == (2, 3, 4, 4)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state.memory, last.memory)
    torch.testing.assert_close(state.weight, last.weight)


def test_later_tokens_change_nothing_before_them():
    q, k, v = draw()
    before, _ = linear_attention(q, k, v, chunk=4)
    for x in (q, k, v):
        x[:, :, -1] += 1
    after, _ = linear_attention(q, k, v, chunk=4)
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])


def test_long_texts_keep_their_precision_in_bfloat16():
    """Sums in bfloat16 stop growing at 256 equal terms; these are of thousands."""
    q, k, v = draw(t=6000, dtype=torch.bfloat16)
    found, _ = linear_attention(q, k, v)
    assert found.dtype == torch.bfloat16
    exact = quadratic(*(x[:1, :1].double() for x in (q, k, v)))
    error = (found[:1, :1].double() - exact).abs().max()
    assert float(error) < 2**-8  # values are below 1 there, and bfloat16 holds 8 bits


def test_the_module_shares_the_weights_of_softmax_attention():
    torch.manual_seed(0)
    module = LinearAttention(12, 3, head_size=5).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    out, weights = module(x, need_weights=True)
    torch.testing.assert_close(out, module(x)[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))
    assert not bool(weights.triu(1).any())
    v = module.heads(x)[2]
    by_weights = module.proj((weights @ v).transpose(1, 2).reshape(2, 7, -1))
    torch.testing.assert_close(out, by_weights)


def test_shapes_that_do_not_fit():
    q, k, v = draw()
    with pytest.raises(InputError, match=r"\(B, H, T, D\)"):
        linear_attention(q, k[..., :2], v)
    with pytest.raises(InputError, match="chunk"):
        linear_attention(q, k, v, chunk=0)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 15))
def test_a_factor_on_the_own_key_equals_the_masked_form(seed, t, chunk):
    q, k, v = draw(seed, t)
    own = torch.rand(2, 3, t, generator=torch.Generator().manual_seed(seed), dtype=q.dtype) + 0.1
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    weights.diagonal(dim1=-2, dim2=-1).mul_(own)
    expected = weights @ v / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(linear_attention(q, k, v, own=own, chunk=chunk)[0], expected)


@pytest.mark.parametrize("damping", [5.0, 10.0, 20.0, 60.0])
def test_a_strongly_damped_own_key_keeps_its_precision(damping):
    """In float32, against float64: also of the first query, which sees no other key."""
    q, k, v = draw(t=9)
    own = torch.full((2, 3, 9), -damping, dtype=torch.float64).exp()
    expected, _ = linear_attention(q, k, v, own=own)
    torch.testing.assert_close(expected[:, :, 0], v[:, :, 0])
    found, _ = linear_attention(q.float(), k.float(), v.float(), own=own.float(), chunk=4)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    weights = linear_weights(q.float(), k.float(), own.float())
    torch.testing.assert_close((weights @ v.float()).double(), expected, atol=1e-5, rtol=1e-4)


def test_the_module_of_strong_damping_is_finite():
    torch.manual_seed(0)
    module = LinearSDAttention(12, 3)
    torch.nn.init.constant_(module.damping.bias, 500.0)
    out, weights = module(torch.randn(2, 7, 12), need_weights=True)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7))


def test_features_far_below_zero_stay_positive():
    q, k, v = draw()
    q, k = (x.float() - 30 for x in (q, k))
    found, _ = linear_attention(q, k, v.float())
    exact, _ = linear_attention(q.double(), k.double(), v)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-3)
    x = torch.linspace(-20, 20, 401, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(_features(x), F.elu(x) + 1)
    assert torch.autograd.gradcheck(
        _features, torch.tensor([-3.0, -0.1, 0.2, 4.0]).double().requires_grad_()
    )


def test_sums_are_float32_under_autocast():
    q, k, v = draw(t=2048, dtype=torch.float32)
    exact, last = linear_attention(q, k, v, need_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, state = linear_attention(q, k, v, need_state=True)
        weights = linear_weights(q[:, :, :64], k[:, :, :64])
    assert state.memory.dtype == state.weight.dtype == weights.dtype == torch.float32
    assert torch.equal(found, exact)
    assert torch.equal(state.weight, last.weight)


def test_hidden_keys_may_hold_anything():
    q, k, v = draw()
    seen = torch.ones(2, 13, dtype=torch.bool)
    seen[:, 9:] = False
    expected, _ = linear_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    k[:, :, 9:], v[:, :, 9:] = float("nan"), float("inf")
    found, _ = linear_attention(q, k, v, seen=seen)
    torch.testing.assert_close(found[:, :, :9], expected)
    assert torch.isfinite(found).all()
    nothing, _ = linear_attention(q, k, v, seen=torch.zeros_like(seen))
    assert not bool(nothing.any())


KINDS = ["softmax", "sd", "linear", "linear-sd"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,) * 9, (4, 1, 3, 1), (9,)])
def test_decoding_with_caches_gives_the_logits_of_the_whole_window(kind, sizes):
    config = GPTConfig(2, 2, 8, 9, 11, kind, init_std=0.5, dropout=0.0)
    model = GPT(config, seed=3).double().eval()
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)[0]
    caches, start = None, 0
    for n in sizes:
        logits, caches = model.decode(tokens[:, start : start + n], caches, start)
        start += n
        torch.testing.assert_close(logits, whole[:, start - 1])
    if kind.startswith("linear"):
        assert caches[0].memory.shape[-2:] == ((4, 4) if kind == "linear" else (8, 4))
    else:
        assert caches[0][0].shape[2] == 9
    with pytest.raises(InputError, match="more than the context"):
        model.decode(tokens[:, :1], caches, 9)
    _, caches = model.decode(tokens[:, :4])
    for wrong, at in ((None, 4), (caches, 0), (caches[:1], 4), (caches, -1)):
        with pytest.raises(InputError, match=r"came before|caches for 2 layers|start is a whole"):
            model.decode(tokens[:, 4:5], wrong, at)
    other = GPT(GPTConfig(2, 2, 8, 9, 11, "softmax" if "linear" in kind else "linear"))
    _, foreign = other.decode(tokens[:, :4])
    with pytest.raises(InputError, match="another kind of attention"):
        model.decode(tokens[:, 4:5], foreign, 4)
    if not kind.startswith("linear"):
        with pytest.raises(InputError, match="caches are of 4 tokens, not of 3"):
            model.decode(tokens[:, 4:5], caches, 3)


@pytest.mark.parametrize("kind", ["linear", "linear-sd"])
def test_weights_asked_for_belong_to_the_output(kind):
    model = GPT(GPTConfig(1, 2, 8, 7, 5, kind, init_std=0.5, dropout=0.0)).double().eval()
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1)).double()
    attention = model.blocks[0].attention
    out, weights = attention(x, need_weights=True)
    v = attention.heads(x)[2]
    again = attention.proj((weights.double() @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(again, out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(attention(x)[0], out)
    assert (weights.triu(1) == 0).all()


def test_generation_goes_on_beyond_the_context_and_gated_attention_has_no_cache():
    model = GPT(GPTConfig(1, 2, 8, 6, 5, "linear"))
    assert len(model.generate(torch.zeros(2, dtype=torch.long), 10)) == 12
    gated = GPT(GPTConfig(1, 2, 8, 6, 5, "ega-1"))
    assert len(gated.generate(torch.zeros(2, dtype=torch.long), 10)) == 12
    with pytest.raises(InputError, match="at least one"):
        model.generate(torch.zeros(0, dtype=torch.long), 2)
    with pytest.raises(InputError, match="no cache"):
        gated.decode(torch.zeros(1, 2, dtype=torch.long))


def test_shapes_that_do_not_fit_are_named():
    q, k, v = draw()
    with pytest.raises(InputError, match="own: the shape"):
        linear_attention(q, k, v, own=torch.ones(2, 3, 4))
    with pytest.raises(InputError, match="seen: the shape"):
        linear_attention(q, k, v, seen=torch.ones(2, 4, dtype=torch.bool))
    state = linear_attention(*draw(size=5), need_state=True)[1]
    with pytest.raises(InputError, match="state: the shape"):
        linear_attention(q, k, v, state=state)
    state = linear_attention(q, k, v, need_state=True)[1]
    with pytest.raises(InputError, match="state: the shape"):
        linear_attention(q, k, v, state=state._replace(weight=state.weight[..., :2]))
    with pytest.raises(InputError, match="a state is what an earlier call returned"):
        linear_attention(q, k, v, state=(state.memory, state.weight))
    with pytest.raises(InputError, match="seen: the shape or type"):
        linear_attention(q, k, v, seen=torch.ones(2, 13))
    with pytest.raises(InputError, match="are floats"):
        linear_attention(q.long(), k, v)
    for low in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="own is a positive factor"):
            linear_attention(q, k, v, own=torch.full((2, 3, 13), low))
    mixed, _ = linear_attention(q, k.float(), v)
    torch.testing.assert_close(mixed, linear_attention(q, k, v)[0], atol=1e-5, rtol=1e-5)
