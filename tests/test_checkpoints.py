"""Checkpoints: whole, ours, undamaged, of this architecture, or refused."""

import json

import pytest
import torch

from attnlib import GPT, GPTConfig, InputError, load_checkpoint, save_checkpoint

CONFIG = GPTConfig(n_layer=2, n_head=2, d_model=8, context=8, vocab_size=5)


def test_round_trip_without_pickle(tmp_path):
    model = GPT(CONFIG, seed=1)
    save_checkpoint(tmp_path / "c", model, meta={"note": "π"})
    loaded, meta = load_checkpoint(tmp_path / "c")
    assert meta["note"] == "π"
    assert loaded.config == CONFIG
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    files = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert files == ["meta.json", "model.safetensors"]


def test_it_replaces_an_earlier_one_whole(tmp_path):
    save_checkpoint(tmp_path / "c", GPT(CONFIG, seed=1), tensors={"x": torch.ones(2)})
    save_checkpoint(tmp_path / "c", GPT(CONFIG, seed=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    assert not (tmp_path / "c" / "state.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"d_model": 12}, "token_embedding.weight: model"),
        ({"n_layer": 3}, "checkpoint has none"),
        ({"attention": "ega-1"}, "blocks.0.attention.alpha"),
        ({"norm": False}, "model has none"),
        ({"n_head": 4}, "n_head: model 4, checkpoint 2"),
        ({"context": 8, "normalize_over": "key"}, "normalize_over: model key"),
    ],
)
def test_another_architecture_is_refused_by_key(tmp_path, changes, names):
    save_checkpoint(tmp_path / "c", GPT(CONFIG))
    other = GPT(GPTConfig(**{**CONFIG.to_dict(), **changes}), seed=9)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(InputError, match="another architecture") as error:
        load_checkpoint(tmp_path / "c", other)
    assert names in str(error.value)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_damage_is_seen(tmp_path):
    save_checkpoint(tmp_path / "c", GPT(CONFIG))
    path = tmp_path / "c" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"sha256": {}}', "\x00"])
def test_a_damaged_record_is_refused(tmp_path, content):
    save_checkpoint(tmp_path / "c", GPT(CONFIG))
    (tmp_path / "c" / "meta.json").write_text(content)
    with pytest.raises(InputError, match="delete it and train anew"):
        load_checkpoint(tmp_path / "c")


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "c", GPT(CONFIG), meta={"x": object()})
    assert not list(tmp_path.iterdir())


def test_nothing_there(tmp_path):
    with pytest.raises(InputError, match="not a checkpoint"):
        load_checkpoint(tmp_path)


def test_unknown_parameter_in_the_record(tmp_path):
    save_checkpoint(tmp_path / "c", GPT(CONFIG))
    path = tmp_path / "c" / "meta.json"
    meta = json.loads(path.read_text())
    meta["model"]["rope"] = True
    path.write_text(json.dumps(meta))
    with pytest.raises(InputError, match="rope"):
        load_checkpoint(tmp_path / "c")
