"""Cuts of routing and filtering, against the same cut of full matrices, layer by layer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    InputError,
    attention_fields,
    hodge,
    iter_interactions,
    keep_routing,
    reference_means,
    split_interaction,
    truncate_filtering,
    truncate_routing,
    window_losses,
)
from attnlib.surgery import leading_map


def tokens_of(n=4, t=12, vocab=11, seed=0):
    return torch.randint(0, vocab, (n, t), generator=torch.Generator().manual_seed(seed))


def logits_of(model, tokens):
    """First layer's interactions before damping and mask, ``(n, H, T, T)``."""
    _, _, query, key = next(iter(iter_interactions(model, tokens)))
    return (query @ key.mT).double()


def weights_of(model, tokens):
    """First layer's attention."""
    fields = attention_fields(model, tokens, heads="all").values[0]  # (H, n, T, T)
    return torch.from_numpy(fields).transpose(0, 1).double()


def softmax(logits):
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -math.inf).softmax(-1)


def best(matrix, rank):
    """Best approximation by the singular value decomposition of each full matrix."""
    u, s, v = torch.linalg.svd(matrix)
    return u[..., :rank] * s[..., None, :rank] @ v[..., :rank, :]


def damping_of(model, tokens):
    attention = model.blocks[0].attention
    positions = torch.arange(tokens.shape[1])
    x = model.token_embedding(tokens) + model.position_embedding(positions)
    return torch.diag_embed(attention.token_damping(model.blocks[0].norm_1(x))).double()


