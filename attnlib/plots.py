"""One function a kind of figure. Each takes labelled arrays and returns a matplotlib Figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe & Ito 2008: distinct for every common kind of colour vision.
MODEL_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
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


def _period_axis(axis, which: str, periods) -> None:
    """A logarithmic axis of periods, with ticks within their range."""
    low, high = float(np.min(periods)), float(np.max(periods))
    _token_axis(axis, which, [t for t in PERIOD_TICKS if low <= t <= high])


def layer_colors(n: int) -> np.ndarray:
    """One colour a layer, dark to light with depth."""
    return plt.get_cmap("viridis")(np.linspace(0, 0.88, n))


def _grid(n: int, columns: int, width: float = 2.3, height: float = 2.3, **kwargs):
    columns = min(columns, n)
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns + 0.9, height * rows + 0.4), squeeze=False, **kwargs
    )
    for axis in axes.flat[n:]:
        axis.set_visible(False)
    return figure, axes


def _edge_labels(axes, x: str, y: str, n: int) -> None:
    """Label only the outer axes of a grid of n panels."""
    columns = axes.shape[1]
    for i, axis in enumerate(axes.flat[:n]):
        if i % columns == 0:
            axis.set_ylabel(y)
        if i + columns >= n:
            axis.set_xlabel(x)


def _token_axis(axis, which: str, ticks) -> None:
    """A logarithmic axis of tokens with plain numbers."""
    getattr(axis, f"set_{which}scale")("log", base=2)
    side = getattr(axis, f"{which}axis")
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(NullFormatter())
    if ticks is not None:
        getattr(axis, f"set_{which}ticks")(ticks)


# ------------------------------------------------------------------ models


def loss_curves(history: xr.Dataset, yardsticks: dict[str, float]):
    """Training and validation loss against steps, with horizontal yardsticks.

    `history`: ``train_loss``, ``val_loss``, ``val_loss_se`` on (model, step).
    """
    figure, axis = plt.subplots(figsize=(7.6, 3.6))
    for color, name in zip(MODEL_COLORS, history["model"].values, strict=False):
        one = history.sel(model=name)
        axis.plot(one["step"], one["train_loss"], color=color, lw=1, ls=":")
        axis.plot(one["step"], one["val_loss"], color=color, lw=1.8, label=f"{name} (validation)")
        band = 1.96 * one["val_loss_se"]
        axis.fill_between(
            one["step"],
            one["val_loss"] - band,
            one["val_loss"] + band,
            color=color,
            alpha=0.2,
            lw=0,
        )
    axis.plot([], [], color="0.4", lw=1, ls=":", label="training")
    for (name, value), style in zip(yardsticks.items(), ("--", "-."), strict=False):
        axis.axhline(value, color="0.5", lw=1, ls=style, label=f"{name} ({value:.2f})")
    axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", xlim=(0, None))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def loss_by_prefix(losses: xr.Dataset):
    """Loss of the next token by prefix length, and its paired difference to the first model.

    `losses` on (model, prefix): ``prefix_loss``, and ``difference`` with ``difference_se`` after
    prefixes alone (``prefix_...``) and inside whole windows (``window_...``).
    """
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.3))
    names = losses["model"].values
    for i, (color, name) in enumerate(zip(MODEL_COLORS, names, strict=False)):
        one = losses.sel(model=name)
        axes[0].plot(one["prefix"], one["prefix_loss"], color=color, marker="o", ms=3, label=name)
        for kind, style, where in (
            ("prefix", "-", "after prefixes"),
            ("window", ":", "in windows"),
        ):
            if i > 0:
                axes[1].errorbar(
                    one["prefix"], one[f"{kind}_difference"],
                    1.96 * one[f"{kind}_difference_se"], color=color, ls=style, marker="o", ms=3,
                    capsize=2, label=f"{name}, {where}",
                )  # fmt: skip
    for axis in axes:
        _token_axis(axis, "x", None)
        axis.set_xlabel("prefix length (tokens)")
    axes[1].axhline(0, color="0.6", lw=1)
    axes[0].set_ylabel("loss of the next token (nats)")
    axes[1].set_ylabel(f"difference to {names[0]} (nats)")
    axes[0].legend()
    if len(names) > 1:
        axes[1].legend()
    return figure


# ------------------------------------------------------------------ fields


def field_maps(fields: xr.DataArray, *, signed: bool = False, label: str = "attention"):
    """One picture a layer of fields (layer, query, key); logarithmic, or signed about 0."""
    n = fields.sizes["layer"]
    figure, axes = _grid(n, 3, sharex=True, sharey=True)
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
    _edge_labels(axes, "key position", "query position", n)
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
    figure, axes = plt.subplots(
        1, len(profiles), figsize=(3.7 * len(profiles) + 1, 3.3), sharey=True, squeeze=False
    )
    for axis, (name, profile) in zip(axes.flat, profiles.items(), strict=True):
        for color, layer in zip(
            layer_colors(profile.sizes["layer"]), profile["layer"].values, strict=True
        ):
            one = profile.sel(layer=layer)
            axis.plot(one["lag"] + 1, one, color=color, lw=1.4, label=f"layer {layer}")
        axis.set(xlabel="lag + 1 (tokens)", title=name, yscale="log")
        _token_axis(axis, "x", None)
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# ------------------------------------------------------------------ wavelets


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
    _token_axis(axes[2], "x", None)
    axes[2].set(xlabel="period (tokens)", ylabel="squared modulus", title="power by period")
    axes[2].legend()
    return figure


def scalogram_panels(power: xr.DataArray, label: str = "power / red noise"):
    """One scalogram (scale, lag) a layer, logarithmic about 1; blank outside the cone."""
    n = power.sizes["layer"]
    figure, axes = _grid(n, 3, width=2.7, height=2.1, sharex=True, sharey=True)
    span = min(4.0, float(np.nanquantile(np.abs(np.log2(power.values)), 0.98))) or 1.0
    for axis, layer in zip(axes.flat, power["layer"].values, strict=False):
        one = np.log2(power.sel(layer=layer).transpose("scale", "lag"))
        image = axis.pcolormesh(
            power["lag"], power["period"], one, cmap=DIVERGING, vmin=-span, vmax=span,
            shading="nearest", rasterized=True,
        )  # fmt: skip
        _period_axis(axis, "y", power["period"])
        axis.set_ylim(float(power["period"].min()), float(power["period"].max()))
        axis.set_facecolor("0.9")
        axis.set_title(f"layer {layer}")
    _edge_labels(axes, "lag (tokens)", "period (tokens)", n)
    figure.colorbar(
        image, ax=axes.ravel().tolist(), label=f"log2({label})", shrink=0.85, extend="both"
    )
    return figure


def scale_spectra(panels: dict[str, tuple[xr.DataArray, xr.Dataset | None]], ylabel: str):
    """Power by period, one curve a layer, one panel a (title: power, interval)."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.6 * len(panels) + 1.4, 3.0), squeeze=False
    )
    for axis, (title, (power, interval)) in zip(axes.flat, panels.items(), strict=True):
        layers = power["layer"].values
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            one = power.sel(layer=layer)
            axis.plot(one["period"], one, color=color, lw=1.5, label=f"layer {layer}")
            if interval is not None:
                low, high = interval["low"].sel(layer=layer), interval["high"].sel(layer=layer)
                axis.fill_between(one["period"], low, high, color=color, alpha=0.2, lw=0)
        axis.set(xlabel="period (tokens)", title=title, yscale="log")
        _period_axis(axis, "x", power["period"])
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def dominant_by_layer(dominant: dict[str, xr.Dataset], periods):
    """Dominant periods of each layer, a colour a model; the axis spans the grid of periods."""
    figure, axis = plt.subplots(figsize=(6.4, 3.0))
    shift = np.linspace(-0.2, 0.2, len(dominant)) if len(dominant) > 1 else [0.0]
    for color, offset, (name, one) in zip(MODEL_COLORS, shift, dominant.items(), strict=False):
        layer = one["layer"].broadcast_like(one["dominant"])
        axis.scatter(layer + offset, one["dominant_period"], s=45, color=color, label=name)
    _period_axis(axis, "y", periods)
    axis.set_ylim(float(np.min(periods)), float(np.max(periods)))
    axis.set(xlabel="layer", ylabel="dominant period (tokens)")
    layers = next(iter(dominant.values()))["layer"].values
    axis.set(xticks=layers, xlim=(layers[0] - 0.5, layers[-1] + 0.5))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# ------------------------------------------------------------------ POD


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
    _edge_labels(axes, "key", "query", axes.size)
    return figure


