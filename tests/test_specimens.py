"""Specimens: known by recipe and hashes, resumed, checked, refused when foreign."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    check_specimens,
    load_checkpoint,
    load_specimen,
    make_specimens,
    specimens,
)
from attnlib.__main__ import main
from attnlib.checkpoints import from_eight_bits, in_eight_bits, save_checkpoint
from attnlib.runner import project_root
from attnlib.specimens import recipes

TEXT = "".join(chr(97 + (i * i + i // 7) % 13) for i in range(6000))


@pytest.fixture
def place(tmp_path):
    """A folder of specimens with a text of its own."""
    (tmp_path / "text.txt").write_text(TEXT)
    book = {
        "corpus": str(tmp_path / "text.txt"),
        "shared": {
            "model": {"n_layer": 1, "n_head": 2, "d_model": 16, "context": 8, "dropout": 0.0},
            "training": {"steps": 6, "batch_size": 4, "warmup": 2, "eval_every": 3,
                         "eval_windows": 4, "optimizer": "muon", "device": "cpu"},
        },
        "specimens": {"one": {"seeds": [0, 1], "model": {"attention": "ega-1"}}},
        "records": {"fast": {"seeds": [0], "training": {"learning_rate": 0.01}}},
    }  # fmt: skip
    write(tmp_path, book)
    return tmp_path, book


def write(folder, book):
    (folder / "recipes.yaml").write_text(yaml.safe_dump(book))


def made(folder, names=()):
    return make_specimens(names, folder=folder, work=folder / "work", jobs=2, progress=False)


def test_rounding_is_wrong_by_half_a_step_at_most():
    weights = {"m": torch.randn(5, 7), "zero": torch.zeros(2, 3), "v": torch.randn(4)}
    stored = in_eight_bits(weights)
    assert stored["m"].dtype == torch.int8
    back = from_eight_bits(stored)
    assert list(back) == list(weights)
    gap = (back["m"] - weights["m"]).abs()
    assert bool((gap <= 0.5001 * weights["m"].abs().amax(1, keepdim=True) / 127).all())
    assert torch.equal(back["v"], weights["v"])
    assert torch.equal(back["zero"], weights["zero"])


def test_what_is_missing_is_trained_once_and_loads_as_it_was_scored(place, monkeypatch):
    folder, _ = place
    assert [r.label for r in made(folder)] == ["one/seed-0", "one/seed-1", "fast/seed-0"]
    model, card = load_specimen("one", 1, device="cpu", folder=folder)
    assert card["tokens"] == 6 * 4 * 8
    assert card["recipe"]["training"]["optimizer"] == "muon"
    assert abs(card["loss"]["rounding"]) < 0.002
    assert len(card["seconds"]) == len(card["history"]["step"]) == 2
    exact, _ = load_checkpoint(folder / "work" / "one" / "seed-1" / "final")
    rounded = from_eight_bits(in_eight_bits(exact.state_dict()))
    assert all(torch.equal(v, rounded[k]) for k, v in model.state_dict().items())
    assert not (folder / "records" / "fast" / "seed-0" / "model.safetensors").exists()
    # Neither is trained again, even when the source of the code has another text.
    monkeypatch.setattr(specimens, "ProcessPoolExecutor", None)
    assert made(folder) == []
    lines = check_specimens(folder=folder)
    assert len(lines) == 3
    assert "as its card says" in lines[0]
    assert "a record" in lines[2]


def test_a_finished_training_without_its_specimen_is_taken_not_repeated(place, monkeypatch):
    folder, _ = place
    made(folder, ["one/seed-0"])
    first = (folder / "one" / "seed-0" / "meta.json").read_text()
    for path in (folder / "one" / "seed-0").iterdir():
        path.unlink()
    (folder / "one" / "seed-0").rmdir()
    monkeypatch.setattr("attnlib.training._train_loop", None)
    specimens._make(recipes(["one/seed-0"], folder=folder)[0], folder, folder / "work", 0, False)
    assert (folder / "one" / "seed-0" / "meta.json").read_text() == first


def test_what_is_damaged_foreign_or_of_another_recipe_is_refused(place, tmp_path):
    folder, book = place
    with pytest.raises(InputError, match="has not been trained: `python -m attnlib specimens one"):
        load_specimen("one", 0, folder=folder)
    assert check_specimens(["one"], folder=folder)[0] == "one/seed-0: not trained yet"
    made(folder, ["one/seed-0"])
    path = folder / "one" / "seed-0"

    other = json.loads(json.dumps(book))
    other["shared"]["training"]["steps"] = 7
    write(folder, other)
    for asked in (lambda: load_specimen("one", 0, folder=folder), lambda: made(folder)):
        with pytest.raises(InputError, match="give a changed recipe a name of its own"):
            asked()
    write(folder, book)

    (folder / "text.txt").write_text(TEXT[:-1])
    with pytest.raises(InputError, match="another text than"):
        check_specimens(["one"], folder=folder)
    (folder / "text.txt").write_text(TEXT)

    card = json.loads((path / "meta.json").read_text())
    card["loss"]["loss"] += 0.01
    (path / "meta.json").write_text(json.dumps(card))
    with pytest.raises(InputError, match="nats here, its card says"):
        check_specimens(["one"], folder=folder)

    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-9])
    with pytest.raises(InputError, match=r"damaged .*wrong hash"):
        check_specimens(["one"], folder=folder)

    save_checkpoint(path, GPT(GPTConfig(n_layer=1, n_head=1, d_model=4, context=8)))
    with pytest.raises(InputError, match="no specimen: its card names no recipe"):
        load_specimen("one", 0, folder=folder)


def test_recipes_that_no_model_has(place):
    folder, book = place
    for part, message in (
        ({"model": {"n_layers": 3}}, "unknown n_layers"),
        ({"training": {"optimizer": "sgd"}}, "optimizer is one of"),
    ):
        write(folder, {**book, "specimens": {"one": {"seeds": [0], **part}}})
        with pytest.raises(InputError, match=message):
            recipes(folder=folder)
    (folder / "recipes.yaml").write_text("- one")
    with pytest.raises(InputError, match="is no list of recipes"):
        recipes(folder=folder)
    write(folder, book)
    with pytest.raises(InputError, match="no specimen two; there are fast"):
        recipes(["two"], folder=folder)


def test_rounding_that_costs_too_much_makes_no_specimen(place, monkeypatch):
    folder, _ = place
    recipe = recipes(["one/seed-0"], folder=folder)[0]
    monkeypatch.setattr(specimens, "MOST_LOST", 1e-12)
    with pytest.raises(InputError, match="no specimen is made of it"):
        specimens._make(recipe, folder, folder / "work", 0, False)
    assert not specimens.specimen_folder(recipe, folder).exists()
    assert (folder / "work" / "one" / "seed-0" / "final").is_dir()


def test_identity_is_of_the_recipe_alone(place):
    folder, _ = place
    one, two, _ = recipes(folder=folder)
    assert one.identity("x") != two.identity("x") != one.identity("y")
    assert one.identity("x") == replace(one, name="another").identity("x")


def test_those_of_the_book_are_as_their_cards_say(capsys):
    there = [r for r in recipes() if specimens.specimen_folder(r).is_dir()]
    assert [r.label for r in there][:1] == ["base/seed-0"]
    for recipe in there:
        if recipe.weights:
            load_specimen(recipe.name, recipe.seed, device="cpu")  # hashes and recipe
    size = sum(p.stat().st_size for p in (project_root() / "specimens").rglob("*.safetensors"))
    assert size < 100e6
    assert main(["specimens", "base/seed-0", "--check"]) == 0
    assert "as its card says" in capsys.readouterr().out
