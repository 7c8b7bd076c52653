"""Checkpoints: a folder of safetensors and JSON, written atomically, refused if unfit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from .device import pick_device
from .errors import InputError
from .gpt import GPT, GPTConfig

TRAINING_ONLY = ("dropout", "init_std", "embedding_std", "residual_std")


def save_checkpoint(
    path,
    model: GPT,
    *,
    meta: dict | None = None,
    tensors: dict | None = None,
    weights: dict | None = None,
):
    """Write a checkpoint folder atomically: ``model.safetensors``, ``meta.json``, no pickle.

    Parameters
    ----------
    path : path-like
        The folder. It appears complete or not at all, and replaces an earlier one.
    model : GPT
    meta : dict, optional
        Anything that JSON can hold, beside the model's configuration.
    tensors : dict of str to Tensor, optional
        More state (optimizer, random generators), into ``state.safetensors``.
    weights : dict of str to Tensor, optional
        The model's weights as ``in_eight_bits`` gives them, to be stored so.

    Raises
    ------
    InputError
        The folder cannot be written.
    """
    from safetensors.torch import save_file

    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        if weights is None:
            weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        hashes = {}
        for name, content in (("model.safetensors", weights), ("state.safetensors", tensors)):
            if content:
                save_file(content, fresh / name)
                hashes[name] = hashlib.sha256((fresh / name).read_bytes()).hexdigest()
        record = {"model": model.config.to_dict(), "sha256": hashes, **(meta or {})}
        (fresh / "meta.json").write_text(json.dumps(record, indent=1))
        for file in fresh.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write the checkpoint {path}: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_checkpoint(path) -> tuple[dict, dict, dict]:
    """``(meta, weights, state)`` of a checkpoint folder, its hashes checked."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(path)
    if not (path / "meta.json").is_file():
        raise InputError(f"{path} is not a checkpoint: run the notebook that trains it first")
    try:
        meta, parts = json.loads((path / "meta.json").read_text()), []
        for name in ("model.safetensors", "state.safetensors"):
            wanted = meta["sha256"].get(name)
            content = (path / name).read_bytes() if wanted else b""
            if wanted and hashlib.sha256(content).hexdigest() != wanted:
                raise ValueError(f"wrong hash of {name}")
            parts.append(load(content) if wanted else {})
        meta["model"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete it and train anew"
        ) from error
    return meta, from_eight_bits(parts[0]), parts[1]


SCALE = "|scale"


def in_eight_bits(weights: dict) -> dict:
    """Matrices as whole numbers from -127 to 127, each row with a scale of its own.

    Parameters
    ----------
    weights : dict of str to Tensor
        Vectors stay as they are; the matrix `name` becomes int8 codes, and ``name|scale`` float32
        ``(rows, 1)``: weight = code * scale, wrong by half a scale at most.

    Returns
    -------
    dict of str to Tensor
        On the CPU.
    """
    import torch

    stored = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu().float()
        if weight.dim() < 2:
            stored[name] = weight.contiguous()
            continue
        largest = weight.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        stored[name] = (weight / scale).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def from_eight_bits(stored: dict) -> dict:
    """The weights that ``in_eight_bits`` stored; others are left as they are."""
    return {
        name: part.float() * stored[name + SCALE] if name + SCALE in stored else part
        for name, part in stored.items()
        if not name.endswith(SCALE)
    }


def load_checkpoint(path, model: GPT | None = None, device: str = "cpu") -> tuple[GPT, dict]:
    """Read a checkpoint folder.

    Parameters
    ----------
    path : path-like
    model : GPT, optional
        Load into this model; without it the model is built from the stored configuration.
    device : str
        As in :class:`TrainConfig`.

    Returns
    -------
    model : GPT
        In evaluation mode.
    meta : dict
        ``model`` (configuration) and whatever was saved: ``characters``, ``corpus_hash``, ...

    Raises
    ------
    InputError
        No checkpoint, a damaged one, or one of another architecture (naming the first keys that
        do not match). Nothing is loaded in part.
    """
    meta, weights, _ = read_checkpoint(path)
    stored = GPTConfig.from_dict(meta["model"])
    if model is None:
        model = GPT(stored)
    check_keys(model, weights, path)
    # Shapes alone do not tell two heads of 8 from four of 4.
    own, other = model.config.to_dict(), stored.to_dict()
    # What the shape does not depend on may differ.
    differ = [k for k in own if own[k] != other[k] and k not in TRAINING_ONLY]
    if differ:
        shown = ", ".join(f"{k}: model {own[k]}, checkpoint {other[k]}" for k in differ)
        raise InputError(f"{path} is a checkpoint of another architecture ({shown})")
    model.load_state_dict(weights)
    return model.to(pick_device(device)).eval(), meta


def check_keys(model: GPT, weights: dict, path) -> None:
    """Refuse weights, called `path` in the error, whose names or shapes are not the model's."""
    own = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    stored = {k: tuple(v.shape) for k, v in weights.items()}
    wrong = [k for k in {**own, **stored} if own.get(k) != stored.get(k)]
    if wrong:
        shown = "; ".join(
            f"{k}: model {own.get(k, 'has none')}, checkpoint {stored.get(k, 'has none')}"
            for k in wrong[:3]
        )
        raise InputError(
            f"{path} is a checkpoint of another architecture; {len(wrong)} keys differ ({shown})"
        )
