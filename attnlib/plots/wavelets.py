"""Figures of transforms and scalograms."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from .base import (
    DIVERGING,
    MODEL_COLORS,
    edge_labels,
    grid,
    layer_colors,
    log_axis,
    period_axis,
    token_axis,
)


def transform_check(x, ours, theirs, period_axis, wavelength: float):
    """A sine, its transform by two libraries at one scale, and its power by period."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.9))
    axes[0].plot(x, color="0.2", lw=1)
    axes[0].set(xlabel="lag (tokens)", ylabel="signal", title=f"cosine of period {wavelength:g}")
    axes[1].plot(np.abs(ours), color=MODEL_COLORS[0], lw=2.5, label="attnlib")
    axes[1].plot(np.abs(theirs), color=MODEL_COLORS[1], lw=1.2, ls="--", label="PyWavelets")
    axes[1].set(xlabel="lag (tokens)", ylabel="modulus of W", title="transform at that period")
    axes[1].legend(loc="lower center")
    period, power = period_axis
    axes[2].plot(period, power, color=MODEL_COLORS[0], lw=1.8)
    axes[2].axvline(wavelength, color="0.5", ls=":", lw=1.5, label="true period")
    token_axis(axes[2], "x", None)
    axes[2].set(xlabel="period (tokens)", ylabel="squared modulus", title="power by period")
    axes[2].legend()
    return figure


def scalogram_panels(power: xr.DataArray, label: str = "power / red noise"):
    """One scalogram (scale, lag) a layer, logarithmic about 1; blank outside the cone."""
    n = power.sizes["layer"]
    figure, axes = grid(n, 3, width=2.7, height=2.1, sharex=True, sharey=True)
    span = min(4.0, float(np.nanquantile(np.abs(np.log2(power.values)), 0.98))) or 1.0
    for axis, layer in zip(axes.flat, power["layer"].values, strict=False):
        one = np.log2(power.sel(layer=layer).transpose("scale", "lag"))
        image = axis.pcolormesh(
            power["lag"], power["period"], one, cmap=DIVERGING, vmin=-span, vmax=span,
            shading="nearest", rasterized=True,
        )  # fmt: skip
        period_axis(axis, "y", power["period"])
        axis.set_ylim(float(power["period"].min()), float(power["period"].max()))
        axis.set_facecolor("0.9")
        axis.set_title(f"layer {layer}")
    edge_labels(axes, "lag (tokens)", "period (tokens)", n)
    figure.colorbar(
        image, ax=axes.ravel().tolist(), label=f"log2({label})", shrink=0.85, extend="both"
    )
    return figure


def scale_spectra(panels: dict[str, tuple[xr.DataArray, xr.Dataset | None]], ylabel: str):
    """Power by period, one curve a layer, one panel a (title: power, interval)."""
    figure, axes = grid(len(panels), 3, width=2.6, height=2.4, sharex=True, sharey=True)
    for axis, (title, (power, interval)) in zip(axes.flat, panels.items(), strict=False):
        layers = power["layer"].values
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            one = power.sel(layer=layer)
            axis.plot(one["period"], one, color=color, lw=1.5, label=f"layer {layer}")
            if interval is not None:
                low, high = interval["low"].sel(layer=layer), interval["high"].sel(layer=layer)
                axis.fill_between(one["period"], low, high, color=color, alpha=0.2, lw=0)
        axis.set_title(title)
        log_axis(axis)
        period_axis(axis, "x", power["period"])
    edge_labels(axes, "period (tokens)", ylabel, len(panels))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def dominant_by_layer(panels: dict[str, dict[str, xr.Dataset]], periods):
    """Dominant periods of each layer, a panel a background, a colour a model.

    The axis spans the grid of periods; a panel without any dominant period says so.
    """
    figure, axes = grid(len(panels), 2, width=3.4, height=2.4, sharex=True, sharey=True)
    for axis, (title, dominant) in zip(axes.flat, panels.items(), strict=False):
        shift = np.linspace(-0.2, 0.2, len(dominant)) if len(dominant) > 1 else [0.0]
        for color, offset, (name, one) in zip(
            cycle(MODEL_COLORS), shift, dominant.items(), strict=False
        ):
            layer = one["layer"].broadcast_like(one["dominant"])
            axis.scatter(layer + offset, one["dominant_period"], s=40, color=color, label=name)
        if not any(one["dominant"].notnull().any() for one in dominant.values()):
            axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", color="0.4")
        period_axis(axis, "y", periods)
        axis.set_ylim(float(np.min(periods)), float(np.max(periods)))
        layers = next(iter(dominant.values()))["layer"].values
        axis.set(xticks=layers, xlim=(layers[0] - 0.5, layers[-1] + 0.5), title=title)
    edge_labels(axes, "layer", "dominant period (tokens)", len(panels))
    most = max(range(len(panels)), key=lambda i: len(list(panels.values())[i]))
    handles, labels = axes.flat[most].get_legend_handles_labels()
    axes[0, -1].legend(handles, labels, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def window_banks(panels: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]):
    """Windows over the lag, a curve a scale, and their sum: a panel a (title: lags, scales, w)."""
    figure, axes = grid(len(panels), 2, width=3.4, height=2.1, sharex=True, sharey=True)
    for axis, (title, (lag, scales, windows)) in zip(axes.flat, panels.items(), strict=False):
        for color, scale, window in zip(layer_colors(len(scales)), scales, windows, strict=True):
            axis.plot(lag + 1, window, color=color, lw=1.6, label=f"scale {scale:g}")
        axis.plot(lag + 1, windows.sum(0), color="0.4", ls="--", lw=1.2, label="sum")
        token_axis(axis, "x", None)
        axis.set_title(title)
    edge_labels(axes, "lag + 1 (tokens)", "window", len(panels))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
