"""Copies of a model with some of its attention made cheaper: linear, or of a lower rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from .capture import CHANGE, LayerShape, plain_attention, reader_of, refuse_extras, seen_keys
from .errors import InputError
from .gpt import GPT
from .linear import LINEAR_KIND, linear_attention, linear_weights
from .surgery import check_layers, leading_map, means_of

HF_NAME = "attnlib_changed"


def linearize(model, layers: Sequence[int], *, share_weights: bool = False):
    """A copy with the softmax of some layers replaced by ELU + 1, on the same projections.

    exp(q . k / sqrt(D)) becomes phi(q) . phi(k), and of S-D attention, whose logits are S - D,
    phi([q_i, -k_i]) . phi([k_j, q_j]) with the factor exp(-d_i) on the query's own key.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Ours of softmax or S-D attention; a causal model of transformers. It is not touched.
    layers : sequence of int
        From 1, each once, at least one.
    share_weights : bool
        A copy of a transformers model that has its weights in common with it: to look at, not to
        train.

    Returns
    -------
    GPT or transformers.PreTrainedModel
        Of ours a model of the kinds ``"linear"`` and ``"linear-sd"``, which can be saved. One of
        transformers keeps its class and weights and computes these layers through the attention
        interface; ``save_pretrained`` does not store that.

    Raises
    ------
    InputError
        Layers that are not there or given twice; gated, bidirectional, windowed or already linear
        attention.

    References
    ----------
    Jamil & Kapadia 2026 (B11); the feature map of Katharopoulos et al. 2020. The form for S-D
    attention is our reading.
    """
    return linearized(reader_of(model), layers, share_weights)


def linearized(reader, layers, share_weights: bool = False):
    """As :func:`linearize`, of a model whose reader is there already."""
    model = reader.model
    if layers is None:
        raise InputError(f"say which layers become linear: some of 1 to {reader.n_layer}")
    layers = check_layers(layers, reader.n_layer)
    if not isinstance(model, GPT):
        return _changed(reader, dict.fromkeys(layers, "linear"), share_weights)
    kinds = list(model.config.per_layer("attention"))
    shapes = reader.layer_shapes()
    for layer in layers:
        check_kind(layer, shapes[layer - 1])
        kinds[layer - 1] = LINEAR_KIND[kinds[layer - 1]]
    return _with_weights(model, model.state_dict(), attention=tuple(kinds))


def lower_rank(
    model,
    rank: int,
    layers: Sequence[int] | None = None,
    *,
    reference,
    share_weights: bool = False,
):
    """A copy whose logits have a lower rank in some layers, by one fixed map a head.

    Of softmax attention Q K^T becomes the product of that rank which is nearest to it over all
    pairs of tokens of the reference (all heads that share a key use one map for it, so that the
    key itself gets shorter). Of S-D attention S becomes the nearest skew matrix, of `rank` / 2
    planes. Queries and keys then fit in fewer numbers: in the cache, in the product, and, where no
    rotation by position stands between, in the weights.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        As in :func:`linearize`. It is not touched.
    rank : int
        From 1 to the head size; of S-D attention even, from 2 to twice the head size.
    layers : sequence of int, optional
        All by default.
    reference : torch.Tensor or dict
        ``(n, T)`` windows, or what :func:`attnlib.reference_means` made of them.
    share_weights : bool
        As in :func:`linearize`.

    Returns
    -------
    GPT or transformers.PreTrainedModel
        Of ours with the maps in the weights, whose shapes stay.

    Raises
    ------
    InputError
        A rank that does not fit, layers as in :func:`linearize`, a reference of another model.
    """
    return lowered(reader_of(model), rank, layers, reference, share_weights)


def lowered(reader, rank, layers, reference, share_weights: bool = False):
    """As :func:`lower_rank`, of a model whose reader is there already."""
    model = reader.model
    layers, of_all = check_layers(layers, reader.n_layer), reader.layer_shapes()
    shapes = [of_all[layer - 1] for layer in layers]
    rank = int(rank) if hasattr(rank, "__index__") and not isinstance(rank, bool) else rank
    for layer, shape in zip(layers, shapes, strict=True):
        check_kind(layer, shape)
        check_rank(layer, shape, rank)
    straight = [i for i, x in enumerate(of_all, 1) if x.kind not in LINEAR_KIND]
    if straight and isinstance(reference, torch.Tensor):
        raise InputError(
            f"layers {straight} have no logits, so no reference can be read: cut ranks first, then "
            "linearize, or give what reference_means made with the model before"
        )
    reference = means_of(model, reference, layers, of_all)
    if not isinstance(model, GPT):
        groups = [shape.n_head // shape.n_key for shape in shapes]
        maps = {
            layer: nearest_map(reference[layer].gram, rank, group).float()
            for layer, group in zip(layers, groups, strict=True)
        }
        return _changed(reader, maps, share_weights)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for layer, shape in zip(layers, shapes, strict=True):
        name = f"blocks.{layer - 1}.attention.qkv.weight"
        state[name] = _folded(state[name], reference[layer].gram, rank, shape)
    return _with_weights(model, state)


def check_kind(layer: int, shape: LayerShape) -> None:
    """Refuse attention that is gated or linear: only logits can be cut or made linear."""
    if shape.kind not in LINEAR_KIND:
        raise InputError(
            f"layer {layer} is of the kind {shape.kind!r}: softmax and sd attention can be made "
            "linear or cut to a lower rank"
        )


def check_rank(layer: int, shape: LayerShape, rank) -> None:
    """Refuse what is no rank of the logits of this layer."""
    step = 2 if shape.kind == "sd" else 1
    whole = isinstance(rank, int) and not isinstance(rank, bool)
    if not whole or rank % step or not step <= rank <= shape.width:
        raise InputError(
            f"the logits of layer {layer} are cut to a rank from {step} to {shape.width}"
            f"{', which is even' if step == 2 else ''}, not {rank!r}"
        )


def nearest_map(gram: torch.Tensor, rank: int, group: int = 1) -> torch.Tensor:
    """M ``(H, D, D)`` so that Q M K^T is the nearest of this rank to Q K^T over a reference.

    Parameters
    ----------
    gram : torch.Tensor
        ``(H, 2 D, 2 D)`` float64: second moments of [query, key].
    rank : int
    group : int
        Heads that share a key, one after the other. Their M is one projection of the key.

    Notes
    -----
    With the roots R of the queries' moments (summed over a group) and C of the keys', the error is
    the norm of R (I - M) C. It is least for R M C = R C V V^T, V the leading right singular vectors
    of R C, so M = C V V^T C^-1: a key needs only the numbers V^T C^-1 k.
    """
    size = gram.shape[-1] // 2
    queries = gram[:, :size, :size].unflatten(0, (-1, group)).sum(1)  # (H / group, D, D)
    keys = gram[::group, size:, size:]
    root, inverse = _roots(keys)
    # The leading eigenvectors of C R^2 C: (H / group, D, D), those of the largest last.
    vectors = torch.linalg.eigh(root @ queries @ root).eigenvectors[..., -rank:]
    found = root @ vectors @ vectors.mT @ inverse
    return found.repeat_interleave(group, 0)


def _roots(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Root of a positive matrix, and its inverse where there is something to invert."""
    values, vectors = torch.linalg.eigh(moments)
    there = values > 1e-12 * values[..., -1:]
    root = torch.where(there, values, 0.0).sqrt()
    inverse = torch.where(there, 1 / torch.where(there, root, 1.0), 0.0)
    return tuple((vectors * x.unsqueeze(-2)) @ vectors.mT for x in (root, inverse))


