"""Where to compute, and in which precision."""

from __future__ import annotations

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
    """Autocast to bfloat16, or not: ``"auto"`` does so on a GPU alone."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {PRECISIONS}, not {precision!r}")
    wide = precision == "float32" or (precision == "auto" and device.type != "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=not wide)


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
