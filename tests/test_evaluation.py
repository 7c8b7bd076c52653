"""Losses and their errors, against direct computation."""

import math

import numpy as np
import pytest
import torch

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    attention_fields,
    evaluate,
    look_ahead,
    ngram_loss,
    paired_difference,
    position_losses,
    prefix_losses,
    window_losses,
)


@pytest.fixture
def tokens():
    return torch.randint(11, (5, 13), generator=torch.Generator().manual_seed(0))


def test_window_losses_against_a_loop(tiny_model, tokens):
    model = tiny_model()
    losses = window_losses(model, tokens, batch_size=2)
    for window, loss in zip(tokens, losses, strict=True):
        log_p = model(window[None, :-1])[0][0].log_softmax(-1)
        expected = -sum(float(log_p[i, window[i + 1]].detach()) for i in range(12)) / 12
        assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_prefix_losses_of_a_causal_model_are_its_window_losses(tiny_model, tokens):
    losses = prefix_losses(tiny_model(), tokens, range(1, 13))
    torch.testing.assert_close(losses.mean(1), window_losses(tiny_model(), tokens))


def test_prefix_losses_of_a_model_that_looks_ahead_are_not(tiny_model, tokens):
    model = tiny_model(attention="ega-1")
    difference = prefix_losses(model, tokens, range(1, 13)).mean(1) - window_losses(model, tokens)
    assert float(difference.abs().max()) > 1e-4


def test_positions_of_windows_are_prefixes_of_a_causal_model(tiny_model, tokens):
    model = tiny_model(attention="ega-1", normalize_over="key")
    torch.testing.assert_close(
        prefix_losses(model, tokens, range(1, 13)), position_losses(model, tokens),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    assert look_ahead(model, tokens) == 0
    assert look_ahead(tiny_model(attention="ega-1"), tokens) > 1e-4


def test_paired_differences():
    losses = torch.tensor([[1.0, 2.0, 3.0], [1.5, 2.0, 4.0]])
    mean, se = paired_difference(losses)
    assert mean.tolist() == [0.0, 0.5]
    assert se[1].item() == pytest.approx(0.5 / math.sqrt(3))


def test_standard_errors(tiny_model, tokens):
    model = tiny_model().train()
    score, losses = evaluate(model, tokens), window_losses(model, tokens).numpy()
    assert model.training
    assert score["loss"] == pytest.approx(losses.mean())
    assert score["loss_se"] == pytest.approx(losses.std(ddof=1) / math.sqrt(5))
    assert score["perplexity"] == pytest.approx(math.exp(losses.mean()))
    assert score["perplexity_se"] == pytest.approx(score["perplexity"] * score["loss_se"])


def test_two_windows_are_too_few(tiny_model, tokens):
    with pytest.raises(InputError, match="at least 3"):
        evaluate(tiny_model(), tokens[:2])


def test_prefix_lengths_have_limits(tiny_model, tokens):
    with pytest.raises(InputError, match="between 1 and 12"):
        prefix_losses(tiny_model(), tokens, [13])


def test_ngrams_against_counting():
    training = torch.tensor([0, 1, 0, 1, 2, 0])
    scored = torch.tensor([0, 1, 2])
    unigram = (np.array([3, 2, 1]) + 1) / (6 + 3)
    expected = -np.log(unigram[[0, 1, 2]]).mean()
    assert ngram_loss(training, scored, 3, order=1) == pytest.approx(expected)
    pairs = np.ones((3, 3))
    for a, b in [(0, 1), (1, 0), (0, 1), (1, 2), (2, 0)]:
        pairs[a, b] += 1
    p = pairs / pairs.sum(1, keepdims=True)
    expected = -np.log([p[0, 1], p[1, 2]]).mean()
    assert ngram_loss(training, scored, 3) == pytest.approx(expected)
    with pytest.raises(InputError, match="order"):
        ngram_loss(training, scored, 3, order=3)


def test_losses_of_transformers_models(hugging_face):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=12,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = [float(model(one[None, :-1], labels=None).logits[0].log_softmax(-1)
                        .gather(-1, one[1:, None]).mean().neg()) for one in tokens]  # fmt: skip
    np.testing.assert_allclose(window_losses(model, tokens), wanted, rtol=1e-5)
    with pytest.raises(InputError, match="longer than the model's context of 12"):
        window_losses(model, tokens.repeat(1, 2))
    with pytest.raises(InputError, match="does not predict tokens"):
        window_losses(hugging_face("bert"), tokens)


def test_losses_put_the_mode_back_and_take_tokens_of_32_bits():
    model = GPT(GPTConfig(1, 2, 8, 6, 5)).train()
    tokens = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(position_losses(model, tokens.int()), position_losses(model, tokens))
    expected = position_losses(model, tokens)[:, 1:2]
    torch.testing.assert_close(prefix_losses(model, tokens.int(), [2]), expected)
    assert model.training
    broken = GPT(GPTConfig(1, 2, 8, 6, 5)).train()
    broken.norm = None
    for measure in (position_losses, lambda m, t: prefix_losses(m, t, [2])):
        with pytest.raises(TypeError):
            measure(broken, tokens)
        assert broken.training


def test_each_module_gets_its_own_mode_back(tiny_model, tokens):
    model = tiny_model().train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    window_losses(model, tokens)
    attention_fields(model, tokens[:, :-1])
    model.generate(tokens[0, :2], 2)
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
