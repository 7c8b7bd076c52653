"""Run the benchmarks and write ``benchmarks/README.md``.

``python -m benchmarks`` measures the functions; ``--book`` also times the whole of ``make book``
and ``make test`` from clean results, which takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
FIGURES = Path(__file__).with_name("figures.json")
N, T = 150, 256  # the paper's ensemble
SCALES = 2 ** np.linspace(1, 6, 20)
POD_SCALES = [2.0, 4.0, 8.0, 16.0]


def machine() -> str:
    """The hardware and the software that matter for speed, in a line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [x.split(":")[1] for x in info.read_text().splitlines() if "model name" in x]
        model = names[0].strip() if names else model
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{model}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def seconds(function, repeats: int = 7) -> tuple[float, float]:
    """Median time of a call after one to warm up, and half the spread between the quartiles."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), (high - low) / 2


def fields(n: int = N, t: int = T) -> torch.Tensor:
    """One layer of causal row-stochastic fields."""
    logits = torch.randn(n, t, t, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(t, t).tril() == 0
    return logits.masked_fill(mask, float("-inf")).softmax(-1)[None]


def measure_fields() -> list[dict]:
    """Scalogram and POD of one layer at the paper's size, beside the plain ways."""
    from attnlib import bootstrap, lag_rows, morlet_cwt, pod, scale_gram, scalogram

    layer = fields()
    u = layer[0] - layer[0].mean(0)

    def transforms():
        """The row-averaged scalogram by batched transforms of every row, document by document."""
        total = torch.zeros(len(SCALES), T)
        for document in u:
            rows, _ = lag_rows(document[None])
            total += morlet_cwt(rows[0], SCALES).abs().square().mean(0)
        return total / N

    form = seconds(lambda: scalogram(layer, SCALES, rows="all"))
    cone = seconds(lambda: scalogram(layer, SCALES))
    batched = seconds(transforms, 3)
    ours = scalogram(layer, SCALES, rows="all")["power"].values[0]
    theirs = transforms().numpy()
    difference = float(np.abs(ours - theirs).max() / theirs.max())
    decomposition = seconds(lambda: pod(layer, POD_SCALES, 5))
    one = seconds(lambda: scale_gram(layer, [4.0]))
    many = seconds(lambda: scale_gram(layer, np.geomspace(2, 40, 64)))
    gram = scale_gram(layer, [4.0])
    resamples = seconds(lambda: bootstrap(gram, lambda v: v[:, 0], 1000), 3)
    return [
        row("scalogram, each row's cone, 20 scales", cone),
        row("scalogram, all rows, 20 scales", form),
        row("the same by batched transforms of every row", batched),
        ratio("quadratic form against batched transforms", batched, form, f"{difference:.0e}"),
        row("POD at 4 scales, 5 modes each, mode fields included", decomposition),
        {
            "what": "scalogram and POD together (goal: under 1 s a layer)",
            "figure": f"{cone[0] + decomposition[0]:.2f} s",
        },
        row("Gram at 1 scale", one),
        row("Gram at 64 scales", many),
        ratio("64 scales against 1", many, one),
        row("1,000 bootstrap resamples of one spectrum", resamples),
    ]


def measure_attention() -> list[dict]:
    """Energy-gated attention by the fused kernel against the plain form, forward and backward."""
    from attnlib import softmax_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 8, 1024, 32, generator=generator).unbind(0)
    bias = torch.randn(4, 8, 1024, generator=generator)

    def run(need_weights):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out, _ = softmax_attention(*inputs[:3], bias=inputs[3], need_weights=need_weights)
        out.sum().backward()
        return out

    fused, plain = seconds(lambda: run(False), 5), seconds(lambda: run(True), 5)
    difference = float((run(False) - run(True)).abs().max().detach())
    return [
        row("gate per key at T = 1,024, fused, forward and backward", fused),
        row("the same, plain form", plain),
        ratio("fused against plain", plain, fused, f"{difference:.0e}"),
    ]


def row(what: str, timed: tuple[float, float]) -> dict:
    return {"what": what, "figure": f"{timed[0]:.3g} ± {timed[1]:.1g} s"}


def ratio(what: str, slow, fast, difference: str | None = None) -> dict:
    spread = slow[0] / fast[0] * (slow[1] / slow[0] + fast[1] / fast[0])
    note = f", largest difference {difference}" if difference else ""
    return {"what": what, "figure": f"{slow[0] / fast[0]:.2f}x ± {spread:.1g}{note}"}


def timed_command(command: list[str]) -> tuple[float, float]:
    """Wall time of a command, and the peak of its processes' resident memory in GiB."""
    peak = 0.0
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def watch():
        nonlocal peak
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            try:
                for one in [parent, *parent.children(recursive=True)]:
                    total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            peak = max(peak, total / 2**30)
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    watcher.join()
    return time.perf_counter() - start, peak


def measure_book() -> list[dict]:
    """The two commands of the README, from clean results, after set-up."""
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


PARTS = {
    "fields": (f"Fields of the paper's size (N = {N}, T = {T}, one layer)", measure_fields),
    "attention": ("Attention (batch 4, 8 heads of size 32)", measure_attention),
    "book": ("The whole, after set-up", measure_book),
}


def write(figures: dict) -> None:
    """Figures to JSON, and as tables to README.md."""
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python -m benchmarks --book` for the last table). Times are the "
        "median of several calls, ± half the spread between the quartiles; ratios are measured "
        "side by side in one run. They are never tests.",
        "",
    ]
    for key, (title, _) in PARTS.items():
        if key in figures:
            part = figures[key]
            lines += [f"## {title}", "", f"{part['machine']}; {part['date']}.", ""]
            lines += ["| what | measured |", "|---|---|"]
            lines += [f"| {r['what']} | {r['figure']} |" for r in part["rows"]] + [""]
    Path(__file__).with_name("README.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--book", action="store_true", help="also time make book and make test")
    arguments = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    for key, (title, measure) in PARTS.items():
        if key == "book" and not arguments.book:
            continue
        print(f"{title} ...", file=sys.stderr)
        today = datetime.date.today().isoformat()
        figures[key] = {"machine": machine(), "date": today, "rows": measure()}
        write(figures)
        for one in figures[key]["rows"]:
            print(f"  {one['what']}: {one['figure']}")


if __name__ == "__main__":
    main()
