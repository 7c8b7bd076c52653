"""Figures of training and losses."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import xarray as xr

from .base import MODEL_COLORS, edge_labels, grid, token_axis


def loss_curves(history: xr.Dataset, yardsticks: dict[str, float]):
    """Training and validation loss against steps, with horizontal yardsticks.

    `history`: ``train_loss``, ``val_loss``, ``val_loss_se`` on (model, step).
    """
    figure, axis = plt.subplots(figsize=(7.6, 3.6))
    for color, name in zip(cycle(MODEL_COLORS), history["model"].values, strict=False):
        one = history.sel(model=name)
        axis.plot(one["step"], one["train_loss"], color=color, lw=1, ls=":")
        axis.plot(one["step"], one["val_loss"], color=color, lw=1.8, label=f"{name} (validation)")
        band = 1.96 * one["val_loss_se"]
        axis.fill_between(
            one["step"],
            one["val_loss"] - band,
            one["val_loss"] + band,
            color=color,
            alpha=0.2,
            lw=0,
        )
    axis.plot([], [], color="0.4", lw=1, ls=":", label="training")
    for (name, value), style in zip(yardsticks.items(), ("--", "-."), strict=False):
        axis.axhline(value, color="0.5", lw=1, ls=style, label=f"{name} ({value:.2f})")
    axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", xlim=(0, None))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def loss_by_prefix(losses: xr.Dataset):
    """Paired difference of the next token's loss to the first model, a panel a model.

    `losses` on (model, prefix): ``difference`` with ``difference_se``, after prefixes alone
    (``prefix_...``) and inside whole windows (``window_...``).
    """
    names = losses["model"].values
    figure, axes = grid(max(1, len(names) - 1), 3, width=2.7, height=2.2, sharex=True, sharey=True)
    kinds = (("prefix", "-", "after prefixes"), ("window", ":", "in windows"))
    for axis, name in zip(axes.flat, names[1:], strict=False):
        one = losses.sel(model=name)
        for color, (kind, style, where) in zip(cycle(MODEL_COLORS), kinds, strict=False):
            axis.errorbar(
                one["prefix"], one[f"{kind}_difference"], 1.96 * one[f"{kind}_difference_se"],
                color=color, ls=style, marker="o", ms=3, capsize=2, label=where,
            )  # fmt: skip
        axis.axhline(0, color="0.6", lw=1, zorder=0)
        axis.set_title(str(name))
        token_axis(axis, "x", None)
    n = max(1, len(names) - 1)
    edge_labels(axes, "prefix length (tokens)", f"less {names[0]} (nats)", n)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
