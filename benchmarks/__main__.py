"""Run the benchmarks and write ``benchmarks/README.md``.

``python -m benchmarks`` measures the functions, and compares them with the peers that are
installed. Some parts are asked for: ``--streaming`` (minutes), and ``--book``, the whole of
``make book`` and ``make test`` from clean results (half an hour). ``--only PART`` runs one.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .acting import measure_acting
from .attention import measure_attention
from .book import WHOLE, measure_book
from .fields import N, T, measure_fields, measure_floor
from .multiscale import measure_published
from .peers import measure_pod, measure_transforms
from .routing import measure_routing
from .streaming import measure_streaming
from .timing import machine

FIGURES = Path(__file__).with_name("figures.json")
ON_REQUEST = ("streaming", "book")


class Part(NamedTuple):
    title: str
    measure: Callable[[], list[dict]]
    peers: tuple[str, ...] = ()


SIZE = f"N = {N}, T = {T}, one layer"
PARTS = {
    "fields": Part(f"Fields of the paper's size ({SIZE})", measure_fields),
    "floor": Part(f"Against the machine's speed in matrix products ({SIZE})", measure_floor),
    "published": Part("Against plain loops of the published algorithm", measure_published),
    "pod": Part(
        f"Unfiltered POD against its peers ({SIZE})", measure_pod, ("xeofs", "scikit-learn")
    ),
    "transforms": Part(
        f"Wavelet transforms against their peers ({SIZE})",
        measure_transforms,
        ("pywavelets", "ssqueezepy"),
    ),
    "streaming": Part("Streaming, in a process of its own", measure_streaming),
    "attention": Part("Attention (batch 4, 8 heads of size 32)", measure_attention),
    "routing": Part("Routing and filtering", measure_routing),
    "acting": Part("Linear attention and prescriptions", measure_acting),
    "book": Part("The whole, after set-up", measure_book),
}


def write(figures: dict) -> None:
    """Figures to JSON, and as tables to README.md."""
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python -m benchmarks --streaming --book` for every table). "
        "Times are the median of several calls, ± half the spread between the quartiles. Ratios "
        "are measured side by side in one run: the calls take turns, and each is set against its "
        "neighbour. Goals are stated, met or not. Benchmarks are never tests.",
        "",
    ]
    for key, part in PARTS.items():
        if key in figures:
            found = figures[key]
            lines += [f"## {part.title}", "", f"{found['machine']}; {found['date']}.", ""]
            lines += ["| what | measured |", "|---|---|"]
            lines += [f"| {r['what']} | {r['figure']} |" for r in found["rows"]] + [""]
    Path(__file__).with_name("README.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--streaming", action="store_true", help="also stream a large ensemble")
    parser.add_argument(
        "--book", nargs="*", choices=WHOLE, help="also time make book and make test, or some of it"
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    arguments = parser.parse_args()
    asked = {key for key in ON_REQUEST if getattr(arguments, key) not in (None, False)}
    wanted = arguments.only or [key for key in PARTS if key not in ON_REQUEST or key in asked]
    figures = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    for key in wanted:
        part = PARTS[key]
        print(f"{part.title} ...", file=sys.stderr)
        measure = part.measure
        if key == "book":
            measure = functools.partial(measure, arguments.book or WHOLE)
        today = datetime.date.today().isoformat()
        figures[key] = {"machine": machine(part.peers), "date": today, "rows": measure()}
        write(figures)
        for one in figures[key]["rows"]:
            print(f"  {one['what']}: {one['figure']}")


if __name__ == "__main__":
    main()
