"""What a model computes inside its attention, read while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .device import pick_device
from .errors import InputError, check_whole


class _OurModel:
    """How to read a `GPT`."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        heads = set(model.config.per_layer("n_head"))
        # Layers with different numbers of heads make no rectangular array of heads.
        self.most_heads = max(heads)
        self.n_head = heads.pop() if len(heads) == 1 else None
        self.n_layer, self.context = model.config.n_layer, model.config.context

    def _check_mask(self, mask) -> None:
        if mask is not None and not bool(mask.all()):
            raise InputError("our GPT has no padding: pass windows of equal length and no mask")

    def run(self, tokens, mask, on_attention) -> None:
        """Call ``on_attention(layer, weights)`` for each layer, counted from 0."""
        self._check_mask(mask)
        self.model(tokens, on_attention=on_attention)

    def run_factors(self, tokens, mask, on_factors) -> None:
        """Call ``on_factors(layer, query, key)`` with ``query key^T`` the layer's logits."""
        self._check_mask(mask)
        hooks = []
        try:
            for layer, block in enumerate(self.model.blocks):

                def hook(module, inputs, layer=layer):
                    on_factors(layer, *module.factors(inputs[0]))

                hooks.append(block.attention.register_forward_pre_hook(hook))
            self.model(tokens)
        finally:
            for hook in hooks:
                hook.remove()


class _HuggingFaceModel:
    """How to read a transformers model: through its attention interface.

    The model's own eager attention function computes the weights, so scale, biases, rotary
    positions, grouped keys and masks are the model's; one layer is held at a time.
    """

    NAME = "attnlib_capture"

    def __init__(self, model):
        self.model = model
        config = model.config.get_text_config()
        self.n_layer, self.n_head = config.num_hidden_layers, config.num_attention_heads
        self.most_heads = self.n_head
        self.context = getattr(config, "max_position_embeddings", None)

    def run(self, tokens, mask, on_attention) -> None:
        """As :meth:`_OurModel.run`."""

        def attend(layer, eager, module, query, key, value, attention_mask, **kwargs):
            out, weights = eager(module, query, key, value, attention_mask, **kwargs)
            on_attention(layer, weights)
            return out

        self._run(tokens, mask, attend)

    def run_factors(self, tokens, mask, on_factors) -> None:
        """As :meth:`_OurModel.run_factors`; grouped keys are repeated for each of their heads."""

        def attend(layer, eager, module, query, key, value, attention_mask, scaling=None, **kwargs):
            if kwargs.get("softcap") or kwargs.get("position_bias") is not None:
                raise InputError(
                    f"the logits of {type(module).__name__} are more than a product of queries and "
                    "keys, so its interaction cannot be captured"
                )
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            on_factors(layer, query * scale, key.repeat_interleave(len(query[0]) // len(key[0]), 1))
            return eager(module, query, key, value, attention_mask, scaling=scale, **kwargs)[0]

        self._run(tokens, mask, attend)

    def _run(self, tokens, mask, attend) -> None:
        import sys

        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        seen = []

        def capture(module, query, key, value, attention_mask, **kwargs):
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            if eager is None:
                raise InputError(
                    f"{type(module).__name__} has no eager attention function, so its attention "
                    "cannot be captured"
                )
            out = attend(len(seen), eager, module, query, key, value, attention_mask, **kwargs)
            seen.append(type(module).__name__)
            return out, None

        AttentionInterface.register(self.NAME, capture)
        AttentionMaskInterface.register(self.NAME, eager_mask)
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(self.NAME)
            self.model(
                input_ids=tokens,
                attention_mask=mask if mask is not None else tokens.new_ones(tokens.shape),
            )
        finally:
            self.model.set_attn_implementation(before)
        if len(seen) != self.n_layer:
            raise InputError(
                f"{type(self.model).__name__} used transformers' attention interface in "
                f"{len(seen)} of its {self.n_layer} layers: its attention cannot be captured"
            )


def reader_of(model):
    """How to read this model, or an error that names its class."""
    if (
        hasattr(model, "blocks")
        and hasattr(model, "generate")
        and not hasattr(model, "name_or_path")
    ):
        return _OurModel(model)
    if hasattr(model, "set_attn_implementation"):
        return _HuggingFaceModel(model)
    raise InputError(
        f"{type(model).__name__} is neither an attnlib.GPT nor a transformers model: its attention "
        "cannot be captured"
    )


def run_in_blocks(
    model, tokens: torch.Tensor, run: Callable, mask: torch.Tensor | None, block: int, device
) -> Iterator[tuple[slice, list]]:
    """Run a model over blocks of documents: ``(documents, layers)``, a list that `run` filled.

    ``run(tokens, mask, layers)`` is called without gradients, with the model in evaluation mode on
    `device` (default: where it is); the mode is put back in the end.
    """
    if mask is not None and mask.shape != tokens.shape:
        raise InputError(
            f"the mask has the shape {tuple(mask.shape)}, the tokens {tuple(tokens.shape)}"
        )
    check_whole("block", block)
    where = pick_device(device) if device else next(model.parameters()).device
    model.to(where)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(tokens), block):
            documents, layers = slice(start, min(start + block, len(tokens))), []
            with torch.no_grad():
                some = mask[documents].to(where) if mask is not None else None
                run(tokens[documents].to(where), some, layers)
            yield documents, layers
            layers.clear()  # not held while the next block runs
    finally:
        model.train(was_training)
