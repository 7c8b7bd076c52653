"""Figures of attention drawn on the text that it looks at."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from ..errors import InputError
from .base import DIVERGING

SYMBOLS = {"\n": "↵", "\t": "→", "\r": "←"}
WIDTH = 7.5  # inches: the width of a page of the book


def attention_on_text(
    texts: Sequence[Sequence[str]],
    values,
    queries: Sequence[int],
    titles: Sequence[str],
    *,
    columns: int = 64,
    label: str = "fluctuation",
):
    """Windows of text, one below the other, coloured by what one query pays to each token.

    Parameters
    ----------
    texts : sequence of (str or sequence of str)
        The tokens of each window; a plain string has one a character. Longer tokens take a cell a
        character.
    values : sequence of array-like
        ``(T,)`` each: what the query pays to each token, signed. All windows share one scale.
    queries : sequence of int
        Position of the query, which is outlined; the text after it is grey.
    titles : sequence of str
    columns : int
        Characters a line.
    label : str
        Of the colour bar.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        Not as many values as tokens, or a query outside its window.
    """
    if not len(texts) or not len(texts) == len(values) == len(queries) == len(titles):
        raise InputError("give one text, one row of values, one query and one title a window")
    spread = [_cells(*window) for window in zip(texts, values, queries, strict=True)]
    rows = [-(-len(characters) // columns) for characters, *_ in spread]
    size = WIDTH / (columns + 8)  # inches a cell, with room for the colour bar
    heights = [1.7 * size * n + 0.27 for n in rows]
    figure, axes = plt.subplots(
        len(texts), 1, squeeze=False, figsize=(WIDTH, sum(heights)), height_ratios=heights
    )
    seen = np.concatenate([shade[known] for _, shade, known, _ in spread])
    top = float(np.quantile(np.abs(seen), 0.995)) or 1.0
    norm = Normalize(-top, top)
    for axis, one, n, title in zip(axes[:, 0], spread, rows, titles, strict=True):
        image = _draw(axis, *one, n, columns, norm, 72 * size)
        axis.set_title(title, fontsize=8.5, loc="left", pad=2)
    bar = figure.colorbar(image, ax=axes[:, 0].tolist(), extend="both", aspect=30)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=8.5)
    return figure


def _cells(text, values, query: int) -> tuple:
    """Characters of a window, the value of each, whether the query sees it, and is it."""
    tokens, values = list(text), np.asarray(values, dtype=float)
    if values.shape != (len(tokens),) or not 0 <= query < len(tokens):
        raise InputError(
            f"a window of {len(tokens)} tokens has as many values, not {values.shape}, and its "
            f"query is one of them, not {query}"
        )
    owner = np.repeat(np.arange(len(tokens)), [len(t) for t in tokens])
    return "".join(tokens), values[owner], owner <= query, owner == query


def _draw(axis, characters, shade, known, asked, rows, columns, norm, points):
    """One window on a grid of cells; returns its image."""
    cells = np.full(rows * columns, np.nan)
    cells[: len(characters)] = np.where(known, shade, np.nan)
    image = axis.imshow(
        cells.reshape(rows, columns), cmap=DIVERGING, norm=norm, aspect=1.7, origin="upper"
    )
    for i, character in enumerate(characters):
        row, column = divmod(i, columns)
        strong = abs(shade[i]) > 0.65 * norm.vmax
        color = ("white" if strong else "black") if known[i] else "0.62"
        axis.text(
            column, row, SYMBOLS.get(character, character), color=color, fontsize=0.95 * points,
            family="monospace", ha="center", va="center_baseline", parse_math=False,
        )  # fmt: skip
        if asked[i]:
            box = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec="black", lw=1.3)
            axis.add_patch(box).set_clip_on(False)
    axis.set_axis_off()
    return image
