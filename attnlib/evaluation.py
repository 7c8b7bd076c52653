"""Losses on document windows: per window, after prefixes, with standard errors, and yardsticks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .errors import InputError


def autocast(device: torch.device, precision: str):
    """Autocast to bfloat16, or not: ``"auto"`` does so on a GPU alone."""
    wide = precision == "float32" or (precision == "auto" and device.type != "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=not wide)


def window_losses(
    model, tokens: torch.Tensor, *, batch_size: int = 32, precision: str = "auto"
) -> torch.Tensor:
    """Mean cross-entropy of each window, for paired comparisons of models.

    Parameters
    ----------
    model : GPT
        Evaluated in evaluation mode, on its own device, and put back as it was.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows; each scores its last T tokens.

    Returns
    -------
    torch.Tensor
        ``(n,)`` float64 on the CPU, nats per token.
    """
    device = next(model.parameters()).device
    was_training, losses = model.training, []
    model.eval()
    with torch.no_grad(), autocast(device, precision):
        for block in tokens.split(batch_size):
            block = block.to(device)
            logits = model(block[:, :-1])[0].float()  # (B, T, vocab)
            nats = F.cross_entropy(logits.transpose(1, 2), block[:, 1:], reduction="none")
            losses.append(nats.mean(1).cpu())
    model.train(was_training)
    return torch.cat(losses).double()


def prefix_losses(
    model, tokens: torch.Tensor, lengths, *, batch_size: int = 32, precision: str = "auto"
) -> torch.Tensor:
    """Cross-entropy of one next token after prefixes alone, as in decoding.

    A model whose earlier outputs depend on later tokens can be better on windows than it is here.

    Parameters
    ----------
    model, tokens
        As in :func:`window_losses`.
    lengths : sequence of int
        Prefix lengths, 1 to T.

    Returns
    -------
    torch.Tensor
        ``(n, len(lengths))`` float64 on the CPU, nats: of token `length` given those before it.
    """
    device = next(model.parameters()).device
    was_training, columns = model.training, []
    model.eval()
    with torch.no_grad(), autocast(device, precision):
        for length in lengths:
            if not 1 <= length < tokens.shape[1]:
                raise InputError(f"prefix lengths lie between 1 and {tokens.shape[1] - 1}")
            parts = []
            for block in tokens.split(batch_size):
                block = block.to(device)
                logits = model(block[:, :length])[0][:, -1].float()  # (B, vocab)
                parts.append(F.cross_entropy(logits, block[:, length], reduction="none").cpu())
            columns.append(torch.cat(parts))
    model.train(was_training)
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
    if len(tokens) < 3:
        raise InputError(f"{len(tokens)} windows give no standard error: take 3 or more")
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


def ngram_loss(
    training: torch.Tensor, tokens: torch.Tensor, vocab_size: int, order: int = 2
) -> float:
    """Cross-entropy of a character model that a neural one has to beat, add-one smoothed.

    Parameters
    ----------
    training, tokens : torch.Tensor
        Token ids ``(n,)`` to count in, and to score.
    order : {1, 2}
        Unigrams, or bigrams.

    Returns
    -------
    float
        Nats per token.
    """
    if order == 1:
        counts = torch.bincount(training, minlength=vocab_size).double() + 1
        return float(-(counts / counts.sum()).log()[tokens].mean())
    if order != 2:
        raise InputError(f"order is 1 or 2, not {order}")
    pairs = training[:-1] * vocab_size + training[1:]
    counts = torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, -1).double() + 1
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    return float(-log_p[tokens[:-1], tokens[1:]].mean())
