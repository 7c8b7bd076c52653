"""Figures of attention fields."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.colors import LogNorm, TwoSlopeNorm

from .base import DIVERGING, SEQUENTIAL, edge_labels, grid, layer_colors, token_axis


def field_maps(fields: xr.DataArray, *, signed: bool = False, label: str = "attention"):
    """One picture a layer of fields (layer, query, key); logarithmic, or signed about 0."""
    n = fields.sizes["layer"]
    figure, axes = grid(n, 3, sharex=True, sharey=True)
    values = fields.values
    if signed:
        top = float(np.quantile(np.abs(values[values != 0]), 0.995)) if values.any() else 1.0
        style = {"norm": TwoSlopeNorm(0, -top, top), "cmap": DIVERGING}
    else:
        style = {"norm": LogNorm(1e-4, 1), "cmap": SEQUENTIAL}
    for axis, layer in zip(axes.flat, fields["layer"].values, strict=False):
        picture = fields.sel(layer=layer).values
        shown = np.where(np.tri(len(picture)) > 0, np.maximum(picture, 1e-4), np.nan)
        image = axis.imshow(picture if signed else shown, **style)
        axis.set_title(f"layer {layer}")
    edge_labels(axes, "key position", "query position", n)
    extend = "both" if signed else "min"
    figure.colorbar(image, ax=axes.ravel().tolist(), label=label, shrink=0.8, extend=extend)
    return figure


def two_readings(causal: np.ndarray, published: np.ndarray):
    """Rows of one field as functions of the lag, in the causal and the published convention."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.4), sharey=True)
    pairs = (
        (causal, "lag = query − key", "causal convention"),
        (published, "lag = key − query", "published convention"),
    )
    for axis, (rows, lag, title) in zip(axes, pairs, strict=True):
        image = axis.imshow(np.maximum(rows, 1e-4), norm=LogNorm(1e-4, 1), cmap=SEQUENTIAL)
        axis.set(xlabel=f"{lag} (tokens)", title=title)
    axes[0].set_ylabel("query position")
    figure.colorbar(image, ax=axes.tolist(), label="attention", shrink=0.85, extend="min")
    return figure


def by_lag(profiles: dict[str, xr.DataArray], ylabel: str):
    """Curves over the lag, one a layer, one panel a model; both axes logarithmic."""
    figure, axes = grid(len(profiles), 2, width=3.5, height=2.6, sharex=True, sharey=True)
    for axis, (name, profile) in zip(axes.flat, profiles.items(), strict=False):
        for color, layer in zip(
            layer_colors(profile.sizes["layer"]), profile["layer"].values, strict=True
        ):
            one = profile.sel(layer=layer)
            axis.plot(one["lag"] + 1, one, color=color, lw=1.4, label=f"layer {layer}")
        axis.set(title=name, yscale="log")
        token_axis(axis, "x", None)
    edge_labels(axes, "lag + 1 (tokens)", ylabel, len(profiles))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
