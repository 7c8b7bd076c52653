"""Silenced heads against arithmetic, pruning against loops, overlaps against NumPy."""

import itertools

import numpy as np
import pytest
import torch
import xarray as xr

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    attention_fields,
    head_overlap,
    pruning_curve,
    pruning_losses,
    window_losses,
    without_heads,
)
from attnlib.heads import share_heads


@pytest.fixture
def tokens():
    return torch.randint(11, (8, 13), generator=torch.Generator().manual_seed(0))


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens[:, :-1])[0]


def attention_outputs(model, tokens, layer):
    """What the attention of a layer adds, caught from a forward pass."""
    seen = []
    module = model.blocks[layer - 1].attention
    handle = module.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    logits(model, tokens)
    handle.remove()
    return seen[0]


def hooks(model):
    return sum(len(m._forward_pre_hooks) for m in model.modules())


# ------------------------------------------------------------------ silencing


@pytest.mark.parametrize("kind", ["softmax", "ega-1", "ega-c"])
def test_a_layer_without_heads_adds_the_bias_of_its_projection(tiny_model, tokens, kind):
    model = tiny_model(attention=kind)
    with torch.no_grad():
        model.blocks[1].attention.proj.bias.normal_()
    with without_heads(model, {2: [1, 2]}):
        out = attention_outputs(model, tokens, 2)
    torch.testing.assert_close(out, model.blocks[1].attention.proj.bias.expand_as(out))


def test_silencing_a_head_is_zeroing_its_columns(tiny_model, tokens):
    model, other = tiny_model(n_head=4), tiny_model(n_head=4)
    with torch.no_grad():
        other.blocks[0].attention.proj.weight[:, 4:12] = 0
    with without_heads(model, {1: [2, 3]}):
        silenced = logits(model, tokens)
    torch.testing.assert_close(silenced, logits(other, tokens))
    assert not torch.allclose(silenced, logits(model, tokens), atol=1e-3)


@pytest.mark.parametrize("heads", [{}, {1: []}, {1: [], 2: ()}])
def test_silencing_none_changes_nothing(tiny_model, tokens, heads):
    model = tiny_model()
    before = logits(model, tokens)
    with without_heads(model, heads) as same:
        assert same is model
        assert torch.equal(logits(model, tokens), before)


@pytest.mark.parametrize("replace", ["zero", "mean"])
def test_everything_is_as_before_afterwards(tiny_model, tokens, replace):
    model = tiny_model()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    before = logits(model, tokens)

    def use():
        with without_heads(model, {1: [1]}, replace, tokens):
            assert not torch.equal(logits(model, tokens), before)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert hooks(model) == 0
    assert torch.equal(logits(model, tokens), before)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_contexts_nest(tiny_model, tokens):
    model = tiny_model()
    with without_heads(model, {1: [1], 2: [2]}):
        together = logits(model, tokens)
    with without_heads(model, {1: [1]}), without_heads(model, {2: [2]}):
        torch.testing.assert_close(logits(model, tokens), together)


def test_the_mean_takes_the_place_of_a_head(tiny_model, tokens):
    model = tiny_model()
    outputs = attention_outputs(model, tokens, 1)
    with without_heads(model, {1: [1, 2]}, "mean", tokens):
        replaced = attention_outputs(model, tokens, 1)
        shorter = attention_outputs(model, tokens[:2, :6], 1)
    torch.testing.assert_close(replaced, outputs.mean(0).expand_as(outputs), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(shorter, replaced[:2, :5])


def test_the_mean_of_copies_of_a_window_is_the_window(tiny_model, tokens):
    model, copies = tiny_model().train(), tokens[:1].expand(5, -1)
    increase = pruning_losses(model, copies, replace="mean")
    np.testing.assert_allclose(increase, 0, atol=1e-6)
    assert np.abs(pruning_losses(model, copies)).max() > 1e-3
    assert model.training


def test_gradients_of_a_silent_head_are_zero(tiny_model, tokens):
    model = tiny_model()
    with without_heads(model, {1: [1]}):
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    gradient = model.blocks[0].attention.proj.weight.grad
    assert float(gradient[:, :8].abs().max()) == 0 < float(gradient[:, 8:].abs().max())


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({3: [1]}, "the model has layers 1 to 2, no layer 3"),
        ({0: [1]}, "no layer 0"),
        ({1: [0]}, "layer 1 has heads 1 to 2, no head 0"),
        ({1: [1], 2: [3]}, "layer 2 has heads 1 to 2, no head 3"),
        ({1: [1, 1]}, "head of layer 1 is given twice"),
        ({1: [1.5]}, "no head 1.5"),
        ({1: "one"}, "no head 'one'"),
        ({True: [1]}, "no layer True"),
        ([1, 2], "given by layer"),
    ],
)
def test_heads_that_are_not_there(tiny_model, heads, message):
    model = tiny_model()
    with pytest.raises(InputError, match=message), without_heads(model, heads):
        pass
    assert hooks(model) == 0