def mode_profiles(profiles: xr.DataArray, max_lag: int | None = None):
    """Lag profiles of the leading modes, one panel a layer: (layer, mode, lag)."""
    n = profiles.sizes["layer"]
    figure, axes = _grid(n, 3, width=2.7, height=2.0, sharex=True)
    some = profiles if max_lag is None else profiles.sel(lag=slice(0, max_lag))
    for axis, layer in zip(axes.flat, some["layer"].values, strict=False):
        for color, style, k in zip(
            MODEL_COLORS, (*LINE_STYLES, "-"), some["mode"].values, strict=False
        ):
            one = some.sel(layer=layer, mode=k)
            axis.plot(one["lag"], 1e3 * one, color=color, ls=style, lw=1.4, label=f"mode {k}")
        axis.axhline(0, color="0.7", lw=0.8, zorder=0)
        axis.set_title(f"layer {layer}")
    _edge_labels(axes, "lag (tokens)", "mode (10⁻³)", n)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _by_scale(curves: xr.DataArray, along: str, xlabel: str, ylabel: str):
    """A panel a scale, a curve a layer, over the dimension `along`; returns figure and axes."""
    scales, layers = curves["scale"].values, curves["layer"].values
    figure, axes = _grid(len(scales), 3, width=2.6, sharey=True)
    for axis, scale in zip(axes.flat, scales, strict=False):
        for color, layer in zip(layer_colors(len(layers)), layers, strict=True):
            one = curves.sel(scale=scale, layer=layer)
            axis.plot(one[along], one, color=color, lw=1.4, label=f"layer {layer}")
        title = f"period {float(curves['period'].sel(scale=scale)):.1f}"
        axis.set_title(title if np.isfinite(scale) else "no filter")
    _edge_labels(axes, xlabel, ylabel, len(scales))
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


