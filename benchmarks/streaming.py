"""A Gram of 2,000 windows of 512 tokens, streamed from a model in a process of its own.

``python -m benchmarks.streaming`` is that process: it prints its seconds and its peak memory.
"""

from __future__ import annotations

import json
import time

from .timing import in_fresh_process

WINDOWS, LENGTH = 2000, 512


def measure_streaming() -> list[dict]:
    """Seconds and peak resident memory of the whole process, libraries and model included."""
    found = in_fresh_process("benchmarks.streaming")
    held = 4 * WINDOWS * LENGTH**2 / 1e9
    return [
        {
            "what": f"one layer, no filter and a = 4, N = {WINDOWS:,} windows of T = {LENGTH}",
            "figure": f"{found['seconds']:.0f} s, one call",
        },
        {
            "what": "peak resident memory (goal: under 3 GB)",
            "figure": f"{found['peak'] / 1e9:.2f} GB, where the fields alone would take {held:.1f}",
        },
    ]


def main() -> None:
    import resource
    import sys

    import numpy as np
    import torch

    from attnlib import GPT, GPTConfig, stream_gram

    shape = {"n_layer": 1, "n_head": 2, "d_model": 64, "context": LENGTH, "vocab_size": 65}
    model = GPT(GPTConfig(**shape), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(65, (WINDOWS, LENGTH), generator=generator)
    start = time.perf_counter()
    gram = stream_gram(model, tokens, [np.inf, 4.0], layers=[1], progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    if gram.shape != (1, 2, WINDOWS, WINDOWS) or not np.isfinite(gram.values).all():
        raise SystemExit(f"no Gram: {gram.shape}")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    main()
