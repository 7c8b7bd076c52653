"""What attention takes in memory, operations and weights, and head sizes that spend it by rank."""

from __future__ import annotations

import numbers

import numpy as np

from .capture import LayerShape, reader_of
from .errors import InputError, check_whole
from .gpt import GPT


def allocate(
    ranks,
    *,
    largest: int,
    smallest: int = 2,
    multiple: int = 2,
    share: float | None = None,
) -> tuple[int, ...]:
    """Head sizes by layer, in proportion to measured ranks.

    Parameters
    ----------
    ranks : sequence of float
        One positive number a layer, such as the routing rank of its heads.
    largest : int
        Head size of the layer with the highest rank, and the uniform size that `share` refers to.
    smallest, multiple : int
        No head is smaller than the one, and all are multiples of the other.
    share : float, optional
        The sizes add up to at most this share of the uniform model's, and to as much as the
        rounding allows; by default the layer of the highest rank has `largest`.

    Returns
    -------
    tuple of int
        For ``GPTConfig(head_size=...)``.

    Raises
    ------
    InputError
        Ranks that are not finite and positive, sizes that do not fit each other, a share that
        cannot be met.

    References
    ----------
    Jamil & Kapadia 2026 (B13), who go from 8 to 64; the proportion is our reading.
    """
    try:
        ranks = np.asarray(ranks.detach().cpu() if hasattr(ranks, "detach") else ranks, float)
    except (TypeError, ValueError) as error:
        raise InputError(f"ranks are numbers, one a layer, not {ranks!r}") from error
    if ranks.ndim != 1 or not len(ranks):
        raise InputError(f"ranks are one number a layer, not of the shape {ranks.shape}")
    if not (np.isfinite(ranks).all() and (ranks > 0).all()):
        raise InputError(
            f"ranks are finite and positive, not {ranks.tolist()}: a layer without routing has none"
        )
    for name, value in (("largest", largest), ("smallest", smallest), ("multiple", multiple)):
        check_whole(name, value)
    if smallest > largest or smallest % multiple or largest % multiple:
        raise InputError(
            f"head sizes from {smallest} to {largest} in steps of {multiple} do not fit: both ends "
            "are multiples of the step"
        )

    def sizes(factor):
        wanted = np.rint(factor * ranks / multiple) * multiple
        return np.clip(wanted, smallest, largest).astype(int)

    if share is None:
        return tuple(int(x) for x in sizes(largest / ranks.max()))
    if not isinstance(share, numbers.Real) or not 0 < share <= 1 or smallest > share * largest:
        raise InputError(
            f"a share of {share!r} of heads of {largest} cannot be met with heads of at least "
            f"{smallest}"
        )
    # A layer's size changes where its rounding does: these are all factors that make a difference.
    half_steps = (np.arange(smallest, largest + 1, multiple) - multiple / 2)[:, None] / ranks
    factors = np.unique(np.concatenate([[0.0], np.nextafter(half_steps, np.inf).ravel()]))
    fit = [f for f in factors if sizes(f).sum() <= share * largest * len(ranks)]
    return tuple(int(x) for x in sizes(fit[-1]))


def attention_budget(
    shape: LayerShape, d_model: int, context: int, rank: int | None = None
) -> dict[str, float]:
    """What the attention of one layer takes, with keys of full width or of a lower rank.

    Parameters
    ----------
    shape : LayerShape
        Its kind may be softmax, sd, linear or linear-sd.
    d_model, context : int
    rank : int, optional
        Of the logits.

    Returns
    -------
    dict
        ``cache``: numbers kept of `context` tokens of one text (keys and values; in S-D attention
        queries as well; of linear attention its state); ``flops`` of products of scores and values
        a token, the mean over the context (one multiplication and addition count 2);
        ``parameters`` of queries, keys, values and output.
    """
    h, g, size = shape.n_head, shape.n_key, shape.head_size
    sd = shape.kind.endswith("sd")
    width = rank or size * (2 if sd else 1)  # numbers a key
    mean_keys = (context + 1) / 2
    # Of S-D attention a rank of 2 n takes n numbers of each query and each key.
    projected = h * width if sd else (h + g) * width
    found = {
        "cache": g * (width + size) * context,
        "flops": 2 * h * (width + size) * mean_keys,
        "parameters": d_model * (projected + g * size + h * size),
    }
    if shape.kind.startswith("linear"):
        found["cache"] = g * width * (size + 1)
        found["flops"] = 2 * (g + h) * width * (size + 1)
    return found


def model_budget(model, context: int) -> dict[str, float]:
    """What the attention of a whole model takes; the sum over layers.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Of softmax, S-D or linear attention. Logits of a lower rank (:func:`attnlib.lower_rank`)
        count in full: the copy computes with the shapes that it had.
    context : int
        Tokens of the text.

    Returns
    -------
    dict
        ``cache``: numbers kept of `context` tokens of one text (keys and values; in S-D attention
        queries as well; of linear attention a state whose size does not depend on `context`);
        ``flops`` of the products of scores and values for a token, the mean over the context;
        ``parameters`` of queries, keys, values and output.

    Raises
    ------
    InputError
        Energy-gated attention, whose gates we do not count.
    """
    shapes = reader_of(model).layer_shapes()
    gated = sorted({shape.kind for shape in shapes if shape.kind.startswith("ega")})
    if gated:
        raise InputError(f"{', '.join(gated)}: gates are not counted in a budget of attention")
    check_whole("context", context)
    rows = [attention_budget(shape, width_of(model), context) for shape in shapes]
    return {name: float(sum(row[name] for row in rows)) for name in rows[0]}


def width_of(model) -> int:
    config = model.config if isinstance(model, GPT) else model.config.get_text_config()
    return getattr(config, "d_model", None) or config.hidden_size
