"""Losses on document windows: per window, after prefixes, with standard errors, and yardsticks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from .capture import reader_of
from .device import autocast, in_evaluation
from .errors import InputError, check_whole, check_windows


def position_losses(
    model, tokens: torch.Tensor, *, batch_size: int = 32, precision: str = "auto"
) -> torch.Tensor:
    """Cross-entropy of every next token of whole windows.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        A causal language model, evaluated in evaluation mode, on its own device, and put back as it
        was.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows.

    Returns
    -------
    torch.Tensor
        ``(n, T)`` float64 on the CPU, nats: column `i` scores token `i + 1`.

    Raises
    ------
    InputError
        Tokens that are no windows, are not of the model's vocabulary, or longer than its context; a
        model that does not give the logits of a next token.
    """
    _check_scored(model, tokens)
    losses = []
    with _evaluated(model, precision) as device:
        for block in tokens.split(batch_size):
            block = block.to(device).long()
            logits = model(block[:, :-1])[0].float()  # (B, T, vocab)
            if logits.shape[-1] != model.config.vocab_size:
                raise InputError(f"{type(model).__name__} does not predict tokens: it has no loss")
            targets = block[:, 1:]
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            losses.append(nats.view_as(targets).cpu())  # (B, T)
    return torch.cat(losses).double()


@contextmanager
def _evaluated(model, precision: str) -> Iterator[torch.device]:
    """The device of a model that is in evaluation mode for as long as this lasts."""
    device = next(model.parameters()).device
    with in_evaluation(model), torch.no_grad(), autocast(device, precision):
        yield device


def _check_scored(model, tokens) -> None:
    """Windows ``(n, T + 1)`` whose last token is scored and never seen."""
    vocab = model.config.vocab_size
    check_windows(tokens, reader_of(model).context, extra=1, least=1, vocab=vocab)


def window_losses(model, tokens: torch.Tensor, **options) -> torch.Tensor:
    """Mean cross-entropy of each window, ``(n,)``, for paired comparisons of models.

    Parameters
    ----------
    model, tokens, options
        As in :func:`position_losses`, whose mean over positions this is.
    """
    return position_losses(model, tokens, **options).mean(1)


def prefix_losses(
    model, tokens: torch.Tensor, lengths, *, batch_size: int = 32, precision: str = "auto"
) -> torch.Tensor:
    """Cross-entropy of one next token after prefixes alone, as in decoding.

    Of a causal model it is column `length - 1` of :func:`position_losses`. A model whose earlier
    outputs depend on later tokens can be better there than it is here.

    Parameters
    ----------
    model, tokens
        As in :func:`position_losses`.
    lengths : sequence of int
        Prefix lengths, 1 to T.

    Returns
    -------
    torch.Tensor
        ``(n, len(lengths))`` float64 on the CPU, nats: of token `length` given those before it.
    """
    _check_scored(model, tokens)
    lengths = [check_whole("a prefix length", length) for length in lengths]
    if not lengths or max(lengths) >= tokens.shape[1]:
        raise InputError(f"prefix lengths lie between 1 and {tokens.shape[1] - 1}")
    columns = []
    with _evaluated(model, precision) as device:
        for length in lengths:
            parts = []
            for block in tokens.split(batch_size):
                block = block.to(device).long()
                logits = model(block[:, :length])[0][:, -1].float()  # (B, vocab)
                parts.append(F.cross_entropy(logits, block[:, length], reduction="none").cpu())
            columns.append(torch.cat(parts))
    return torch.stack(columns, 1).double()


def evaluate(
    model, tokens: torch.Tensor, *, batch_size: int = 32, precision: str = "auto"
) -> dict[str, float]:
    """Loss and perplexity on document windows, with standard errors.

    Parameters
    ----------
    model, tokens, batch_size, precision
        As in :func:`window_losses`; at least 3 windows.

    Returns
    -------
    dict
        ``loss`` (mean cross-entropy, nats per token), ``loss_se`` (standard error over windows),
        ``perplexity`` and ``perplexity_se`` (delta method), ``n`` windows.
    """
    check_windows(tokens)  # of one or two there is no standard error
    losses = window_losses(model, tokens, batch_size=batch_size, precision=precision)
    loss, se = float(losses.mean()), float(losses.std() / math.sqrt(len(losses)))
    perplexity = math.exp(loss)
    return {
        "loss": loss,
        "loss_se": se,
        "perplexity": perplexity,
        "perplexity_se": perplexity * se,
        "n": len(losses),
    }


def look_ahead(model, tokens: torch.Tensor) -> float:
    """Largest change of an earlier logit when the last token of a window changes.

    Parameters
    ----------
    model : GPT
    tokens : torch.Tensor
        ``(n, T)`` windows.

    Returns
    -------
    float
        Exactly 0 for a causal model.
    """
    check_windows(tokens, model.config.context, least=1, vocab=model.config.vocab_size)
    device = next(model.parameters()).device
    tokens = tokens.to(device).long()
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = (model(t)[0][:, :-1] for t in (tokens, changed))
    return float((before - after).abs().max())


def paired_difference(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean difference to the first model on the same windows, and its standard error.

    Parameters
    ----------
    losses : torch.Tensor
        ``(model, window, ...)``

    Returns
    -------
    mean, se : torch.Tensor
        ``(model, ...)``; the standard error is over windows.
    """
    difference = losses - losses[:1]
    return difference.mean(1), difference.std(1) / math.sqrt(losses.shape[1])


def ngram_loss(
    training: torch.Tensor, tokens: torch.Tensor, vocab_size: int, order: int = 2
) -> float:
    """Cross-entropy of counting, which a trained model has to beat; add-one smoothed.

    Parameters
    ----------
    training, tokens : torch.Tensor
        Token ids ``(n,)`` to count in, and to score.
    vocab_size : int
    order : {1, 2}
        Unigrams, or bigrams.

    Returns
    -------
    float
        Nats per token.

    Raises
    ------
    InputError
        Another order.
    """
    if order not in (1, 2):
        raise InputError(f"order is 1 or 2, not {order}")
    count = torch.bincount(training, minlength=vocab_size)
    if order == 1:
        p = (count[tokens] + 1).double() / (len(training) + vocab_size)
        return float(-p.log().mean())
    # Only pairs that occur are counted: the table of all pairs of 50,257 tokens takes 20 GB.
    seen, times = torch.unique(
        training[:-1] * vocab_size + training[1:], return_counts=True
    )  # sorted
    wanted = tokens[:-1] * vocab_size + tokens[1:]
    at = torch.searchsorted(seen, wanted).clamp(max=len(seen) - 1)
    pair = torch.where(seen[at] == wanted, times[at], 0)
    first = torch.bincount(training[:-1], minlength=vocab_size)[tokens[:-1]]
    return float(-((pair + 1).double() / (first + vocab_size)).log().mean())
