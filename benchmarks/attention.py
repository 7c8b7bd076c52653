"""Energy-gated attention by the fused kernel against the plain form."""

from __future__ import annotations

import torch

from .timing import in_turn, ratio, row


def measure_attention() -> list[dict]:
    """Forward and backward, with a gate per key."""
    from attnlib import softmax_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 8, 1024, 32, generator=generator).unbind(0)
    bias = torch.randn(4, 8, 1024, generator=generator)

    def run(need_weights):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out, _ = softmax_attention(*inputs[:3], bias=inputs[3], need_weights=need_weights)
        out.sum().backward()
        return out

    times = in_turn({"fused": lambda: run(False), "plain": lambda: run(True)}, 5)
    difference = float((run(False) - run(True)).abs().max().detach())
    note = f"largest difference {difference:.0e}"
    return [
        row("gate per key at T = 1,024, fused, forward and backward", times["fused"]),
        row("the same, plain form", times["plain"]),
        ratio("fused against plain", times["plain"], times["fused"], note),
    ]
