"""Fields: what the model computes, no more and no less, on ours and on transformers' models."""

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from attnlib import (
    InputError,
    attention_fields,
    fluctuation,
    iter_fields,
    lag_mean,
    lag_rows,
    reynolds,
)
from attnlib.ensemble import each_field


@pytest.fixture
def tokens():
    return torch.randint(11, (5, 14), generator=torch.Generator().manual_seed(1))


def naive_weights(model, window):
    """Attention weights from the model's own parts, head by head."""
    x = model.token_embedding(window) + model.position_embedding(torch.arange(len(window)))
    layers = []
    for block in model.blocks:
        h, a = block.norm_1(x), block.attention
        q, k, _ = a.qkv(h).view(len(window), 3, a.n_head, a.head_size).unbind(1)
        heads = []
        for n in range(a.n_head):
            logits = q[:, n] @ k[:, n].T / a.head_size**0.5
            heads.append(logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -1e30).softmax(-1))
        layers.append(torch.stack(heads))
        x = block(x[None])[0][0]
    return torch.stack(layers)  # (layer, head, T, T)


def test_fields_of_our_model_against_a_loop(tiny_model, tokens):
    model = tiny_model()
    fields = attention_fields(model, tokens, heads="all", block=2)
    assert fields.dims == ("layer", "head", "snapshot", "query", "key")
    assert fields.dtype == np.float32
    assert fields["layer"].values.tolist() == [1, 2]
    assert fields["head"].values.tolist() == [1, 2]
    for s, window in enumerate(tokens):
        expected = naive_weights(model, window).detach().numpy()
        np.testing.assert_allclose(fields.isel(snapshot=s), expected, atol=1e-6)
    mean = attention_fields(model, tokens)
    np.testing.assert_allclose(mean, fields.mean("head"), atol=1e-6)


def test_blocks_do_not_change_anything_and_layers_come_in_order(tiny_model, tokens):
    model = tiny_model(attention="ega-1").train()
    stream = list(iter_fields(model, tokens, block=2))
    assert [(n, s.start) for n, s, _ in stream] == [(n, s) for s in (0, 2, 4) for n in (1, 2)]
    assert model.training  # put back as it was
    whole = attention_fields(model, tokens)
    for layer, documents, weights in stream:
        np.testing.assert_allclose(
            whole.sel(layer=layer).isel(snapshot=documents), weights, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "bert"])
def test_fields_of_transformers_models_are_their_own_weights(hugging_face, kind):
    model = hugging_face(kind)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    before = model.config._attn_implementation
    fields = attention_fields(model, tokens, heads="all", block=3)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(own):
        expected = weights.transpose(0, 1).numpy()
        np.testing.assert_allclose(fields.isel(layer=layer), expected, atol=1e-6)
    ahead = float(np.abs(np.triu(fields.values, 1)).sum())
    assert (ahead > 1) == (kind == "bert")
    assert float(fields.std("key").max()) > 0.05


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_gives_zero_rows_and_no_nan(hugging_face, kind):
    model = hugging_face(kind)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # left padding: under a causal mask these rows attend to nothing
    fields = attention_fields(model, tokens, attention_mask=mask)
    padded = fields.isel(snapshot=1)
    assert np.isfinite(fields.values).all()
    assert (padded.isel(query=slice(0, 5)) == 0).all()
    np.testing.assert_allclose(padded.isel(query=slice(5, None)).sum("key"), 1, atol=1e-5)
    assert (np.abs(padded.isel(key=slice(0, 5))) < 1e-6).all()


def test_a_model_whose_attention_cannot_be_captured():
    with pytest.raises(InputError, match="Linear is neither"):
        attention_fields(torch.nn.Linear(2, 2), torch.zeros(3, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.long), "at least 3"),
        (torch.zeros(3, 25, dtype=torch.long), "longer than the model's context of 24"),
        (torch.zeros(3, 5), "whole numbers of shape"),
        (torch.zeros(5, dtype=torch.long), "whole numbers of shape"),
    ],
)
def test_bad_tokens(tiny_model, bad, message):
    with pytest.raises(InputError, match=message):
        attention_fields(tiny_model(), bad)


