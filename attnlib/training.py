"""Training that survives a kill and resumes to the same weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .checkpoints import (
    check_keys,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from .corpus import batches, make_tokenizer, split_tokens, text_hash, windows
from .device import PRECISIONS, autocast, pick_device, training_precision
from .errors import InputError
from .evaluation import evaluate
from .gpt import GPT, GPTConfig
from .optimizers import OPTIMIZERS, Optimizers, learning_rate

# Modules whose text decides a run's weights.
DECISIVE = (
    "attention", "causal", "sd", "linear", "gpt", "optimizers", "training", "evaluation", "corpus",
)  # fmt: skip
HISTORY = ("train_loss", "val_loss", "val_loss_se", "grad_norm")


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The defaults are those of Zeris 2026.

    Parameters
    ----------
    steps, batch_size, accumulate : int
        Optimizer steps; windows a step; in how many micro-batches they are computed.
    optimizer : {"adamw", "muon", "muon-vo"}
        AdamW; Muon on the matrices of the blocks and AdamW on the rest; or the same with the
        queries' and keys' matrices left to AdamW. Muon needs torch 2.9.
    learning_rate, betas, weight_decay, warmup, clip
        Of both optimizers (decay on matrices alone): linear warm-up over `warmup` steps, cosine to
        0, gradient norm clipped to `clip`. `betas` are AdamW's; Muon's momentum is 0.95.
    eval_every, eval_windows : int
        Validation loss on `eval_windows` fixed disjoint windows, every `eval_every` steps.
    checkpoint_every : int
        A killed run loses at most this many steps.
    keep_steps : tuple of int
        Steps whose weights are kept, to look at the training afterwards; see
        :func:`attnlib.kept_models`.
    stop_if_diverged : bool
        What to do when the loss is no longer finite. False: an error. True: end the run there, with
        the last weights that were finite, and ``diverged_at`` in its record.
    seed : int
        Data order and dropout. (The initial weights have the seed given to `GPT`.)
    tokenizer : {"char", "gpt2"}
    device : {"auto", "cuda", "mps", "cpu"}
        ``"auto"`` takes the first of them that the machine has.
    precision : {"auto", "float32", "bfloat16"}
        Of the products: ``"auto"`` is bfloat16 autocast where that is faster, see
        ``attnlib.device.training_precision``. Weights and losses stay float32.
    compile : bool
        ``torch.compile`` the model.
    """

    steps: int = 5000
    batch_size: int = 64
    accumulate: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int = 300
    clip: float = 1.0
    eval_every: int = 250
    eval_windows: int = 64
    checkpoint_every: int = 250
    keep_steps: tuple[int, ...] = ()
    stop_if_diverged: bool = False
    seed: int = 0
    tokenizer: str = "char"
    device: str = "auto"
    precision: str = "auto"
    compile: bool = False

    def __post_init__(self):
        least = {"eval_windows": 3, "seed": 0}
        names = ("steps", "batch_size", "accumulate", "eval_every", "checkpoint_every", *least)
        for name in names:
            if getattr(self, name) < least.get(name, 1):
                raise InputError(
                    f"{name} is at least {least.get(name, 1)}, not {getattr(self, name)}"
                )
        if any(not 1 <= step <= self.steps for step in self.keep_steps):
            raise InputError(f"keep_steps lie between 1 and {self.steps}, not {self.keep_steps}")
        if not (0 < self.learning_rate < math.inf and self.warmup >= 0 and self.clip > 0):
            raise InputError("learning_rate and clip are positive and finite, warmup not negative")
        if self.batch_size % self.accumulate:
            raise InputError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer is one of {OPTIMIZERS}, not {self.optimizer!r}")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is one of {PRECISIONS}, not {self.precision!r}")


