"""What a model computes inside its attention, read while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .device import in_evaluation, pick_device
from .errors import InputError, check_whole

# Attribute of an attention module while something else stands for its logits: a function of
# (query, key, damping), see `logits_replaced`.
REPLACED = "_attnlib_logits"
# Attribute of a transformers attention module that `conversion` changed: "linear", or a map
# ``(H, D, D)`` of its queries.
CHANGE = "_attnlib_change"


class LayerShape(NamedTuple):
    """The attention of one layer."""

    kind: str  # as in GPTConfig; "softmax" in a transformers model, "linear" where made so
    n_head: int
    n_key: int  # heads of keys and values, of which several heads may use one
    head_size: int

    @property
    def width(self) -> int:
        """The highest rank of the logits of a head."""
        return self.head_size * (2 if self.kind == "sd" else 1)


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

    def run_heads(self, tokens, mask, on_heads) -> None:
        """Call ``on_heads(layer, query, key, damping)``: queries with the scale of the logits.

        The logits are q k^T, before gates and the mask, and the damping None; in S-D attention they
        are q k^T - k q^T less the damping on the diagonal. Grouped keys are repeated for each of
        their heads.
        """

        def read(layer, module, x):
            _check_logits(module, getattr(module, "is_linear", False))
            on_heads(layer, *_scaled_heads(module, x), _damping(module, x))

        self._run(tokens, mask, read)

    def _run(self, tokens, mask, read) -> None:
        self._check_mask(mask)
        hooks = []
        try:
            for layer, module in enumerate(self.attention_modules()):

                def hook(module, inputs, layer=layer):
                    read(layer, module, inputs[0])

                hooks.append(module.register_forward_pre_hook(hook))
            self.model(tokens)
        finally:
            for hook in hooks:
                hook.remove()

    def attention_modules(self) -> list:
        """The attention of each layer."""
        return [block.attention for block in self.model.blocks]

    def layer_shapes(self) -> list[LayerShape]:
        """The attention of each layer, in numbers."""
        kinds = self.config.per_layer("attention")
        heads = [(m.n_head, m.n_head, m.head_size) for m in self.attention_modules()]
        return [LayerShape(kind, *rest) for kind, rest in zip(kinds, heads, strict=True)]

    def _check_kind(self, module) -> None:
        _check_logits(module, getattr(module, "is_linear", False))
        if hasattr(module, "token_energy"):
            raise InputError(
                f"{type(module).__name__} gates its weights, so they are more than the softmax of "
                "routing and filtering: take a model of softmax or sd attention"
            )

    @contextmanager
    def replaced(self):
        """While it lasts, modules with the attribute `REPLACED` use it."""

        def put(module):
            def attend(x, q, k, v, dropout, need_weights):
                logits = getattr(module, REPLACED)(
                    q / math.sqrt(q.shape[-1]), k, _damping(module, x)
                )
                weights = _softmax(logits, None, causal=True).to(v.dtype)
                return weights @ v, weights if need_weights else None

            module.attend = attend

        own = [m for m in self.attention_modules() if hasattr(m, REPLACED)]
        own = [m for m in own if "attend" not in m.__dict__]  # not those of a context around this
        try:
            for module in own:
                self._check_kind(module)
                put(module)
            yield
        finally:
            for module in own:
                module.__dict__.pop("attend", None)


def _check_logits(module, linear: bool) -> None:
    if linear:
        raise InputError(
            f"{type(module).__name__} is linear: it has weights, but no logits to take apart"
        )


def _scaled_heads(module, x) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = module.heads(x)
    return q / math.sqrt(q.shape[-1]), k


def _damping(module, x) -> torch.Tensor | None:
    return module.token_damping(x) if hasattr(module, "token_damping") else None


def _softmax(logits, mask, causal: bool) -> torch.Tensor:
    if mask is not None:
        logits = logits + mask
    elif causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~seen, float("-inf"))
    return logits.softmax(-1)


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
        self._modules = None  # found when they are asked for: it takes a run

    def run(self, tokens, mask, on_attention) -> None:
        """As :meth:`_OurModel.run`."""

        def attend(layer, module, query, key, value, attention_mask, **kwargs):
            out, weights = _attend(module, query, key, value, attention_mask, **kwargs)
            on_attention(layer, weights)
            return out

        self._run(tokens, mask, attend)

    def run_heads(self, tokens, mask, on_heads) -> None:
        """As :meth:`_OurModel.run_heads`."""

        def attend(layer, module, query, key, value, attention_mask, **kwargs):
            change = getattr(module, CHANGE, None)
            _check_logits(module, isinstance(change, str))
            query = query if change is None else query @ change
            on_heads(layer, *_scaled(module, query, key, **kwargs), None)
            return plain_attention(module, query, key, value, attention_mask, **kwargs)[0]

        self._run(tokens, mask, attend)

    def layer_shapes(self) -> list[LayerShape]:
        """As :meth:`_OurModel.layer_shapes`."""
        config = self.model.config.get_text_config()
        keys = getattr(config, "num_key_value_heads", None) or self.n_head
        size = getattr(config, "head_dim", None) or config.hidden_size // self.n_head
        linear = [isinstance(getattr(m, CHANGE, None), str) for m in self.attention_modules()]
        return [LayerShape("linear" if x else "softmax", self.n_head, keys, size) for x in linear]

    def attention_modules(self) -> list:
        """The attention of each layer, as a run over one token meets them."""
        if self._modules is None:
            self._modules = self._met()
        return self._modules

    def _met(self) -> list:
        modules = []

        def attend(layer, module, *inputs, **kwargs):
            modules.append(module)
            return _attend(module, *inputs, **kwargs)[0]

        where = next(self.model.parameters()).device
        with torch.no_grad():
            self._run(torch.zeros(1, 1, dtype=torch.long, device=where), None, attend)
        return modules

    @contextmanager
    def replaced(self):
        """As :meth:`_OurModel.replaced`."""
        with self._attending(_attend, "attnlib_replaced"):
            yield

    @contextmanager
    def _attending(self, function, name: str):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask)
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(name)
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _run(self, tokens, mask, attend) -> None:
        seen = []

        def capture(module, *inputs, **kwargs):
            out = attend(len(seen), module, *inputs, **kwargs)
            seen.append(type(module).__name__)
            return out, None

        with self._attending(capture, "attnlib_capture"):
            self.model(
                input_ids=tokens,
                attention_mask=mask if mask is not None else tokens.new_ones(tokens.shape),
            )
        if len(seen) != self.n_layer:
            raise InputError(
                f"{type(self.model).__name__} used transformers' attention interface in "
                f"{len(seen)} of its {self.n_layer} layers: its attention cannot be captured"
            )


def _attend(module, query, key, value, attention_mask, **kwargs):
    """A module's attention, or what stands for it: output ``(B, T, H, D)`` and weights."""
    change = getattr(module, CHANGE, None)
    if isinstance(change, str):
        from .linear import linear_weights

        _check_logits(module, hasattr(module, REPLACED))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        weights = linear_weights(query, key, seen=seen_keys(attention_mask)).to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    query = query if change is None else query @ change
    return plain_attention(module, query, key, value, attention_mask, **kwargs)


