"""Several trainings side by side, and the models that a results folder holds."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from .checkpoints import load_checkpoint
from .corpus import load_text, make_tokenizer, split_tokens, text_hash, windows
from .device import pick_device
from .errors import InputError, check_whole
from .gpt import GPT, GPTConfig
from .store import load
from .training import TrainConfig, train

FIRST = "01_data_and_models.nc"


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
    seeds=(0,),
    jobs: int | None = None,
    progress: bool = True,
) -> dict[tuple[str, int], tuple]:
    """Train each of several shapes from each of several seeds, or take the finished runs.

    Parameters
    ----------
    runs : dict of str to GPTConfig
        Name and shape of each model. Where trainings take different times, name the longest first.
    corpus : str
        As for :func:`attnlib.load_text`.
    config : TrainConfig
        Shared by all. Its seed is replaced by each of `seeds`, so that models of one seed see the
        same batches in the same order.
    out : path-like
        The folder of a run is ``out/seed-SEED/NAME``.
    seeds : sequence of int, or dict of str to sequence of int
        Of initial weights, data order and dropout; a dict gives each model its own.
    jobs : int, optional
        How many at a time. By default one on a GPU, else as many as torch has threads; each has
        its share of them.
    progress : bool

    Returns
    -------
    dict
        (name, seed) to ``(model, meta)`` as from :func:`attnlib.train`.

    Raises
    ------
    InputError
        As :func:`attnlib.train`, no runs at all, a seed given twice, or a checkpoint that another
        process replaced.
    """
    import torch

    seeds = seeds if isinstance(seeds, dict) else dict.fromkeys(runs, seeds)
    if not runs or set(seeds) != set(runs) or not all(len(some) for some in seeds.values()):
        raise InputError("no models to train: name at least one kind of attention and one seed")
    for name, some in seeds.items():
        if len(set(some)) < len(some):
            raise InputError(f"a seed is given twice: {list(some)}")
        if Path(name).name != name:
            raise InputError(f"{name!r} cannot be the name of a model: it is that of a folder too")
    tasks = [(name, check_whole("a seed", seed, 0)) for name in runs for seed in seeds[name]]
    # The threads that this process may use: OMP_NUM_THREADS, if set, else all cores.
    cores = torch.get_num_threads()
    on_cpu = pick_device(config.device).type == "cpu"
    jobs = jobs or (min(len(tasks), cores) if on_cpu else 1)
    threads = max(1, cores // jobs)
    # Fresh processes even for one job: the thread count then does not depend on the caller.
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _start_worker, (threads,)
    ) as pool:
        waiting = {
            (name, seed): pool.submit(
                _work,
                f"{name}, seed {seed}",
                runs[name],
                corpus,
                replace(config, seed=seed),
                run_folder(out, name, seed),
                seed,
                i % jobs,
                progress,
            )
            for i, (name, seed) in enumerate(tasks)
        }
        try:
            marks = {task: future.result() for task, future in waiting.items()}
        except BrokenProcessPool as error:
            raise InputError(
                "a training process was killed (out of memory?): run again, it continues from its "
                "last checkpoint, or ask for jobs=1"
            ) from error
    trained = {}
    for task, mark in marks.items():
        trained[task] = load_checkpoint(run_folder(out, *task) / "final", device=config.device)
        if trained[task][1]["fingerprint"] != mark:
            raise InputError(
                f"another run has replaced the checkpoint of {task[0]} in {out}: use another folder"
            )
    return trained


def run_folder(out, name: str, seed: int) -> Path:
    """Folder of one run of :func:`train_all`, in its folder `out`; ``final`` is the checkpoint."""
    return Path(out) / f"seed-{seed}" / name


def load_runs(
    results,
    n_snapshots: int,
    *,
    seed: int = 0,
    training_seed: int | None = None,
    names=(),
    device: str = "auto",
    source: str = FIRST,
):
    """Models that a notebook trained, and document windows of the validation text.

    Parameters
    ----------
    results : path-like
        Its results folder.
    n_snapshots : int
        Windows of the models' full context, the same for all models.
    seed : int
        Of the windows.
    training_seed : int, optional
        Which trainings to take; by default those of the first seed.
    names : sequence of str
        Which models; all by default.
    device : str
    source : str
        Results file of the notebook that trained them, by default the first.

    Returns
    -------
    models : dict of str to GPT
    tokens : torch.Tensor
        ``(n_snapshots, context)``
    corpus_hash : str

    Raises
    ------
    InputError
        The notebook has not run, its checkpoints are gone or belong to another run, it trained no
        such model or seed, or the text is not the one that it used.
    """
    results = Path(results)
    trained = load(results / source)
    seeds = [int(s) for s in trained["seed"].values]
    training_seed = seeds[0] if training_seed is None else training_seed
    there = [str(m) for m in trained["model"].values]
    names = list(names) or there
    if training_seed not in seeds or not set(names) <= set(there):
        raise InputError(
            f"notebook {source[:2]} trained {', '.join(there)} with seeds {seeds}, not "
            f"{', '.join(names)} with seed {training_seed}"
        )
    models = {n: _trained_model(results, trained, n, training_seed, device) for n in names}
    context = models[names[0]].config.context
    tokens = held_out_windows(results, n_snapshots, context, seed=seed)
    return models, tokens, trained.attrs["corpus_hash"]


def every_run(
    results, *, names=(), device: str = "auto", source: str = FIRST
) -> dict[tuple[str, int], GPT]:
    """All trainings of a notebook, of every seed.

    Parameters
    ----------
    results, names, device, source
        As in :func:`load_runs`, which raises the same errors.

    Returns
    -------
    dict
        (Name, seed) to the model, the first seed's models first.
    """
    results = Path(results)
    trained = load(results / source)
    there = [str(m) for m in trained["model"].values]
    names = list(names) or there
    if not set(names) <= set(there):
        raise InputError(
            f"notebook {source[:2]} trained {', '.join(there)}, not "
            f"{', '.join(n for n in names if n not in there)}"
        )
    pairs = [(n, int(s)) for s in trained["seed"].values for n in names]
    return {
        (n, s): _trained_model(results, trained, n, s, device)
        for n, s in pairs
        if _mark_of(trained, n, s)
    }


def kept_models(
    results, name: str, seed: int, *, device: str = "auto", source: str = FIRST
) -> dict[int, GPT]:
    """One training as it went on: its model at each step that was kept.

    Parameters
    ----------
    results, device, source
        As in :func:`load_runs`, which raises the same errors.
    name : str
    seed : int

    Returns
    -------
    dict of int to GPT
        Step to model: 0, the initial weights; ``keep_steps`` of the training; and its last.
    """
    results = Path(results)
    trained = load(results / source)
    last = _trained_model(results, trained, name, seed, device)
    folder = run_folder(results / "models", name, seed)
    models = {0: untrained(last, seed=seed)}
    for path in sorted(folder.glob("kept-*")):
        model, meta = load_checkpoint(path, device=device)
        _check_mark(meta, trained, name, seed)
        models[meta["step"]] = model
    return models | {load_checkpoint(folder / "final")[1]["step"]: last}


def _trained_model(results: Path, trained, name: str, seed: int, device: str) -> GPT:
    """One model of a notebook, if its checkpoint is the one that the results speak of."""
    folder = run_folder(results / "models", name, seed) / "final"
    model, meta = load_checkpoint(folder, device=device)
    _check_mark(meta, trained, name, seed)
    return model


def _mark_of(trained, name: str, seed: int) -> str:
    """Fingerprint of a run, or nothing where a model was not trained from that seed."""
    return str(trained["fingerprint"].sel(model=name, seed=seed).item())


def _check_mark(meta: dict, trained, name: str, seed: int) -> None:
    if meta["fingerprint"] != _mark_of(trained, name, seed):
        raise InputError(f"the checkpoint of {name} is of another run: run its notebook again")


def held_out_windows(results, n: int, length: int, *, seed: int = 0, part: str = "validation"):
    """Document windows of the validation text of notebook 01, as token ids ``(n, length)``.

    Parameters
    ----------
    results : path-like
    n, length, seed
        As in :func:`attnlib.windows`.
    part : {"validation", "training", "all"}
        ``"training"`` draws from what the models were trained on, to train them further; ``"all"``
        from the whole text, for ensembles larger than the validation text holds, so that most
        windows are of text that the models were trained on.

    Raises
    ------
    InputError
        The notebook has not run, the text has changed, or it is too short.
    """
    trained = load(Path(results) / FIRST)
    text = load_text(trained.attrs["corpus"])
    if text_hash(text) != trained.attrs["corpus_hash"]:
        raise InputError(f"the text {trained.attrs['corpus']} has changed: run notebook 01 again")
    if part not in ("training", "validation", "all"):
        raise InputError(f"part is 'training', 'validation' or 'all', not {part!r}")
    everything = _encoded(trained.attrs["tokenizer"], text)
    halves = dict(zip(("training", "validation"), split_tokens(everything), strict=True))
    tokens = everything if part == "all" else halves[part]
    return windows(tokens, n, length, seed=seed)


@functools.lru_cache(maxsize=1)
def _encoded(tokenizer: str, text: str):
    """All tokens of a text; the notebooks ask several times for windows of one."""
    return make_tokenizer(tokenizer, text).encode(text)


def run_tokenizer(results):
    """Tokenizer of the models that notebook 01 trained."""
    trained = load(Path(results) / FIRST)
    return make_tokenizer(trained.attrs["tokenizer"], load_text(trained.attrs["corpus"]))


def run_seeds(results) -> list[int]:
    """Seeds of the trainings of notebook 01."""
    return [int(s) for s in load(Path(results) / FIRST)["seed"].values]


def run_recipe(results, *, source: str = FIRST) -> TrainConfig:
    """How a notebook trained, for trainings that are to be compared with its own.

    `source` is its results file, by default that of notebook 01. The seed is one of its own.
    """
    trained = load(Path(results) / source)
    name = str(trained["model"].values[0])
    seed = next(int(s) for s in trained["seed"].values if _mark_of(trained, name, s))
    meta = load_checkpoint(run_folder(Path(results) / "models", name, seed) / "final")[1]
    _check_mark(meta, trained, name, seed)
    recipe = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["training"].items()}
    return TrainConfig(**recipe)


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


def by_run(parts: dict):
    """Results of several trainings as one, on the new first dimensions `seed` and `model`.

    Parameters
    ----------
    parts : dict of (str, int) to xarray.DataArray or xarray.Dataset
        (Name of the model, seed) to its result. What a seed lacks is NaN there.

    Returns
    -------
    xarray.DataArray or xarray.Dataset
    """
    import xarray as xr

    seeds = list(dict.fromkeys(seed for _, seed in parts))
    of_seed = [by_model({n: r for (n, s), r in parts.items() if s == seed}) for seed in seeds]
    return xr.concat(
        of_seed,
        dim=xr.DataArray(seeds, dims="seed", name="seed"),
        join="outer",
        combine_attrs="drop_conflicts",
    )


def untrained(model, seed: int = 1000):
    """A model of the same shape with fresh weights, on the same device: the null of training.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
    seed : int
        Of the weights; not that of the trained models.

    Returns
    -------
    GPT or transformers.PreTrainedModel
        In evaluation mode.
    """
    import torch

    if isinstance(model, GPT):
        fresh = GPT(model.config, seed=seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(check_whole("seed", seed, 0))
            fresh = type(model)(model.config)
    return fresh.to(next(model.parameters()).device).eval()
