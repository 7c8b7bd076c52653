"""The two commands of the README, from clean results, after set-up."""

from __future__ import annotations

import json
import shutil

import torch

from .fields import matrix_speed
from .timing import ROOT, timed_command

WHOLE = ("smoke", "quick", "test")


def measure_book(what=WHOLE) -> list[dict]:
    """``make book`` at two presets, twice each, and ``make test``; or some of it."""
    rows = []
    for preset in [w for w in WHOLE[:2] if w in what]:
        clean(preset)
        speeds = [matrix_speed(torch.float32)]
        for when in ("from clean results", "again, nothing changed"):
            took, peak = timed_command(["make", "book", f"PRESET={preset}"])
            figure = f"{took:.0f} s, peak memory {peak:.1f} GiB"
            rows.append({"what": f"`make book` at `{preset}`, {when}", "figure": figure})
            if len(speeds) < 2:
                speeds.append(matrix_speed(torch.float32))
        # Most of the time is training, whose speed is that of such products.
        figure = " and ".join(f"{speed / 1e9:.0f}" for speed in speeds) + " Gflop/s"
        rows.append(
            {"what": "matrix product, 2,048 x 2,048, float32, before and after", "figure": figure}
        )
        rows.append({"what": "its chapters, seconds, two at a time", "figure": chapters(preset)})
    if "test" in what:
        clean("smoke")
        took, peak = timed_command(["make", "test"])
        figure = f"{took:.0f} s, peak memory {peak:.1f} GiB"
        rows.append({"what": "`make test`, from clean results", "figure": figure})
    return rows


def chapters(preset: str) -> str:
    """How long each notebook of a preset took, the start of its kernel included."""
    found = []
    for path in sorted((ROOT / "results" / preset / "notebooks").glob("[0-9]*[a-z].ipynb")):
        took = json.loads(path.read_text())["metadata"]["papermill"]["duration"]
        found.append(f"{path.stem[:2]} {took:.0f}")
    return ", ".join(found)


def clean(preset: str) -> None:
    """Remove what a preset made: results, trained models, pages."""
    for made in ("results", "build/book", "build/stage"):
        shutil.rmtree(ROOT / made / preset, ignore_errors=True)