# ------------------------------------------------------------------ complexity


def estimates_by_layer(panels: dict[str, xr.Dataset], ylabel: str):
    """Estimates with intervals by layer, a panel a (title: estimate, low, high (model, layer))."""
    figure, axes = _grid(len(panels), 3, width=2.6, sharey=True)
    for axis, (title, one) in zip(axes.flat, panels.items(), strict=False):
        names = one["model"].values
        shift = np.linspace(-0.12, 0.12, len(names)) if len(names) > 1 else [0.0]
        for color, offset, name in zip(MODEL_COLORS, shift, names, strict=False):
            some = one.sel(model=name)
            middle = some["estimate"].values
            bars = np.stack([middle - some["low"], some["high"] - middle]).clip(min=0)
            axis.errorbar(
                some["layer"] + offset, middle, bars, color=color, marker="o", ms=4, lw=0,
                elinewidth=1.4, capsize=2.5, label=str(name),
            )  # fmt: skip
        axis.set_title(title)
        axis.set_xticks(one["layer"].values)
    _edge_labels(axes, "layer", ylabel, len(panels))
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def rank_curves(curves: xr.Dataset, epsilon: float):
    """H*(epsilon; N) against N, a panel a model, with the line that only counts snapshots."""
    names = curves["model"].values
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.4 * len(names) + 1.3, 2.9), sharey=True, squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=True):
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
        axis.set(title=str(name), xlabel="snapshots N")
    axes[0, 0].set_ylabel(f"H*({epsilon:g}; N)")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
