"""Muon on the blocks' matrices: each matrix of a fused weight by itself, the rest by AdamW."""

import copy
from dataclasses import replace

import pytest
import torch

from attnlib import GPT, GPTConfig, InputError, TrainConfig
from attnlib import optimizers as module
from attnlib.optimizers import Optimizers

SHAPE = GPTConfig(n_layer=2, n_head=2, d_model=16, context=16, vocab_size=11, dropout=0.0)
MUON = TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.1, device="cpu")


def with_gradients(model, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    return model


def orthogonal_factor(update):
    """Newton and Schulz' five steps, as published, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.double()
    x = x / x.norm()
    if x.shape[0] > x.shape[1]:
        return orthogonal_factor(update.mT).mT
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_step(weight, gradient, config):
    """The first step of Muon on one matrix, whose running mean is a multiple of the gradient."""
    step = 0.2 * max(weight.shape) ** 0.5 * orthogonal_factor(gradient)
    shrunk = weight.double() * (1 - config.learning_rate * config.weight_decay)
    return shrunk - config.learning_rate * step


def test_the_update_of_each_third_of_a_fused_weight_is_that_of_a_separate_matrix():
    model = with_gradients(GPT(SHAPE, seed=1))
    before, gradients = (
        {n: f(p).clone() for n, p in model.named_parameters()}
        for f in (lambda p: p.detach(), lambda p: p.grad)
    )
    Optimizers(model, MUON).step(MUON.learning_rate)
    for name, after in model.named_parameters():
        if name.endswith("qkv.weight"):
            parts = [slice(0, 16), slice(16, 32), slice(32, 48)]
        elif name.endswith(("proj.weight", "mlp.0.weight", "mlp.2.weight")):
            parts = [slice(None)]
        else:
            continue
        for rows in parts:
            wanted = muon_step(before[name][rows], gradients[name][rows], MUON)
            # torch finds the factor in bfloat16 where that is fast: 8 bits.
            near = 2**-7 * MUON.learning_rate if module.bfloat16_is_fast(after.device) else 1e-6
            torch.testing.assert_close(after.detach()[rows].double(), wanted, atol=near, rtol=0)
        if len(parts) == 3:  # as one matrix the update is another
            whole = muon_step(before[name], gradients[name], MUON)
            assert float((after.detach() - whole).abs().max()) > 1e-3


@pytest.mark.parametrize("attention", ["softmax", "ega-c", "sd"])
def test_the_rest_steps_by_adamw(attention):
    """Embeddings, gains, biases, gates and dampings move as in AdamW alone."""
    config = replace(MUON, optimizer="muon-vo")
    model = with_gradients(GPT(replace(SHAPE, attention=attention), seed=1))
    twin = with_gradients(copy.deepcopy(model))
    Optimizers(model, config).step(0.01)
    Optimizers(twin, replace(config, optimizer="adamw")).step(0.01)
    differ = set()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not torch.equal(one, other):
            differ.add(name.split(".", 2)[-1])
        if name.endswith("qkv.weight"):  # queries and keys are AdamW's, values Muon's
            assert torch.equal(one[:32], other[:32])
            assert not torch.equal(one[32:], other[32:])
    assert differ == {
        "attention.qkv.weight",
        "attention.proj.weight",
        "mlp.0.weight",
        "mlp.2.weight",
    }


def test_the_same_step_in_float32_and_in_bfloat16(monkeypatch):
    """The factor is found in either; bfloat16 holds 8 bits of it."""
    found = []
    for fast in (True, False):
        monkeypatch.setattr(module, "bfloat16_is_fast", lambda device, fast=fast: fast)
        model = with_gradients(GPT(SHAPE, seed=1))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        Optimizers(model, MUON).step(0.01)
        found.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    for name, update in found[0].items():
        gap = float((update - found[1][name]).norm() / found[1][name].norm())
        assert gap < 0.03, name
        by_muon = name.endswith(("qkv.weight", "proj.weight", "mlp.0.weight", "mlp.2.weight"))
        assert (gap > 0) == by_muon, name


def test_what_muon_needs(monkeypatch):
    with pytest.raises(InputError, match="not those of Linear: take optimizer='adamw'"):
        Optimizers(torch.nn.Linear(3, 3), MUON)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"needs torch 2\.9 or newer"):
        Optimizers(GPT(SHAPE), MUON)
    with pytest.raises(InputError, match="optimizer is one of"):
        replace(MUON, optimizer="sgd")
