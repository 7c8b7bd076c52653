"""The whole analysis of a layer against plain loops of the published algorithm."""

from __future__ import annotations

import sys

import numpy as np

from .fields import make_fields
from .published import by_attnlib, by_loops
from .timing import apart, apart_each, in_turn, once, ratio, row

SMALL, LARGE = (60, 128), (150, 256)
SOME = 10  # documents of the large ensemble that the loops go through


def _compare(ours: dict, theirs: dict) -> str:
    """Scalogram and spectra side by side."""
    if not np.array_equal(ours["chosen"], theirs["chosen"]):
        raise SystemExit(f"scales differ: {ours['chosen']} and {theirs['chosen']}")
    rank = ours["eigenvalues"].shape[-1]
    spectra = apart_each(ours["eigenvalues"], theirs["eigenvalues"][:, :rank])
    return f"scalogram: {apart(ours['energy'], theirs['energy'])}; eigenvalues: {spectra}"


def measure_published() -> list[dict]:
    """Scalogram at 20 scales, POD at the 4 of most energy, 5 modes each, beta and H*.

    The loops run in full on the small ensemble, where the results are compared as well. On the
    large one they run on some of its documents; the time of every loop is proportional to their
    number, and the one N x N product that is not takes well under a second.
    """
    rows = []
    names = {True: "published lag", False: "causal lag"}
    for n, t in (SMALL, LARGE):
        layer = make_fields(n, t)[0]
        part = layer if (n, t) == SMALL else layer[:SOME]
        goal = 50 if (n, t) == SMALL else 200
        for forward, name in names.items():
            print(f"  loops, N = {n}, T = {t}, {name} ...", file=sys.stderr)
            loops, theirs = once(lambda part=part, f=forward: by_loops(part.numpy(), forward=f))
            fast = in_turn({"ours": lambda x=layer, f=forward: by_attnlib(x, forward=f)})["ours"]
            note = _compare(by_attnlib(part, forward=forward), theirs)
            share = n / len(part)
            what = f"N = {n}, T = {t}, {name}"
            if share > 1:
                note = f"loops timed on {SOME} of {n} documents, times {share:.0f}; there, {note}"
            rows += [
                row(f"{what}: functions", fast),
                row(f"{what}: loops", [share * loops], "extrapolated" if share > 1 else ""),
                ratio(
                    f"{what}: loops against functions (goal: {goal}x)", [loops], fast, note, share
                ),
            ]
    return rows