def test_what_takes_their_place(tiny_model, tokens):
    model = tiny_model()
    with pytest.raises(InputError, match="'zero' or 'mean'"), without_heads(model, {}, "median"):
        pass
    with pytest.raises(InputError, match="reference"), without_heads(model, {1: [1]}, "mean"):
        pass
    with (
        without_heads(model, {1: [1]}, "mean", tokens[:, :9]),
        pytest.raises(InputError, match="8 positions"),
    ):
        logits(model, tokens)


@pytest.mark.parametrize("function", [pruning_losses, pruning_curve])
def test_other_models_and_few_windows(tiny_model, tokens, function):
    with pytest.raises(InputError, match=r"attnlib.GPT, not in Linear"):
        function(torch.nn.Linear(2, 2), tokens)
    with pytest.raises(InputError, match=r"2 window\(s\): at least"):
        function(tiny_model(), tokens[:2])
    with pytest.raises(InputError, match="context of 24"):
        function(tiny_model(), torch.zeros(8, 26, dtype=torch.int64))


# ------------------------------------------------------------------ pruning


@pytest.mark.parametrize("replace", ["zero", "mean"])
def test_pruning_losses_against_a_loop(tiny_model, tokens, replace):
    model = tiny_model(n_head=(2, 3), head_size=5)
    increase = pruning_losses(model, tokens, replace=replace)
    assert increase.dims == ("layer", "head", "window")
    assert increase.dtype == np.float64
    for layer, n in ((1, 2), (2, 3)):
        for head in range(1, n + 1):
            with without_heads(model, {layer: [head]}, replace, tokens):
                losses = window_losses(model, tokens)
            expected = (losses - window_losses(model, tokens)).numpy()
            np.testing.assert_allclose(increase.sel(layer=layer, head=head), expected, atol=1e-9)
    assert increase.sel(layer=1, head=3).isnull().all()
    assert increase.sel(layer=2).notnull().all()


def test_a_head_that_nobody_reads_is_worth_nothing(tiny_model, tokens):
    model = tiny_model()
    with torch.no_grad():
        model.blocks[1].attention.proj.weight[:, 8:] = 0
    increase = pruning_losses(model, tokens)
    np.testing.assert_allclose(increase.sel(layer=2, head=2), 0, atol=1e-7)
    curve = pruning_curve(model, tokens)
    assert curve["removed"].sel(layer=2, kept=1) == 2
    np.testing.assert_allclose(curve["increase"].sel(layer=2, kept=1), 0, atol=1e-7)


def test_pruning_curve_against_a_search(tiny_model, tokens):
    model = tiny_model(n_head=(3, 2), head_size=4)
    curve = pruning_curve(model, tokens)
    assert curve["kept"].values.tolist() == [3, 2, 1, 0]
    assert curve.sizes["window"] == 4

    def increase(layer, heads, windows):
        with without_heads(model, {layer: heads}):
            silenced = window_losses(model, windows)
        return (silenced - window_losses(model, windows)).numpy()

    for layer, n in ((1, 3), (2, 2)):
        silent = []
        for kept in range(n - 1, -1, -1):
            harm = {
                h: increase(layer, [*silent, h], tokens[::2]).mean()
                for h in range(1, n + 1)
                if h not in silent
            }
            silent.append(min(harm, key=harm.get))
            one = curve.sel(layer=layer, kept=kept)
            assert one["removed"] == silent[-1]
            expected = increase(layer, silent, tokens[1::2])
            np.testing.assert_allclose(one["increase"], expected, atol=1e-9)
    assert (curve["increase"].sel(layer=2, kept=slice(3, 2)) == 0).all()
    assert (curve["removed"].sel(layer=2, kept=slice(3, 2)) == 0).all()


# ------------------------------------------------------------------ heads as fields


def many_heads(n_layer=2, n_head=3, n=7, t=6, seed=0):
    values = np.random.default_rng(seed).normal(size=(n_layer, n_head, n, t, t)) * np.tri(t)
    return xr.DataArray(values, dims=("layer", "head", "snapshot", "query", "key"))


def test_overlap_against_naive_loops(monkeypatch):
    monkeypatch.setattr("attnlib.heads.BLOCK_BYTES", 8 * 3 * 6 * 6 * 2)  # 2 snapshots at a time
    fields = many_heads()
    fields[:, 1] += 3 + 0.7 * fields[:, 0]
    result = head_overlap(fields.transpose("snapshot", "key", "head", "query", "layer"))
    for layer in range(2):
        u = fields.values[layer] - fields.values[layer].mean(1, keepdims=True)
        for a, b in itertools.product(range(3), repeat=2):
            product = sum(float((u[a, s] * u[b, s]).sum()) for s in range(7))
            norm = np.sqrt(np.square(u[a]).sum() * np.square(u[b]).sum())
            found = result["correlation"].isel(layer=layer, head=a, head_=b)
            assert found.item() == pytest.approx(product / norm, rel=1e-12, abs=1e-14)
        eigenvalues = np.linalg.eigvalsh(result["correlation"].values[layer])
        expected = eigenvalues.sum() ** 2 / np.square(eigenvalues).sum()
        assert result["effective_heads"].values[layer] == pytest.approx(expected)
        np.testing.assert_allclose(result["energy"][layer], np.square(u).sum((1, 2, 3)) / 7)
    assert result["head"].values.tolist() == result["head_"].values.tolist() == [1, 2, 3]


