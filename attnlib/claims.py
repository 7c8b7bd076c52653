"""The ledger: each published claim, what we measured, and the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import xarray as xr

from .errors import InputError
from .store import load

# Claim id -> (the claim, the published figure). Ids as in the literature table of the book.
CLAIMS = {
    "A1": (
        "scales are organised by layer",
        "energy at a ≤ 7 tokens in layers 1–2, at a ≥ 20 in layers 5–6",
    ),
    "A2": ("T_spec of early layers", "about 1.0 in layers 1–2, read as slow decay"),
    "A3": (
        "late layers are more concentrated",
        "leading modes hold more of the variance in layers 5–6",
    ),
    "A4": (
        "modes read as language",
        "oscillation at lags 2–10 in layer 2, peaks at 10–35 in layer 4, several over 10–40 in "
        "layer 6",
    ),
    "A5": (
        "effective rank H*(0.10) with N = 150",
        "more than 150 in layers 1–2, about 91 in layers 3–6",
    ),
    "A6": ("8 heads everywhere are too many deep, too few early", "follows from A5"),
    "A7": (
        "energy gating amplifies coherent structures",
        "more scalogram energy in every layer",
    ),
    "A8": ("EGA-1 against BASE", "T_spec a little higher in layers 3–4, lower in 5–6"),
    "A9": ("POD is optimal", "Theorem 1"),
    "A10": ("unfiltered POD mixes scales", "the filter is needed for readable modes"),
    "A11": ("high coherence marks recurrent patterns", "maps for layers 1, 3 and 6"),
    "A12": ("energy gating lowers the validation loss", "1.4742 to 1.3712"),
    "B1": ("filtering dominates pretrained heads", "1,776 heads of 5 models"),
    "B2": ("routing has a low rank, far below the head's capacity", "the same heads"),
    "B3": ("every standard head is unstable", "an eigenvalue with Re > 0 in all"),
    "B4": ("S-D attention is stable by construction", "Re ≤ 0 for every eigenvalue"),
    "B5": ("S-D attention trains without layer normalisation", "at all of six sizes"),
    "B6": (
        "routing forms a cascade over depth",
        "rank 2 in layer 1, a plateau at 2–3, more than 10 planes at the end",
    ),
    "B7": ("the last layer's rank follows the head size, not the depth", "six sizes"),
    "B8": (
        "the cascade is the same at every scale",
        "layers at minimum rank: 33% (18M) to 92% (355M)",
    ),
    "B9": ("filtering collapses to one scalar a head", "+0.3 perplexity"),
    "B10": ("S-D attention without its routing fails", "catastrophically"),
    "B11": (
        "the first layers of an S-D model can be linearised after training",
        "7 of 12 layers under 5% of perplexity; standard attention collapses by layer 3",
    ),
    "B12": (
        "the first four layers can be trained as linear attention",
        "within 1.4% of perplexity at full head size",
    ),
    "B13": (
        "the cascade tells each layer's head size",
        "heads of 8 to 64: 47–65% fewer attention parameters for 3.9–8.4% of perplexity",
    ),
    "B14": (
        "the two kinds are each other's inverse",
        "standard: filtering cannot be cut, routing can; S-D: the reverse",
    ),
    "B15": ("layer normalisation hides the cascade", "the cascade shows without it"),
    "B16": ("the region that can be linearised widens with depth", "no figure"),
    "X1": ("what is the low rank of routing made of?", "not asked"),
    "X6": ("does one measurement of a model prescribe what its layers need?", "not asked"),
}

# The last is for a question that nobody has published an answer to.
VERDICTS = ("reproduced", "partly", "not reproduced", "not measurable at this size", "new")


def claim_row(claim: str, measured: str, verdict: str) -> dict[str, str]:
    """One line of a closing table.

    Parameters
    ----------
    claim : str
        Id, a key of ``CLAIMS``.
    measured : str
        What was found, with its interval; made from results, never typed in.
    verdict : str
        ``"reproduced"``, ``"partly"``, ``"not reproduced"``, ``"not measurable at this size"``, or
        ``"new"`` for an answer that nothing published can be held against.

    Returns
    -------
    dict
        ``claim``, ``measured``, ``verdict``.

    Raises
    ------
    InputError
        An unknown claim or verdict, or an empty or not finite figure in `measured`.
    """
    if claim not in CLAIMS:
        raise InputError(f"no claim '{claim}'; there are: {', '.join(CLAIMS)}")
    if verdict not in VERDICTS:
        raise InputError(f"a verdict is one of {VERDICTS}, not '{verdict}'")
    if not isinstance(measured, str) or "\n" in measured:
        raise InputError(f"what was measured is a text of one line, not {measured!r}")
    if not measured.strip() or re.search(r"\b(nan|inf)\b", measured, re.IGNORECASE):
        raise InputError(f"the figures for claim {claim} are missing: '{measured}'")
    return {"claim": claim, "measured": measured, "verdict": verdict}


def claim_table(rows: list[dict[str, str]]) -> str:
    """Closing table in Markdown: claim, published, measured, verdict.

    Parameters
    ----------
    rows : list of dict
        From :func:`claim_row`; a column ``notebook``, if they have one, comes last.
    """
    extra = ["notebook"] if any("notebook" in r for r in rows) else []
    heads = ["", "claim", "published", "measured", "verdict", *(["in"] if extra else [])]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        about, published = CLAIMS[row["claim"]]
        cells = [row["claim"], about, published, row["measured"], f"**{row['verdict']}**"]
        cells += [row.get(name, "") for name in extra]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def claim_results(rows: list[dict[str, str]]) -> xr.Dataset:
    """The rows as variables ``claim_measured`` and ``claim_verdict`` on `claim`, for results."""
    return xr.Dataset(
        {f"claim_{key}": ("claim", [r[key] for r in rows]) for key in ("measured", "verdict")},
        {"claim": [r["claim"] for r in rows]},
    )


def ledger(paths) -> list[dict[str, str]]:
    """All claims that a set of results files speak of, in the order of the ledger.

    Parameters
    ----------
    paths : sequence of path-like
        Results files; those without claims are passed over.

    Returns
    -------
    list of dict
        As from :func:`claim_row`, with the number of its ``notebook``; a claim that several
        notebooks test has several rows.
    """
    rows = []
    for path in map(Path, paths):
        data = load(path)
        if "claim" in data.dims:
            for claim in data["claim"].values:
                one = data.sel(claim=claim)
                measured, verdict = (
                    str(np.asarray(one[f"claim_{k}"])) for k in ("measured", "verdict")
                )
                rows.append({**claim_row(str(claim), measured, verdict), "notebook": path.stem[:2]})
    order = list(CLAIMS)
    return sorted(rows, key=lambda r: (order.index(r["claim"]), r["notebook"]))