def test_bad_heads_and_device(tiny_model, tokens):
    with pytest.raises(InputError, match="'mean' or 'all'"):
        attention_fields(tiny_model(), tokens, heads="first")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="has none"):
            attention_fields(tiny_model(), tokens, device="cuda")


def test_an_overflow_in_the_model_names_layer_and_snapshot(tiny_model, tokens):
    model = tiny_model()
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="layer 2, snapshot 0"):
        attention_fields(model, tokens)


def test_one_nan_names_layer_and_snapshot(make_fields):
    fields = make_fields(n_layer=3)
    fields[1, 7, 3, 2] = np.nan
    for function in (fluctuation, lambda f: list(each_field(f))):
        with pytest.raises(InputError, match="layer 2, snapshot 7"):
            function(fields)


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_snapshots(make_fields, n):
    with pytest.raises(InputError, match="at least 3"):
        fluctuation(make_fields(n=n))


def test_any_layout_will_do_but_no_other_dimensions(make_fields):
    fields = make_fields()
    tensor = fluctuation(torch.from_numpy(fields.values))
    np.testing.assert_allclose(tensor, fluctuation(fields), atol=1e-6)
    turned = fields.transpose("query", "snapshot", "key", "layer")
    xr.testing.assert_identical(fluctuation(turned), fluctuation(fields))
    with pytest.raises(InputError, match="snapshot, query, key"):
        list(each_field(fields.rename(key="column")))
    with pytest.raises(InputError, match="square"):
        list(each_field(fields.isel(key=slice(0, 5))))


@given(st.integers(0, 10**6))
def test_reynolds_decomposition(seed):
    from conftest import random_fields

    fields = random_fields(seed=seed).astype("float64")
    u, mean = fluctuation(fields), fields.mean("snapshot")
    np.testing.assert_allclose(u.mean("snapshot"), 0, atol=1e-12)
    np.testing.assert_allclose(u.sum("key"), 0, atol=1e-6)  # rows of attention sum to one
    space = ("query", "key")
    total = (fields**2).sum(space).mean("snapshot")
    np.testing.assert_allclose(total, (mean**2).sum(space) + (u**2).sum(space).mean("snapshot"))
    split = reynolds(fields)
    np.testing.assert_allclose(split["mean"], mean, atol=1e-12)
    np.testing.assert_allclose(split["variance"], (u**2).mean("snapshot"), atol=1e-12)
    np.testing.assert_allclose(split["mean_energy"] + split["fluctuation_energy"], total)
    np.testing.assert_allclose(split["fluctuation_share"], split["fluctuation_energy"] / total)


def test_lag_rows_of_each_convention_against_loops(make_fields):
    field = torch.from_numpy(make_fields(t=6).values[0])
    n, t = 12, 6
    causal, lag = lag_rows(field, "causal")
    assert lag.tolist() == list(range(6))
    published, _ = lag_rows(field, "published")
    signed, both = lag_rows(field.transpose(1, 2).contiguous(), "signed")
    assert both.tolist() == list(range(-5, 6))
    for s in range(n):
        for i in range(t):
            for tau in range(t):
                expected = field[s, i, i - tau] if i >= tau else 0
                assert causal[s, i, tau] == expected
                assert published[s, i, tau] == field[s, i, min(i + tau, t - 1)]
            for m, tau in enumerate(both):
                inside = 0 <= i - tau < t
                assert signed[s, i, m] == (field[s, i - tau, i] if inside else 0)


def test_causal_lag_of_a_bidirectional_field_is_refused():
    from attnlib import pod

    fields = torch.rand(1, 5, 6, 6)
    with pytest.raises(InputError, match="convention='signed'"):
        pod(fields, [2.0], 1)


