"""Streamed Grams equal those of fields in memory."""

import numpy as np
import pytest
import torch

from attnlib import GPTConfig, InputError, attention_fields, scale_gram, stream_gram


@pytest.fixture
def tokens():
    return torch.randint(0, 11, (9, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("memory", [1, 15_000, 2**30])  # a layer at a time, two, all
@pytest.mark.parametrize("bank", [False, True])
def test_streaming_equals_scale_gram(tiny_model, tokens, memory, bank):
    model = tiny_model(n_layer=3)
    scales = [2.0, 4.0, np.inf]
    fields = attention_fields(model, tokens)
    whole = scale_gram(fields, scales, bank=bank)
    streamed = stream_gram(model, tokens, scales, bank=bank, memory=memory)
    np.testing.assert_allclose(streamed, whole, rtol=1e-9, atol=1e-12 * float(np.abs(whole).max()))
    np.testing.assert_allclose(streamed["rounding"], whole["rounding"], rtol=1e-9)
    assert streamed.dims == whole.dims
    assert streamed.attrs == whole.attrs


def test_some_layers_in_the_order_asked_for(tiny_model, tokens):
    model = tiny_model(n_layer=3)
    whole = stream_gram(model, tokens)
    some = stream_gram(model, tokens, layers=[3, 1])
    np.testing.assert_array_equal(some["layer"], [3, 1])
    np.testing.assert_allclose(some, whole.sel(layer=[3, 1]), rtol=1e-12)


def test_chunks_do_not_matter(tiny_model, tokens, monkeypatch):
    import attnlib.streaming as streaming

    whole = stream_gram(tiny_model(), tokens, [2.0, np.inf])
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 8 * 9 * 7)  # 7 pairs at a time
    np.testing.assert_allclose(stream_gram(tiny_model(), tokens, [2.0, np.inf]), whole, rtol=1e-9)


@pytest.mark.parametrize("layers", [[0], [1, 1], [3], [], [1.7], [True]])
def test_layers_that_are_not_there(tiny_model, tokens, layers):
    with pytest.raises(InputError, match=r"numbers from 1 to 2|a layer is a whole number"):
        stream_gram(tiny_model(), tokens, layers=layers)


def test_a_bidirectional_model_is_refused(tokens):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=24,
    )  # fmt: skip
    with pytest.raises(InputError, match="keys after the query"):
        stream_gram(BertModel(config).eval(), tokens)


def test_heads_may_differ_by_layer(tiny_model, tokens):
    model = tiny_model(n_head=(1, 3), head_size=8)
    assert isinstance(model.config, GPTConfig)
    np.testing.assert_allclose(
        stream_gram(model, tokens), scale_gram(attention_fields(model, tokens), [np.inf]),
        rtol=1e-9, atol=1e-15,
    )  # fmt: skip
    with pytest.raises(InputError, match="different numbers of heads"):
        attention_fields(model, tokens, heads="all")