def training_state(optimizers: Optimizers, device: torch.device) -> dict[str, torch.Tensor]:
    """What a training needs beside the weights to go on as if it had never stopped."""
    state = {"rng.cpu": torch.get_rng_state(), **optimizers.state()}
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_training_state(state: dict, optimizers: Optimizers, device: torch.device) -> None:
    torch.set_rng_state(state.pop("rng.cpu"))
    if "rng.cuda" in state:
        on_gpu = state.pop("rng.cuda")
        if device.type == "cuda":
            torch.cuda.set_rng_state(on_gpu, device)
    optimizers.restore(state)


def training_steps(
    loss_of: Callable,
    stream: Iterator,
    optimizers: Optimizers,
    config: TrainConfig,
    device: torch.device,
    *,
    precision: str = "float32",
    first: int = 0,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The one loop: loss and gradient in micro-batches, clip, step.

    Parameters
    ----------
    loss_of : callable
        Inputs and targets ``(B, T)`` on `device` to their loss in nats.
    stream : iterator
        Of (inputs, targets), ``batch_size`` windows each.
    optimizers : Optimizers
        Over what is trained; the norm of their parameters' gradient is clipped.
    config : TrainConfig
    device : torch.device
    precision : {"float32", "bfloat16"}
    first : int
        Steps that were taken before.

    Yields
    ------
    done, loss, norm
        Steps taken, their last one's loss and gradient norm before clipping, scalars on `device`.
        Where either is not finite the step is not taken on a CPU, whose values are at hand; a GPU
        would have to wait for them.
    """
    micro = config.batch_size // config.accumulate
    for step in range(first, config.steps):
        inputs, targets = next(stream)
        total = torch.zeros((), device=device)
        for x, y in zip(inputs.split(micro), targets.split(micro), strict=True):
            with autocast(device, precision):
                loss = loss_of(x.to(device), y.to(device)) / config.accumulate
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(optimizers.whole.values(), config.clip)
        if device.type != "cpu" or bool(torch.isfinite(total + norm)):
            optimizers.step(learning_rate(step, config))
        yield step + 1, total, norm


def fingerprint(model_config: GPTConfig, config: TrainConfig, seed: int, corpus_hash: str) -> str:
    """Hash of all that decides a run's weights: parameters, corpus and the code that trains."""
    code = "".join((Path(__file__).parent / f"{name}.py").read_text() for name in DECISIVE)
    ignored = ("checkpoint_every",)
    decisive = {k: v for k, v in asdict(config).items() if k not in ignored}
    text = json.dumps([model_config.to_dict(), decisive, seed, corpus_hash, code])
    return hashlib.sha256(text.encode()).hexdigest()


def train(
    model: GPT | GPTConfig,
    text: str,
    config: TrainConfig | None = None,
    out=None,
    *,
    seed: int = 0,
    identity: str | None = None,
    name: str = "model",
    progress: bool = True,
    position: int = 0,
) -> tuple[GPT, dict]:
    """Train a model on the first 90% of a text, or take the finished run that `out` holds.

    Parameters
    ----------
    model : GPT or GPTConfig
        A model to train from where it is, or a shape. A shape's vocabulary is set from the text,
        and its initial weights from `seed`.
    text : str
    config : TrainConfig, optional
    out : path-like, optional
        Folder of the run. A killed run continues from its last checkpoint there and ends with the
        weights of an unbroken one, bit for bit on a CPU with the same number of threads; a
        finished run is loaded; a run of other parameters, text or code is set aside.
    seed : int
        Of the initial weights.
    identity : str, optional
        What tells this run from another in `out`, in the place of a hash of parameters, text and
        code: a long training is not to be lost to a change of a docstring.
    name, progress, position
        Label, visibility and line of the progress bar (loss, tokens/s, time left; on stderr).

    Returns
    -------
    model : GPT
        In evaluation mode, on the device of `config`.
    meta : dict
        ``history`` (``step``, ``train_loss``, ``val_loss``, ``val_loss_se``, ``grad_norm``; the
        training loss and the norm of the gradient before clipping are means over the steps since
        the last entry), ``model``, ``training``, ``diverged_at`` (a step, or None),
        ``corpus_hash``, ``characters`` and ``fingerprint``.
    """
    config = config or TrainConfig()
    device = pick_device(config.device)
    tokenizer = make_tokenizer(config.tokenizer, text)
    if isinstance(model, GPTConfig):
        model = GPT(replace(model, vocab_size=tokenizer.vocab_size), seed=seed)
        start_weights = ""
    else:
        flat = torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])
        start_weights = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    if model.config.vocab_size != tokenizer.vocab_size:
        raise InputError(
            f"the model has {model.config.vocab_size} tokens, the text {tokenizer.vocab_size}: "
            "pass a GPTConfig instead of a model to have the vocabulary set from the text"
        )
    corpus_hash = text_hash(text)
    meta = {
        "fingerprint": identity
        or fingerprint(model.config, config, seed, corpus_hash + start_weights),
        "training": asdict(config),
        "seed": seed,
        "corpus_hash": corpus_hash,
        "characters": getattr(tokenizer, "characters", None),
    }
    training, validation = split_tokens(tokenizer.encode(text))
    context = model.config.context
    held_out = windows(validation, config.eval_windows, context + 1, seed=config.seed)
    next(batches(training, 1, context))  # too short a text fails here, before anything is written
    run = _Run(Path(out), meta["fingerprint"]) if out is not None else None
    try:
        if run and run.finished:
            return load_checkpoint(run.final, model, config.device)
        shown = {"desc": name, "disable": not progress, "position": position}
        return _train_loop(model.to(device), training, held_out, config, meta, run, shown)
    finally:
        if run:
            run.lock.release()


