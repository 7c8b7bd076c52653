"""Times taken side by side, the rows that report them, and memory measured in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent


def machine(packages: tuple[str, ...] = ()) -> str:
    """The hardware and the software that matter for speed, in a line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [x.split(":")[1] for x in info.read_text().splitlines() if "model name" in x]
        model = names[0].strip() if names else model
    memory = psutil.virtual_memory().total / 2**30
    peers = "".join(f", {p} {version(p)}" for p in packages if installed(p))
    return (
        f"{model}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        f", numpy {np.__version__}{peers}"
    )


def installed(package: str) -> bool:
    """Whether a package is there, by its name on PyPI."""
    module = {"scikit-learn": "sklearn", "pywavelets": "pywt"}.get(package, package)
    return importlib.util.find_spec(module) is not None


# ------------------------------------------------------------------ time


def once(function: Callable) -> tuple[float, object]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def in_turn(functions: dict[str, Callable], repeats: int = 7) -> dict[str, list[float]]:
    """Seconds of several calls of each function, after one of each to warm up.

    The functions take turns, so that whatever else slows the machine slows all of them, and the
    ratio of two is taken from calls that stood side by side.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(once(function)[0])
    return times


def middle(values: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles (0 for a single value)."""
    if len(values) == 1:
        return values[0], 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return statistics.median(values), (high - low) / 2


# ------------------------------------------------------------------ rows


def row(what: str, times: list[float], note: str = "") -> dict:
    """A time. One call has no spread, and says so."""
    median, spread = middle(times)
    figure = f"{median:.3g} ± {spread:.1g} s" if len(times) > 1 else f"{median:.3g} s, one call"
    return {"what": what, "figure": figure + (f"; {note}" if note else "")}


def ratio(what: str, slow: list, fast: list, note: str = "", times: float = 1) -> dict:
    """How many times longer `slow` takes, call against neighbouring call.

    `times` is the number of equal parts of which `slow` did one. A single slow call is set
    against every fast one.
    """
    slow = slow * len(fast) if len(slow) == 1 else slow
    median, spread = middle([times * s / f for s, f in zip(slow, fast, strict=True)])
    digits = 2 if median < 10 else 1 if median < 100 else 0
    figure = f"{median:.{digits}f}x ± {spread:.{1 if spread < 10 else 2}g}"
    return {"what": what, "figure": figure + (f"; {note}" if note else "")}


def missing(package: str) -> dict:
    return {"what": f"against {package}", "figure": "skipped: not installed (`make bench` does)"}


def apart(ours, theirs) -> str:
    """Largest difference between two arrays, over the largest value of the second."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    share = np.abs(ours - theirs).max() / np.abs(theirs).max()
    return f"largest difference {share:.0e} of the largest value"


def apart_each(ours, theirs) -> str:
    """Largest difference between two arrays, each value over its own size."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return f"largest relative difference {np.abs(ours / theirs - 1).max():.0e}"


# ------------------------------------------------------------------ memory


def reset_peak() -> None:
    """Let the peak of resident memory start again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Peak resident memory of this process in bytes since :func:`reset_peak` (Linux)."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def in_fresh_process(*arguments: str) -> dict:
    """What ``python -m benchmarks.NAME ...`` prints, a JSON object."""
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def timed_command(command: list[str]) -> tuple[float, float]:
    """Wall time of a command, and the peak of its processes' resident memory in GiB."""
    highest = 0.0
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def watch():
        nonlocal highest
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            try:
                for one in [parent, *parent.children(recursive=True)]:
                    total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            highest = max(highest, total / 2**30)
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    watcher.join()
    return time.perf_counter() - start, highest
