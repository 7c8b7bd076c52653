"""Figures of routing and filtering."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.patches import FancyArrowPatch

from ..errors import InputError
from .base import MODEL_COLORS, edge_labels, grid, layer_ticks
from .text import SYMBOLS, WIDTH


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


def routing_on_text(words, routing, potential, title: str = "", *, most: int = 40):
    """A skew matrix as arrows between the words of a sentence, and its potential as their height.

    Parameters
    ----------
    words : sequence of str
        N tokens, best fewer than 20.
    routing : array-like
        ``(N, N)``, skew. An arrow from i to j where i prefers j, as wide and dark as it does so.
    potential : array-like
        ``(N,)``, u with R_ij = u_i - u_j + rest. Drawn is -u, what every query sees in a key.
    title : str
    most : int
        Arrows drawn in each row, the strongest.
    """
    routing, potential = np.asarray(routing, float), np.asarray(potential, float)
    n = len(words)
    if routing.shape != (n, n) or potential.shape != (n,):
        raise InputError(
            f"{n} words have a routing ({n}, {n}) and a potential ({n},), not {routing.shape} and "
            f"{potential.shape}"
        )
    rest = routing - (potential[:, None] - potential)
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 5.6), sharex=True, height_ratios=[1, 1, 0.55])
    top = np.abs(routing).max() or 1.0
    for axis, matrix, label in zip(axes, (routing, rest), ("routing", "cyclic part"), strict=False):
        i, j = np.nonzero(matrix > 0)
        for one in matrix[i, j].argsort()[::-1][:most]:
            start, end, size = i[one], j[one], matrix[i[one], j[one]] / top
            # Arcs bend upwards whichever way they go.
            bend = f"arc3,rad={0.45 if end < start else -0.45}"
            axis.add_patch(
                FancyArrowPatch(
                    (start, 0), (end, 0), connectionstyle=bend, arrowstyle="-|>", mutation_scale=8,
                    shrinkA=2, shrinkB=2, lw=0.4 + 2 * size, color=MODEL_COLORS[0],
                    alpha=float(np.clip(0.15 + 0.85 * size, 0, 1)),
                )
            )  # fmt: skip
        axis.set(xlim=(-0.7, n - 0.3), ylim=(-0.03 * n, 0.25 * n), yticks=[], ylabel=label)
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="x", length=0)
    axes[2].bar(np.arange(n), -potential, color=MODEL_COLORS[1], width=0.6)
    axes[2].axhline(0, color="0.4", lw=0.8)
    axes[2].set_ylabel("−potential")
    shown = ["".join(SYMBOLS.get(c, c) for c in word).replace(" ", "␣") for word in words]
    axes[2].set_xticks(np.arange(n), shown, rotation=50 if max(map(len, shown)) > 2 else 0)
    for label in axes[2].get_xticklabels():
        label.set_parse_math(False)
    figure.suptitle(title, fontsize=10)
    return figure


def trimming_curves(panels: dict, whole: dict[str, float]):
    """Perplexity against the rank that is kept, a panel a model.

    `panels`: title to {label: (perplexity, standard error), both on `kept`}; `whole`: title to the
    perplexity of the whole model, a dotted line.
    """
    figure, axes = grid(len(panels), 3, width=2.9, height=2.4, sharex=True, sharey=True)
    colors = dict(zip(("routing", "filtering"), MODEL_COLORS, strict=False))
    drawn = {}
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for label, (middle, error) in curves.items():
            drawn[label] = axis.errorbar(
                middle["kept"], middle, 1.96 * error, color=colors[label], marker="o", ms=3,
                lw=1.4, capsize=2, ls="-" if label == "routing" else "--",
            )  # fmt: skip
        drawn["whole model"] = axis.axhline(whole[title], color="0.5", ls=":", lw=1.2)
        axis.set_title(title)
    edge_labels(axes, "rank kept", "perplexity", len(panels))
    axes[0, -1].legend(drawn.values(), drawn.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
