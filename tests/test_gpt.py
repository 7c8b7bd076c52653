"""The model: its counts, its shape, and its refusals."""

import pytest
import torch

from attnlib import GPT, GPTConfig, InputError


@pytest.mark.parametrize(
    ("attention", "count"),
    [
        ("softmax", 4_816_640),
        ("ega-1", 4_816_640 + 12_480),
        ("ega-c", 4_816_640 + 1_377_216),
    ],
)
def test_published_parameter_counts(attention, count):
    assert GPT(GPTConfig(attention=attention)).n_parameters() == count


def test_same_seed_same_weights_and_no_trace_in_the_global_state():
    before = torch.get_rng_state()
    config = GPTConfig(n_layer=1, n_head=1, d_model=4, context=4, vocab_size=3)
    a, b, c = GPT(config, seed=1), GPT(config, seed=1), GPT(config, seed=2)
    assert torch.equal(a.token_embedding.weight, b.token_embedding.weight)
    assert not torch.equal(a.token_embedding.weight, c.token_embedding.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_is_handed_out_layer_by_layer(tiny_model):
    model, seen = tiny_model(), []
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, loss = model(tokens, tokens, on_attention=lambda n, w: seen.append((n, w.shape)))
        fused, _ = model(tokens)
    assert seen == [(0, (3, 2, 9, 9)), (1, (3, 2, 9, 9))]
    torch.testing.assert_close(logits, fused, atol=1e-5, rtol=1e-4)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, expected)


def test_layers_may_differ():
    config = GPTConfig(
        n_layer=2, n_head=2, d_model=8, context=8, vocab_size=5,
        attention=("softmax", "ega-1"), head_size=(2, 6),
    )  # fmt: skip
    model = GPT(GPTConfig.from_dict(config.to_dict()))
    assert [type(b.attention).__name__ for b in model.blocks] == [
        "SoftmaxAttention",
        "EnergyGatedAttention",
    ]
    assert [b.attention.head_size for b in model.blocks] == [2, 6]
    assert model(torch.zeros(1, 8, dtype=torch.long))[0].shape == (1, 8, 5)


def test_without_norm_there_is_none():
    model = GPT(GPTConfig(n_layer=1, n_head=1, d_model=4, context=4, vocab_size=3, norm=False))
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())


def test_generation_repeats_itself_by_seed(tiny_model):
    model, start = tiny_model(), torch.tensor([1, 2, 3])
    a = model.generate(start, 30, seed=4)
    assert torch.equal(a, model.generate(start, 30, seed=4))
    assert not torch.equal(a, model.generate(start, 30, seed=5))
    assert len(a) == 33  # longer than the context of 24
    greedy = model.generate(start, 3, top_k=1)
    assert int(greedy[3]) == int(model(start[None])[0][0, -1].argmax())


def test_a_window_beyond_the_context(tiny_model):
    with pytest.raises(InputError, match="longer than the model's context of 24"):
        tiny_model()(torch.zeros(1, 25, dtype=torch.long))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"attention": "softmex"}, "attention is one of"),
        ({"attention": ("softmax",) * 3}, "names 3 layers"),
        ({"d_model": 10, "n_head": 4}, "not a multiple"),
        ({"dropout": 1.0}, "dropout"),
        ({"n_layer": 0}, "n_layer is a positive whole number"),
        ({"n_head": 2.0}, "n_head is a positive whole number"),
        ({"normalize_over": "row"}, "normalize_over"),
    ],
)
def test_impossible_shapes(bad, message):
    with pytest.raises(InputError, match=message):
        GPTConfig(**{"n_layer": 6, **bad})


def test_unknown_parameter_in_a_stored_shape():
    with pytest.raises(InputError, match="n_heads"):
        GPTConfig.from_dict({"n_heads": 4})