def test_copies_are_one_head_and_orthogonal_heads_are_many():
    fields = many_heads(n_head=4)
    fields[:] = fields[:, :1].values * np.array([1, 2, 0.5, 1])[:, None, None, None]
    np.testing.assert_allclose(head_overlap(fields)["effective_heads"], 1)
    apart = many_heads(n_head=4)
    for head in range(4):  # each varies at an entry of its own
        only = np.zeros((6, 6))
        only[head, 0] = 1
        apart[:, head] = apart[:, head] * 0 + only * np.arange(7)[:, None, None]
    np.testing.assert_allclose(head_overlap(apart)["effective_heads"], 4)


def test_the_mean_field_does_not_enter():
    fields = many_heads().astype("float32")
    moved = fields + 1e3 * many_heads(seed=1).isel(snapshot=0).drop_vars(
        "snapshot", errors="ignore"
    )
    np.testing.assert_allclose(
        head_overlap(moved)["correlation"], head_overlap(fields)["correlation"], atol=1e-6
    )


def test_a_head_that_does_not_vary_does_not_count():
    fields = many_heads().astype("float32")
    fields[0, 2] = 0.1
    result = head_overlap(fields).isel(layer=0)
    assert (result["correlation"].isel(head=2) == 0).all()
    assert (result["correlation"].isel(head_=2) == 0).all()
    expected = head_overlap(fields[:1, :2])["effective_heads"].item()
    assert result["effective_heads"].item() == pytest.approx(expected)
    fields[0] = 0.1
    with pytest.raises(InputError, match="no head of layer 1 varies"):
        head_overlap(fields)


def test_overlap_of_a_model(tiny_model, tokens):
    result = head_overlap(attention_fields(tiny_model(), tokens[:, :-1], heads="all"))
    assert result["correlation"].shape == (2, 2, 2)
    np.testing.assert_allclose(np.diagonal(result["correlation"], axis1=1, axis2=2), 1)
    assert ((result["effective_heads"] > 1) & (result["effective_heads"] <= 2)).all()


def test_fields_that_have_no_overlap(tiny_model, tokens):
    with pytest.raises(InputError, match="no heads"):
        head_overlap(attention_fields(tiny_model(), tokens))
    with pytest.raises(InputError, match="no heads"):
        head_overlap(torch.zeros(2, 3, 7, 6, 6))
    with pytest.raises(InputError, match="at least 3"):
        head_overlap(many_heads(n=2))
    broken = many_heads()
    broken[1, 0, 4, 2, 1] = np.nan
    with pytest.raises(InputError, match="layer 2, snapshot 4"):
        head_overlap(broken)


# ------------------------------------------------------------------ allocation


@pytest.mark.parametrize(
    ("weights", "total", "heads"),
    [
        ([1, 1, 1], 6, (2, 2, 2)),
        ([150, 150, 91, 91, 91, 91], 48, (11, 11, 7, 7, 6, 6)),
        ([1, 1, 1, 1, 1, 1], 8, (2, 2, 1, 1, 1, 1)),
        ([100, 1, 1], 6, (4, 1, 1)),
        ([1, 1e-9, 1e-9, 1], 4, (1, 1, 1, 1)),
        ([0.1, 0.2, 0.3], 6, (1, 2, 3)),
    ],
)
def test_heads_are_shared_in_proportion(weights, total, heads):
    assert share_heads(weights, total) == heads
    trained = GPTConfig(n_layer=len(heads), n_head=heads, head_size=4, d_model=8, context=4)
    uniform = GPTConfig(n_layer=1, n_head=total, head_size=4, d_model=8, context=4)
    attention = [sum(p.numel() for b in GPT(c).blocks for p in b.attention.parameters())
                 - 8 * c.n_layer for c in (trained, uniform)]  # fmt: skip
    assert attention[0] == attention[1]


def test_impossible_shares():
    with pytest.raises(InputError, match="too few"):
        share_heads([1, 1, 1], 2)
    for weights in ([1, 0], [1, -1], [1, np.nan], [[1, 2]], 3):
        with pytest.raises(InputError, match="one positive number a layer"):
            share_heads(weights, 4)


@pytest.mark.parametrize("total", [2.5, np.nan, "a", True, 0])
def test_a_total_of_heads_is_a_whole_number(total):
    with pytest.raises(InputError, match="total is a whole number"):
        share_heads([1, 2], total)
