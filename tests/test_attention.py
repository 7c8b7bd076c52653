"""Attention against naive loops, and who may look ahead."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    EnergyGatedAttention,
    InputError,
    SoftmaxAttention,
    energy_gated_attention,
    log_energy_gate,
    softmax_attention,
    standardize_energy,
)
from attnlib.attention import causal_filters

B, H, T, D = 2, 3, 7, 4


def qkv(seed=0, dtype=torch.float64, t=T):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, H, t, D, generator=generator, dtype=dtype).unbind(0)


def naive(q, k, v, gate=None):
    """Multiply softmax weights by the gate and renormalise, one query at a time, as published."""
    out, weights = torch.zeros_like(q), torch.zeros(*q.shape[:3], q.shape[2], dtype=q.dtype)
    for b, h, i in np.ndindex(*q.shape[:3]):
        logits = torch.stack([q[b, h, i] @ k[b, h, j] for j in range(i + 1)]) / math.sqrt(D)
        row = torch.exp(logits - logits.max())
        row = row / row.sum()
        if gate is not None:
            row = row * (gate[b, h, : i + 1] if gate.dim() == 3 else gate[b, h, i, : i + 1])
            row = row / row.sum()
        weights[b, h, i, : i + 1] = row
        out[b, h, i] = row @ v[b, h, : i + 1]
    return out, weights


@pytest.mark.parametrize("kind", ["none", "per key", "per query and key"])
def test_plain_and_fused_forms_equal_the_loop(kind):
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(1)
    shape = {"none": None, "per key": (B, H, T), "per query and key": (B, H, T, T)}[kind]
    gate = None if shape is None else torch.rand(shape, generator=generator, dtype=q.dtype)
    log_gate = None if gate is None else gate.log()
    expected, expected_weights = naive(q, k, v, gate)
    plain, weights = softmax_attention(q, k, v, bias=log_gate, need_weights=True)
    fused, none = softmax_attention(q, k, v, bias=log_gate)
    assert none is None
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(fused, expected)


@pytest.mark.parametrize("kind", ["per key", "per query and key"])
def test_gradients_of_both_forms_agree(kind):
    grads = []
    for need_weights in (True, False):
        q, k, v = (x.requires_grad_() for x in qkv())
        bias = torch.linspace(-2, 0, B * H * T, dtype=q.dtype).view(B, H, T)
        bias = (bias if kind == "per key" else bias[..., None, :] + bias[..., None]).clone()
        bias.requires_grad_()
        out, _ = energy_gated_attention(q, k, v, bias, need_weights=need_weights)
        out.square().sum().backward()
        grads.append([q.grad, k.grad, v.grad, bias.grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_weights_are_causal_and_sum_to_one(seed, t):
    q, k, v = qkv(seed, t=t)
    _, weights = softmax_attention(3 * q, k, v, need_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, t, dtype=q.dtype))
    assert bool((weights.triu(1) == 0).all())


def test_standardisation_against_its_definition():
    energy = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(2))
    e = energy.numpy().astype(np.float64)

    def z(values, over):
        deviation = over.std()
        return (values - over.mean()) / deviation if deviation > 1e-9 else np.zeros_like(values)

    sequence = standardize_energy(energy, "sequence").numpy()
    key = standardize_energy(energy, "key").numpy()
    query = standardize_energy(energy, "query").numpy()
    for index in np.ndindex(2, 3):
        row = e[index]
        np.testing.assert_allclose(sequence[index], z(row, row), atol=1e-5)
        for j in range(1, 9):
            np.testing.assert_allclose(key[index][j], z(row[j], row[: j + 1]), atol=1e-5)
            np.testing.assert_allclose(query[index][j], z(row, row[: j + 1]), atol=1e-5)
    assert bool((standardize_energy(energy, "key")[..., 0] == 0).all())


@pytest.mark.parametrize("over", ["sequence", "key", "query"])
def test_equal_energies_give_zero_and_finite_gradients(over):
    energy = torch.full((1, 1, 6), 3.0, requires_grad=True)
    z = standardize_energy(energy, over)
    assert bool((z == 0).all())
    z.sum().backward()
    assert bool(torch.isfinite(energy.grad).all())


def test_unknown_normalisation():
    with pytest.raises(InputError, match="normalize_over"):
        standardize_energy(torch.ones(3), "window")


def test_gate_is_the_mixture_of_sigmoids():
    energy = torch.randn(B, H, 2, T, generator=torch.Generator().manual_seed(4))
    alpha, tau, mix = torch.tensor([[2.0, 1.0]] * H), torch.full((H, 2), 0.3), torch.ones(H, 2)
    mix[:, 1] = 2.0
    gate = log_energy_gate(energy, alpha, tau, mix, "sequence").exp()
    z = standardize_energy(energy)
    weight = mix.softmax(-1)
    expected = sum(
        weight[None, :, m, None]
        * torch.sigmoid(alpha[None, :, m, None] * (z[:, :, m] - tau[None, :, m, None]))
        for m in range(2)
    )
    torch.testing.assert_close(gate, expected)


@pytest.mark.parametrize("over", ["sequence", "query", "key"])
@pytest.mark.parametrize("filters", [None, (3, 7)])
def test_modules_return_the_same_with_and_without_weights(over, filters):
    torch.manual_seed(0)
    module = EnergyGatedAttention(8, 2, n_scales=2, filters=filters, normalize_over=over).eval()
    x = torch.randn(2, 10, 8)
    plain, weights = module(x, need_weights=True)
    fused, none = module(x)
    assert none is None
    assert weights.shape == (2, 2, 10, 10)
    torch.testing.assert_close(plain, fused, atol=1e-5, rtol=1e-4)


def test_head_size_is_free_of_the_width():
    module = SoftmaxAttention(8, 2, head_size=6)
    assert module(torch.randn(1, 5, 8))[0].shape == (1, 5, 8)
    assert module.qkv.weight.shape == (3 * 2 * 6, 8)


@pytest.mark.parametrize(
    ("attention", "over", "causal"),
    [
        ("softmax", "sequence", True),
        ("ega-1", "sequence", False),
        ("ega-2", "sequence", False),
        ("ega-c", "sequence", False),
        ("ega-1", "query", True),
        ("ega-1", "key", True),
        ("ega-c", "query", True),
        ("ega-c", "key", True),
    ],
)
def test_who_looks_ahead(tiny_model, attention, over, causal):
    model = tiny_model(attention=attention, normalize_over=over)
    tokens = torch.arange(20)[None] % 11
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 5) % 11
    with torch.no_grad():
        difference = (model(tokens)[0] - model(changed)[0])[:, :-1].abs().max()
    if causal:
        assert float(difference) == 0
    else:
        assert float(difference) > 1e-4


def test_a_bias_per_key_is_not_rounded_to_bfloat16():
    q, k, v = qkv(dtype=torch.float32)
    bias = torch.randn(B, H, T, generator=torch.Generator().manual_seed(5)) * 3 + 0.123
    errors = []
    for b in (None, bias):
        exact, _ = softmax_attention(q, k, v, bias=b)
        low, _ = softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=b)
        errors.append(float((low.float() - exact).abs().max()))
    assert errors[1] < 2 * errors[0]


@given(
    st.integers(0, 2**31), st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=3)
)
def test_causal_filters_are_convolutions(seed, t, sizes):
    generator = torch.Generator().manual_seed(seed)
    filters = [torch.nn.Conv1d(3, 4, size, dtype=torch.float64) for size in sizes]
    x = torch.randn(2, t, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    along = x.transpose(1, 2)
    padded = [F.pad(along, (conv.kernel_size[0] - 1, 0)) for conv in filters]
    expected = torch.cat([conv(p) for conv, p in zip(filters, padded, strict=True)], 1)
    found = causal_filters(x, filters)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    wanted = [x, *(p for conv in filters for p in conv.parameters())]
    ours, theirs = (torch.autograd.grad((y * weights).sum(), wanted) for y in (found, expected))
    torch.testing.assert_close(ours, theirs)
