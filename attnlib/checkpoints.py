"""Checkpoints: a folder of safetensors and JSON, written atomically, refused if unfit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch

from .errors import InputError
from .gpt import GPT, GPTConfig


def pick_device(name: str = "auto") -> torch.device:
    """The named device, or with ``"auto"`` the first of cuda, mps, cpu that the machine has."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((n for n, there in available.items() if there), "cpu")
    kind = name.split(":")[0]
    if kind not in ("cuda", "mps", "cpu"):
        raise InputError(f"device is 'auto', 'cuda', 'mps' or 'cpu', not '{name}'")
    if not available.get(kind, True):
        raise InputError(f"device='{name}', but this machine has none: use 'auto' or 'cpu'")
    return torch.device(name)


def save_checkpoint(path, model: GPT, *, meta: dict | None = None, tensors: dict | None = None):
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
    """
    from safetensors.torch import save_file

    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
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
        shutil.rmtree(fresh, ignore_errors=True)
        raise InputError(f"cannot write the checkpoint {path}: {error}") from error


def read_checkpoint(path) -> tuple[dict, dict, dict]:
    """``(meta, weights, state)`` of a checkpoint folder, its hashes checked."""
    from safetensors.torch import load

    path = Path(path)
    if not (path / "meta.json").is_file():
        raise InputError(f"{path} is not a checkpoint: run the notebook that trains it first")
    meta, parts = json.loads((path / "meta.json").read_text()), []
    for name in ("model.safetensors", "state.safetensors"):
        if name not in meta["sha256"]:
            parts.append({})
            continue
        content = (path / name).read_bytes() if (path / name).is_file() else b""
        if hashlib.sha256(content).hexdigest() != meta["sha256"][name]:
            raise InputError(f"{path / name} is damaged (wrong hash): delete {path} and train anew")
        parts.append(load(content))
    return meta, *parts


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
    model = model if model is not None else GPT(GPTConfig.from_dict(meta["model"]))
    load_weights(model, weights, path)
    return model.to(pick_device(device)).eval(), meta


def load_weights(model: GPT, weights: dict, path) -> None:
    """Load all weights or none; `path` names them in the error where keys or shapes differ."""
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
    model.load_state_dict(weights)
