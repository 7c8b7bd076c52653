"""Several trainings side by side, and the models that a results folder holds."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .checkpoints import load_checkpoint
from .corpus import load_text, make_tokenizer, split_tokens, text_hash, windows
from .device import pick_device
from .errors import InputError
from .gpt import GPT, GPTConfig
from .store import load
from .training import TrainConfig, train


def _start_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    # A worker must not outlive a killed parent: a restart would meet it in the same folder.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(name, shape, corpus, config, out, seed, position, progress) -> str:
    _, meta = train(
        shape,
        load_text(corpus),
        config,
        out,
        seed=seed,
        name=name,
        position=position,
        progress=progress,
    )
    return meta["fingerprint"]


def train_all(
    runs: dict[str, GPTConfig],
    corpus: str,
    config: TrainConfig,
    out,
    *,
    seed: int = 0,
    jobs: int | None = None,
    progress: bool = True,
) -> dict[str, tuple]:
    """Train each of several shapes on the same batches, or take the finished runs.

    Parameters
    ----------
    runs : dict of str to GPTConfig
        Name and shape of each model; the run's folder is ``out/name``.
    corpus : str
        As for :func:`attnlib.load_text`.
    config : TrainConfig
        Shared by all, so that all see the same batches in the same order.
    out : path-like
    seed : int
        Of the initial weights.
    jobs : int, optional
        How many at a time. By default one on a GPU, else as many as there are cores; each has
        ``cores // jobs`` threads.
    progress : bool

    Returns
    -------
    dict
        Name to ``(model, meta)`` as from :func:`attnlib.train`, in the order of `runs`.

    Raises
    ------
    InputError
        As :func:`attnlib.train`, no runs at all, or a checkpoint that another process replaced.
    """
    if not runs:
        raise InputError("no models to train: name at least one kind of attention")
    cores = os.cpu_count() or 1
    on_cpu = pick_device(config.device).type == "cpu"
    jobs = jobs or (min(len(runs), cores) if on_cpu else 1)
    threads = max(1, cores // jobs)
    # Fresh processes even for one job: the thread count then does not depend on the caller.
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _start_worker, (threads,)
    ) as pool:
        waiting = [
            pool.submit(_work, name, shape, corpus, config, Path(out) / name, seed, i, progress)
            for i, (name, shape) in enumerate(runs.items())
        ]
        marks = [future.result() for future in waiting]
    trained = {}
    for name, mark in zip(runs, marks, strict=True):
        trained[name] = load_checkpoint(Path(out) / name / "final", device=config.device)
        if trained[name][1]["fingerprint"] != mark:
            raise InputError(
                f"another run has replaced the checkpoint of {name} in {out}: use another folder"
            )
    return trained


def load_runs(results, n_snapshots: int, *, seed: int = 0, device: str = "auto"):
    """Models that notebook 01 trained, and document windows of its validation text.

    Parameters
    ----------
    results : path-like
        Its results folder.
    n_snapshots : int
        Windows of the models' full context, the same for all models.
    seed : int
        Of the windows.
    device : str

    Returns
    -------
    models : dict of str to GPT
    tokens : torch.Tensor
        ``(n_snapshots, context)``
    corpus_hash : str

    Raises
    ------
    InputError
        The notebook has not run, its checkpoints are gone or belong to another run, or the text
        is not the one that it used.
    """
    results = Path(results)
    trained = load(results / "01_data_and_models.nc")
    models = {}
    for name, mark in zip(trained["model"].values, trained["fingerprint"].values, strict=True):
        model, meta = load_checkpoint(results / "models" / str(name) / "final", device=device)
        if meta["fingerprint"] != mark:
            raise InputError(f"the checkpoint of {name} is of another run: run notebook 01 again")
        models[str(name)] = model
    text = load_text(trained.attrs["corpus"])
    if text_hash(text) != trained.attrs["corpus_hash"]:
        raise InputError(f"the text {trained.attrs['corpus']} has changed: run notebook 01 again")
    tokenizer = make_tokenizer(meta["training"]["tokenizer"], text)
    validation = split_tokens(tokenizer.encode(text))[1]
    tokens = windows(validation, n_snapshots, model.config.context, seed=seed)
    return models, tokens, meta["corpus_hash"]


def by_model(parts: dict):
    """Results of several models as one, on a new first dimension `model`.

    Parameters
    ----------
    parts : dict of str to xarray.DataArray or xarray.Dataset
        Name of the model to its result.

    Returns
    -------
    xarray.DataArray or xarray.Dataset
    """
    import xarray as xr

    together = xr.concat(list(parts.values()), dim="model", combine_attrs="drop_conflicts")
    return together.assign_coords(model=list(parts))


def untrained(model: GPT, seed: int = 1000) -> GPT:
    """A model of the same shape with fresh weights, on the same device: the null of training.

    Parameters
    ----------
    model : GPT
    seed : int
        Of the weights; not that of the trained models.

    Returns
    -------
    GPT
        In evaluation mode.
    """
    return GPT(model.config, seed=seed).to(next(model.parameters()).device).eval()
