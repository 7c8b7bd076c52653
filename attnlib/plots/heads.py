"""Figures of heads: their ranks, what they are worth, and how they are shared among layers."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.colors import TwoSlopeNorm

from .base import DIVERGING, MODEL_COLORS, grid, layer_colors


def head_ranks(ranks: xr.DataArray, of_mean: xr.DataArray, largest: int, epsilon: float):
    """H* of each head's own field (model, layer, head) and of their average (model, layer)."""
    names = ranks["model"].values
    figure, axes = grid(len(names), 3, width=2.9, height=2.5, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        one = ranks.sel(model=name)
        layer = one["layer"].broadcast_like(one)
        axis.scatter(layer, one, s=22, color=MODEL_COLORS[0], label="single heads")
        axis.scatter(
            of_mean["layer"], of_mean.sel(model=name), s=260, marker="_", lw=2.2,
            color=MODEL_COLORS[1], label="head average",
        )  # fmt: skip
        axis.axhline(largest, color="0.5", ls="--", lw=1, label="N − 1")
        axis.set(title=str(name), xlabel="layer", xticks=one["layer"].values, ylim=(0, None))
    axes[0, 0].set_ylabel(f"H*({epsilon:g})")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def head_numbers(effective: xr.DataArray, n_head: int):
    """Effective number of distinct heads by layer, a curve a model (model, layer)."""
    figure, axis = plt.subplots(figsize=(5.6, 2.9))
    for color, name in zip(cycle(MODEL_COLORS), effective["model"].values, strict=False):
        one = effective.sel(model=name)
        axis.plot(one["layer"], one, color=color, marker="o", ms=4, lw=1.4, label=str(name))
    axis.axhline(n_head, color="0.5", ls="--", lw=1, label="heads a layer")
    axis.set(xlabel="layer", ylabel="distinct heads", xticks=effective["layer"].values)
    axis.set_ylim(0, None)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def head_worth(increase: xr.DataArray, error: xr.DataArray):
    """Increase of the loss without one head, a map (layer, head); bold where beyond 2 errors."""
    figure, axis = plt.subplots(
        figsize=(0.95 * increase.sizes["head"] + 2.2, 0.45 * increase.sizes["layer"] + 1.0)
    )
    values = 1e3 * increase.transpose("layer", "head").values
    errors = 1e3 * error.transpose("layer", "head").values
    top = float(np.quantile(np.abs(values), 0.95)) or 1.0  # one head may be worth all others
    image = axis.imshow(values, cmap=DIVERGING, norm=TwoSlopeNorm(0, -top, top), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        axis.text(
            column, row, f"{round(value, 1) + 0.0:.1f}", ha="center", va="center", fontsize=8.5,
            color="white" if abs(value) > 0.6 * top else "black",
            weight="bold" if abs(value) > 2 * errors[row, column] else "normal",
        )  # fmt: skip
    axis.set(
        xlabel="head", ylabel="layer",
        xticks=range(increase.sizes["head"]), yticks=range(increase.sizes["layer"]),
        xticklabels=increase["head"].values, yticklabels=increase["layer"].values,
    )  # fmt: skip
    figure.colorbar(image, ax=axis, label="increase (10⁻³ nats per token)", extend="both")
    return figure


def pruning_curves(increase: xr.DataArray, error: xr.DataArray, tolerance: float):
    """Increase of the loss against the heads that a layer keeps (layer, kept), with 2 errors."""
    figure, axis = plt.subplots(figsize=(6.2, 3.3))
    layers = increase["layer"].values
    for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
        one = increase.sel(layer=layer)
        axis.errorbar(
            one["kept"], one, 2 * error.sel(layer=layer), color=color, marker="o", ms=3.5, lw=1.4,
            capsize=2, label=f"layer {layer}",
        )  # fmt: skip
    axis.axhline(tolerance, color="0.5", ls=":", lw=1.2, label="tolerated")
    axis.set_yscale("symlog", linthresh=max(tolerance, 1e-6))
    axis.set(
        xlabel="heads kept in the layer",
        ylabel="increase (nats per token)\nlinear below the dotted line",
    )
    axis.set_xticks(increase["kept"].values)
    axis.invert_xaxis()
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def rank_against_worth(panels: dict[str, tuple[xr.DataArray, xr.DataArray]], xlabel: str):
    """Scatter of (rank, worth), a point a layer (layer[, seed]), a panel a kind of worth."""
    figure, axes = grid(len(panels), 3, width=2.7, height=2.4)
    for axis, (title, (rank, worth)) in zip(axes.flat, panels.items(), strict=False):
        layers = rank["layer"].values
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            x, y = np.ravel(rank.sel(layer=layer)), np.ravel(worth.sel(layer=layer))
            axis.scatter(x, y, s=20, color=color, alpha=0.45, lw=0)
            axis.scatter(x.mean(), y.mean(), s=52, color=color, label=f"layer {layer}")
        axis.set(title=title, xlabel=xlabel)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def allocation_losses(heads: xr.DataArray, difference: xr.DataArray, half: float | None = None):
    """Heads by layer (variant, layer), and what each allocation loses against the first.

    `difference` is (variant, seed), 0 for the first; `half`, half an interval about its mean.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.1), width_ratios=(1.3, 1))
    names = heads["variant"].values
    shift = np.linspace(-0.3, 0.3, len(names)) if len(names) > 1 else np.zeros(1)
    width = 0.85 * (shift[1] - shift[0] if len(names) > 1 else 0.6)
    for i, (color, name) in enumerate(zip(cycle(MODEL_COLORS), names, strict=False)):
        one = heads.sel(variant=name)
        axes[0].bar(one["layer"] + shift[i], one, width, color=color, label=str(name))
        if i:
            values = difference.sel(variant=name).values
            axes[1].scatter(np.full(len(values), i), values, s=18, color=color, alpha=0.55)
            axes[1].errorbar(
                i + 0.16, values.mean(), half, color=color,
                marker="o", ms=6, capsize=3,
            )  # fmt: skip
    axes[0].set(xlabel="layer", ylabel="heads", xticks=heads["layer"].values)
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(4, len(names)))
    axes[1].axhline(0, color="0.6", lw=1)
    axes[1].set(xlim=(-0.5, len(names) - 0.5), ylabel=f"loss less that of {names[0]} (nats)")
    axes[1].set_xticks(range(len(names)), [str(n).replace("-", "\n") for n in names])
    return figure
