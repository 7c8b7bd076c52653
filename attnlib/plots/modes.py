"""Figures of modes and their spectra."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from .base import (
    DIVERGING,
    LINE_STYLES,
    MODEL_COLORS,
    edge_labels,
    grid,
    layer_colors,
    log_axis,
    period_axis,
)


def mode_maps(modes: xr.DataArray):
    """Modes as fields, a row a layer, a column a mode: (layer, mode, query, key)."""
    layers, numbers = modes["layer"].values, modes["mode"].values
    figure, axes = plt.subplots(
        len(layers), len(numbers), squeeze=False, sharex=True, sharey=True,
        figsize=(1.9 * len(numbers) + 0.6, 1.9 * len(layers) + 0.5),
    )  # fmt: skip
    for row, layer in zip(axes, layers, strict=True):
        for axis, k in zip(row, numbers, strict=True):
            picture = modes.sel(layer=layer, mode=k).values
            top = float(np.quantile(np.abs(picture), 0.998)) or 1.0
            axis.imshow(picture, cmap=DIVERGING, vmin=-top, vmax=top)
            axis.set_title(f"layer {layer}, mode {k}", fontsize=8.5)
    edge_labels(axes, "key", "query", axes.size)
    return figure


def _by_scale(curves: xr.DataArray, along: str, xlabel: str, ylabel: str):
    """A panel a scale, a curve a layer, over the dimension `along`; returns figure and axes."""
    scales, layers = curves["scale"].values, curves["layer"].values
    figure, axes = grid(len(scales), 3, width=2.6, sharey=True)
    for axis, scale in zip(axes.flat, scales, strict=False):
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            one = curves.sel(scale=scale, layer=layer)
            axis.plot(one[along], one, color=color, lw=1.4, label=f"layer {layer}")
        title = f"period {float(curves['period'].sel(scale=scale)):.1f}"
        axis.set_title(title if np.isfinite(scale) else "no filter")
    edge_labels(axes, xlabel, ylabel, len(scales))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure, axes.flat[: len(scales)]


def eigenvalue_spectra(eigenvalues: xr.DataArray):
    """Share of the variance by mode, log-log, a panel a scale, a curve a layer."""
    share = eigenvalues / eigenvalues.sum("mode")
    figure, axes = _by_scale(share, "mode", "mode", "share of the variance")
    for axis in axes:
        axis.set(xscale="log", yscale="log", ylim=(1e-4, 1))
    return figure


def reconstruction_error(error: xr.DataArray):
    """Relative mean square error against the number of modes, a panel a scale."""
    figure, axes = _by_scale(error, "kept", "modes kept", "relative mean square error")
    for axis in axes:
        axis.axhline(0.1, color="0.6", lw=1, ls=":")
        axis.set_ylim(0, 1)
    return figure


def stability_curves(panels: dict[str, xr.Dataset]):
    """Overlap of the modes of two halves against K, a panel a title, a curve a layer.

    Each of `panels` has ``overlap``, ``low`` and ``high`` on (layer, mode), from split halves, and
    perhaps ``null``, whose mean over layers is dashed.
    """
    figure, axes = grid(len(panels), 3, width=2.5, height=2.2, sharey=True)
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=False):
        layers = one["layer"].values
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            some = one.sel(layer=layer)
            axis.plot(
                some["mode"], some["overlap"], color=color, marker="o", ms=3, lw=1.4,
                label=f"layer {layer}",
            )  # fmt: skip
            axis.fill_between(
                some["mode"], some["low"], some["high"], color=color, alpha=0.13, lw=0
            )
        if "null" in one:
            axis.plot(
                one["mode"], one["null"].mean("layer"), color="0.3", ls="--", lw=1, label="K / D"
            )
        axis.set(title=title, ylim=(-0.02, 1.02), xticks=one["mode"].values)
    edge_labels(axes, "first K modes", "overlap of halves", len(panels))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def basis_errors(error: xr.DataArray):
    """Error of bases against K, (documents, layer, basis, kept): a row a set of documents."""
    rows, layers = error["documents"].values, error["layer"].values
    figure, axes = plt.subplots(
        len(rows), len(layers), squeeze=False, sharex=True, sharey="row",
        figsize=(2.4 * len(layers) + 1.4, 2.2 * len(rows) + 0.3),
    )  # fmt: skip
    colors = (*MODEL_COLORS, "0.5")
    styles = (*LINE_STYLES, (0, (4, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (6, 3)))
    for line, documents in zip(axes, rows, strict=True):
        for axis, layer in zip(line, layers, strict=True):
            for color, style, basis in zip(colors, styles, error["basis"].values, strict=False):
                one = error.sel(documents=documents, layer=layer, basis=basis)
                axis.plot(one["kept"], one, color=color, ls=style, lw=1.5, label=str(basis))
            axis.set_title(f"layer {layer}, {documents}", fontsize=9)
    edge_labels(axes, "vectors K", "relative error", axes.size)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def continuous_spectra(eigenvalues: xr.DataArray):
    """Leading eigenvalues by the period of the window, a panel a layer: (layer, scale, mode)."""
    n = eigenvalues.sizes["layer"]
    figure, axes = grid(n, 3, width=2.7, height=2.1, sharex=True, sharey=True)
    numbers = eigenvalues["mode"].values
    for axis, layer in zip(axes.flat, eigenvalues["layer"].values, strict=False):
        for color, k in zip(layer_colors(len(numbers)), numbers, strict=True):
            one = eigenvalues.sel(layer=layer, mode=k)
            axis.plot(one["period"], one, color=color, lw=1.4, label=f"k = {k}")
        axis.set_title(f"layer {layer}")
        log_axis(axis)
        period_axis(axis, "x", eigenvalues["period"])
    edge_labels(axes, "period (tokens)", "eigenvalue", n)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def eigenvalue_panels(spectra: dict[str, xr.DataArray]):
    """Share of the variance by mode, log-log: a panel a (title: spectra (layer, mode))."""
    figure, axes = grid(len(spectra), 3, width=2.6, height=2.1, sharex=True, sharey=True)
    for axis, (title, values) in zip(axes.flat, spectra.items(), strict=False):
        share = values / values.sum("mode")
        layers = values["layer"].values
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            axis.plot(share["mode"], share.sel(layer=layer), color=color, label=f"layer {layer}")
        axis.set(title=title, xscale="log", yscale="log", ylim=(1e-4, 1))
    edge_labels(axes, "mode", "share of the variance", len(spectra))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
