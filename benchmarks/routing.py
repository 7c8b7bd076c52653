"""Spectra of kernels, S-D attention, and the interactions of a pretrained model.

``python -m benchmarks.routing`` runs the last in a process of its own: it prints its seconds and
its peak memory.
"""

from __future__ import annotations

import json
import math
import time

import numpy as np
import torch
import torch.nn.functional as F

from .timing import apart, in_fresh_process, in_turn, once, ratio, row

# Layers, heads, width and head size of the five models: 1,776 heads.
SHAPES = {
    "gpt2": (12, 12, 768, 64),
    "gpt2-medium": (24, 16, 1024, 64),
    "gpt2-large": (36, 20, 1280, 64),
    "bert-base-uncased": (12, 12, 768, 64),
    "pythia-410m": (24, 16, 1024, 64),
}
WINDOWS, LENGTH = 16, 256


def factors(width: int, size: int, heads: int, seed: int = 0) -> torch.Tensor:
    """Random float32 factors ``(2, heads, width, size)`` of kernels, as large as trained ones."""
    generator = torch.Generator().manual_seed(seed)
    return 0.05 * torch.randn(2, heads, width, size, generator=generator)


def plain(w_q: torch.Tensor, w_k: torch.Tensor) -> dict[str, np.ndarray]:
    """The spectra of one kernel from the full matrix, float64."""
    full = w_q.double().numpy() @ w_k.double().numpy().T
    return {
        "eigenvalues": np.linalg.eigvals(full),
        "routing": np.linalg.svd((full - full.T) / 2, compute_uv=False),
        "filtering": np.linalg.eigvalsh((full + full.T) / 2),
    }


def measure_kernels() -> list[dict]:
    """All heads of five models by factors; the plain way on one head of each, times the heads."""
    from attnlib import kernel_spectrum

    def all_heads():
        for layers, heads, width, size in SHAPES.values():
            for _ in range(layers):
                kernel_spectrum(*factors(width, size, heads))

    drawing = sum(
        once(lambda s=s: [factors(s[2], s[3], s[1]) for _ in range(s[0])])[0]
        for s in SHAPES.values()
    )
    all_heads()
    times = [once(all_heads)[0] for _ in range(3)]
    slow, worst = 0.0, 0.0
    for layers, heads, width, size in SHAPES.values():
        a, b = factors(width, size, 1)
        seconds, full = once(lambda a=a, b=b: plain(a[0], b[0]))
        slow += seconds * layers * heads
        found = kernel_spectrum(a[0], b[0])
        routing = full["routing"][: 2 * size]
        worst = max(worst, np.abs(found.routing.numpy() - routing).max() / routing.max())
        # The full matrix has more eigenvalues, all 0 but for rounding: those of largest size.
        filtering = full["filtering"][np.argsort(-np.abs(full["filtering"]))[: 2 * size]]
        gap = np.abs(np.sort(filtering) - found.filtering.numpy()).max()
        worst = max(worst, gap / np.abs(filtering).max())
        size_of = np.sort(np.abs(full["eigenvalues"]))[::-1][:size]
        gap = np.abs(np.abs(found.eigenvalues.numpy()) - size_of).max()
        worst = max(worst, gap / size_of.max())
    n = sum(s[0] * s[1] for s in SHAPES.values())
    note = f"one head of each model timed, times its heads; largest difference {worst:.0e}"
    return [
        row(
            f"spectra of {n:,} kernels by their factors (goal: under 20 s)",
            times,
            f"{drawing:.1f} s of them to draw the weights",
        ),
        {"what": "the same from the full matrices", "figure": f"{slow:.0f} s; extrapolated"},
        ratio("full matrices against factors (goal: 100x)", [slow], times, note),
    ]


def measure_sd() -> list[dict]:
    """Forward and backward at T = 1,024, batch 4, 8 heads of size 32."""
    from attnlib import sd_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 8, 1024, 32, generator=generator).unbind(0)
    damping = F.softplus(torch.randn(4, 8, 1024, generator=generator))
    wide = torch.randn(3, 4, 8, 1024, 64, generator=generator).unbind(0)

    def run(need_weights):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, damping)]
        out, _ = sd_attention(*inputs, need_weights=need_weights)
        out.sum().backward()
        return out

    def library():
        inputs = [x.clone().requires_grad_() for x in wide]
        scale = 1 / math.sqrt(32)
        F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale).sum().backward()

    times = in_turn({"fused": lambda: run(False), "plain": lambda: run(True), "library": library})
    note = apart(run(False).detach(), run(True).detach())
    return [
        row("S-D attention, no weights asked for, forward and backward", times["fused"]),
        row("the same, plain form", times["plain"]),
        ratio("plain against fused (goal: 4x)", times["plain"], times["fused"], note),
        ratio(
            "fused against the library's softmax attention at twice the head size (goal: 1.3x)",
            times["fused"],
            times["library"],
        ),
    ]


def measure_interactions() -> list[dict]:
    """Energies and ranks of every interaction of SmolLM2-135M, in a process of its own."""
    found = in_fresh_process("benchmarks.routing")
    return [
        {
            "what": f"SmolLM2-135M, {WINDOWS} windows of {LENGTH} tokens, all energies and ranks "
            "(goal: under 3 minutes)",
            "figure": f"{found['seconds']:.0f} s, one call",
        },
        {
            "what": "peak resident memory, model included (goal: under 3 GB)",
            "figure": f"{found['peak'] / 1e9:.2f} GB",
        },
    ]


def measure_routing() -> list[dict]:
    """All of the above."""
    return [*measure_kernels(), *measure_sd(), *measure_interactions()]


def main() -> None:
    import resource
    import sys

    from attnlib import interaction_ranks, load_text, pretrained, token_windows

    model, tokenizer = pretrained("smollm2-135m")
    tokens = token_windows(tokenizer, load_text("shakespeare")[-400_000:], WINDOWS, LENGTH)
    start = time.perf_counter()
    found = interaction_ranks(model, tokens, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    if not np.isfinite(found["routing_rank"].values).all():
        raise SystemExit("a rank is missing")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    main()
