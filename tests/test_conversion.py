"""Linearising, lower ranks, healing: against masked forms, an SVD, and models as they were."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    TrainConfig,
    heal,
    iter_fields,
    iter_interactions,
    linearize,
    lower_rank,
    reference_means,
    truncate_routing,
    window_losses,
)
from attnlib.conversion import nearest_map


def ours(kind="softmax", **more):
    shape = {"n_layer": 3, "n_head": 2, "d_model": 12, "context": 10, "vocab_size": 11}
    config = GPTConfig(**shape, attention=kind, init_std=0.4, dropout=0.0, **more)
    return GPT(config, seed=5).eval()


def tokens_of(n=6, t=11, vocab=11, seed=0):
    return torch.randint(vocab, (n, t), generator=torch.Generator().manual_seed(seed))


def hugging_face(kind, layers=2):
    import transformers as tr

    torch.manual_seed(0)
    shape = {"vocab_size": 11, "num_hidden_layers": layers, "num_attention_heads": 4}
    rotary = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    config = {
        "llama": lambda: tr.LlamaConfig(**shape, **rotary, num_key_value_heads=2),
        "neox": lambda: tr.GPTNeoXConfig(**shape, **rotary),
        "mistral": lambda: tr.MistralConfig(
            **shape, **rotary, num_key_value_heads=2, sliding_window=4
        ),
        "gpt2": lambda: tr.GPT2Config(
            vocab_size=11, n_layer=layers, n_head=4, n_embd=16, n_positions=16
        ),
        "bert": lambda: tr.BertConfig(**shape, **rotary),
    }[kind]()
    config.initializer_range = 0.3
    make = tr.AutoModel if kind == "bert" else tr.AutoModelForCausalLM
    return make.from_config(config, attn_implementation="eager").eval()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------ linear


@pytest.mark.parametrize("kind", ["softmax", "sd"])
def test_linearized_layers_keep_their_weights_and_the_others_their_attention(kind):
    model, tokens = ours(kind), tokens_of(t=10)
    before = weights_of(model)
    new = linearize(model, [1, 3])
    assert new.config.per_layer("attention")[1] == kind
    assert torch.equal(weights_of(new), before)
    seen = {}
    new(tokens, on_attention=lambda layer, w: seen.update({layer: w}))
    attention = model.blocks[0].attention
    x = model.blocks[0].norm_1(model.token_embedding(tokens) + model.position_embedding.weight)
    q, k, _ = attention.heads(x)
    if kind == "softmax":
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    else:
        query, key = torch.cat([q, -k], -1), torch.cat([k, q], -1)
        weights = ((F.elu(query) + 1) @ (F.elu(key) + 1).mT).tril()
        own = (-attention.token_damping(x)).exp()
        weights.diagonal(dim1=-2, dim2=-1).mul_(own)
    torch.testing.assert_close(seen[0], weights / weights.sum(-1, keepdim=True))
    assert torch.equal(weights_of(model), before)  # the caller's model is as it was
    assert model.config.attention == kind


@pytest.mark.parametrize("kind", ["llama", "neox", "gpt2"])
def test_linearized_transformers_models_equal_the_masked_form(kind):
    model, tokens = hugging_face(kind), tokens_of(4, 12)
    before, plain = weights_of(model), model(tokens)[0]
    new = linearize(model, [2])
    assert torch.equal(model(tokens)[0], plain)
    found = new(tokens)[0]
    assert (found - plain).abs().max() > 1e-3
    # The same through the weights that a capture reads: A v, with A the masked form's.
    fields = {layer: w for layer, _, w in iter_fields(new, tokens, heads="all")}
    query = key = None
    for layer, _, q, k in iter_interactions(model, tokens):
        if layer == 2:
            query, key = q * 4**0.5, k  # layer 1 is softmax in both, so layer 2 reads the same
    weights = ((F.elu(query) + 1) @ (F.elu(key) + 1).mT).tril()
    torch.testing.assert_close(
        fields[2], weights / weights.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4
    )
    # What a later token is does not matter, and one token at a time gives the same.
    other = tokens.clone()
    other[:, 8:] = 3
    torch.testing.assert_close(new(other)[0][:, :8], found[:, :8])
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = new.generate(
        tokens[:, :5], **asked, output_logits=True, return_dict_in_generate=True, use_cache=True
    )
    whole = new(made.sequences[:, :-1])[0]
    torch.testing.assert_close(torch.stack(made.logits, 1), whole[:, 4:], atol=1e-5, rtol=1e-4)
    assert torch.equal(weights_of(model), before)


def test_padding_gets_no_weight_in_a_linearized_model():
    model, tokens = linearize(hugging_face("llama"), [1, 2]), tokens_of(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    found = model(tokens, attention_mask=mask)[0]
    torch.testing.assert_close(found[0, :6], model(tokens[:1, :6])[0][0])
    torch.testing.assert_close(found[1], model(tokens[1:])[0][0])
    left = torch.ones_like(tokens)
    left[0, :3] = 0
    positions = (left.cumsum(-1) - 1).clamp(min=0)
    found = model(tokens, attention_mask=left, position_ids=positions)[0]
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0, 3:], model(tokens[:1, 3:])[0][0])


def test_what_cannot_be_linearized_is_refused():
    model = ours()
    for layers in ([], [0], [4], [1, 1], [True]):
        with pytest.raises(InputError, match="layers are among 1 to 3"):
            linearize(model, layers)
    with pytest.raises(InputError, match="'ega-1'"):
        linearize(ours("ega-1"), [1])
    once = linearize(model, [1])
    with pytest.raises(InputError, match="'linear'"):
        linearize(once, [1])
    with pytest.raises(InputError, match="it has weights, but no logits"):
        list(iter_interactions(once, tokens_of(t=10)))
    with pytest.raises(InputError, match="no logits"), truncate_routing(once, 2, layers=[1]):
        once(tokens_of(t=10))
    with pytest.raises(InputError, match="not causal"):
        linearize(hugging_face("bert"), [1])
    windowed = hugging_face("mistral")
    with pytest.raises(InputError, match="sliding window"):
        linearize(windowed, [1])
    tokens = tokens_of(4, 12)  # a lower rank keeps the window
    torch.testing.assert_close(
        lower_rank(windowed, 4, reference=tokens)(tokens)[0],
        windowed(tokens)[0],
        atol=1e-4,
        rtol=1e-3,
    )
    twice = linearize(hugging_face("llama"), [1])
    with pytest.raises(InputError, match="layer 1 is changed already"):
        linearize(twice, [1])
    with pytest.raises(InputError, match="no logits"):
        list(iter_interactions(twice, tokens_of()))


# ------------------------------------------------------------------ rank


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1, 2]))
def test_the_nearest_map_is_the_truncated_svd(seed, rank, group):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(4, 9, 5, generator=generator, dtype=torch.float64)
    k = torch.randn(4 // group, 9, 5, generator=generator, dtype=torch.float64)
    k = k.repeat_interleave(group, 0)
    a = torch.cat([q, k], -1)
    maps = nearest_map(a.mT @ a, rank, group)
    found = q @ maps @ k.mT
    # Heads that share a key: the stack of their interactions, cut as one matrix.
    stacked = (q @ k.mT).unflatten(0, (-1, group)).flatten(1, 2)  # (H / group, group T, T)
    u, s, v = torch.linalg.svd(stacked, full_matrices=False)
    expected = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
    torch.testing.assert_close(found.unflatten(0, (-1, group)).flatten(1, 2), expected)
    assert int(torch.linalg.matrix_rank(maps[0])) == rank


@pytest.mark.parametrize(("kind", "rank", "whole"), [("softmax", 2, 6), ("sd", 4, 12)])
def test_our_models_keep_the_cut_in_their_weights(kind, rank, whole):
    model, tokens = ours(kind), tokens_of(t=10)
    before = weights_of(model)
    torch.testing.assert_close(
        lower_rank(model, whole, reference=tokens)(tokens)[0],
        model(tokens)[0],
        atol=1e-4,
        rtol=1e-3,
    )
    new = lower_rank(model, rank, [1], reference=tokens)
    for (layer, _, q, k), (_, _, q_, k_) in zip(
        iter_interactions(model, tokens), iter_interactions(new, tokens), strict=True
    ):
        if layer > 1:
            continue
        stacked, cut = (x.transpose(0, 1).double() for x in (q @ k.mT, q_ @ k_.mT))
        assert int(torch.linalg.matrix_rank(cut, rtol=1e-5).max()) == rank
        assert (cut - stacked).norm() < stacked.norm()
    if kind == "sd":
        with truncate_routing(model, rank, layers=[1], reference=tokens):
            expected = model(tokens)[0]
        torch.testing.assert_close(new(tokens)[0], expected, atol=1e-4, rtol=1e-3)
    assert torch.equal(weights_of(model), before)
    for wrong in (0, whole + 1, 2.0, True, *((3,) if kind == "sd" else ())):
        with pytest.raises(InputError, match="are cut to a rank from"):
            lower_rank(model, wrong, reference=tokens)
    with pytest.raises(InputError, match="another model"):
        lower_rank(model, rank, reference={})
    other = reference_means(ours("sd" if kind == "softmax" else "softmax"), tokens)
    with pytest.raises(InputError, match="another model: in layer 1"):
        lower_rank(model, rank, reference=other)
    with (
        pytest.raises(InputError, match="another model: in layer 2"),
        truncate_routing(model, 2, layers=[2], reference=other),
    ):
        pass
    for nothing in (None, [[1, 2]]):
        with pytest.raises(InputError, match="a reference is windows"):
            lower_rank(model, rank, reference=nothing)
    assert lower_rank(model, np.int64(rank), np.array([1, 2]), reference=tokens) is not model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_models_compute_with_fewer_numbers_a_key(kind):
    model, tokens = hugging_face(kind), tokens_of(4, 12)
    torch.testing.assert_close(
        lower_rank(model, 4, reference=tokens)(tokens)[0], model(tokens)[0], atol=1e-4, rtol=1e-3
    )
    new = lower_rank(model, 1, [1], reference=tokens)
    for layer, _, q, k in iter_interactions(new, tokens):
        rank = torch.linalg.matrix_rank(q.double() @ k.double().mT, rtol=1e-5)
        assert int(rank.max()) == (1 if layer == 1 else 4)
    # What the capture reads is what the model computes.
    weights = next(w for layer, _, w in iter_fields(new, tokens, heads="all") if layer == 1)
    for layer, _, q, k in iter_interactions(new, tokens):
        if layer == 1:
            logits = (q @ k.mT).masked_fill(~torch.ones(12, 12).tril().bool(), float("-inf"))
            torch.testing.assert_close(weights, logits.softmax(-1), atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------ healing


@pytest.mark.parametrize("make", [ours, lambda: hugging_face("llama", 3)])
def test_healing_trains_what_is_declared_and_nothing_else(make):
    model = make()
    for p in model.parameters():
        p.requires_grad_(True)
    tokens = tokens_of(3, 9)
    before = copy.deepcopy(model.state_dict())
    new = linearize(model, [2])
    config = TrainConfig(steps=40, batch_size=3, learning_rate=0.02, warmup=2)
    first = window_losses(new, tokens).mean()
    record = heal(new, tokens, config, layers=[2])
    assert window_losses(new, tokens).mean() < first - 0.05
    assert len(record["loss"]) == 40
    changed = {k for k, v in new.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all("layers.1.self_attn" in k or "blocks.1.attention" in k for k in changed)
    assert record["n_trained"] == sum(new.state_dict()[k].numel() for k in changed)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in new.parameters())
    again = linearize(model, [2])
    assert heal(again, tokens, config, layers=[2])["loss"] == record["loss"]


def test_healing_that_fails_leaves_the_weights():
    model = ours()
    before = weights_of(model)
    wild = TrainConfig(steps=30, batch_size=2, learning_rate=1e30, warmup=0, clip=1e30)
    with pytest.raises(InputError, match="not finite at step"):
        heal(model, tokens_of(), wild, what="all")
    assert torch.equal(weights_of(model), before)
    with pytest.raises(InputError, match="no parameter matches 'nothing'"):
        heal(model, tokens_of(), what=["blocks.0.attention.*", "nothing"])
    with pytest.raises(InputError, match="longer than the model's context"):
        heal(model, tokens_of(t=14))
    with pytest.raises(InputError, match="another tokenizer"):
        heal(model, tokens_of(vocab=40))
    with pytest.raises(InputError, match="layers say whose attention"):
        heal(model, tokens_of(), what="all", layers=[1])
    with pytest.raises(InputError, match="does not predict tokens"):
        heal(hugging_face("bert"), tokens_of(4, 8))
