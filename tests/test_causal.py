"""Attention by blocks of queries is attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import GPT, GPTConfig, causal, sd
from attnlib import attention as attention_module


def naive(q, k, v, scale, bias, own):
    """One query after another."""
    out = torch.zeros_like(v)
    for i in range(q.shape[-2]):
        logits = scale * (k[..., : i + 1, :] @ q[..., i, :, None])[..., 0]  # (B, H, i + 1)
        logits = logits + bias[..., i, : i + 1]
        logits[..., i] += own[..., i]
        out[..., i, :] = (logits.softmax(-1)[..., None] * v[..., : i + 1, :]).sum(-2)
    return out


@given(t=st.integers(1, 40), block=st.integers(1, 17), seed=st.integers(0, 99))
def test_blocks_equal_the_loop(t, block, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, t, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 3, t, t, generator=draw, dtype=torch.float64)
    own = torch.randn(2, 3, t, generator=draw, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "BLOCK", block)
        found = causal.attention_by_blocks(
            q, k, v, scale=0.7, bias=lambda a, b: bias[..., a:b, :b], own=own
        )
    torch.testing.assert_close(found, naive(q, k, v, 0.7, bias, own))


def test_dropout_keeps_the_mean_and_drops_that_share():
    torch.manual_seed(0)
    t = 64
    q = k = torch.zeros(200, 1, t, 2)
    found = causal.attention_by_blocks(q, k, torch.ones(200, 1, t, 1), scale=1.0, dropout=0.3)
    # The last row sums 64 equal weights, each kept with 0.7: deviation of sqrt(0.3 / 0.7 / 64).
    last = found[:, 0, -1, 0]
    spread = math.sqrt(0.3 / 0.7 / t)
    assert abs(float(last.mean()) - 1) < 4 * spread / math.sqrt(200)
    assert 0.8 < float(last.std()) / spread < 1.2


@pytest.mark.parametrize(
    ("attention", "over"),
    [("softmax", "sequence"), ("sd", "sequence"), ("ega-c", "sequence"),
     ("ega-1", "query"), ("ega-2", "key")],
)  # fmt: skip
def test_models_compute_the_same_by_blocks(monkeypatch, attention, over):
    """Loss and every gradient, in float32, by blocks of 5 and by the fused kernel."""
    shape = GPTConfig(
        n_layer=2, n_head=2, d_model=16, context=23, vocab_size=11, dropout=0.0,
        attention=attention, normalize_over=over, init_std=0.3,
    )  # fmt: skip
    tokens = torch.randint(11, (3, 24), generator=torch.Generator().manual_seed(0))
    found = []
    for blocks in (False, True):
        for module in (attention_module, sd):
            monkeypatch.setattr(module, "blocks_are_faster", lambda q, b=blocks: b)
        monkeypatch.setattr(causal, "BLOCK", 5)
        model = GPT(shape, seed=2)
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)
