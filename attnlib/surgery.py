"""Models with some of their routing or filtering taken away, for as long as a context lasts.

With A = [Q K] ``(T, 2 r)``, queries already scaled, routing and filtering are c A J A^T with
J = [[0, 1], [-1, 0]] and [[0, 1], [1, 0]]; c is 1/2 in standard attention, and 1 in S-D attention,
whose filtering is its damping. A cut to a rank puts another ``(2 r, 2 r)`` matrix in the place of
J.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch

from .capture import REPLACED, reader_of
from .errors import InputError
from .interactions import iter_heads

PARTS = ("potential", "cyclic")


class _Means(NamedTuple):
    """What a cut asks of one layer's tokens, over all windows of a reference; float64."""

    gram: torch.Tensor  # (H, 2 r, 2 r): A^T A
    mean: torch.Tensor  # (H, 1, 2 r): of A
    self_logit: torch.Tensor  # (H,): of q_i . k_i; in S-D attention of -d_i
    sd: bool  # whether the layer is of S-D attention


class _Own:
    """The same of each window by itself, with a dimension B in front, as far as it is asked for."""

    def __init__(self, a: torch.Tensor, damping):
        self.a, self.damping = a, damping

    @cached_property
    def gram(self):
        wide = self.a.double()
        return wide.mT @ wide

    @cached_property
    def mean(self):
        return self.a.double().mean(-2, keepdim=True)

    @cached_property
    def self_logit(self):
        q, k = self.a.double().chunk(2, -1)
        return ((q * k).sum(-1) if self.damping is None else -self.damping.double()).mean(-1)


def reference_means(model, tokens: torch.Tensor) -> dict[int, _Means]:
    """What the cuts of this room ask of a reference, read once for several of them.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
    tokens : torch.Tensor
        ``(n, T)`` windows.

    Returns
    -------
    dict
        By layer, from 1: second moments and means of queries and keys, float64.

    Raises
    ------
    InputError
        As :func:`attnlib.iter_interactions`.
    """
    sums: dict[int, list] = {}
    sd: dict[int, bool] = {}
    for layer, _, query, key, damping in iter_heads(model, tokens):
        sd[layer] = damping is not None
        own = _Own(torch.cat([query, key], -1), damping)
        new = [x.sum(0) for x in (own.gram, own.mean, own.self_logit)]
        sums[layer] = [a + b for a, b in zip(sums.get(layer, [0, 0, 0]), new, strict=True)]
    return {
        layer: _Means(*(x / len(tokens) for x in three), sd[layer]) for layer, three in sums.items()
    }


def truncate_routing(model, rank: int, *, layers: Sequence[int] | None = None, reference=None):
    """Cut the routing of every head to its leading planes of rotation.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Of softmax or S-D attention. No weight is touched, and all is as before after the context.
    rank : int
        Even, from 0 (no routing) to twice the head size (all of it).
    layers : sequence of int, optional
        From 1; all by default.
    reference : torch.Tensor or dict, optional
        ``(n, T)`` windows of tokens, or what :func:`reference_means` made of them. The cut is then
        one fixed map a head, the best over all pairs of tokens of these windows, of one or of two,
        which could be built into a model. Without it each window has its own best cut; it depends
        on later tokens too, so that a loss measured with it is a bound, not what a causal model
        could reach.

    Returns
    -------
    context manager
        That gives the model. One cut of routing and one of filtering may be nested.

    Raises
    ------
    InputError
        A rank that is odd or too high, layers that are not there or given twice, gated attention,
        a second cut of the same kind in one layer.

    References
    ----------
    Jamil & Kapadia 2026 (B9, B10, B14).
    """
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or rank < 0 or rank % 2:
        raise InputError(
            f"routing has an even rank, two for each plane of rotation, so it is cut to 0, 2, 4, "
            f"..., not to {rank!r}"
        )

    leading = _leading_of(-1, rank)

    def cut(means, a, scale):
        if rank > a.shape[-1]:
            raise InputError(f"routing has a rank of at most {a.shape[-1]} here, not {rank}")
        if rank == 0:
            return a.new_zeros(*a.shape[:-1], a.shape[-2])
        return scale * (a @ leading(means).to(a.dtype) @ a.mT)

    return _changed(model, "routing", cut, layers, reference)


