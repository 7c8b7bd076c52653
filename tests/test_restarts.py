"""Losses from a layer on: against whole runs, on every family of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from test_conversion import hugging_face, ours, tokens_of, weights_of

from attnlib import (
    InputError,
    linearize,
    lower_rank,
    prescribe,
    reference_means,
    save,
    window_losses,
)
from attnlib.capture import reader_of
from attnlib.restarts import Restarts, block_names


def with_sdpa():
    model = hugging_face("llama", 4)
    model.set_attn_implementation("sdpa")
    return model


MODELS = {
    **{kind: lambda kind=kind: ours(kind) for kind in ("softmax", "sd")},
    **{kind: lambda kind=kind: hugging_face(kind, 4) for kind in ("llama", "neox", "gpt2")},
    "mistral": lambda: hugging_face("mistral", 4),
    "sdpa": with_sdpa,
}


@pytest.mark.parametrize("batch_size", [2, 32])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_are_those_of_a_whole_run(kind, batch_size):
    model, tokens = MODELS[kind](), tokens_of(5, 11)
    reader, before = reader_of(model), weights_of(model)
    means = reference_means(model, tokens[:, :-1])
    own = window_losses(model, tokens)
    changes = [lambda k: lower_rank(model, 2, [k], reference=means, share_weights=True)]
    if kind != "mistral":  # its window is not of linear attention
        changes.append(lambda k: linearize(model, [k], share_weights=True))
    restarts = Restarts(reader, tokens, own, batch_size)
    assert len(restarts._blocks) == reader.n_layer
    for layer in range(1, reader.n_layer + 1):
        for change in changes:
            whole = window_losses(change(layer), tokens)
            found = restarts.losses(change(layer), layer)
            torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
            assert (found - own).abs().max() > 1e-4
    assert torch.equal(weights_of(model), before)
    assert torch.equal(window_losses(model, tokens), own)


def test_layers_before_are_not_run_again():
    model, tokens = ours(), tokens_of(5, 11)
    restarts = Restarts(reader_of(model), tokens, window_losses(model, tokens))
    ran = []
    changed = linearize(model, [3])
    for layer, block in enumerate(changed.blocks, 1):
        block.mlp.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    restarts.losses(changed, 3)
    assert ran == [3]


def test_a_model_whose_layers_look_further_back_is_run_as_a_whole():
    model, tokens, first = ours(), tokens_of(5, 11), {}

    def remember(block, inputs, output):
        first["x"] = inputs[0]

    def add(block, inputs, output):
        return output[0] + first["x"], output[1]

    model.blocks[0].register_forward_hook(remember)
    model.blocks[-1].register_forward_hook(add)
    own = window_losses(model, tokens)
    means = reference_means(model, tokens[:, :-1])
    restarts = Restarts(reader_of(model), tokens, own)
    for layer in (1, 2, 3):
        # It is a new GPT, which has none of the hooks yet.
        changed = lower_rank(model, 2, [layer], reference=means)
        for at, hook in ((0, remember), (-1, add)):
            changed.blocks[at].register_forward_hook(hook)
        torch.testing.assert_close(
            restarts.losses(changed, layer), window_losses(changed, tokens), rtol=0, atol=0
        )


# ------------------------------------------------------------------ after a kill


@pytest.fixture
def counted(monkeypatch):
    """Layers that were tried; after `last` of them the next is interrupted."""
    tried, whole = [], Restarts.losses

    def losses(self, changed, layer):
        if len(tried) == counts["last"]:
            raise KeyboardInterrupt
        tried.append(layer)
        return whole(self, changed, layer)

    counts = {"last": -1, "tried": tried}
    monkeypatch.setattr("attnlib.restarts.Restarts.losses", losses)
    return counts


@pytest.mark.parametrize("make", [ours, lambda: hugging_face("llama", 3)])
def test_a_prescription_goes_on_after_a_kill(make, tmp_path, counted):
    model, tokens, file = make(), tokens_of(8, 10), tmp_path / "costs.nc"
    unbroken = prescribe(model, tokens, ranks=[2])
    asked = list(counted["tried"])
    counted["tried"].clear()
    counted["last"] = len(asked) - 3  # within layer 2: one candidate of it is done
    with pytest.raises(KeyboardInterrupt):
        prescribe(model, tokens, ranks=[2], keep=file)
    counted["last"] = -1
    counted["tried"].clear()
    again = prescribe(model, tokens, ranks=[2], keep=file)
    assert counted["tried"].count(1) == 0  # layer 1 was there
    assert counted["tried"].count(2) == 2
    xr.testing.assert_identical(again, unbroken)
    counted["tried"].clear()
    some = prescribe(model, tokens, ranks=[2], keep=file, layers=[2])
    assert set(counted["tried"]) <= {3}  # the check of a restart alone
    assert np.isnan(some["cost"].sel(layer=[1, 3], action=["rank 2", "linear"])).all()


def test_costs_of_something_else_are_not_taken(tmp_path, counted):
    file, tokens = tmp_path / "costs.nc", tokens_of(8, 10)
    prescribe(ours(), tokens, ranks=[2], keep=file)
    for model, texts, ranks in (
        (ours("sd"), tokens, [2]),
        (ours(), tokens_of(8, 10, seed=3), [2]),
        (ours(), tokens, [3]),
    ):
        counted["tried"].clear()
        found = prescribe(model, texts, ranks=ranks, keep=file)
        assert counted["tried"].count(1) == 2
        xr.testing.assert_identical(found, prescribe(model, texts, ranks=ranks))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:900]), "delete it"),
        (lambda path: path.write_text("mine"), "delete it"),
        (lambda path: save(xr.Dataset({"x": 1.0}), path), "holds something else"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused_and_left(damage, words, tmp_path, counted):
    file = tmp_path / "costs.nc"
    prescribe(ours(), tokens_of(8, 10), keep=file)
    damage(file)
    left = file.read_bytes()
    counted["tried"].clear()
    with pytest.raises(InputError, match=words):
        prescribe(ours(), tokens_of(8, 10), keep=file)
    assert file.read_bytes() == left
    assert not counted["tried"]
    with pytest.raises(InputError, match=r"ends in \.nc"):
        prescribe(ours(), tokens_of(8, 10), keep=tmp_path / "costs.csv")


# ------------------------------------------------------------------ models with hooks


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("hooked", [0, 1, 2])
def test_hooks_of_a_model_act_once(kind, hooked):
    model, tokens = hugging_face(kind, 4), tokens_of(6, 10)
    block = model.get_submodule(block_names(reader_of(model))[hooked])

    def louder(module, inputs, output):
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5

    block.register_forward_hook(louder)
    means = reference_means(model, tokens[:, :-1])
    restarts = Restarts(reader_of(model), tokens, window_losses(model, tokens))
    assert restarts._blocks
    for layer in (1, 2, 3, 4):
        changed = lower_rank(model, 2, [layer], reference=means)
        whole = window_losses(lower_rank(model, 2, [layer], reference=means), tokens)
        torch.testing.assert_close(restarts.losses(changed, layer), whole)


@pytest.mark.parametrize(("source", "reads"), [(0, 1), (0, 2), (1, 2), (0, 3)])
def test_a_layer_anywhere_that_looks_further_back_is_found(source, reads):
    model, tokens, seen = hugging_face("llama", 4), tokens_of(6, 10), {}
    blocks = model.model.layers

    def remember(module, inputs):
        seen["x"] = inputs[0]

    def add(module, inputs, output):
        return output + seen["x"]

    blocks[source].register_forward_pre_hook(remember)
    blocks[reads].register_forward_hook(add)
    means = reference_means(model, tokens[:, :-1])
    restarts = Restarts(reader_of(model), tokens, window_losses(model, tokens))
    assert not restarts._blocks
    for layer in (1, 2, 3, 4):
        changed = lower_rank(model, 2, [layer], reference=means)
        whole = window_losses(lower_rank(model, 2, [layer], reference=means), tokens)
        torch.testing.assert_close(restarts.losses(changed, layer), whole)


def test_layers_are_asked_for_in_order():
    model, tokens = ours(), tokens_of(6, 10)
    restarts = Restarts(reader_of(model), tokens, window_losses(model, tokens))
    restarts.losses(linearize(model, [3]), 3)
    with pytest.raises(ValueError, match="layer 1 was asked for after layer 3"):
        restarts.losses(linearize(model, [1]), 1)


def test_weights_that_the_losses_do_not_see_are_seen_by_the_kept_costs(tmp_path):
    """Tokens of the reference alone: the held-out losses are the same, the costs are not."""
    model, file, tokens = hugging_face("llama", 3), tmp_path / "costs.nc", tokens_of(8, 10)
    tokens[4:] %= 4
    tokens[:4, 1] = 6
    prescribe(model, tokens, ranks=[2], keep=file)
    with torch.no_grad():
        model.model.embed_tokens.weight[6:] *= 5
    kept = prescribe(model, tokens, ranks=[2], keep=file)
    xr.testing.assert_identical(kept, prescribe(model, tokens, ranks=[2]))
    with pytest.raises(InputError, match="path of a file, not 3"):
        prescribe(model, tokens, ranks=[2], keep=3)


def test_a_model_that_cannot_be_started_within_says_so_and_is_run_as_a_whole():
    model, tokens = hugging_face("llama", 3), tokens_of(6, 10)
    handed = {}

    def keep(module, inputs, output):
        handed["x"] = output

    def take(module, inputs):
        return (handed.pop("x"), *inputs[1:])

    model.model.layers[0].register_forward_hook(keep)
    model.model.layers[1].register_forward_pre_hook(take)
    means = reference_means(model, tokens[:, :-1])
    own = window_losses(model, tokens)
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot be started within .KeyError"):
        restarts = Restarts(reader_of(model), tokens, own)
    for layer in (1, 2, 3):
        changed = lower_rank(model, 2, [layer], reference=means)
        whole = window_losses(lower_rank(model, 2, [layer], reference=means), tokens)
        torch.testing.assert_close(restarts.losses(changed, layer), whole, rtol=0, atol=0)