class _Run:
    """The folder of one run: ``step-N`` checkpoints while it goes on, ``final`` at its end."""

    def __init__(self, folder: Path, mark: str):
        from filelock import FileLock, Timeout

        self.folder, self.final = folder, folder / "final"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("no permission to write")
        except OSError as error:
            raise InputError(f"the output folder {folder} cannot be written: {error}") from error
        self.lock = FileLock(folder / ".lock", timeout=30)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise InputError(f"another process is training in {folder}: wait for it") from error
        for path in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
            shutil.rmtree(path, ignore_errors=True)
        for path in [self.final, *self.steps(), *folder.glob("kept-*")]:
            if path.is_dir() and (other := self._mark(path)) != mark:
                # Somebody may have waited hours for it: set it aside rather than delete it.
                aside = folder / f"superseded-{other[:10]}-{path.name}"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
        for path in folder.glob("superseded-unreadable-step-*"):
            shutil.rmtree(path, ignore_errors=True)  # half of a checkpoint that a kill left
        self.finished = self.final.is_dir()

    @staticmethod
    def _mark(path: Path) -> str:
        try:
            return json.loads((path / "meta.json").read_text())["fingerprint"]
        except (OSError, ValueError, KeyError):
            return "unreadable"

    def steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, step: int, model, meta: dict, tensors: dict) -> None:
        older = self.steps()
        save_checkpoint(self.folder / f"step-{step:08d}", model, meta=meta, tensors=tensors)
        for path in older:
            shutil.rmtree(path)

    def keep(self, step: int, model, meta: dict) -> None:
        save_checkpoint(self.folder / f"kept-{step:08d}", model, meta={**meta, "step": step})

    def finish(self, model, meta: dict) -> None:
        save_checkpoint(self.final, model, meta=meta)
        for path in self.steps():
            shutil.rmtree(path)