def _folded(weight: torch.Tensor, gram: torch.Tensor, rank: int, shape) -> torch.Tensor:
    """Weights ``(3 H D, d)`` of queries, keys and values with the map in them."""
    h, size = shape.n_head, shape.head_size
    q, k, v = weight.double().view(3, h, size, -1)  # each (H, D, d)
    if shape.kind != "sd":
        q = nearest_map(gram, rank).mT.to(q) @ q  # q' = M^T q, so that q'.k = q M k
    else:
        # a = [q / sqrt(D), k], S' = a G a^T and G = X Y^T - Y X^T: q' = sqrt(D) a X, k' = a Y.
        x, y = _planes(leading_map(gram, -1, rank).to(q), rank // 2)
        a = torch.cat([q * size**-0.5, k], 1)  # (H, 2 D, d)
        pad = (0, 0, 0, size - rank // 2)
        q, k = F.pad(x.mT @ a, pad) * size**0.5, F.pad(y.mT @ a, pad)
    return torch.stack([q, k, v]).flatten(0, 2).to(weight.dtype)


def _planes(g: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """X and Y ``(H, 2 D, n)`` with G = X Y^T - Y X^T, of a skew G of rank 2 n.

    i G is Hermitian; an eigenvector (x + i y) / sqrt(2) of s > 0 means G x = s y and G y = -s x.
    """
    size, vectors = torch.linalg.eigh(1j * g)
    size, vectors = size[..., -n:].clamp(min=0), vectors[..., -n:]
    vectors = vectors * (2 * size).sqrt().unsqueeze(-2)
    return vectors.imag, vectors.real


def _with_weights(model: GPT, state: dict, **changes) -> GPT:
    """A GPT of the same shape but for `changes`, with these weights."""
    new = GPT(replace(model.config, **changes)).to(next(model.parameters()))
    new.load_state_dict(state)
    return new.train(model.training)


# ------------------------------------------------------------------ models of transformers


def _changed(reader, changes: dict, share_weights: bool):
    """A copy of a transformers model with a change by layer: "linear", or a map of queries."""
    model = reader.model
    check_changeable(reader, changes)
    windowed = [k for k, x in changes.items() if isinstance(x, str) and _sees_a_window(model, k)]
    if windowed:
        raise InputError(
            f"layers {windowed} see a sliding window only, which no sum over all earlier tokens "
            "stands for: leave them out, or take no linear attention"
        )
    # What is not changed keeps the implementation of the model.
    name = f"{HF_NAME}_{'sdpa' if 'sdpa' in model.config._attn_implementation else 'eager'}"
    _register()
    new = sharing_weights(model) if share_weights else copy.deepcopy(model)
    names = {module: path for path, module in model.named_modules()}
    for layer, module in enumerate(reader.attention_modules(), start=1):
        if layer in changes:
            change = changes[layer]
            if isinstance(change, torch.Tensor):
                change = change.to(next(model.parameters()))
            setattr(new.get_submodule(names[module]), CHANGE, change)
    new.set_attn_implementation(name)
    if "linear" in changes.values():
        with torch.no_grad():  # one token tells whether the attention is more than a softmax
            new(torch.zeros(1, 1, dtype=torch.long, device=next(new.parameters()).device))
    return new


def sharing_weights(model):
    """A copy of a model that has its weights in common with it."""
    return copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})


def check_changeable(reader, layers) -> None:
    """Refuse layers that are gated, bidirectional, linear, or changed already."""
    shapes, modules = reader.layer_shapes(), reader.attention_modules()
    for layer in layers:
        module = modules[layer - 1]
        if hasattr(module, CHANGE):
            raise InputError(f"the attention of layer {layer} is changed already")
        check_kind(layer, shapes[layer - 1])
        if not getattr(module, "is_causal", isinstance(reader.model, GPT)):
            raise InputError(
                f"{type(module).__name__} is not causal: no sum over earlier tokens stands for it"
            )


def _sees_a_window(model, layer: int) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = not kinds or kinds[layer - 1] == "sliding_attention"
    return bool(getattr(config, "sliding_window", None)) and windowed


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    for kind, others, mask in (
        ("sdpa", sdpa_attention_forward, sdpa_mask),
        ("eager", plain_attention, eager_mask),
    ):
        AttentionInterface.register(f"{HF_NAME}_{kind}", partial(_attend_changed, others))
        AttentionMaskInterface.register(f"{HF_NAME}_{kind}", mask)


def _attend_changed(others, module, query, key, value, attention_mask, **kwargs):
    """Attention as `_changed` left it, for transformers: output ``(B, T, H, D)`` and weights."""
    change = getattr(module, CHANGE, None)
    if not isinstance(change, str):
        query = query if change is None else query @ change
        return others(module, query, key, value, attention_mask, **kwargs)
    refuse_extras(module, ("s_aux", "softcap", "position_bias"), kwargs)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    before = key.shape[2] - query.shape[2]
    seen = seen_keys(attention_mask)  # (B, 1, T, T_all)
    if seen is not None:
        last = seen[:, 0, -1]  # the last query sees all but the padding
        causal = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril(before)
        if not torch.equal(seen, (causal & last.unsqueeze(1)).unsqueeze(1).expand_as(seen)):
            # Several texts in one, or a cache with room to come: no sum over all that was before.
            weights = linear_weights(query, key, seen=seen).to(value.dtype)
            return (weights @ value).transpose(1, 2).contiguous(), None
        seen = last.expand(len(query), -1)
    # Earlier tokens come as keys alone: queries of zeros stand for theirs, and are cut off again.
    query = F.pad(query, (0, 0, before, 0))
    out, _ = linear_attention(query, key, value, seen=seen)
    return out[:, :, before:].transpose(1, 2).contiguous(), None
