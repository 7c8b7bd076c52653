"""Figures of the ledger."""

from __future__ import annotations

import matplotlib.pyplot as plt

VERDICT_COLORS = ("#009E73", "#E69F00", "#D55E00", "0.7", "#0072B2")


def verdict_counts(rows: list[dict[str, str]], verdicts: tuple[str, ...]):
    """Claims by verdict, each named: rows from :func:`attnlib.ledger`."""
    figure, axis = plt.subplots(figsize=(7.0, 0.5 * len(verdicts) + 0.6))
    for y, (verdict, color) in enumerate(zip(verdicts, VERDICT_COLORS, strict=True)):
        names = list(dict.fromkeys(r["claim"] for r in rows if r["verdict"] == verdict))
        axis.barh(y, len(names), color=color, height=0.6)
        axis.text(len(names) + 0.1, y, ", ".join(names), va="center")
    most = max(sum(r["verdict"] == v for r in rows) for v in verdicts)
    axis.set(yticks=range(len(verdicts)), yticklabels=verdicts, xlabel="claims")
    axis.set_xlim(0, most + 3)
    axis.set_xticks(range(most + 1))
    axis.invert_yaxis()
    return figure
