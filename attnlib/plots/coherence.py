"""Figures of wavelet coherence."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from .base import MODEL_COLORS, SEQUENTIAL, edge_labels, grid

FOUND = "#D55E00"  # stands out on every colour of the map
MARKERS = ("o", "s", "^", "D", "v")


def coherence_maps(result: xr.Dataset, top: float | None = None):
    """Coherence, a panel a layer and scale; from :func:`attnlib.coherence` in either convention.

    Hatched: the wavelet's own footprint. Outlined: pairs outside it that stand out, above the
    threshold of the map or, as published, above the floor of the pair. Blank: outside the cone.
    The colours end at `top`, by default where 1 of 200 pairs outside the footprint lies higher.
    """
    published = "query" in result["coherence"].dims
    pair = ("query", "key") if published else ("lag", "lag_")
    layers, scales = result["layer"].values, result["scale"].values
    by_scale = len(scales) > 1
    n = len(layers) * len(scales)
    figure, axes = grid(n, len(scales) if by_scale else 3, sharex=True, sharey=True)
    result = result.transpose(..., *pair)
    free = result["coherence"].where(~result["footprint"])
    if published:
        found = (free > result["floor"]) & np.tri(result.sizes["query"], dtype=bool)
        top = 1.0 if top is None else top
    else:
        found = result["significant"]
        if top is None:
            top = float(free.quantile(0.995)) if free.notnull().any() else 1.0
    top = top if np.isfinite(top) and top > 0 else 1.0
    panels = [(layer, scale) for layer in layers for scale in scales]
    for axis, (layer, scale) in zip(axes.flat, panels, strict=False):
        one = {"layer": layer, "scale": scale}
        image = axis.imshow(
            result["coherence"].sel(one), cmap=SEQUENTIAL, vmin=0, vmax=top,
            origin="upper" if published else "lower",
        )  # fmt: skip
        own = result["footprint"].sel(scale=scale).values.astype(float)
        if own.any():
            axis.contourf(own, levels=[0.5, 1.5], colors=[(0.85, 0.85, 0.85, 0.45)])
            with plt.rc_context({"hatch.color": "0.35", "hatch.linewidth": 0.5}):
                axis.contourf(own, levels=[0.5, 1.5], colors="none", hatches=["////"])
        outlined = found.sel(one).values.astype(float)
        if outlined.any():
            axis.contour(outlined, levels=[0.5], colors=FOUND, linewidths=0.8)
        period = float(result["period"].sel(scale=scale))
        axis.set_title(f"layer {layer}" + (f", period {period:.1f}" if by_scale else ""))
    if published:
        edge_labels(axes, "key position j", "query position i", n)
    else:
        edge_labels(axes, "lag b′ (tokens)", "lag b (tokens)", n)
    label = "coherence" if by_scale else f"coherence, period {period:.1f} tokens"
    figure.colorbar(
        image,
        ax=axes.ravel().tolist(),
        label=label,
        shrink=0.8,
        extend="max" if top < 1 else "neither",
    )
    return figure


def coherence_shares(panels: dict[str, xr.Dataset]):
    """Share of the pairs that pass the floor, by layer, a panel a (title: results).

    Results on (model, layer, scale) with ``share`` and ``share_by_chance``. A panel with the same
    models as the one before it has the same legend.
    """
    figure, axes = grid(len(panels), 2, width=3.2, height=2.5, sharex=True, sharey=True)
    before = None
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=False):
        names, scales = one["model"].values, one["scale"].values
        place = np.arange(one.sizes["layer"])
        shift = np.linspace(-0.32, 0.32, len(names) * len(scales)).reshape(len(names), -1)
        for color, name, of_name in zip(cycle(MODEL_COLORS), names, shift, strict=False):
            for marker, scale, offset in zip(MARKERS, scales, of_name, strict=False):
                some, at = one.sel(model=name, scale=scale), place + offset
                label = f"{name}, period {float(some['period']):.1f}"
                axis.plot(at, some["share_by_chance"], color="0.6", marker="_", lw=0)
                axis.plot(at, some["share"], color=color, marker=marker, ms=4, lw=0, label=label)
        axis.plot([], [], color="0.6", marker="_", lw=0, label="reached by chance")
        axis.set_title(title)
        axis.set_xticks(place, one["layer"].values)
        if before is None or not np.array_equal(names, before):
            axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        before = names
    axes[0, 0].set_ylim(0, None)  # last: it stops the shared axis from growing
    edge_labels(axes, "layer", "share of pairs above the floor", len(panels))
    return figure
