"""Figures of ranks and other estimates."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .base import edge_labels, grid, layer_colors, layer_ticks, model_colors


def estimates_by_layer(
    panels: dict[str, xr.Dataset], ylabel: str, *, reference: float | None = None
):
    """Estimates with intervals by layer, a panel a (title: estimate, low, high (model, layer))."""
    figure, axes = grid(len(panels), 3, width=2.6, sharey=True)
    everyone = list(dict.fromkeys(str(m) for one in panels.values() for m in one["model"].values))
    colors, handles = model_colors(everyone), {}
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=False):
        names = one["model"].values
        shift = np.linspace(-0.12, 0.12, len(names)) if len(names) > 1 else [0.0]
        for offset, name in zip(shift, names.astype(str), strict=True):
            some = one.sel(model=name)
            middle = some["estimate"].values
            bars = np.stack([middle - some["low"], some["high"] - middle]).clip(min=0)
            handles[name] = axis.errorbar(
                some["layer"] + offset, middle, bars, color=colors[name], marker="o", ms=4, lw=0,
                elinewidth=1.4, capsize=2.5,
            )  # fmt: skip
        if reference is not None:
            axis.axhline(reference, color="0.6", lw=1, zorder=0)
        axis.set_title(title)
        layer_ticks(axis, one["layer"].values)
    edge_labels(axes, "layer", ylabel, len(panels))
    axes[0, -1].legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def rank_curves(curves: xr.Dataset, epsilon: float):
    """H*(epsilon; N) against N, a panel a model, with the line that only counts snapshots."""
    names = curves["model"].values
    figure, axes = grid(len(names), 3, width=2.5, height=2.3, sharex=True, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        for color, layer in zip(
            layer_colors(curves.sizes["layer"]), curves["layer"].values, strict=True
        ):
            one = curves.sel(model=name, layer=layer)
            axis.plot(one["size"], one["H"], color=color, marker="o", ms=3, label=f"layer {layer}")
            axis.fill_between(
                one["size"], one["H_low"], one["H_high"], color=color, alpha=0.2, lw=0
            )
        sizes = curves["size"].values
        axis.plot(sizes, sizes - 1, color="0.5", ls="--", lw=1, label="N − 1")
        axis.set_title(str(name))
    edge_labels(axes, "snapshots N", f"H*({epsilon:g}; N)", len(names))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
