"""Figures of training and losses."""

from __future__ import annotations

import matplotlib.pyplot as plt
import xarray as xr

from .base import MODEL_COLORS, token_axis


def loss_curves(history: xr.Dataset, yardsticks: dict[str, float]):
    """Training and validation loss against steps, with horizontal yardsticks.

    `history`: ``train_loss``, ``val_loss``, ``val_loss_se`` on (model, step).
    """
    figure, axis = plt.subplots(figsize=(7.6, 3.6))
    for color, name in zip(MODEL_COLORS, history["model"].values, strict=False):
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
    """Loss of the next token by prefix length, and its paired difference to the first model.

    `losses` on (model, prefix): ``prefix_loss``, and ``difference`` with ``difference_se`` after
    prefixes alone (``prefix_...``) and inside whole windows (``window_...``).
    """
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.3))
    names = losses["model"].values
    for i, (color, name) in enumerate(zip(MODEL_COLORS, names, strict=False)):
        one = losses.sel(model=name)
        axes[0].plot(one["prefix"], one["prefix_loss"], color=color, marker="o", ms=3, label=name)
        for kind, style, where in (
            ("prefix", "-", "after prefixes"),
            ("window", ":", "in windows"),
        ):
            if i > 0:
                axes[1].errorbar(
                    one["prefix"], one[f"{kind}_difference"],
                    1.96 * one[f"{kind}_difference_se"], color=color, ls=style, marker="o", ms=3,
                    capsize=2, label=f"{name}, {where}",
                )  # fmt: skip
    for axis in axes:
        token_axis(axis, "x", None)
        axis.set_xlabel("prefix length (tokens)")
    axes[1].axhline(0, color="0.6", lw=1)
    axes[0].set_ylabel("loss of the next token (nats)")
    axes[1].set_ylabel(f"difference to {names[0]} (nats)")
    axes[0].legend()
    if len(names) > 1:
        axes[1].legend()
    return figure
