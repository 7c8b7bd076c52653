"""The two commands of the README, from clean results, after set-up."""

from __future__ import annotations

import shutil

from .timing import ROOT, timed_command


def measure_book() -> list[dict]:
    """``make book`` at two presets, twice each, and ``make test``."""
    rows = []
    for preset in ("smoke", "quick"):
        for made in ("results", "build/book", "build/stage"):
            shutil.rmtree(ROOT / made / preset, ignore_errors=True)
        for when in ("from clean results", "again, nothing changed"):
            took, peak = timed_command(["make", "book", f"PRESET={preset}"])
            rows.append(
                {
                    "what": f"`make book` at `{preset}`, {when}",
                    "figure": f"{took:.0f} s, peak memory {peak:.1f} GiB",
                }
            )
    for made in ("results/smoke", "build/book/smoke", "build/stage/smoke"):
        shutil.rmtree(ROOT / made, ignore_errors=True)
    took, peak = timed_command(["make", "test"])
    rows.append(
        {"what": "`make test`, from clean results", "figure": f"{took:.0f} s, peak {peak:.1f} GiB"}
    )
    return rows
