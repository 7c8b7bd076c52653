"""A short training of declared weights, for models whose attention was changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch

import torch
import torch.nn.functional as F

from .capture import reader_of
from .errors import InputError, check_windows
from .optimizers import Optimizers
from .surgery import check_layers
from .training import TrainConfig, training_steps


def heal(
    model,
    tokens: torch.Tensor,
    config: TrainConfig | None = None,
    *,
    what: str | Sequence[str] = "attention",
    layers: Sequence[int] | None = None,
    progress: bool = False,
) -> dict:
    """Train some of a model's weights for a short while, where they are.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        A causal language model. It is changed, and ends in evaluation mode.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows to train on, drawn at random.
    config : TrainConfig, optional
        Its steps, batch_size, accumulate, optimizer, learning_rate, betas, weight_decay, warmup,
        clip and seed count; by default 100 steps of 4 windows. In float32.
    what : {"attention", "all"} or sequence of str
        What is trained: the attention of `layers`, everything, or the parameters whose names match
        one of these patterns (as in ``"blocks.0.attention.*"``). Nothing else moves.
    layers : sequence of int, optional
        From 1; all by default.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    dict
        ``loss``, nats, of each step; ``n_trained``, the number of weights that were trained.

    Raises
    ------
    InputError
        Tokens that are no windows of the model, patterns that name nothing, layers that are not
        there, a model that is not causal or of float16, a loss, a gradient or weights that are not
        finite. The weights are then as they were.
    """
    from tqdm import tqdm

    if config is None:
        config = TrainConfig(steps=100, batch_size=4, learning_rate=1e-3, warmup=10)
    if not isinstance(config, TrainConfig):
        raise InputError(f"config is a TrainConfig, not {type(config).__name__}")
    reader = reader_of(model)
    check_windows(tokens, reader.context, extra=1, least=1, vocab=model.config.vocab_size)
    if not all(getattr(m, "is_causal", True) for m in reader.attention_modules()):
        raise InputError(
            f"{type(model).__name__} is not causal: it sees the tokens that it would be trained to "
            "predict"
        )
    trained = _declared(model, reader, what, layers)
    if any(p.dtype == torch.float16 for p in trained.values()):
        raise InputError("weights of float16 overflow in training: make the model .float() first")
    before = {name: p.detach().clone() for name, p in trained.items()}
    wanted = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    optimizers = Optimizers(model, config, trained)
    was_training = model.training
    bar = tqdm(desc="healing", total=config.steps, disable=not progress, file=sys.stderr)
    try:
        for p in wanted:
            p.requires_grad_(False)
            p.grad = None
        for p in trained.values():
            p.requires_grad_(True)
        model.train()
        with torch.enable_grad():
            losses = _train(model, tokens, optimizers, config, bar)
    except BaseException:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(before[name])
        model.train(was_training)
        raise
    finally:
        bar.close()
        for p, (needed, grad) in wanted.items():
            p.requires_grad_(needed)
            p.grad = grad
    model.eval()
    return {"loss": losses, "n_trained": sum(p.numel() for p in trained.values())}


def _train(model, tokens, optimizers, config, bar) -> list[float]:
    """The loss of each step; refuses what is not finite."""
    where, losses = next(model.parameters()).device, []

    def drawn():
        generator = torch.Generator().manual_seed(config.seed)
        while True:
            block = tokens[torch.randint(len(tokens), (config.batch_size,), generator=generator)]
            yield block[:, :-1].long(), block[:, 1:].long()

    def loss_of(x, y):
        logits = model(x)[0].float()
        if logits.shape[-1] != model.config.vocab_size:
            raise InputError(f"{type(model).__name__} does not predict tokens: it has no loss")
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    for done, loss, norm in training_steps(loss_of, drawn(), optimizers, config, where):
        for what, value in (("the loss is", loss), ("gradients are", norm)):
            _check_finite(what, value, done, config)
        losses.append(float(loss))
        bar.update()
    total = sum(p.detach().abs().sum() for p in optimizers.whole.values())
    _check_finite("weights are", total, config.steps, config)
    return losses


def _check_finite(what: str, value: torch.Tensor, step: int, config: TrainConfig) -> None:
    if not bool(torch.isfinite(value)):
        raise InputError(
            f"{what} not finite at step {step}: lower learning_rate ({config.learning_rate})"
        )


def _declared(model, reader, what, layers) -> dict[str, torch.nn.Parameter]:
    named = dict(model.named_parameters())
    if layers is not None and what != "attention":
        raise InputError("layers say whose attention is trained: leave them out, or what")
    if what == "all":
        return named
    if what == "attention":
        layers = check_layers(layers, reader.n_layer)
        modules = [reader.attention_modules()[layer - 1] for layer in layers]
        inside = {id(p) for module in modules for p in module.parameters()}
        return {name: p for name, p in named.items() if id(p) in inside}
    patterns = [what] if isinstance(what, str) else what
    if not isinstance(patterns, Sequence) or not all(isinstance(x, str) for x in patterns):
        raise InputError(f"what is 'attention', 'all' or names of parameters, not {what!r}")
    found = {n: p for n, p in named.items() if any(fnmatch(n, x) for x in patterns)}
    idle = [x for x in patterns if not any(fnmatch(n, x) for n in named)]
    if idle or not found:
        raise InputError(
            f"no parameter matches {', '.join(map(repr, idle)) or 'an empty list'}; there are for "
            f"example {', '.join(list(named)[:4])}"
        )
    return found
