"""Figures of cheaper attention: costs by layers changed, plans as stacks, cost against saving."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .base import MODEL_COLORS, edge_labels, grid, model_colors


def _increase_axis(axis, linear: float) -> None:
    """Nats on an axis that all panels share: linear up to `linear`, logarithmic above.

    What noise puts far below 0 is cut off.
    """
    axis.set_yscale("symlog", linthresh=linear)
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -linear / 2), high)
    ticks = [t for t in (0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if t <= high]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def cost_curves(panels: dict[str, xr.Dataset], xlabel: str, *, tolerance: float | None = None):
    """Increase of the loss against a number of layers, a panel a (title: estimate and error).

    Each has `increase` and `increase_se` on (model, changed); the vertical axis is linear below
    the tolerance, which is a dotted line, and logarithmic above.
    """
    figure, axes = grid(len(panels), 3, width=3.0, height=2.5, sharey=True)
    everyone = list(dict.fromkeys(str(m) for one in panels.values() for m in one["model"].values))
    colors, handles = model_colors(everyone), {}
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=False):
        for i, name in enumerate(one["model"].values.astype(str)):
            some = one.sel(model=name).dropna("changed", subset=["increase"])
            handles[name] = axis.errorbar(
                some["changed"], some["increase"], 1.96 * some["increase_se"], color=colors[name],
                marker="os^Dv"[i % 5], ms=3.5, lw=1.3, capsize=2,
                ls=("-", "--", "-.", ":")[i % 4],
            )  # fmt: skip
        axis.axhline(0, color="0.6", lw=0.8, zorder=0)
        if tolerance:
            handles[f"+{tolerance:g} nats"] = axis.axhline(tolerance, color="0.4", ls=":", lw=1.2)
        axis.set_title(title)
    _increase_axis(axes[0, 0], tolerance or 0.05)
    edge_labels(
        axes, xlabel, "increase (nats per token)\nlinear below the dotted line", len(panels)
    )
    axes[0, -1].legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plan_stacks(plans: dict[str, xr.Dataset]):
    """Plans as stacks of layers, the first at the bottom, drawn to the width that is left."""
    actions = list(dict.fromkeys(str(a) for p in plans.values() for a in p["action"].values))
    # Full first, linear last, ranks between from high to low: one colour each over all panels.
    ranks = sorted((a for a in actions if a.startswith("rank")), key=lambda a: -int(a.split()[1]))
    order = [a for a in ("full", *ranks, "linear") if a in actions]
    colors = dict(zip(order, MODEL_COLORS, strict=False))
    figure, axes = grid(len(plans), 5, width=1.9, height=3.0, sharex=True)
    drawn = {}
    for axis, (title, plan) in zip(axes.flat, plans.items(), strict=False):
        for layer in plan["layer"].values:
            one = plan.sel(layer=layer)
            action, left = str(one["recommendation"].item()), 1 - float(one["saving"])
            drawn[action] = axis.barh(
                layer, left, left=-left / 2, height=0.86, color=colors[action]
            )
        axis.set(xlim=(-0.52, 0.52), xticks=[], ylim=(0.3, plan.sizes["layer"] + 0.7))
        axis.set_yticks(plan["layer"].values[:: max(1, plan.sizes["layer"] // 8)])
        axis.grid(False)
        share = f"{plan.attrs['saving']:.0%} less {plan.attrs['save']}"
        axis.set_title("\n".join([*title.split(", "), share]), fontsize=9)
    edge_labels(axes, "width: what is left", "layer", len(plans))
    drawn = {a: drawn[a] for a in order if a in drawn}
    axes[0, -1].legend(drawn.values(), drawn.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def cost_frontiers(panels: dict[str, tuple[xr.Dataset, xr.Dataset]], save: str = "cache"):
    """Cost against saving, a panel a (title: the plan, what its plans cost when carried out).

    The line is what the plan predicts as its tolerance grows; points are on `allowed`, the
    tolerances: `saving`, `measured`, `measured_se`.
    """
    figure, axes = grid(len(panels), 3, width=2.8, height=2.4, sharey=True)
    for axis, (title, (plan, found)) in zip(axes.flat, panels.items(), strict=False):
        line = axis.plot(
            plan["frontier_saving"], plan["frontier_cost"].clip(min=0), color=MODEL_COLORS[0],
            lw=1.5, drawstyle="steps-post",
        )[0]  # fmt: skip
        points = axis.errorbar(
            found["saving"], found["measured"], 1.96 * found["measured_se"], color=MODEL_COLORS[1],
            marker="o", ms=4, lw=0, elinewidth=1.3, capsize=2.5,
        )  # fmt: skip
        axis.axhline(0, color="0.6", lw=0.8, zorder=0)
        axis.set_title(title, fontsize=9)
        axis.set_xlim(-0.03, 1.03)
        axis.set_xticks(np.arange(0, 1.01, 0.5), ["0", "50%", "100%"])
    _increase_axis(axes[0, 0], 0.05)
    edge_labels(axes, f"{save} saved", "increase (nats per token)\nlinear below 0.05", len(panels))
    axes[0, -1].legend(
        [line, points], ["predicted", "carried out"], loc="center left", bbox_to_anchor=(1, 0.5)
    )
    return figure


def increase_by_variant(panels: dict[str, xr.Dataset], labels: dict[str, dict[str, str]]):
    """Increase of the loss over a uniform model, a panel a base, a point a training.

    Each panel has `increase` and `increase_se` on (model, seed); `labels` gives what to write of
    each model.
    """
    widths = [max(2, one.sizes["model"]) for one in panels.values()]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2 + 0.75 * sum(widths), 3.2), width_ratios=widths, sharey=True,
        squeeze=False,
    )  # fmt: skip
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=True):
        names = one["model"].values.astype(str)
        shift = np.linspace(-0.12, 0.12, one.sizes["seed"]) if one.sizes["seed"] > 1 else [0.0]
        for i, (offset, seed) in enumerate(zip(shift, one["seed"].values, strict=True)):
            some = one.sel(seed=seed, model=names)
            axis.errorbar(
                np.arange(len(names)) + offset, some["increase"], 1.96 * some["increase_se"],
                color=MODEL_COLORS[i], marker="os^D"[i % 4], ms=4.5, lw=0, elinewidth=1.3,
                capsize=2.5, label=f"seed {seed}",
            )  # fmt: skip
        axis.axhline(0, color="0.6", lw=1)
        written = [labels[title][n].replace(" ", "\n") for n in names]
        axis.set_xticks(range(len(names)), written)
        axis.set(title=title, xlim=(-0.5, len(names) - 0.5))
    axes[0, 0].set_ylabel("increase (nats per token)")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
