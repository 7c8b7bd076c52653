"""AdamW, or Muon on the matrices of the blocks and AdamW on the rest, stepped as one.

Muon's step is W <- (1 - r d) W - 0.2 r sqrt(max(A, B)) O for a matrix (A, B): O is the orthogonal
factor of its gradient's running mean, r the learning rate, d the decay. The factor 0.2 sqrt(...)
gives the step the size of AdamW's, so that both take one learning rate.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .device import bfloat16_is_fast
from .errors import InputError

OPTIMIZERS = ("adamw", "muon", "muon-vo")


def learning_rate(step: int, config) -> float:
    """Linear warm-up, then cosine to 0 at ``config.steps``."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * config.learning_rate * (1 + math.cos(math.pi * progress))


class _InFloat32(TorchFunctionMode):
    """Lets torch's Muon find the orthogonal factors in float32.

    It asks for bfloat16, which a CPU without the hardware emulates, far slower than float32.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.bfloat16:
            return args[0].clone()
        return function(*args, **(kwargs or {}))


class Optimizers:
    """One optimizer or two over the parameters of a model.

    Parameters
    ----------
    model : torch.nn.Module
        Muon needs a :class:`GPT`, whose fused weights it knows how to take apart.
    config : TrainConfig
        ``optimizer``, ``learning_rate``, ``betas`` and ``weight_decay`` count. Decay is on matrices
        and embeddings, not on biases, gains and gate scalars.
    trained : dict of str to Parameter, optional
        Those to be trained, by name; all by default.

    Raises
    ------
    InputError
        Muon with a torch that has none, or with a model that is no GPT.

    References
    ----------
    Muon: Jordan et al. 2024; its step of AdamW's size: Liu et al. 2025 (arXiv 2502.16982).
    """

    def __init__(self, model: nn.Module, config, trained: dict[str, nn.Parameter] | None = None):
        self.whole = dict(model.named_parameters()) if trained is None else trained
        rows = {} if config.optimizer == "adamw" else _muon_rows(model, config.optimizer)
        # A fused weight is several matrices. Each is a view of some of its rows, under the name
        # "weight[0:256]"; the optimizers see the views, the model the whole.
        self.parts, self._views, muon = {}, [], []
        for name, parameter in self.whole.items():
            if name not in rows:
                self.parts[name] = parameter
                continue
            for start, stop, by_muon in rows[name]:
                view = nn.Parameter(parameter.detach()[start:stop])
                label = f"{name}[{start}:{stop}]"
                self.parts[label] = view
                self._views.append((parameter, view, slice(start, stop)))
                if by_muon:
                    muon.append(label)
        device = next(iter(self.whole.values())).device
        self._matrices = nullcontext() if bfloat16_is_fast(device) else _InFloat32()
        decayed, rest = [], []
        for label, part in self.parts.items():
            if label not in muon:
                matrix = part.dim() >= 2 and label.split("[")[0].endswith("weight")
                (decayed if matrix else rest).append(part)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        fused = all(p.device.type in ("cuda", "cpu") for p in self.parts.values())
        self._all = [torch.optim.AdamW(groups, config.learning_rate, config.betas, fused=fused)]
        if muon:
            self._all.append(
                torch.optim.Muon(
                    [self.parts[label] for label in muon],
                    config.learning_rate,
                    config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, rate: float) -> None:
        """Step at a learning rate, and forget the gradients."""
        for whole, view, rows in self._views:
            view.grad = None if whole.grad is None else whole.grad[rows]
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            with self._matrices:
                optimizer.step()
        for parameter in [*self.whole.values(), *self.parts.values()]:
            parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """All running means and counts, on the CPU, by name."""
        return {
            f"{label}|{key}": value.detach().cpu().contiguous()
            for label, part in self.parts.items()
            for optimizer in self._all
            for key, value in optimizer.state.get(part, {}).items()
        }

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        for name, value in state.items():
            label, key = name.split("|")
            part = self.parts[label]
            owner = next(
                o for o in self._all for g in o.param_groups for p in g["params"] if p is part
            )
            # AdamW keeps its step count on the CPU unless it is fused.
            keep = key == "step" and part.device.type != "cuda"
            owner.state[part][key] = value if keep else value.to(part.device)


def _muon_rows(model, optimizer: str) -> dict[str, list[tuple[int, int, bool]]]:
    """Weights that hold matrices of Muon: (first row, row after the last, whether Muon's) of each.

    Queries, keys and values lie in one weight, below one another. The gates' and dampings' weights
    are vectors, one a head, and embeddings are looked up: they are AdamW's.
    """
    from .attention import SoftmaxAttention
    from .gpt import GPT

    if not hasattr(torch.optim, "Muon"):
        raise InputError(
            f"optimizer={optimizer!r} needs torch 2.9 or newer, this is {torch.__version__}: "
            "upgrade torch, or train with optimizer='adamw'"
        )
    if not isinstance(model, GPT):
        raise InputError(
            f"optimizer={optimizer!r} knows how the weights of our GPT are laid out, not those of "
            f"{type(model).__name__}: take optimizer='adamw'"
        )
    rows = {}
    for path, module in model.named_modules():
        if isinstance(module, SoftmaxAttention):
            n = module.qkv.weight.shape[0] // 3
            all_three = optimizer == "muon"
            rows[f"{path}.qkv.weight"] = [
                (0, n, all_three), (n, 2 * n, all_three), (2 * n, 3 * n, True)
            ]  # fmt: skip
            rows[f"{path}.proj.weight"] = [(0, module.proj.weight.shape[0], True)]
        elif path.endswith(".mlp"):
            for i in (0, 2):
                rows[f"{path}.{i}.weight"] = [(0, module[i].weight.shape[0], True)]
    return rows
