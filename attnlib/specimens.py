"""Specimens: trained models that the book keeps and measures, each with its card.

A specimen is a checkpoint folder ``specimens/NAME/seed-SEED`` whose weights are rounded to 8 bits
and whose ``meta.json`` is its card: recipe, corpus, tokens, seconds, machine, versions, losses,
hashes. A record is a card without weights. What is to be trained stands in
``specimens/recipes.yaml``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path

from .checkpoints import (
    from_eight_bits,
    in_eight_bits,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from .corpus import load_text, make_tokenizer, split_tokens, text_hash, windows
from .errors import InputError
from .evaluation import evaluate
from .gpt import GPT, GPTConfig
from .runner import project_root
from .runs import _start_worker
from .store import provenance
from .training import TrainConfig, train

MOST_LOST = 0.002  # nats that rounding may cost
MOST_DRIFT = 0.002  # nats between machines: other orders of summation, nothing else
SCORED = 64  # validation windows of the loss in a card
CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class Recipe:
    """One training of ``specimens/recipes.yaml``: all that decides its weights."""

    name: str
    seed: int
    corpus: str
    model: dict
    training: dict
    weights: bool

    @property
    def label(self) -> str:
        return f"{self.name}/seed-{self.seed}"

    @property
    def tokens(self) -> int:
        return self.training["steps"] * self.training["batch_size"] * self.model["context"]

    def identity(self, corpus_hash: str) -> str:
        """What is the same for one training and no other: not the text of the code."""
        parts = {"corpus_hash": corpus_hash, "model": self.model, "training": self.training}
        text = json.dumps(parts | {"seed": self.seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def configs(self) -> tuple[GPTConfig, TrainConfig]:
        shape, how = (
            {k: tuple(v) if isinstance(v, list) else v for k, v in part.items()}
            for part in (self.model, self.training)
        )
        return GPTConfig(**shape), TrainConfig(
            **how, seed=self.seed, checkpoint_every=CHECKPOINT_EVERY
        )


def recipes(names=(), *, folder=None) -> list[Recipe]:
    """What is to be trained, in order: ``specimens/recipes.yaml``, read and checked.

    Parameters
    ----------
    names : sequence of str
        ``"base"`` for all its seeds, ``"base/seed-1"`` for one; all by default.
    folder : path-like, optional
        By default ``specimens`` of this project.

    Raises
    ------
    InputError
        No such file or name, or a recipe that no model or training has.
    """
    import yaml

    path = _folder(folder) / "recipes.yaml"
    try:
        book = yaml.safe_load(path.read_text())
        found = [
            Recipe(
                name,
                seed,
                book["corpus"],
                {**book["shared"]["model"], **own.get("model", {})},
                {**book["shared"]["training"], **own.get("training", {})},
                kind == "specimens",
            )
            for kind in ("specimens", "records")
            for name, own in (book.get(kind) or {}).items()
            for seed in own["seeds"]
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no list of recipes ({type(error).__name__}: {error})"
        ) from error
    for recipe in found:
        for part, known in ((recipe.model, GPTConfig), (recipe.training, TrainConfig)):
            unknown = set(part) - {f.name for f in fields(known)}
            if unknown:
                raise InputError(
                    f"{recipe.name} of {path}: unknown {', '.join(map(str, sorted(unknown)))}"
                )
        recipe.configs()  # refuses impossible values
    known = {r.name for r in found} | {r.label for r in found}
    if not set(names) <= known:
        missing = ", ".join(sorted(set(names) - known))
        raise InputError(f"no specimen {missing}; there are {', '.join(sorted(known))}")
    return [r for r in found if not names or {r.name, r.label} & set(names)]


def load_specimen(
    name: str, seed: int = 0, *, device: str = "auto", folder=None
) -> tuple[GPT, dict]:
    """A specimen and its card, hashes checked.

    Parameters
    ----------
    name : str
    seed : int
        Of its training.
    device : str
    folder : path-like, optional
        By default ``specimens`` of this project.

    Returns
    -------
    model : GPT
        In evaluation mode; its weights are float32, the rounded values.
    card : dict
        ``recipe``, ``identity``, ``corpus_hash``, ``tokens``, ``seconds``, ``machine``,
        ``versions``, ``precision``, ``history``, ``loss``, ``sha256``, ...

    Raises
    ------
    InputError
        A specimen that is not there, is damaged, or is not of its recipe.
    """
    recipe = recipes([f"{name}/seed-{seed}"], folder=folder)[0]
    path = specimen_folder(recipe, folder)
    if not (path / "meta.json").is_file():
        raise InputError(
            f"the specimen {recipe.label} has not been trained: "
            f"`python -m attnlib specimens {recipe.label}` trains it"
        )
    model, card = load_checkpoint(path, device=device)
    _check_card(recipe, card, path)
    return model, card


def specimen_folder(recipe: Recipe, folder=None) -> Path:
    """Where a recipe's specimen, or record, lies."""
    base = _folder(folder)
    return (base if recipe.weights else base / "records") / recipe.label