def keep_routing(model, part: str, *, layers: Sequence[int] | None = None, reference=None):
    """Leave of the routing only its potential, or only its cyclic part (:func:`attnlib.hodge`).

    Parameters
    ----------
    model, layers
        As in :func:`truncate_routing`.
    part : {"potential", "cyclic"}
    reference : torch.Tensor or dict, optional
        As there: windows over which the mean query and the mean key are taken that make the
        potential. Without it they are those of each window, later tokens included.

    Returns
    -------
    context manager
        As :func:`truncate_routing`, with its errors.
    """
    if part not in PARTS:
        raise InputError(f"part is one of {PARTS}, not {part!r}")

    def cut(means, a, scale):
        cyclic = _product(a - means.mean.to(a.dtype), -1)
        return scale * (cyclic if part == "cyclic" else _product(a, -1) - cyclic)

    return _changed(model, "routing", cut, layers, reference)


def truncate_filtering(
    model, rank: int | str, *, layers: Sequence[int] | None = None, reference=None
):
    """Cut the filtering of every head to its leading directions, or to one scalar.

    Parameters
    ----------
    model, layers, reference
        As in :func:`truncate_routing`.
    rank : int or "scalar"
        From 0 (no filtering) to twice the head size. ``"scalar"``: a multiple of the identity, the
        head's mean self-logit (F_ii; in S-D attention -d_i). Of S-D attention, whose filtering is
        diagonal, ``"scalar"`` and 0 alone.

    Returns
    -------
    context manager
        As :func:`truncate_routing`, with its errors.
    """
    whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    if not whole and rank != "scalar":
        raise InputError(f"filtering is cut to a whole rank or to 'scalar', not to {rank!r}")

    leading = _leading_of(1, rank)

    def cut(means, a, scale):
        zeros = a.new_zeros(*a.shape[:-1], a.shape[-2])
        if rank == "scalar":
            scalar = means.self_logit.to(a.dtype)[..., None, None]
            return zeros + scalar * torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
        if rank == 0:
            return zeros
        if scale == 1:
            raise InputError("the filtering of S-D attention is diagonal: cut it to 'scalar' or 0")
        if rank > a.shape[-1]:
            raise InputError(f"filtering has a rank of at most {a.shape[-1]} here, not {rank}")
        return scale * (a @ leading(means).to(a.dtype) @ a.mT)

    return _changed(model, "filtering", cut, layers, reference)


# ------------------------------------------------------------------ the algebra


def _product(a: torch.Tensor, sign: int) -> torch.Tensor:
    """A J A^T, ``(B, H, T, T)``."""
    q, k = a.chunk(2, -1)
    product = q @ k.mT
    return product + sign * product.mT


def _leading_of(sign: int, rank) -> Callable:
    """As `leading_map`, from means; of a reference, whose means stay the same, found once."""
    known: dict[int, torch.Tensor] = {}

    def leading(means):
        if isinstance(means, _Own):
            return leading_map(means.gram, sign, rank)
        if id(means) not in known:
            known[id(means)] = leading_map(means.gram, sign, rank)
        return known[id(means)]

    return leading


def leading_map(gram: torch.Tensor, sign: int, rank: int) -> torch.Tensor:
    """G so that A G A^T is the best approximation of A J A^T of this rank, from A^T A alone.

    J is skew for sign -1, symmetric for 1. With a root A^T A = T^T T, A is Q T with orthonormal Q,
    the spectrum of A J A^T is that of the small T J T^T, and G = T^-1 (its leading part) T^-T.
    """
    r = gram.shape[-1] // 2
    form = torch.zeros_like(gram[..., :, :])
    form[..., :r, r:] = torch.eye(r)
    form[..., r:, :r] = sign * torch.eye(r)
    values, vectors = torch.linalg.eigh(gram)
    there = values > 1e-12 * values[..., -1:]  # fewer tokens than columns leave some at 0
    root = torch.where(there, values, 0.0).sqrt()
    inverse = torch.where(there, 1 / torch.where(there, root, 1.0), 0.0)
    t = root.unsqueeze(-1) * vectors.mT
    small = t @ form @ t.mT
    # i times a real skew matrix is Hermitian: its eigenvalues are real, in pairs of s and -s.
    size, basis = torch.linalg.eigh(1j * small if sign < 0 else small)
    order = size.abs().argsort(dim=-1, descending=True, stable=True)[..., :rank]
    basis = basis.gather(-1, order.unsqueeze(-2).expand(*basis.shape[:-1], -1))
    kept = (basis * size.gather(-1, order).unsqueeze(-2)) @ basis.mH
    kept = kept.imag if sign < 0 else kept  # kept is i times what is wanted
    back = vectors * inverse.unsqueeze(-2)
    return back @ kept @ back.mT


