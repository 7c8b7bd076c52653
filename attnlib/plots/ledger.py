"""Figures of the ledger."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

VERDICT_COLORS = ("#009E73", "#E69F00", "#D55E00", "0.7", "#56B4E9")


def verdict_counts(rows: list[dict[str, str]], verdicts: tuple[str, ...]):
    """Claims by verdict, one named cell each: rows from :func:`attnlib.ledger`."""
    found = [
        list(dict.fromkeys(row["claim"] for row in rows if row["verdict"] == verdict))
        for verdict in verdicts
    ]
    figure, axis = plt.subplots(figsize=(7.0, 0.4 * len(verdicts) + 0.6))
    for y, (names, color) in enumerate(zip(found, VERDICT_COLORS, strict=True)):
        for x, name in enumerate(names):
            axis.barh(y, 1, left=x, color=color, edgecolor="white", height=0.7)
            axis.text(x + 0.5, y, name, ha="center", va="center", fontsize=8)
    axis.set(yticks=range(len(verdicts)), yticklabels=verdicts, xlabel="claims")
    axis.set(xlim=(0, max(10, *map(len, found))), ylim=(len(verdicts) - 0.5, -0.5))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