@pytest.mark.parametrize("rank", [0, 2, 4, 8])
def test_routing_is_cut_as_its_full_matrices_are(tiny_model, rank):
    model, tokens = tiny_model(), tokens_of()
    routing, filtering = split_interaction(logits_of(model, tokens))
    with truncate_routing(model, rank):
        found = weights_of(model, tokens)
    torch.testing.assert_close(found, softmax(best(routing, rank) + filtering), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_filtering_is_cut_as_its_full_matrices_are(tiny_model, rank):
    model, tokens = tiny_model(), tokens_of()
    routing, filtering = split_interaction(logits_of(model, tokens))
    with truncate_filtering(model, rank):
        found = weights_of(model, tokens)
    torch.testing.assert_close(found, softmax(routing + best(filtering, rank)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [0, 2, 6, 16])
def test_s_d_routing_is_cut_and_damping_stays(tiny_model, rank):
    model, tokens = tiny_model(attention="sd"), tokens_of()
    routing = logits_of(model, tokens)
    with truncate_routing(model, rank), torch.no_grad():
        found = weights_of(model, tokens)
        damping = damping_of(model, tokens)
    wanted = softmax(best(routing, rank) - damping)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_one_scalar_a_head_is_the_mean_self_logit(tiny_model):
    model, tokens = tiny_model(), tokens_of()
    routing, filtering = split_interaction(logits_of(model, tokens))
    own = filtering.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    with truncate_filtering(model, "scalar"):
        found = weights_of(model, tokens)
    wanted = softmax(routing + own * torch.eye(tokens.shape[1]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    skew = tiny_model(attention="sd")
    with torch.no_grad():
        damping = damping_of(skew, tokens).diagonal(dim1=-2, dim2=-1).mean((0, 2))
    with truncate_filtering(skew, "scalar", reference=tokens):
        found = weights_of(skew, tokens)
    wanted = logits_of(skew, tokens) - torch.diag_embed(damping[None, :, None].expand(4, -1, 12))
    torch.testing.assert_close(found, softmax(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["softmax", "sd"])
@pytest.mark.parametrize("part", ["potential", "cyclic"])
def test_parts_of_routing_are_those_of_hodge(tiny_model, attention, part):
    model, tokens = tiny_model(attention=attention), tokens_of()
    routing, filtering = split_interaction(logits_of(model, tokens))
    if attention == "sd":
        with torch.no_grad():
            filtering = -damping_of(model, tokens)
    potential, cyclic = hodge(routing)
    gradient = potential.unsqueeze(-1) - potential.unsqueeze(-2)
    with keep_routing(model, part):
        found = weights_of(model, tokens)
    wanted = softmax((gradient if part == "potential" else cyclic) + filtering)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@given(st.integers(0, 2**31), st.sampled_from([2, 4, 6]), st.booleans())
def test_a_fixed_map_is_the_best_of_its_rank_over_all_texts_together(seed, rank, skew):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(30, 6, dtype=torch.float64, generator=generator)
    q, k = a.chunk(2, -1)
    sign = -1 if skew else 1
    whole = q @ k.mT + sign * k @ q.mT
    found = a @ leading_map(a.mT @ a, sign, rank) @ a.mT
    torch.testing.assert_close(found, best(whole, rank), atol=1e-9, rtol=1e-7)
    assert torch.linalg.matrix_rank(found, rtol=1e-9) <= rank


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox"])
def test_transformers_models_are_whole_at_full_rank_and_cut_below(hugging_face, kind):
    model = hugging_face(kind)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))

    def out():
        with torch.no_grad():
            return model(tokens)[0]

    whole = out()
    full = 2 * next(iter(iter_interactions(model, tokens)))[2].shape[-1]
    with truncate_routing(model, full), truncate_filtering(model, full):
        torch.testing.assert_close(out(), whole, atol=1e-5, rtol=1e-5)
    routing, filtering = split_interaction(logits_of(model, tokens))
    with truncate_routing(model, 2, layers=[1]):
        found = weights_of(model, tokens)
        assert float((out() - whole).abs().max()) > 1e-4
    torch.testing.assert_close(found, softmax(best(routing, 2) + filtering), atol=1e-5, rtol=0)
    assert torch.equal(out(), whole)


def test_an_encoder_is_cut_with_its_padding(hugging_face):
    model = hugging_face("bert")
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0

    def out():
        with torch.no_grad():
            return model(tokens, attention_mask=mask)[0][mask.bool()]

    before = out()
    full = 2 * next(iter(iter_interactions(model, tokens)))[2].shape[-1]
    with truncate_routing(model, full):
        torch.testing.assert_close(out(), before, atol=1e-5, rtol=0)
    with keep_routing(model, "cyclic"):
        assert float((out() - before).abs().max()) > 1e-4


@pytest.mark.parametrize("attention", ["softmax", "sd"])
def test_everything_is_as_before_afterwards(tiny_model, attention):
    model, tokens = tiny_model(attention=attention), tokens_of(t=13)
    before = window_losses(model, tokens)
    with truncate_routing(model, 2, layers=[2]):
        assert not torch.equal(window_losses(model, tokens), before)
    with pytest.raises(InputError, match="vocabulary"), truncate_routing(model, 2):
        window_losses(model, tokens + 11)
    with truncate_routing(model, 0), truncate_filtering(model, "scalar", layers=[1]):
        both = window_losses(model, tokens)
    with truncate_filtering(model, "scalar", layers=[1]), truncate_routing(model, 0):
        torch.testing.assert_close(window_losses(model, tokens), both)
    assert torch.equal(window_losses(model, tokens), before)
    assert not any("_attnlib" in k for b in model.blocks for k in b.attention.__dict__)


def test_a_fixed_cut_does_not_look_ahead_and_an_own_one_does(tiny_model):
    model, tokens = tiny_model(), tokens_of(n=3, t=16)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11

    def moved(**options):
        with torch.no_grad(), truncate_routing(model, 2, **options):
            return float((model(tokens)[0] - model(changed)[0])[:, :-1].abs().max())

    assert moved(reference=tokens_of(n=6, t=16, seed=1)) == 0
    assert moved() > 1e-4


def test_means_read_once_serve_several_cuts(tiny_model):
    model, tokens, others = tiny_model(), tokens_of(t=13), tokens_of(n=6, seed=2)
    means = reference_means(model, others)
    for cut in (
        lambda r: truncate_routing(model, 4, reference=r),
        lambda r: keep_routing(model, "cyclic", reference=r),
        lambda r: truncate_filtering(model, 3, reference=r),
    ):
        with cut(means):
            once = window_losses(model, tokens)
        with cut(others):
            torch.testing.assert_close(window_losses(model, tokens), once, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda m: truncate_routing(m, 3), "even rank"),
        (lambda m: truncate_routing(m, -2), "even rank"),
        (lambda m: truncate_routing(m, 2.0), "even rank"),
        (lambda m: truncate_routing(m, 2, layers=[3]), "layers are among 1 to 2"),
        (lambda m: truncate_routing(m, 2, layers=[1, 1]), "each once"),
        (lambda m: truncate_routing(m, 2, layers=[]), "at least one"),
        (lambda m: keep_routing(m, "gradient"), "potential"),
        (lambda m: truncate_filtering(m, "one"), "scalar"),
        (lambda m: truncate_filtering(m, True), "scalar"),
        (lambda m: truncate_routing(m, 2, reference=tokens_of(t=99)), "longer than the model"),
        (lambda m: truncate_routing(m, 2, reference={}), "another model"),
        (lambda m: truncate_routing(torch.nn.Linear(2, 2), 2), "Linear"),
    ],
)
def test_what_cannot_be_cut_is_refused_and_nothing_is_changed(tiny_model, cut, message):
    model, tokens = tiny_model(), tokens_of(t=13)
    before = window_losses(model, tokens)
    with pytest.raises(InputError, match=message), cut(model):
        pass
    assert torch.equal(window_losses(model, tokens), before)


def test_ranks_beyond_the_head_second_cuts_and_other_attention_are_refused(tiny_model):
    model, tokens = tiny_model(), tokens_of(t=13)
    for cut in (truncate_routing, truncate_filtering):
        with pytest.raises(InputError, match="at most 16 here, not 18"), cut(model, 18):
            window_losses(model, tokens)
    with truncate_routing(model, 2):
        with pytest.raises(InputError, match="cut already"), keep_routing(model, "cyclic"):
            pass
        window_losses(model, tokens)  # the outer cut still stands
    skew = tiny_model(attention="sd")
    with pytest.raises(InputError, match="diagonal"), truncate_filtering(skew, 2):
        window_losses(skew, tokens)
    gated = tiny_model(attention="ega-1")
    with pytest.raises(InputError, match="EnergyGatedAttention"), truncate_routing(gated, 2):
        pass
    window_losses(gated, tokens)