# ------------------------------------------------------------------ the change of a model


def check_layers(layers, n_layer: int) -> list[int]:
    """Layers, counted from 1; all for None. Refuses what is not there, nothing and repetitions."""
    if layers is None:
        return list(range(1, n_layer + 1))
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    whole = [hasattr(x, "__index__") and not isinstance(x, bool) for x in layers]
    layers = [int(x) if ok else x for x, ok in zip(layers, whole, strict=True)]
    wrong = [x for x, ok in zip(layers, whole, strict=True) if not ok or not 1 <= x <= n_layer]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise InputError(
            f"layers are among 1 to {n_layer}, at least one and each once, not {layers}"
        )
    return layers


def means_of(model, reference, layers, shapes) -> dict[int, _Means]:
    """The means of a reference, tokens or means of before; refuses those of another model."""
    if isinstance(reference, torch.Tensor):
        return reference_means(model, reference)
    if not isinstance(reference, dict) or not all(
        isinstance(x, _Means) for x in reference.values()
    ):
        raise InputError(
            "a reference is windows of tokens, a tensor (n, T), or what reference_means made of it"
        )
    if not set(layers) <= set(reference):
        raise InputError("the reference is of another model: it lacks some of the layers")
    for layer in layers:
        shape = shapes[layer - 1]
        gram = tuple(reference[layer].gram.shape)
        expected = (shape.n_head, 2 * shape.head_size, 2 * shape.head_size)
        if gram != expected or reference[layer].sd != (shape.kind == "sd"):
            raise InputError(
                f"the reference is of another model: in layer {layer} it has the shape {gram}, not "
                f"{expected}, or it is of another kind of attention"
            )
    return reference


@contextmanager
def _changed(model, kind: str, cut: Callable, layers, reference) -> Iterator:
    """The model with `cut(means, a, scale)` in the place of one kind of part."""
    reader = reader_of(model)
    layers = check_layers(layers, reader.n_layer)
    modules = reader.attention_modules()
    if reference is not None:
        reference = means_of(model, reference, layers, reader.layer_shapes())
    changed = []
    try:
        for layer in layers:
            module = modules[layer - 1]
            cuts = getattr(module, REPLACED, None) or _Cuts()
            if kind in cuts:
                raise InputError(f"the {kind} of layer {layer} is cut already")
            cuts[kind] = cut, reference and reference[layer]
            changed.append((module, cuts))
            setattr(module, REPLACED, cuts)
        with reader.replaced():
            yield model
    finally:
        for module, cuts in changed:
            del cuts[kind]
            if not cuts:
                delattr(module, REPLACED)


class _Cuts(dict):
    """What takes the place of routing and filtering in one layer: kind to (cut, its means)."""

    def __call__(self, query, key, damping):
        """Logits ``(B, H, T, T)`` before the mask."""
        a = torch.cat([query, key], -1).float()  # (B, H, T, 2 r)
        scale = 0.5 if damping is None else 1.0
        parts, own = {}, _Own(a, damping)  # the windows' own means, where there is no reference
        for kind, (cut, means) in self.items():
            parts[kind] = cut(means or own, a, scale)
        if "routing" not in parts:
            parts["routing"] = scale * _product(a, -1)
        if "filtering" not in parts and damping is None:
            parts["filtering"] = scale * _product(a, 1)
        elif "filtering" not in parts:
            parts["filtering"] = -torch.diag_embed(damping.to(a.dtype))
        return parts["routing"] + parts["filtering"]