def seen_keys(mask):
    """A mask of transformers, whether of booleans or added to the logits, as booleans."""
    return mask if mask is None or mask.dtype == torch.bool else mask == 0


def plain_attention(module, query, key, value, attention_mask, **kwargs):
    """As `_attend`, where the logits are queries times keys, or replaced."""
    import sys

    logits = getattr(module, REPLACED, None)
    if logits is not None:
        query, key = _scaled(module, query, key, **kwargs)
        refuse_extras(module, ("s_aux",), kwargs)
        causal = getattr(module, "is_causal", False)
        weights = _softmax(logits(query, key, None), attention_mask, causal).to(value.dtype)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise InputError(
            f"{type(module).__name__} has no eager attention function, so its attention cannot be "
            "captured"
        )
    if kwargs.get("scaling") is None:
        kwargs["scaling"] = query.shape[-1] ** -0.5
    return eager(module, query, key, value, attention_mask, **kwargs)


def _scaled(module, query, key, scaling=None, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries with the scale of the logits, and keys, once for each head that uses them."""
    refuse_extras(module, ("softcap", "position_bias"), kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query * scale, key.repeat_interleave(query.shape[1] // key.shape[1], 1)


# What some models put into their attention beside the product of queries and keys.
_EXTRAS = {
    "softcap": "caps its logits (softcap)",
    "position_bias": "adds a bias by position to its logits",
    "s_aux": "has attention sinks (s_aux) beside its keys",
}


def refuse_extras(module, names, kwargs: dict) -> None:
    """Refuse attention with more than a product of queries and keys, where that would be lost."""
    for name in names:
        value = kwargs.get(name)
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise InputError(
                f"{type(module).__name__} {_EXTRAS[name]}: its attention is more than the softmax "
                "of a product of queries and keys, and this is for that alone"
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
    with in_evaluation(model):
        for start in range(0, len(tokens), block):
            documents, layers = slice(start, min(start + block, len(tokens))), []
            with torch.no_grad():
                some = mask[documents].to(where) if mask is not None else None
                run(tokens[documents].to(where), some, layers)
            yield documents, layers
            layers.clear()  # not held while the next block runs
