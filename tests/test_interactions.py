"""Interactions: the model's own weights follow from them, and their ranks from full matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnlib import (
    InputError,
    attention_fields,
    hodge,
    interaction_ranks,
    iter_interactions,
    position_shares,
    routing_rank,
    singular_rank,
    split_interaction,
)


def logits_of(model, tokens, **options):
    """All interactions, (layer, head, snapshot, query, key)."""
    layers: dict[int, list] = {}
    for layer, _, query, key in iter_interactions(model, tokens, block=3, **options):
        layers.setdefault(layer, []).append(query @ key.mT)
    return torch.stack([torch.cat(blocks).transpose(0, 1) for blocks in layers.values()])


def causal(logits):
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "bert"])
def test_weights_of_transformers_models_follow(hugging_face, kind):
    model = hugging_face(kind)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    before = model.config._attn_implementation
    logits = logits_of(model, tokens)
    assert model.config._attn_implementation == before
    weights = (logits if kind == "bert" else causal(logits)).softmax(-1)
    fields = attention_fields(model, tokens, heads="all")
    np.testing.assert_allclose(weights, fields, atol=1e-5)
    assert float(fields.std("key").max()) > 0.05


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_is_left_out(hugging_face, kind):
    model = hugging_face(kind)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    logits = logits_of(model, tokens, attention_mask=mask)
    assert not bool(logits[:, :, 1, :5].any())
    assert not bool(logits[:, :, 1, :, :5].any())
    seen = logits[:, :, 1, 5:, 5:]
    weights = (seen if kind == "bert" else causal(seen)).softmax(-1)
    fields = attention_fields(model, tokens, heads="all", attention_mask=mask)
    np.testing.assert_allclose(weights, fields.values[:, :, 1, 5:, 5:], atol=1e-5)


def test_ranks_of_a_padded_text_are_those_of_the_text(hugging_face):
    model = hugging_face("bert")
    tokens = torch.randint(3, 50, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[:, 9:] = 0
    others = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    padded = interaction_ranks(model, tokens, attention_mask=mask, reference=others)
    alone = interaction_ranks(model, tokens[:, :9], reference=others)
    for name in alone:
        np.testing.assert_allclose(padded[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_weights_of_our_models_follow(tiny_model):
    model = tiny_model()
    tokens = torch.randint(11, (5, 14), generator=torch.Generator().manual_seed(1))
    weights = causal(logits_of(model, tokens)).softmax(-1)
    np.testing.assert_allclose(weights, attention_fields(model, tokens, heads="all"), atol=1e-6)


def test_ranks_are_those_of_the_full_matrices(tiny_model):
    model = tiny_model()
    tokens = torch.randint(11, (5, 14), generator=torch.Generator().manual_seed(1))
    found = interaction_ranks(model, tokens, block=2)
    full = logits_of(model, tokens).double()
    routing, filtering = split_interaction(full)
    potential, cyclic = hodge(routing)
    gradient = potential[..., :, None] - potential[..., None, :]
    energy = {
        k: x.square().sum((-1, -2)).numpy()
        for k, x in {"r": routing, "f": filtering, "g": gradient}.items()
    }
    np.testing.assert_allclose(found["routing_energy"], energy["r"], rtol=1e-5)
    np.testing.assert_allclose(found["filtering_energy"], energy["f"], rtol=1e-5)
    share = energy["r"] / (energy["r"] + energy["f"])
    np.testing.assert_allclose(found["routing_share"], share, rtol=1e-5)
    np.testing.assert_allclose(found["potential_share"], energy["g"] / energy["r"], rtol=1e-4)
    for method in found["rank_by"].values:
        one = found.sel(rank_by=method)
        expected = routing_rank(routing, method)
        np.testing.assert_allclose(one["routing_rank"], expected, rtol=1e-4)
        np.testing.assert_allclose(one["cyclic_rank"], routing_rank(cyclic, method), rtol=1e-4)


def test_input_that_has_no_interaction(tiny_model):
    tokens = torch.randint(11, (4, 14), generator=torch.Generator().manual_seed(1))
    with pytest.raises(InputError, match="Linear is neither"):
        list(iter_interactions(torch.nn.Linear(2, 2), tokens))
    with pytest.raises(InputError, match="longer than the model's context"):
        list(iter_interactions(tiny_model(), torch.zeros(2, 30, dtype=torch.int64)))
    with pytest.raises(InputError, match="different numbers of heads"):
        interaction_ranks(tiny_model(n_head=(2, 3), head_size=5), tokens)
    broken = tiny_model()
    with torch.no_grad():
        broken.blocks[1].attention.qkv.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="layer 2, snapshot 0"):
        list(iter_interactions(broken, tokens))


@pytest.mark.parametrize("attention", ["softmax", "sd"])
def test_ranks_without_what_the_softmax_does_not_see(tiny_model, attention):
    model = tiny_model(attention=attention)
    tokens = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    found = interaction_ranks(model, tokens)["gauged_rank"].sel(rank_by="participation")
    routing = split_interaction(logits_of(model, tokens).double())[0]
    gauged = routing - routing.mean(-1, keepdim=True)
    wanted = singular_rank(torch.linalg.svdvals(gauged))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_the_filtering_of_s_d_attention_is_its_damping(tiny_model):
    model = tiny_model(attention="sd")
    tokens = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    found = interaction_ranks(model, tokens)
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(12))
    with torch.no_grad():
        damping = model.blocks[0].attention.token_damping(model.blocks[0].norm_1(x))
    energy = damping.square().sum(-1).T  # (H, n)
    np.testing.assert_allclose(found["filtering_energy"].sel(layer=1), energy, rtol=1e-5)
    skew = logits_of(model, tokens).double().square().sum((-2, -1))
    np.testing.assert_allclose(found["routing_energy"], skew, rtol=1e-4)


@pytest.mark.parametrize("attention", ["softmax", "sd"])
def test_what_the_mean_of_other_texts_makes_is_a_potential(tiny_model, attention):
    model = tiny_model(attention=attention)
    tokens, others = torch.randint(0, 11, (2, 6, 12), generator=torch.Generator().manual_seed(0))
    found = interaction_ranks(model, tokens, reference=others)
    assert (found["mean_share"] <= found["potential_share"] + 1e-9).all()
    # Of one text by itself the mean is its own, and all of the potential.
    alone = interaction_ranks(model, tokens[:1], reference=tokens[:1])
    np.testing.assert_allclose(alone["mean_share"], alone["potential_share"], atol=1e-9)
    # Against the full matrices of the first layer.
    query, key = next(iter(iter_interactions(model, others)))[2:]
    mean_query, mean_key = (x.double().mean((0, 2)).unsqueeze(-2) for x in (query, key))
    query, key = (x.double() for x in next(iter(iter_interactions(model, tokens)))[2:])
    whole = split_interaction(query @ key.mT)[0]
    if attention == "softmax":
        rest = split_interaction((query - mean_query) @ (key - mean_key).mT)[0]
        share = 1 - rest.square().sum((-2, -1)) / whole.square().sum((-2, -1))
        np.testing.assert_allclose(found["mean_share"].sel(layer=1), share.T, atol=1e-6)


def test_positions_alone_and_content_alone_are_told_apart(tiny_model):
    """Where the answer is known: embeddings of positions alone, or of tokens alone."""
    tokens = torch.randint(0, 11, (64, 12), generator=torch.Generator().manual_seed(0))
    for kept, other in (("position", "token"), ("token", "position")):
        model = tiny_model(n_layer=1)
        with torch.no_grad():
            getattr(model, f"{other}_embedding").weight.zero_()
        found = position_shares(model, tokens)
        if kept == "position":
            np.testing.assert_allclose(found["position"], 1, atol=1e-5)
            np.testing.assert_allclose(found["content"], 0, atol=1e-5)
        else:
            # Without positions a mean query is the same everywhere: it routes nothing by itself.
            assert (np.abs(found["position"].sel(part="routing")) < 0.05).all()
            assert (found["content"].sel(part="routing") > 0.3).all()
    total = found["position"] + found["content"] + found["mixed"]
    np.testing.assert_allclose(total, 1)


def test_shares_of_positions_are_free_of_the_bias_of_a_mean(tiny_model):
    """Tokens without order have no part of positions, however few the texts."""
    model = tiny_model(n_layer=1)
    with torch.no_grad():
        model.position_embedding.weight.zero_()
        model.token_embedding.weight.sub_(model.token_embedding.weight.mean(0))
    many = []
    for seed in range(40):
        tokens = torch.randint(0, 11, (4, 12), generator=torch.Generator().manual_seed(seed))
        many.append(position_shares(model, tokens).mean("head").isel(layer=0))
    position = np.array([one["position"].values for one in many])  # (draw, part)
    error = position.std(0, ddof=1) / np.sqrt(len(many))
    assert (np.abs(position.mean(0)) < 4 * error + 0.02).all()


def test_position_shares_refuse_too_few_texts(tiny_model):
    with pytest.raises(InputError, match="at least 4"):
        position_shares(tiny_model(), torch.zeros(3, 12, dtype=torch.long))
    with pytest.raises(InputError, match="different numbers of heads"):
        position_shares(
            tiny_model(n_head=(1, 2), head_size=8), torch.zeros(4, 12, dtype=torch.long)
        )