def _train_loop(model, training, held_out, config, meta, run, shown):
    from tqdm import tqdm

    device = next(model.parameters()).device
    optimizers = Optimizers(model, config)
    history, clock = {k: [] for k in ("step", *HISTORY)}, []
    torch.manual_seed(config.seed)
    first, losses, norms = 0, [], []
    if run and run.steps():
        stored, weights, state = read_checkpoint(run.steps()[-1])
        check_keys(model, weights, run.folder)
        model.load_state_dict(weights)
        losses, norms = (list(state.pop(k).to(device)) for k in ("losses", "norms"))
        restore_training_state(state, optimizers, device)
        first, history, clock = stored["step"], stored["history"], stored["seconds"]
        # What it began in is what it goes on in, on whatever machine.
        meta["precision"] = stored["precision"]
    else:
        width = model.config.d_model
        meta["precision"] = training_precision(device, config.precision, width)
    context = model.config.context
    tokens_per_step = config.batch_size * context
    bar = tqdm(
        **shown,
        total=config.steps * tokens_per_step,
        initial=first * tokens_per_step,
        unit="tok",
        unit_scale=True,
        file=sys.stderr,
        mininterval=1.0,
        dynamic_ncols=True,
    )
    step_model = torch.compile(model) if config.compile else model
    good = None if device.type == "cpu" else _copy(model)
    began = time.monotonic() - (clock[-1] if clock else 0.0)
    diverged = None
    model.train()
    steps = training_steps(
        lambda x, y: step_model(x, y)[1],
        batches(training, config.batch_size, context, seed=config.seed, start=first),
        optimizers,
        config,
        device,
        precision=meta["precision"],
        first=first,
    )
    with bar:
        for done, loss, norm in steps:
            losses.append(loss)
            norms.append(norm)
            bar.update(tokens_per_step)
            evaluated = done % config.eval_every == 0 or done == config.steps
            saved = done % config.checkpoint_every == 0 and done < config.steps
            if device.type == "cpu" or evaluated or saved:
                finite = torch.isfinite(torch.stack(losses) + torch.stack(norms))
                if not finite.all():
                    if good is not None:
                        model.load_state_dict(good)
                    at = done - len(finite) + int(finite.int().argmin())  # steps before it
                    if not config.stop_if_diverged:
                        _not_finite(model, training, config, {**meta, "step": at}, run, shown)
                    diverged = at + 1
                    break
                good = None if device.type == "cpu" else _copy(model)
            if evaluated:
                recent, norm = (float(torch.stack(x).mean()) for x in (losses, norms))
                losses, norms = [], []
                held = evaluate(model, held_out)
                clock.append(round(time.monotonic() - began, 2))
                row = (done, recent, held["loss"], held["loss_se"], norm)
                for key, value in zip(history, row, strict=True):
                    history[key].append(value)
                bar.set_postfix(train=f"{recent:.3f}", val=f"{held['loss']:.3f}")
            if run and done in config.keep_steps:
                run.keep(done, model, meta)
            if run and saved:
                state = training_state(optimizers, device)
                for key, values in (("losses", losses), ("norms", norms)):
                    state[key] = torch.stack(values).cpu() if values else torch.zeros(0)
                record = {**meta, "step": done, "history": history, "seconds": clock}
                run.save(done, model, record, state)
    meta |= {"step": diverged or config.steps, "diverged_at": diverged, "history": history}
    meta |= {"seconds": clock, "model": model.config.to_dict()}
    if run:
        run.finish(model, meta)
    return model.eval(), meta


def _copy(model) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _not_finite(model, training, config, meta, run, shown) -> None:
    """Keep the last good weights and the batch that broke them, and say so."""
    step, kept = meta["step"], ""
    if run:
        context = model.config.context
        stream = batches(training, config.batch_size, context, seed=config.seed, start=step)
        inputs, targets = (x.contiguous() for x in next(stream))
        path = run.folder / "not-finite"
        save_checkpoint(path, model, meta=meta, tensors={"inputs": inputs, "targets": targets})
        kept = f". The last good weights and the batch of that step are in {path}"
    raise InputError(
        f"{shown['desc']}: the loss is not finite at step {step + 1}: lower learning_rate "
        f"({config.learning_rate}) or lengthen warmup ({config.warmup}){kept}"
    )
