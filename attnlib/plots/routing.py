"""Figures of routing and filtering."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .base import MODEL_COLORS, grid, layer_ticks


def heads_by_layer(
    panels: dict[str, xr.DataArray], ylabel: str, *, reference: dict[str, float] | None = None
):
    """Values of single heads (layer, head) and their mean by layer, a panel a model.

    `reference` holds the height of a dashed line for some of the panels.
    """
    figure, axes = grid(len(panels), 3, width=2.7, height=2.4, sharey=True)
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=False):
        layer, heads = values["layer"].values, values.transpose("layer", "head").values
        axis.plot(layer, heads, color=MODEL_COLORS[0], marker="o", ms=2.5, lw=0, alpha=0.4)
        axis.plot(layer, heads.mean(1), color=MODEL_COLORS[1], lw=1.6, label="mean of the heads")
        axis.plot([], [], color=MODEL_COLORS[0], marker="o", ms=4, lw=0, label="one head")
        if reference and title in reference:
            axis.axhline(reference[title], color="0.4", ls="--", lw=1, label="random factors")
        layer_ticks(axis, layer)
        axis.set(title=title, xlabel="layer")
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def eigenvalue_planes(panels: dict[str, np.ndarray]):
    """Eigenvalues in the complex plane, a panel a head, each over the largest modulus."""
    figure, axes = grid(len(panels), 3, width=2.4, height=2.4, sharex=True, sharey=True)
    angle = np.linspace(0, 2 * np.pi, 200)
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=False):
        size = np.abs(values).max()
        values = values / (size if size > 0 else 1)
        axis.axvspan(0, 1.1, color=MODEL_COLORS[4], alpha=0.12, lw=0)
        axis.axhline(0, color="0.8", lw=0.8)
        axis.plot(np.cos(angle), np.sin(angle), color="0.7", lw=0.8)
        axis.plot(values.real, values.imag, color=MODEL_COLORS[0], marker="o", ms=3, lw=0)
        axis.set(title=title, xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
        axis.set_xlabel("real part")
    axes[0, 0].set_ylabel("imaginary part")
    return figure