def _folder(folder) -> Path:
    return Path(folder) if folder is not None else project_root() / "specimens"


def _check_card(recipe: Recipe, card: dict, path) -> None:
    identity = card.get("identity")
    if identity is None:
        raise InputError(f"{path} is no specimen: its card names no recipe")
    if identity != recipe.identity(card["corpus_hash"]):
        raise InputError(
            f"{path} was trained by another recipe than that in recipes.yaml: give a changed "
            "recipe a name of its own"
        )


def make_specimens(
    names=(), *, folder=None, work=None, jobs: int | None = None, progress: bool = True
) -> list[Recipe]:
    """Train what is missing, in order; a killed call continues when it is made again.

    Parameters
    ----------
    names, folder
        ``"base"`` for all its seeds, ``"base/seed-1"`` for one, by default all; and the folder
        of specimens, by default that of this project.
    work : path-like, optional
        Where trainings keep their checkpoints; by default ``build/specimens``.
    jobs : int, optional
        Trainings side by side: by default as many as torch has threads on a CPU (one thread each is
        the fastest use of them), one on a GPU.
    progress : bool
        A bar for all tokens, with the time left, and one for each training.

    Returns
    -------
    list of Recipe
        What was trained.

    Raises
    ------
    InputError
        An unknown name, bad recipes, or as :func:`attnlib.train`; a specimen of another recipe
        under that name; weights whose rounding costs more than 0.002 nats.
    """
    import multiprocessing
    import sys

    import torch
    from tqdm import tqdm

    from .device import pick_device

    asked = recipes(names, folder=folder)
    missing = [r for r in asked if not (specimen_folder(r, folder) / "meta.json").is_file()]
    for recipe in asked:
        if recipe not in missing:
            path = specimen_folder(recipe, folder)
            _check_card(recipe, read_checkpoint(path)[0], path)
    if not missing:
        return []
    load_text(missing[0].corpus)  # fetched once, before the processes ask for it
    work = Path(work) if work is not None else project_root() / "build" / "specimens"
    cores = torch.get_num_threads()
    jobs = jobs or (min(cores, len(missing)) if pick_device().type == "cpu" else 1)
    bar = tqdm(
        total=sum(r.tokens for r in missing),
        desc=f"{len(missing)} trainings",
        unit="tok",
        unit_scale=True,
        disable=not progress,
        file=sys.stderr,
        dynamic_ncols=True,
    )
    context = multiprocessing.get_context("spawn")
    threads = (max(1, cores // jobs),)
    with bar, ProcessPoolExecutor(jobs, context, _start_worker, threads) as pool:
        waiting = {
            pool.submit(_make, recipe, _folder(folder), work, 1 + i % jobs, progress): recipe
            for i, recipe in enumerate(missing)
        }
        try:
            for done in as_completed(waiting):
                done.result()
                bar.update(waiting[done].tokens)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return missing


def _make(recipe: Recipe, folder: Path, work: Path, position: int, progress: bool) -> None:
    """Train one recipe, or take its finished training, and leave its specimen or record."""
    text = load_text(recipe.corpus)
    shape, how = recipe.configs()
    model, meta = train(
        shape,
        text,
        how,
        work / recipe.label,
        seed=recipe.seed,
        identity=recipe.identity(text_hash(text)),
        name=recipe.label,
        position=position,
        progress=progress,
    )
    keep(recipe, model, meta, text, folder)


def keep(recipe: Recipe, model: GPT, meta: dict, text: str, folder=None) -> Path:
    """Round the weights to 8 bits, score the model before and after, and write it and its card.

    Parameters
    ----------
    recipe : Recipe
    model, meta
        As from :func:`attnlib.train`.
    text : str
        What it was trained on.
    folder : path-like, optional
        By default ``specimens`` of this project.

    Returns
    -------
    pathlib.Path
        The specimen's folder, or the record's.

    Raises
    ------
    InputError
        Rounding costs more than 0.002 nats.
    """
    scored = _scored(recipe, text)
    exact = evaluate(model, scored, precision="float32")
    if recipe.weights:
        stored = in_eight_bits(model.state_dict())
        model.load_state_dict(from_eight_bits(stored))
    rounded = evaluate(model, scored, precision="float32")
    lost = rounded["loss"] - exact["loss"]
    if abs(lost) > MOST_LOST:
        raise InputError(
            f"{recipe.label}: rounding to 8 bits changes the loss by {lost:.4f} nats, more than "
            f"{MOST_LOST}: the training is kept, but no specimen is made of it"
        )
    versions = json.loads(provenance()["versions"])
    card = {
        "name": recipe.name,
        "seed": recipe.seed,
        "recipe": {"model": recipe.model, "training": recipe.training},
        "identity": recipe.identity(text_hash(text)),
        "corpus": recipe.corpus,
        "tokens": meta["step"] * recipe.training["batch_size"] * recipe.model["context"],
        "loss": {**rounded, "rounding": lost},
        "machine": machine(),
        "versions": versions,
        **{k: meta[k] for k in ("corpus_hash", "characters", "precision", "step", "seconds")},
        **{k: meta[k] for k in ("diverged_at", "history", "training")},
    }
    path = specimen_folder(recipe, folder)
    if recipe.weights:
        save_checkpoint(path, model, meta=card, weights=stored)
    else:
        path.mkdir(parents=True, exist_ok=True)
        fresh = path / f".meta.json.{os.getpid()}.tmp"
        fresh.write_text(json.dumps({"model": model.config.to_dict(), "sha256": {}, **card}))
        os.replace(fresh, path / "meta.json")
    return path


def _scored(recipe: Recipe, text: str):
    """Validation windows of a card's loss: not those of the training's own history."""
    tokens = split_tokens(make_tokenizer("char", text).encode(text))[1]
    return windows(tokens, SCORED, recipe.model["context"] + 1, seed=recipe.seed + 1)


def machine() -> dict:
    """What trained: architecture, cores, vector instructions or GPU."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
    }


def check_specimens(names=(), *, folder=None) -> list[str]:
    """Each specimen and record against its recipe, its hashes and its loss, on this machine.

    Parameters
    ----------
    names, folder
        As for :func:`attnlib.make_specimens`.

    Returns
    -------
    list of str
        One line each; nothing that is missing is an error.

    Raises
    ------
    InputError
        A damaged or foreign specimen, a text that is not its card's, or a loss that is not the
        recorded one to 0.002 nats.
    """
    lines = []
    for recipe in recipes(names, folder=folder):
        path = specimen_folder(recipe, folder)
        if not (path / "meta.json").is_file():
            lines.append(f"{recipe.label}: not trained yet")
            continue
        if recipe.weights:
            model, card = load_specimen(recipe.name, recipe.seed, folder=folder)
        else:
            card = read_checkpoint(path)[0]
            _check_card(recipe, card, path)
        recorded = card["loss"]["loss"]
        if not recipe.weights:
            lines.append(f"{recipe.label}: a record, {recorded:.4f} nats")
            continue
        text = load_text(recipe.corpus)
        if text_hash(text) != card["corpus_hash"]:
            raise InputError(
                f"{recipe.label} was trained on another text than the {recipe.corpus} here: its "
                f"hash is {card['corpus_hash'][:12]}..., this one's {text_hash(text)[:12]}..."
            )
        found = evaluate(model, _scored(recipe, text), precision="float32")["loss"]
        if abs(found - recorded) > MOST_DRIFT:
            raise InputError(
                f"{recipe.label} has a loss of {found:.4f} nats here, its card says {recorded:.4f}"
            )
        lines.append(f"{recipe.label}: {found:.4f} nats, as its card says ({recorded:.4f})")
    return lines
