"""A short training of declared weights, for models whose attention was changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch

import torch
import torch.nn.functional as F

from .capture import reader_of
from .errors import InputError, check_windows
from .surgery import check_layers
from .training import TrainConfig, learning_rate


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
        Its steps, batch_size, learning_rate, betas, weight_decay, warmup, clip and seed count; by
        default 100 steps of 4 windows.
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
        there, a loss that is not finite. The weights are then as they were.
    """
    from tqdm import tqdm

    config = config or TrainConfig(steps=100, batch_size=4, learning_rate=1e-3, warmup=10)
    reader = reader_of(model)
    check_windows(tokens, reader.context, extra=1, least=1, vocab=model.config.vocab_size)
    trained = _declared(model, reader, what, layers)
    before = {name: p.detach().clone() for name, p in trained.items()}
    wanted = {p: p.requires_grad for p in model.parameters()}
    optimizer = torch.optim.AdamW(
        trained.values(), config.learning_rate, config.betas, weight_decay=config.weight_decay
    )
    generator = torch.Generator().manual_seed(config.seed)
    where, losses = next(model.parameters()).device, []
    model.train()
    try:
        for p in wanted:
            p.requires_grad_(False)
        for p in trained.values():
            p.requires_grad_(True)
        for step in tqdm(range(config.steps), "healing", disable=not progress, file=sys.stderr):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            drawn = torch.randint(len(tokens), (config.batch_size,), generator=generator)
            batch = tokens[drawn].to(where)
            logits = model(batch[:, :-1])[0].float()
            if logits.shape[-1] != model.config.vocab_size:
                raise InputError(f"{type(model).__name__} does not predict tokens: it has no loss")
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            if not bool(torch.isfinite(loss)):
                raise InputError(
                    f"the loss is not finite at step {step + 1}: lower learning_rate "
                    f"({config.learning_rate})"
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), config.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
    except BaseException:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(before[name])
        raise
    finally:
        for p, value in wanted.items():
            p.requires_grad_(value)
            p.grad = None
        model.eval()
    return {"loss": losses, "n_trained": sum(p.numel() for p in trained.values())}


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
    patterns = [what] if isinstance(what, str) else list(what)
    found = {n: p for n, p in named.items() if any(fnmatch(n, x) for x in patterns)}
    idle = [x for x in patterns if not any(fnmatch(n, x) for n in named)]
    if idle or not found:
        raise InputError(
            f"no parameter matches {', '.join(map(repr, idle or patterns))}; there are for example "
            f"{', '.join(list(named)[:4])}"
        )
    return found