def test_initial_weights_have_the_deviations_asked_for():
    config = GPTConfig(n_layer=2, init_std=0.06, embedding_std=0.15, residual_std=0.03)
    for name, parameter in GPT(config, seed=1).named_parameters():
        if parameter.dim() < 2:
            continue
        wanted = 0.06
        if "embedding" in name:
            wanted = 0.15
        elif "proj" in name or "mlp.2" in name:
            wanted = 0.03
        assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.03), name
    plain = GPT(GPTConfig(n_layer=2), seed=1).blocks[0].attention.proj.weight
    assert float(plain.detach().std()) == pytest.approx(0.02, rel=0.03)
    for bad in ({"init_std": 0.0}, {"embedding_std": -1.0}, {"residual_std": 20.0}):
        with pytest.raises(InputError, match="deviations of weights"):
            GPTConfig(**bad)


def test_heads_may_differ_by_layer():
    model = GPT(GPTConfig(n_layer=2, n_head=(1, 3), head_size=8, d_model=32, context=8))
    assert [b.attention.n_head for b in model.blocks] == [1, 3]
    assert model(torch.zeros(1, 8, dtype=torch.long))[0].shape == (1, 8, 65)
    with pytest.raises(InputError, match="give head_size as well"):
        GPTConfig(n_layer=2, n_head=(1, 3))
    with pytest.raises(InputError, match="n_head names 2 layers"):
        GPTConfig(n_layer=3, n_head=(1, 3), head_size=8)
    with pytest.raises(InputError, match="n_head is a positive whole number"):
        GPTConfig(n_layer=2, n_head=(0, 3), head_size=8)


@pytest.mark.parametrize("size", [0, -4, True, 2.5, (2, "a")])
def test_impossible_head_sizes(size):
    with pytest.raises(InputError, match="head_size"):
        GPTConfig(n_layer=2, head_size=size)


def test_a_size_is_layers_width_and_heads():
    sized = GPTConfig(attention="sd", head_size=8).sized("3x48x4")
    assert (sized.n_layer, sized.d_model, sized.n_head, sized.head_size) == (3, 48, 4, None)
    assert sized.attention == "sd"
    for bad in ("3x48", "3x48xfour", "3x-48x4", 7):
        with pytest.raises(InputError, match="layers x width x heads"):
            GPTConfig().sized(bad)
    with pytest.raises(InputError, match="not a multiple"):
        GPTConfig().sized("3x50x4")


@pytest.mark.parametrize(
    ("tokens", "n_new", "options", "words"),
    [
        (torch.zeros(2, dtype=torch.long), -1, {}, "n_new is a whole number"),
        (torch.zeros(2, dtype=torch.long), 2.5, {}, "n_new is a whole number"),
        (torch.zeros(2, dtype=torch.long), 2, {"temperature": 0}, "temperature is a positive"),
        (torch.zeros(2, dtype=torch.long), 2, {"temperature": float("nan")}, "temperature is"),
        (torch.zeros(2, dtype=torch.long), 2, {"top_k": 0}, "top_k is a whole number"),
        (torch.zeros(1, 2, dtype=torch.long), 2, {}, r"of shape \(T,\)"),
        (torch.zeros(2), 2, {}, "int64"),
        (torch.zeros(0, dtype=torch.long), 2, {}, "at least one"),
    ],
)
def test_generation_refuses_what_it_cannot_do(tokens, n_new, options, words):
    model = GPT(GPTConfig(1, 2, 8, 6, 5))
    with pytest.raises(InputError, match=words):
        model.generate(tokens, n_new, **options)
    assert model.training


def test_generation_that_fails_puts_the_mode_back():
    model = GPT(GPTConfig(1, 2, 8, 6, 5))
    with pytest.raises(IndexError):
        model.generate(torch.full((2,), 7), 2)
    assert model.training
    assert len(model.generate(torch.zeros(2, dtype=torch.long), 0)) == 2
    assert len(model.generate(torch.zeros(2, dtype=torch.long), 3, top_k=99)) == 5
