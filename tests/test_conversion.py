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
    with pytest.raises(InputError, match="layer 1 is of the kind 'linear'"):
        lower_rank(once, 2, [1], reference=tokens_of(t=10))
    with pytest.raises(InputError, match=r"layers \[1\] have no logits.*then linearize"):
        lower_rank(once, 2, [2], reference=tokens_of(t=10))
    assert lower_rank(once, 2, [2], reference=reference_means(model, tokens_of(t=10)))
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
    with pytest.raises(InputError, match="layers \\[1\\] have no logits"):
        lower_rank(twice, 2, [2], reference=tokens_of())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_linearized_model_keeps_to_masks_of_every_kind(implementation):
    """Two texts in one window: each token of the second sees the second alone."""
    model, tokens = hugging_face("llama"), tokens_of(2, 10)
    model.set_attn_implementation(implementation)
    new = linearize(model, [1, 2])
    both = torch.ones(10, 10).tril().bool()
    both[6:, :6] = False
    mask = both.expand(2, 1, 10, 10)
    if implementation == "eager":
        mask = torch.zeros(2, 1, 10, 10).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = torch.cat([torch.arange(6), torch.arange(4)]).expand(2, -1)
    found = new(tokens, attention_mask=mask, position_ids=positions)[0]
    for part in (slice(0, 6), slice(6, 10)):
        torch.testing.assert_close(found[:, part], new(tokens[:, part])[0], atol=1e-5, rtol=1e-4)


def test_a_cache_with_room_to_come_is_not_looked_into():
    from transformers import StaticCache

    model, tokens = linearize(hugging_face("llama"), [1, 2]), tokens_of(1, 9)
    whole = model(tokens)[0]
    cache = StaticCache(config=model.config, max_cache_len=16)
    # By place: the cache's name is another from one version of transformers to the next.
    first = model(tokens[:, :5], None, torch.arange(5)[None], cache, use_cache=True)[0]
    torch.testing.assert_close(first, whole[:, :5], atol=1e-5, rtol=1e-4)
    for t in range(5, 9):
        at = torch.tensor([[t]])
        more = model(tokens[:, t : t + 1], None, at, cache, use_cache=True)
        torch.testing.assert_close(more[0], whole[:, t : t + 1], atol=1e-5, rtol=1e-4)


def test_sinks_and_soft_caps_stay_where_nothing_changes_and_are_refused_where_it_does():
    import transformers as tr

    shape = {
        "vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16,
        "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 16, "initializer_range": 0.3,
    }  # fmt: skip
    capped = tr.Gemma2Config(**shape, attn_logit_softcapping=0.5, sliding_window=64)
    sinks = tr.GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1, sliding_window=64)
    tokens = tokens_of(4, 12)
    for config, words in ((capped, "softcap"), (sinks, "sinks")):
        torch.manual_seed(0)
        config.layer_types = ["full_attention", "full_attention"]
        model = tr.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with pytest.raises(InputError, match=words):
            linearize(model, [1])
        if words == "sinks":
            for layer in model.model.layers:  # they would be zeros, which do count in a softmax
                torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
            kept = lower_rank(model, 4, [1], reference=tokens)
            torch.testing.assert_close(kept(tokens)[0], model(tokens)[0], atol=1e-4, rtol=1e-3)
            with pytest.raises(InputError, match="sinks"), truncate_routing(model, 2):
                model(tokens)


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
    for nothing in (None, 3, [], [1]):
        with pytest.raises(InputError, match=r"what is .attention.|matches an empty list"):
            heal(model, tokens_of(), what=nothing)
    with pytest.raises(InputError, match="config is a TrainConfig"):
        heal(model, tokens_of(), {"steps": 3})
    with pytest.raises(InputError, match="not causal"):
        heal(hugging_face("bert"), tokens_of(4, 8))
    with pytest.raises(InputError, match="float16"):
        heal(ours().half(), tokens_of())


def test_healing_leaves_the_state_of_the_caller():
    """Gradients, the mode, and whether gradients are needed: after success and after failure."""
    model = ours().train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    wild = TrainConfig(steps=9, batch_size=2, learning_rate=1e30, warmup=0, clip=1e30)
    with torch.no_grad(), pytest.raises(InputError, match="not finite"):
        heal(model, tokens_of(), wild)
    assert model.training
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    with torch.no_grad():
        heal(model, tokens_of().int(), TrainConfig(steps=2, batch_size=2, warmup=0))
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


def test_healing_never_ends_in_weights_that_are_not_finite():
    """The last step's weights have no loss that would tell."""
    model = ours()
    with torch.no_grad():
        model.position_embedding.weight[9] = 1e38  # of no token, but it decays: 1 - 100 x 0.5
    before = weights_of(model)
    last = TrainConfig(steps=1, batch_size=2, learning_rate=100.0, warmup=0, weight_decay=0.5)
    with pytest.raises(InputError, match="weights are not finite at step 1"):
        heal(model, tokens_of(t=9), last, what="all")
    assert torch.equal(weights_of(model), before)
