"""Style, colours and axes that all figures share."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..errors import InputError

# Okabe & Ito 2008: distinct for every common kind of colour vision.
MODEL_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
SEQUENTIAL, DIVERGING = "cividis", "PuOr_r"


def use_style() -> None:
    """Settings that all figures of the book share."""
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "savefig.dpi": 150,
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "image.interpolation": "nearest",
            "figure.constrained_layout.use": True,
        }
    )


PERIOD_TICKS = (4, 8, 16, 32, 64, 128)


def period_axis(axis, which: str, periods) -> None:
    """A logarithmic axis of periods, with ticks within their range."""
    low, high = float(np.min(periods)), float(np.max(periods))
    token_axis(axis, which, [t for t in PERIOD_TICKS if low <= t <= high])


def model_colors(names) -> dict[str, str]:
    """A colour for each model: the same one on every page for those of the book."""
    known = ("BASE", "EGA-1", "EGA-2", "EGA-C", "untrained")
    colors = {n: MODEL_COLORS[known.index(n)] for n in names if n in known}
    free = [c for c in MODEL_COLORS if c not in colors.values()] or MODEL_COLORS
    colors |= dict(zip([n for n in names if n not in known], cycle(free), strict=False))
    return colors


def layer_colors(n: int) -> np.ndarray:
    """One colour a layer, dark to light with depth."""
    return plt.get_cmap("viridis")(np.linspace(0, 0.88, n))


def grid(n: int, columns: int, width: float = 2.3, height: float = 2.3, **kwargs):
    if n < 1:
        raise InputError("there is nothing to draw: no panel was given")
    columns = 2 if n == 4 else min(columns, n)  # four in a square, none alone in a row
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns + 0.9, height * rows + 0.4), squeeze=False, **kwargs
    )
    for axis in axes.flat[n:]:
        axis.set_visible(False)
    return figure, axes


def edge_labels(axes, x: str, y: str, n: int) -> None:
    """Label only the outer axes of a grid of n panels."""
    columns = axes.shape[1]
    for i, axis in enumerate(axes.flat[:n]):
        if i % columns == 0:
            axis.set_ylabel(y)
        if i + columns >= n:
            axis.set_xlabel(x)
            axis.tick_params(labelbottom=True)  # shared axes label the lowest row alone


def token_axis(axis, which: str, ticks) -> None:
    """A logarithmic axis of tokens with plain numbers."""
    getattr(axis, f"set_{which}scale")("log", base=2)
    side = getattr(axis, f"{which}axis")
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(NullFormatter())
    if ticks is not None:
        getattr(axis, f"set_{which}ticks")(ticks)


def layer_ticks(axis, layers) -> None:
    """A tick a layer, or at whole numbers where there are many."""
    if len(layers) <= 12:
        axis.set_xticks(layers)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def log_axis(axis) -> None:
    """A logarithmic vertical axis; plain numbers where it spans less than two decades."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def line_panels(
    panels: dict[str, dict[str, xr.DataArray]],
    xlabel: str,
    ylabel: str,
    *,
    along: str | None = None,
    log: str = "",
    tokens: bool = False,
    mark: tuple[str, float] | None = None,
    sharey: bool = True,
    columns: int = 3,
    legend: str = "",
):
    """Curves, a panel a (title: label to one-dimensional array).

    `along` names the coordinate for the horizontal axis (default: the array's own); `log` holds
    "x", "y" or both; `tokens` makes the horizontal axis one of tokens to base 2; `mark` is the
    label and position of a vertical line.
    """
    width, height = (2.8, 2.3) if len(panels) > 1 else (4.4, 2.8)
    figure, axes = grid(len(panels), columns, width, height, sharey=sharey)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        ordered = len(curves) > len(MODEL_COLORS) or all(k.startswith("layer") for k in curves)
        colors = layer_colors(len(curves)) if ordered else MODEL_COLORS
        for i, (color, (label, one)) in enumerate(zip(colors, curves.items(), strict=False)):
            style = "-" if ordered else LINE_STYLES[i % len(LINE_STYLES)]
            axis.plot(one[along or one.dims[0]], one, color=color, ls=style, lw=1.5, label=label)
        if mark is not None:
            axis.axvline(mark[1], color="0.5", ls=":", lw=1.2, label=mark[0])
        if "y" in log:
            log_axis(axis)
        if tokens:
            token_axis(axis, "x", None)
        elif "x" in log:
            axis.set_xscale("log")
        axis.set_title(title)
    edge_labels(axes, xlabel, ylabel, len(panels))
    fullest = max(axes.flat[: len(panels)], key=lambda axis: len(axis.get_lines()))
    axes[0, -1].legend(
        *fullest.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1, 0.5),
        title=legend or None,
    )  # fmt: skip
    return figure
