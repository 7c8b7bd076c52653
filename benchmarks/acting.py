"""Linear attention, generation with a state, and prescriptions.

``python -m benchmarks.acting WHAT ...`` measures one thing in a process of its own and prints it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import torch

from .timing import apart, in_fresh_process, in_turn, middle, peak, ratio, reset_peak, row

LENGTHS = (1024, 2048, 4096, 8192, 16384)
CONTEXTS = (1024, 2048, 4096)
KINDS = {
    "softmax": "softmax",
    "first half linear": ("linear",) * 3 + ("softmax",) * 3,
    "linear": "linear",
}


def inputs(t: int, heads: int = 8, size: int = 32, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, t, size, generator=generator)


def quadratic(q, k, v):
    """The masked form, with all weights."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def measure_chunks() -> list[dict]:
    """Forward and backward at T = 4,096, and the growth of memory with T."""
    from attnlib import linear_attention, softmax_attention

    forms = {
        "chunks": lambda *x: linear_attention(*x)[0],
        "quadratic": quadratic,
        "softmax": lambda *x: softmax_attention(*x)[0],
    }

    def run(name):
        leaves = [x.clone().requires_grad_() for x in inputs(4096)]
        out = forms[name](*leaves)
        out.sum().backward()
        return out.detach()

    times = in_turn({name: (lambda n=name: run(n)) for name in forms}, 5)
    rows = [
        row("linear attention in chunks, T = 4,096, 8 heads of 32, and back", times["chunks"]),
        ratio(
            "quadratic form against chunks (goal: 5x)",
            times["quadratic"],
            times["chunks"],
            apart(run("chunks"), run("quadratic")),
        ),
        ratio("the library's softmax attention against chunks", times["softmax"], times["chunks"]),
    ]
    grown = [in_fresh_process("benchmarks.acting", "memory", str(t))["growth"] for t in LENGTHS]
    figure = ", ".join(f"{t:,}: {g / 2**20:.0f} MiB" for t, g in zip(LENGTHS, grown, strict=True))
    steps = [b / a for a, b in itertools.pairwise(grown)]
    note = f"; twice the tokens take {min(steps):.2f} to {max(steps):.2f} times as much"
    what = "peak memory of the chunks by T, forward and back (goal: linear)"
    return [*rows, {"what": what, "figure": figure + note}]


def model_of(kind, context: int):
    """A GPT of the book's paper shape, with fresh weights."""
    from attnlib import GPT, GPTConfig

    return GPT(GPTConfig(context=context, attention=kind, dropout=0.0)).eval()


def measure_generation() -> list[dict]:
    """Seconds a new token after texts of different length, and what is kept of them."""
    rows = []
    for name, kind in KINDS.items():
        found = in_fresh_process("benchmarks.acting", "generation", json.dumps(kind))
        figure = ", ".join(
            f"{t:,}: {1e3 * s:.1f} ms, {n / 2**20:.2f} MiB" for t, s, n in found["rows"]
        )
        what = f"GPT of 4.8 M weights, {name}: time a new token, and its cache, after a text of"
        rows.append({"what": what, "figure": figure})
    return rows


def measure_training() -> list[dict]:
    """Tokens a second of one training step, batch 1."""
    rows = []
    for context in CONTEXTS:
        models = {name: model_of(kind, context).train() for name, kind in KINDS.items()}
        tokens = torch.randint(65, (1, context + 1), generator=torch.Generator().manual_seed(0))

        def step(model, tokens=tokens):
            model(tokens[:, :-1], tokens[:, 1:])[1].backward()

        times = in_turn({n: (lambda m=m: step(m)) for n, m in models.items()}, 3)
        speed = ", ".join(f"{n} {context / middle(t)[0]:,.0f}" for n, t in times.items())
        rows.append({"what": f"training, tokens a second at context {context:,}", "figure": speed})
        rows.append(ratio("softmax against linear there", times["softmax"], times["linear"]))
    return rows


def measure_training_memory() -> list[dict]:
    """What one training step adds to memory, by context."""
    rows = []
    for name, kind in KINDS.items():
        kind = json.dumps(kind)
        grown = [
            in_fresh_process("benchmarks.acting", "training", kind, str(t))["growth"]
            for t in CONTEXTS
        ]
        figure = ", ".join(
            f"{t:,}: {g / 2**20:.0f} MiB" for t, g in zip(CONTEXTS, grown, strict=True)
        )
        what = f"GPT of 4.8 M weights, {name}: peak memory of a training step at context"
        rows.append({"what": what, "figure": figure})
    return rows


def measure_prescription() -> list[dict]:
    """A plan for SmolLM2-135M: linear attention and two ranks in each of 30 layers."""
    found = in_fresh_process("benchmarks.acting", "prescription")
    return [
        {
            "what": f"prescribe, SmolLM2-135M, {found['candidates']} candidates, 8 windows of 96 "
            "tokens (goal: under 5 minutes)",
            "figure": f"{found['seconds']:.0f} s, one call; peak memory "
            f"{found['peak'] / 1e9:.2f} GB",
        }
    ]


def measure_acting() -> list[dict]:
    """All of the above."""
    return [
        *measure_chunks(),
        *measure_generation(),
        *measure_training(),
        *measure_training_memory(),
        *measure_prescription(),
    ]


# ------------------------------------------------------------------ in a process of its own


def _memory(t: str) -> dict:
    from attnlib import linear_attention

    def run(length):
        leaves = [x.requires_grad_() for x in inputs(length)]
        linear_attention(*leaves)[0].sum().backward()

    run(64)  # libraries and threads are there
    reset_peak()
    before = peak()
    run(int(t))
    return {"growth": peak() - before}


def _model_of(kind: str, context: int):
    kind = json.loads(kind)
    return model_of(tuple(kind) if isinstance(kind, list) else kind, context)


def _training(kind: str, t: str) -> dict:
    model = _model_of(kind, int(t)).train()

    def step(length):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(65, (1, length + 1), generator=generator)
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()

    step(64)  # libraries and threads are there, and so is room for the gradients
    reset_peak()
    before = peak()
    step(int(t))
    return {"growth": peak() - before}


def _generation(kind: str) -> dict:
    model = _model_of(kind, max(CONTEXTS) + 64)
    rows = []
    for t in CONTEXTS:
        tokens = torch.randint(65, (1, t), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits, caches = model.decode(tokens)
            times = []
            for i in range(24):
                start = time.perf_counter()
                logits, caches = model.decode(logits.argmax(-1, keepdim=True), caches, t + i)
                times.append(time.perf_counter() - start)
        kept = sum(x.numel() * x.element_size() for cache in caches for x in cache)
        rows.append((t, middle(times)[0], kept))
    return {"rows": rows}


def _prescription() -> dict:
    import resource

    from attnlib import load_text, prescribe, pretrained, token_windows

    model, tokenizer = pretrained("smollm2-135m")
    tokens = token_windows(tokenizer, load_text("shakespeare")[-400_000:], 8, 97)
    start = time.perf_counter()
    plan = prescribe(model, tokens)
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return {
        "seconds": seconds,
        "candidates": int(plan["cost"].sel(action=plan["action"] != "full").notnull().sum()),
        "peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    what, *rest = sys.argv[1:]
    measures = {
        "memory": _memory,
        "generation": _generation,
        "training": _training,
        "prescription": _prescription,
    }
    print(json.dumps(measures[what](*rest)))


if __name__ == "__main__":
    main()
