"""Training that survives a kill and resumes to the same weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
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
from .device import PRECISIONS, autocast, pick_device
from .errors import InputError
from .evaluation import evaluate
from .gpt import GPT, GPTConfig


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The defaults are those of Zeris 2026.

    Parameters
    ----------
    steps, batch_size, accumulate : int
        Optimizer steps; windows a step; in how many micro-batches they are computed.
    learning_rate, betas, weight_decay, warmup, clip
        AdamW (decay on matrices alone), linear warm-up over `warmup` steps, cosine to 0, gradient
        norm clipped to `clip`.
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
        ``"auto"``: bfloat16 autocast on a GPU, float32 on a CPU.
    compile : bool
        ``torch.compile`` the model.
    """

    steps: int = 5000
    batch_size: int = 64
    accumulate: int = 1
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
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is one of {PRECISIONS}, not {self.precision!r}")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to 0 at ``config.steps``."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * config.learning_rate * (1 + math.cos(math.pi * progress))


def _optimizer(model: GPT, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings, not biases, gains and gate scalars."""
    named = list(model.named_parameters())
    decay = [p for n, p in named if p.dim() >= 2 and n.rsplit(".", 1)[-1] == "weight"]
    rest = [p for n, p in named if not (p.dim() >= 2 and n.rsplit(".", 1)[-1] == "weight")]
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    fused = device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, config.learning_rate, config.betas, fused=fused)


def _training_state(model: GPT, optimizer, device: torch.device) -> dict[str, torch.Tensor]:
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name}|{key}"] = value.detach().cpu().contiguous()
    return state


def _restore_training_state(state: dict, model: GPT, optimizer, device: torch.device) -> None:
    torch.set_rng_state(state["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if "|" in name:
            owner, key = name.split("|")
            # AdamW keeps its step count on the CPU unless it is fused.
            keep = key == "step" and device.type != "cuda"
            optimizer.state[parameters[owner]][key] = value if keep else value.to(device)


def fingerprint(model_config: GPTConfig, config: TrainConfig, seed: int, corpus_hash: str) -> str:
    """Hash of all that decides a run's weights: parameters, corpus and the code that trains."""
    code = "".join(
        (Path(__file__).parent / f"{name}.py").read_text()
        for name in ("attention", "sd", "linear", "gpt", "training", "evaluation", "corpus")
    )
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
        "fingerprint": fingerprint(model.config, config, seed, corpus_hash + start_weights),
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


def _copy(model) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _train_loop(model, training, held_out, config, meta, run, shown):
    from tqdm import tqdm

    device = next(model.parameters()).device
    optimizer = _optimizer(model, config, device)
    history = {k: [] for k in ("step", "train_loss", "val_loss", "val_loss_se", "grad_norm")}
    torch.manual_seed(config.seed)
    first, losses, norms, diverged = 0, [], [], None
    if run and run.steps():
        stored, weights, state = read_checkpoint(run.steps()[-1])
        check_keys(model, weights, run.folder)
        model.load_state_dict(weights)
        losses, norms = (list(state.pop(k).to(device)) for k in ("losses", "norms"))
        _restore_training_state(state, model, optimizer, device)
        first, history = stored["step"], stored["history"]
    step_model = torch.compile(model) if config.compile else model
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
    stream = batches(training, config.batch_size, context, seed=config.seed, start=first)
    micro = config.batch_size // config.accumulate
    good = _copy(model) if config.stop_if_diverged else None
    model.train()
    with bar:
        for step in range(first, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            inputs, targets = next(stream)
            total = torch.zeros((), device=device)
            for x, y in zip(inputs.split(micro), targets.split(micro), strict=True):
                with autocast(device, config.precision):
                    loss = step_model(x.to(device), y.to(device))[1] / config.accumulate
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
            norms.append(norm)
            bar.update(tokens_per_step)
            done = step + 1
            due = (done % config.eval_every == 0, done % config.checkpoint_every == 0)
            if any(due) or done == config.steps:
                if not torch.isfinite(torch.stack(losses + norms)).all():
                    if good is None:
                        raise InputError(
                            f"{shown['desc']}: the loss is not finite at step {done}: lower "
                            f"learning_rate ({config.learning_rate}) or lengthen warmup "
                            f"({config.warmup})"
                        )
                    model.load_state_dict(good)
                    diverged = done
                    break
                good = _copy(model) if config.stop_if_diverged else None
            if done % config.eval_every == 0 or done == config.steps:
                recent, norm = (float(torch.stack(x).mean()) for x in (losses, norms))
                losses, norms = [], []
                held = evaluate(model, held_out, precision=config.precision)
                row = (done, recent, held["loss"], held["loss_se"], norm)
                for key, value in zip(history, row, strict=True):
                    history[key].append(value)
                bar.set_postfix(train=f"{recent:.3f}", val=f"{held['loss']:.3f}")
            if run and done in config.keep_steps:
                run.keep(done, model, meta)
            if run and done % config.checkpoint_every == 0 and done < config.steps:
                state = _training_state(model, optimizer, device)
                for key, values in (("losses", losses), ("norms", norms)):
                    state[key] = torch.stack(values).cpu() if values else torch.zeros(0)
                run.save(done, model, {**meta, "step": done, "history": history}, state)
    meta = {**meta, "step": diverged or config.steps, "diverged_at": diverged, "history": history}
    meta["model"] = model.config.to_dict()
    if run:
        run.finish(model, meta)
    return model.eval(), meta
