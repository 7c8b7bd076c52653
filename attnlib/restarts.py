"""What a change of one layer costs: copies of a model, run from that layer on."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

from .conversion import linearized, lowered, sharing_weights
from .errors import InputError
from .evaluation import window_losses
from .plans import LINEAR, rank_of
from .store import check_writable, load, save


def single_costs(
    reader,
    tokens: torch.Tensor,
    own: torch.Tensor,
    layers: Sequence[int],
    actions: Sequence[str],
    means: dict,
    *,
    kept: KeptCosts | None = None,
    progress: bool = False,
) -> np.ndarray:
    """By how much the loss of each window rises when one layer is changed.

    Parameters
    ----------
    reader, tokens, own
        As of :class:`Restarts`.
    layers : sequence of int
    actions : sequence of str
        As plans name them, the first to leave a layer as it is.
    means : dict
        Of a reference, see :func:`attnlib.reference_means`.
    kept : KeptCosts, optional
        Takes each layer as it is done, and has those of an earlier run.
    progress : bool

    Returns
    -------
    numpy.ndarray
        ``(window, layer, action)``, NaN where a layer was not asked for.
    """
    from tqdm import tqdm

    cost = np.full((len(tokens), reader.n_layer, len(actions)), np.nan)
    if kept is not None:
        cost = kept.read(cost.shape)
    cost[:, :, 0] = 0
    there = np.isfinite(cost).all((0, 2))
    left = [layer for layer in sorted(layers) if not there[layer - 1]]
    restarts, each = Restarts(reader, tokens, own), len(actions) - 1
    shown = {"desc": "candidates", "disable": not progress, "file": sys.stderr}
    done = (len(layers) - len(left)) * each
    with tqdm(total=len(layers) * each, initial=done, **shown) as bar:
        for layer in left:
            for at, action in enumerate(actions[1:], start=1):
                if action == LINEAR:
                    changed = linearized(reader, [layer], share_weights=True)
                else:
                    changed = lowered(reader, rank_of(action), [layer], means, share_weights=True)
                cost[:, layer - 1, at] = restarts.losses(changed, layer) - own
                bar.update()
            if kept is not None:
                kept.write(cost)
    unasked = np.setdiff1d(np.arange(reader.n_layer), np.array(layers) - 1)
    cost[:, unasked, 1:] = np.nan
    return cost


class KeptCosts:
    """The costs of the layers that are done, in a file, for a run that goes on after a kill.

    Parameters
    ----------
    path : path-like
        Ends in ``.nc``.

    Raises
    ------
    InputError
        A file that cannot be written, is damaged, or holds something else.
    """

    def __init__(self, path):
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"keep is the path of a file, not {path!r}")
        self.path, self.mark, self.found = check_writable(path), "", None
        if Path(path).exists():
            self.found = load(path)
            if "costs_of" not in self.found.attrs or "window_cost" not in self.found:
                raise InputError(
                    f"{path} holds something else than the costs of a prescription that was begun: "
                    "give another name"
                )

    def of(self, *what) -> KeptCosts:
        """Say what decides the costs, tensors and text; those of anything else are not read."""
        digest = hashlib.sha256(version("attnlib").encode())
        for x in what:
            if isinstance(x, torch.Tensor):  # as bytes: NumPy has no bfloat16
                x = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            else:
                x = str(x).encode()
            digest.update(hashlib.sha256(x).digest())
        self.mark = digest.hexdigest()
        return self

    def read(self, shape) -> np.ndarray:
        """Costs of an earlier run for the same, and NaN elsewhere."""
        if self.found is not None and self.found.attrs["costs_of"] == self.mark:
            cost = self.found["window_cost"].values.copy()
            if cost.shape == shape:
                return cost
        return np.full(shape, np.nan)

    def write(self, cost: np.ndarray) -> None:
        """Replace the file by one with these costs."""
        data = xr.Dataset({"window_cost": (("window", "layer", "action"), cost)})
        save(data.assign_attrs(costs_of=self.mark), self.path)


class Restarts:
    """Window losses of changed copies of a model, without running again what comes before.

    What enters a layer is the same in the model and in a copy that was changed there. It is kept
    of one layer at a time, so layers are asked for in their order.

    Parameters
    ----------
    reader
        Of the model; see :func:`attnlib.capture.reader_of`. The model is not touched.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows.
    own : torch.Tensor
        ``(n,)``: the losses of the model itself. A model whose layers do not give the same when
        each starts from the one before, because they look at more than that, is always run as a
        whole; so is one that cannot be started within.
    """

    def __init__(self, reader, tokens: torch.Tensor, own: torch.Tensor, batch_size: int = 32):
        self._blocks, self._batches = block_names(reader), tokens.split(batch_size)
        self._start(reader.model)
        if len(self._blocks) > 1:
            try:
                same = self._same(reader.model, own)
            except Exception as error:  # whatever a model's own code raises; whole runs will do
                same, cause = False, f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"{type(reader.model).__name__} cannot be started within ({cause}): every "
                    "candidate runs it as a whole, which takes longer",
                    stacklevel=2,
                )
            if not same:
                self._blocks = []
            self._start(reader.model)

    def _same(self, model, own: torch.Tensor) -> bool:
        """Whether layers, each started from the one before, do what they do in a whole run."""
        batches, whole, copy = self._batches, [], sharing_weights(model)
        self._batches, self._given = batches[:1], [None]
        try:
            for name in self._blocks:
                copy.get_submodule(name).register_forward_hook(
                    lambda _, __, output: whole.append(_first(output).clone())
                )
            window_losses(copy, batches[0])
            for layer, expected in enumerate(whole[:-1], start=1):
                # What a layer may have kept for a later one is of other tokens, and shows.
                self._model = sharing_weights(model)
                window_losses(self._model, batches[0][:1].flip(1))
                self._given, self._layer = self._outputs(layer), layer + 1
                if not torch.allclose(_first(self._given[0]), expected, rtol=1e-4, atol=1e-5):
                    return False
            again = self.losses(sharing_weights(model), len(self._blocks))
        finally:
            self._batches = batches
        return torch.allclose(again, own[: len(again)], rtol=1e-4, atol=1e-5)

    def _start(self, model) -> None:
        self._model, self._layer = sharing_weights(model), 1
        self._given = [None] * len(self._batches)  # by batch, what the block before gave

    def losses(self, changed, layer: int) -> torch.Tensor:
        """``(n,)`` losses of a copy changed in `layer`. The copy is good for nothing else then."""
        if layer < self._layer:
            raise ValueError(f"layer {layer} was asked for after layer {self._layer}")
        while self._blocks and self._layer < layer:
            self._given = self._outputs(self._layer)
            self._layer += 1
        parts = []
        for batch, given in zip(self._batches, self._given, strict=True):
            self._pass_over(changed, given)
            parts.append(window_losses(changed, batch))
        return torch.cat(parts)

    def _outputs(self, layer: int) -> list:
        """By batch, what the block of a layer gives."""
        outputs = []
        hook = self._model.get_submodule(self._blocks[layer - 1]).register_forward_hook(_stop)
        for batch, given in zip(self._batches, self._given, strict=True):
            self._pass_over(self._model, given)
            try:
                window_losses(self._model, batch)
            except _Reached as reached:
                outputs.append(reached.output)
        hook.remove()
        if len(outputs) < len(self._batches):
            raise RuntimeError("a layer was not reached: the model calls it in its own way")
        return outputs

    def _pass_over(self, model, given) -> None:
        """Let the blocks before the layer that is next hand on what the last of them gave."""
        for name in self._blocks[: self._layer - 1]:
            block = model.get_submodule(name)
            block.forward = lambda *_, **__: given
            block._forward_hooks.clear()  # they have seen it, when it was made
            block._forward_pre_hooks.clear()


def block_names(reader) -> list[str]:
    """Names of the modules that are a model's layers, or none where they are no list of modules."""
    model, found = reader.model, []
    names = {module: name for name, module in model.named_modules()}
    for attention in reader.attention_modules():
        parts = names[attention].split(".")
        for i in range(1, len(parts) + 1):
            if isinstance(model.get_submodule(".".join(parts[: i - 1])), nn.ModuleList):
                found.append(".".join(parts[:i]))
                break
    whole = len(found) == len(set(found)) == reader.n_layer
    return found if whole else []


def _first(output) -> torch.Tensor:
    """What a block gives for the first window: ``(1, T, d)``."""
    return (output[0] if isinstance(output, tuple) else output)[:1]


class _Reached(Exception):
    """A run came to where it was to stop."""

    def __init__(self, output):
        super().__init__()
        self.output = output


def _stop(module, inputs, output):
    raise _Reached(output)
