"""Where to compute, and in which precision."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .errors import InputError

PRECISIONS = ("auto", "float32", "bfloat16")


def pick_device(name: str = "auto") -> torch.device:
    """A torch device by name.

    Parameters
    ----------
    name : {"auto", "cuda", "mps", "cpu"}
        ``"auto"``: the first of cuda, mps, cpu that the machine has. ``"cuda:1"`` works too.

    Returns
    -------
    torch.device

    Raises
    ------
    InputError
        An unknown name, or a device that this machine does not have.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((n for n, there in available.items() if there), "cpu")
    kind = name.split(":")[0]
    if kind not in ("cuda", "mps", "cpu"):
        raise InputError(f"device is 'auto', 'cuda', 'mps' or 'cpu', not '{name}'")
    if not available.get(kind, True):
        raise InputError(f"device='{name}', but this machine has none: use 'auto' or 'cpu'")
    return torch.device(name)


def autocast(device: torch.device, precision: str):
    """Autocast to bfloat16, or not: ``"auto"`` does so on a GPU alone.

    A training asks :func:`training_precision` first.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {PRECISIONS}, not {precision!r}")
    wide = precision == "float32" or (precision == "auto" and device.type != "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=not wide)


FASTER = 1.3  # times as fast as float32: between them lie no machines, but chance


@functools.cache
def bfloat16_ratio(threads: int) -> float:
    """How many times as fast as in float32 a CPU multiplies matrices in bfloat16.

    Best of several tries, a second in all at worst; well above 1 with AVX-512 BF16 or AMX, far
    below 1 where it is emulated. The product is that of a model of width 256.
    """
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 256, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
        tries = []
        for _ in range(6):
            began = time.perf_counter()
            a @ b
            tries.append(time.perf_counter() - began)
        seconds.append(min(tries))
    return seconds[0] / seconds[1]


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether the hardware multiplies matrices faster in bfloat16 than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bfloat16_ratio(torch.get_num_threads()) >= FASTER


def training_precision(device: torch.device, precision: str, width: int) -> str:
    """The precision of a training's products, ``"float32"`` or ``"bfloat16"``.

    Parameters
    ----------
    device : torch.device
    precision : {"auto", "float32", "bfloat16"}
        ``"auto"``: bfloat16 where the hardware multiplies faster in it. On a GPU that is a
        property of its kind; a CPU is measured, for a second at most, and models narrower than
        128, which gain nothing there, stay in float32.
    width : int
        Of the model.

    Raises
    ------
    InputError
        bfloat16 asked for where the hardware lacks it.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {PRECISIONS}, not {precision!r}")
    if precision == "float32":
        return precision
    if precision == "auto" and device.type == "cpu" and width < 128:
        return "float32"
    there = bfloat16_is_fast(device)
    if precision == "bfloat16" and not there:
        raise InputError(
            f"precision='bfloat16', but this {device.type} lacks the hardware for it: "
            "take 'auto' or 'float32'"
        )
    return "bfloat16" if there else "float32"


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """A model in evaluation mode for as long as this lasts; each module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
