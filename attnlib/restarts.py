"""Losses of copies of a model in which one layer changed, run from that layer on."""

from __future__ import annotations

import torch
from torch import nn

from .conversion import sharing_weights
from .evaluation import window_losses


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
        ``(n,)``: the losses of the model itself. A model that does not give them again when only
        its last layer is run, because its layers look at more than the one before, is always run
        as a whole.
    """

    def __init__(self, reader, tokens: torch.Tensor, own: torch.Tensor, batch_size: int = 32):
        self._blocks, self._batches = block_names(reader), tokens.split(batch_size)
        self._start(reader.model)
        last = len(self._blocks)
        if last > 1:
            self._given, self._layer = self._outputs(last - 1), last
            again = self.losses(sharing_weights(reader.model), last)
            if not torch.allclose(again, own, rtol=1e-4, atol=1e-5):
                self._blocks = []
            self._start(reader.model)

    def _start(self, model) -> None:
        self._model, self._layer = sharing_weights(model), 1
        self._given = [None] * len(self._batches)  # by batch, what the block before gave

    def losses(self, changed, layer: int) -> torch.Tensor:
        """``(n,)`` losses of a copy changed in `layer`. The copy is good for nothing else then."""
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
        return outputs

    def _pass_over(self, model, given) -> None:
        """Let the blocks before the layer that is next hand on what the last of them gave."""
        for name in self._blocks[: self._layer - 1]:
            model.get_submodule(name).forward = lambda *_, **__: given


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


class _Reached(Exception):
    """A run came to where it was to stop."""

    def __init__(self, output):
        super().__init__()
        self.output = output


def _stop(module, inputs, output):
    raise _Reached(output)