def test_lag_mean_against_diagonals(make_fields):
    fields = make_fields()
    mean = lag_mean(fields.mean("snapshot"))
    assert mean.dims == ("layer", "lag")
    values = fields.mean("snapshot").values
    for layer in range(2):
        expected = [np.diagonal(values[layer], -tau).mean() for tau in range(20)]
        np.testing.assert_allclose(mean[layer], expected, rtol=1e-5)


def test_numbers_of_any_kind_but_only_numbers(make_fields):
    from attnlib import pod

    fields = make_fields()
    whole = (1000 * fields).round()
    expected = pod(whole, [np.inf], 2)["mode_field"]
    for dtype in ("int32", "float64", "float32"):
        got = pod(whole.astype(dtype), [np.inf], 2)["mode_field"]
        np.testing.assert_allclose(got, expected, atol=1e-5)
    tensor = torch.from_numpy(fields.values)
    for other in (tensor.requires_grad_(), tensor.detach().bfloat16()):
        assert np.isfinite(pod(other, [np.inf], 2)["mode_field"]).all()
    for bad in (fields + 1j, fields.astype(object), fields.values, None, tensor[0, 0]):
        with pytest.raises(InputError, match="fields"):
            pod(bad, [np.inf], 2)


def test_labels_are_made_where_there_are_none(make_fields):
    from attnlib import pod, scalogram

    fields = make_fields()
    bare = xr.DataArray(fields.values, dims=fields.dims)
    assert pod(bare, [2.0], 2)["layer"].values.tolist() == [1, 2]
    one = pod(fields.sel(layer=2), [2.0], 2)
    assert one["layer"].values.tolist() == [2]
    np.testing.assert_array_equal(one["eigenvalue"][0], pod(fields, [2.0], 2)["eigenvalue"][1])
    assert scalogram(fields.sel(layer=2), [2.0])["layer"].values.tolist() == [2]
    assert scalogram(torch.from_numpy(fields.values[0]), [2.0]).sizes["layer"] == 1
    named = fields.assign_coords(layer=["first", "last"])
    with pytest.raises(InputError, match="layer first"):
        pod(named, [2.0], 50)
    with pytest.raises(InputError, match="no dimensions but layer and head"):
        pod(fields.expand_dims("model"), [2.0], 2)


def test_a_tensor_stays_what_it_is():
    field = torch.rand(4, 5, 5).tril()
    (one,) = each_field(field)
    assert one.data_ptr() == field.data_ptr()
    labelled = xr.DataArray(field.numpy()[None], dims=("layer", "snapshot", "query", "key"))
    (other,) = each_field(labelled)
    assert torch.equal(one, other)


STREAM = """
import resource, sys, torch
from attnlib import GPT, GPTConfig, iter_fields, scale_gram, scalogram
torch.set_num_threads(1)
shape = {"n_layer": 4, "n_head": 2, "d_model": 8, "context": 128, "vocab_size": 5}
model = GPT(GPTConfig(**shape, dropout=0.0)).eval()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(n):
    tokens = torch.randint(5, (n, 128), generator=torch.Generator().manual_seed(0))
    for layer, documents, weights in iter_fields(model, tokens, block=8):
        weights.sum()
run(16)
scale_gram(torch.rand(1, 8, 128, 128).tril(), [2.0])
before = peak()
run(800)
streamed = peak() - before
layer = torch.rand(1, 500, 128, 128).tril_()
before = peak()
scale_gram(layer, [2.0, 4.0, 8.0])
gram = peak() - before
short = torch.rand(1, 3, 1024, 1024).tril_()
before = peak()
scalogram(short, [2.0 * 1.2 ** k for k in range(20)])
print(streamed, gram, peak() - before)
"""


def test_memory_is_bounded_for_many_documents_and_for_long_ones():
    """Fields of 800 windows, 4 layers: 210 MB; of 500 windows, 1 layer: 33 MB; of 3 long: 13 MB."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", STREAM], capture_output=True, text=True, check=True
    )
    streamed, gram, long = map(float, done.stdout.split())
    assert streamed < 40, streamed
    assert gram < 60, gram  # two buffers of 16 MiB, and 3 Grams of 500 x 500
    assert long < 100, long
