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
    routing_rank,
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
