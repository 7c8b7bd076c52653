"""A plan for cheaper attention: what each layer can do without, what it saves, what it costs."""

from __future__ import annotations

import copy
import json
import math
import numbers
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xarray as xr

from .budgets import allocate, attention_budget, width_of
from .capture import LayerShape, reader_of
from .conversion import (
    check_changeable,
    check_rank,
    linearize,
    linearized,
    lower_rank,
)
from .errors import InputError, check_whole, check_windows
from .evaluation import window_losses
from .fields import iter_fields
from .gpt import GPT
from .interactions import interaction_ranks
from .linear import LINEAR_KIND
from .plans import FULL, LINEAR, check_plan, rank_of
from .restarts import KeptCosts, single_costs
from .surgery import check_layers, reference_means

SAVINGS = ("cache", "flops")


def prescribe(
    model,
    tokens: torch.Tensor | None = None,
    *,
    tolerance: float = 0.05,
    caution: float = 1.0,
    factor: float = 1.0,
    ranks: Sequence[int] | None = None,
    linear: bool = True,
    save: str = "cache",
    context: int | None = None,
    layers: Sequence[int] | None = None,
    keep=None,
    progress: bool = False,
) -> xr.Dataset:
    """What to do with the attention of each layer, from one measurement of a model on a text.

    Half of the windows tell ranks and make the maps of lower rank; on the other half each candidate
    is tried in each layer alone. The plan is the choice, one candidate a layer, that saves most
    while the costs of its layers, added up, stay within the tolerance. That costs add up is an
    assumption (notebook 18 tells how far off it is): run :func:`apply` and measure.

    Parameters
    ----------
    model : GPT, transformers.PreTrainedModel or xarray.Dataset
        Of softmax or S-D attention, causal. Or an earlier plan, for a choice with another
        `tolerance`, `caution`, `factor` or `save` without measuring anew.
    tokens : torch.Tensor
        ``(n, T + 1)`` windows, at least 6.
    tolerance : float
        Nats a token by which the loss may rise: 0.05 is 5% of perplexity.
    caution : float
        Standard errors that are added to each cost before the choice, so that a candidate is not
        taken for its luck on few windows.
    factor : float
        How many times the sum of single costs all of them together cost; enters choice and
        prediction.
    ranks : sequence of int, optional
        Candidate ranks of the logits; by default a quarter and a half of what they can have.
    linear : bool
        Whether linear attention is a candidate.
    save : {"cache", "flops"}
        What the plan saves; see :func:`model_budget`.
    context : int, optional
        Tokens at which savings are counted; by default those of the model, or T.
    layers : sequence of int, optional
        Where to try candidates; elsewhere the plan leaves all as it is.
    keep : path-like, optional
        A file (``.nc``) of the costs so far. A call that was killed goes on from it when it is made
        again with the same model, tokens and candidates; costs of anything else are replaced.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.Dataset
        By layer: ``routing_rank``, ``filtering_rank`` (participation) and ``potential_share``,
        means over heads and texts; ``entropy`` of the attention weights, nats, the mean over heads
        and queries; ``head_size``, from :func:`allocate` of the routing rank (it
        needs training); ``recommendation``; ``predicted_cost`` in nats (a measured gain counts as
        0) and ``saving``, the share of its own cache or flops. On (layer, action): ``cost`` and
        ``cost_se`` over windows, ``cache``, ``flops``, ``parameters``. On window: ``loss``.
        ``reference``, the tokens that make the maps. On point: ``frontier_saving`` and
        ``frontier_cost``, of the best plans as the tolerance grows. Attributes: the model's shape,
        ``predicted_cost``, ``predicted_se``, ``saving`` of the whole.

    Raises
    ------
    InputError
        Before anything is measured: too few windows, candidates that do not fit, a model that is
        gated, bidirectional or changed already, or whose attention no linear one stands for; a file
        to keep costs in that cannot be written, is damaged or holds something else. After
        the first measurements: ranks or losses that are not finite.

    References
    ----------
    Jamil & Kapadia 2026, whose cascade says what may be linearised or made smaller.
    """
    if save not in SAVINGS:
        raise InputError(f"save is one of {SAVINGS}, not {save!r}")
    for name, value in (("tolerance", tolerance), ("caution", caution), ("factor", factor)):
        if not isinstance(value, numbers.Real) or not 0 <= value <= 1e6:
            raise InputError(f"{name} is a number from 0 to a million, not {value!r}")
    if factor == 0:
        raise InputError("factor is positive: with 0 nothing would cost anything")
    if isinstance(model, xr.Dataset):
        if (
            tokens is not None
            or ranks is not None
            or layers is not None
            or context is not None
            or keep is not None
            or not linear
        ):
            raise InputError(
                "candidates, layers and context of a plan are measured: another choice from it has "
                "only tolerance, caution, factor and save"
            )
        check_plan(model)
    else:
        model = _measured(model, tokens, ranks, linear, context, layers, keep, progress)
    return _chosen(model, float(tolerance), float(caution), float(factor), save)


def apply(plan: xr.Dataset, model):
    """Carry out of a plan what needs no training: linear layers, and lower ranks.

    Parameters
    ----------
    plan : xarray.Dataset
        From :func:`prescribe`.
    model : GPT or transformers.PreTrainedModel
        The model that it was made for, or another of the same shape. It is not touched.

    Returns
    -------
    GPT or transformers.PreTrainedModel
        A copy. Head sizes are not changed: :meth:`GPTConfig.from_plan` builds a model with them,
        to be trained.

    Raises
    ------
    InputError
        No plan, a plan for another architecture, with ranks that are no numbers or with
        recommendations that we do not know.
    """
    check_plan(plan)
    shapes = reader_of(model).layer_shapes()
    if _described(model, shapes) != plan.attrs["architecture"]:
        raise InputError(
            f"the plan is for another architecture, {plan.attrs['architecture']}, not for "
            f"{_described(model, shapes)}"
        )
    actions = {int(x): str(a) for x, a in plan["recommendation"].to_series().items()}
    reference = torch.from_numpy(plan["reference"].values).long()
    cut = {layer: rank_of(a) for layer, a in actions.items() if rank_of(a)}
    new = model
    if cut:
        means = reference_means(model, reference.to(next(model.parameters()).device))
        for rank in sorted(set(cut.values())):
            new = lower_rank(new, rank, [k for k, r in cut.items() if r == rank], reference=means)
    straight = [layer for layer, action in actions.items() if action == LINEAR]
    if straight:
        new = linearize(new, straight)
    return copy.deepcopy(model) if new is model else new


# ------------------------------------------------------------------ measuring


def _measured(model, tokens, ranks, linear, context, layers, keep, progress) -> xr.Dataset:
    """All of a plan but the choice."""
    reader = reader_of(model)
    check_windows(tokens, reader.context, extra=1, least=6, vocab=model.config.vocab_size)
    tokens, shapes = tokens.long(), reader.layer_shapes()
    layers = check_layers(layers, reader.n_layer)
    if context is not None:
        context = check_whole("context", context)
    check_changeable(reader, range(1, reader.n_layer + 1))  # all of them are read
    ranks = _candidates(ranks, [shapes[layer - 1] for layer in layers], layers)
    actions = [FULL, *(f"rank {rank}" for rank in ranks), *([LINEAR] if linear else [])]
    if len(set(actions)) < len(actions) or len(actions) == 1:
        raise InputError(
            "candidates are ranks, each once, or linear attention, at least one of them, not "
            f"{actions[1:]}"
        )
    if linear:
        linearized(reader, layers, share_weights=True)  # refuses what cannot be
    kept = None if keep is None else KeptCosts(keep)
    half = len(tokens) // 2
    reference, held_out = tokens[:half, :-1], tokens[half:]
    base = window_losses(model, held_out)
    if not bool(torch.isfinite(base).all()):
        raise InputError("the model's own loss is not finite: there is nothing to compare with")
    found = interaction_ranks(model, reference, progress=progress)
    mean_rank = (
        found["routing_rank"].sel(rank_by="participation", drop=True).mean(("head", "snapshot"))
    )
    flat = [int(x) for x in mean_rank["layer"][~np.isfinite(mean_rank)]]
    if flat:
        raise InputError(
            f"layers {flat} have no routing at all on some of these texts of "
            f"{reference.shape[1]} token(s), so that it has no rank: take longer windows"
        )
    means = reference_means(model, reference)
    entropy = np.zeros(reader.n_layer)
    for layer, _, weights in iter_fields(model, reference, heads="all"):
        # (b, H, T, T) to the sum over its texts; 0 log 0 = 0
        entropy[layer - 1] += float(torch.special.entr(weights.double()).sum(-1).mean((1, 2)).sum())

    if kept is not None:
        kept.of(tokens, base, actions, *model.state_dict().values())
    cost = single_costs(
        reader, held_out, base, layers, actions, means, kept=kept, progress=progress
    )
    if context is None:
        context = reader.context or tokens.shape[1] - 1
    d_model = width_of(model)
    budgets = [[_budget_of(a, shape, d_model, context) for a in actions] for shape in shapes]
    if not isinstance(model, GPT):
        # Maps of lower rank come after rotary positions, so that no weight gets smaller.
        budgets = [[b | {"parameters": row[0]["parameters"]} for b in row] for row in budgets]
    both = ("layer", "action")
    data = {
        "routing_rank": mean_rank,
        "filtering_rank": found["filtering_rank"]
        .sel(rank_by="participation", drop=True)
        .mean(("head", "snapshot")),
        "potential_share": found["potential_share"].mean(("head", "snapshot")),
        "entropy": ("layer", entropy / half),
        "window_cost": (("window", *both), cost),
        "cost": (both, cost.mean(0)),
        "cost_se": (both, cost.std(0, ddof=1) / math.sqrt(len(cost))),
        "loss": ("window", base.numpy()),
        "reference": (("reference_window", "token"), reference.cpu().numpy()),
    }
    for name in budgets[0][0]:
        data[name] = (both, np.array([[b[name] for b in row] for row in budgets]))
    largest = max(shape.head_size for shape in shapes)
    multiple = 2 if largest % 2 == 0 else 1
    sizes = allocate(mean_rank, largest=largest, smallest=multiple, multiple=multiple)
    data["head_size"] = ("layer", np.array(sizes))
    coords = {"layer": np.arange(1, reader.n_layer + 1), "action": actions}
    attributes = {
        "architecture": _described(model, shapes),
        "context": context,
        "loss": float(base.mean()),
    }
    if isinstance(model, GPT):
        attributes["config"] = json.dumps(model.config.to_dict())
    return xr.Dataset(data, coords, attributes)


def _candidates(ranks, shapes, layers) -> list[int]:
    """Ranks to try; by default a quarter and a half of what the narrowest layer can have."""
    if ranks is None:
        step = 2 if any(shape.kind == "sd" for shape in shapes) else 1
        width = min(shape.width for shape in shapes)
        return sorted({max(step, width // n // step * step) for n in (4, 2)})
    is_list = isinstance(ranks, Iterable) and not isinstance(ranks, (str, bytes, dict))
    ranks = list(ranks) if is_list else [ranks]
    whole = all(isinstance(r, numbers.Integral) and not isinstance(r, bool) for r in ranks)
    if not is_list or not whole:
        raise InputError(f"ranks are a list of whole numbers, not {ranks!r}")
    ranks = [int(r) for r in ranks]
    for layer, shape in zip(layers, shapes, strict=True):
        for rank in ranks:
            check_rank(layer, shape, rank)
    return ranks


def _budget_of(action: str, shape: LayerShape, d_model: int, context: int) -> dict[str, float]:
    if action == LINEAR:
        shape = shape._replace(kind=LINEAR_KIND[shape.kind])
    return attention_budget(shape, d_model, context, rank_of(action))


def _described(model, shapes) -> str:
    kinds = [f"{s.kind} {s.n_head}/{s.n_key}x{s.head_size}" for s in shapes]
    each = kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)
    return (
        f"{type(model).__name__}, {len(shapes)} layers, width {width_of(model)}, "
        f"{model.config.vocab_size} tokens: {each}"
    )


# ------------------------------------------------------------------ choosing


def _chosen(measured, tolerance: float, caution: float, factor: float, save: str) -> xr.Dataset:
    """The plan that saves most within a tolerance, and those of other tolerances."""
    cost = factor * measured["cost"].values
    feared = cost + factor * caution * measured["cost_se"].values
    budget = measured[save].values
    total = budget[:, 0].sum()
    picked = _most_saved(feared, budget[:, :1] - budget, tolerance)
    rows = np.arange(len(cost))
    by_window = factor * measured["window_cost"].values[:, rows, picked].sum(1)
    predicted = np.clip(cost[rows, picked], 0, None)  # as in the choice: a gain counts as 0
    same = {"caution": caution, "save": save}
    if "frontier_cost" in measured and same.items() <= measured.attrs.items():
        # The tolerances of the frontier are parts of the largest cost, which the factor multiplies.
        times = factor / measured.attrs["factor"]
        frontier = {
            "frontier_saving": measured["frontier_saving"],
            "frontier_cost": measured["frontier_cost"] * times,
        }
    else:
        frontier = _frontier(cost, feared, budget)
    plan = measured.assign(
        recommendation=("layer", measured["action"].values[picked].astype(str)),
        predicted_cost=("layer", predicted),
        saving=("layer", 1 - budget[rows, picked] / budget[:, 0]),
        **frontier,
    )
    return plan.assign_attrs(
        tolerance=tolerance,
        caution=caution,
        factor=factor,
        save=save,
        predicted_cost=float(predicted.sum()),
        predicted_se=float(by_window.std(ddof=1) / math.sqrt(len(by_window))),
        saving=float(1 - budget[rows, picked].sum() / total),
    )


def _frontier(cost: np.ndarray, feared: np.ndarray, budget: np.ndarray) -> dict:
    """Savings and costs of the best plans, as the tolerance grows from none to all of the costs."""
    most = max(np.where(np.isfinite(feared), feared, 0).max(1).clip(min=0).sum(), 1e-9)
    rows, savings, costs = np.arange(len(cost)), [], []
    for tolerance in [0.0, *np.geomspace(most / 1e4, most, 24)]:
        picked = _most_saved(feared, budget[:, :1] - budget, tolerance)
        savings.append(1 - budget[rows, picked].sum() / budget[:, 0].sum())
        costs.append(np.clip(cost[rows, picked], 0, None).sum())
    return {"frontier_saving": ("point", savings), "frontier_cost": ("point", costs)}


def _most_saved(cost: np.ndarray, saved: np.ndarray, tolerance: float) -> np.ndarray:
    """One candidate a layer, ``(layer,)``: the most saved with costs of at most the tolerance.

    A cost below 0 counts as 0: noise in one layer pays for nothing in another.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, m = cost.shape
    there = cost <= tolerance  # nan, of what was not tried, is not; alone too dear cannot be taken
    # In tolerances, so that the solver's own tolerance is a part of ours, however small that is.
    price = np.clip(np.where(there, cost, 0.0), 0, None) / (tolerance or 1.0)
    if not (saved * there > 0).any():
        return np.zeros(n, int)
    one_each = LinearConstraint(np.kron(np.eye(n), np.ones(m)), 1, 1)
    within = LinearConstraint(price.ravel()[None], -np.inf, float(tolerance > 0))
    options = {"integrality": np.ones(n * m), "bounds": Bounds(0, there.ravel())}
    exact = {"options": {"mip_rel_gap": 0.0}}
    goal = saved.ravel() / np.abs(saved).max()
    best = milp(-goal, constraints=[one_each, within], **options, **exact)
    # Of the plans that save as much, the cheapest.
    as_much = LinearConstraint(goal[None], -best.fun - 1e-9, np.inf)
    found = milp(price.ravel(), constraints=[one_each, within, as_much], **options, **exact)
    found = found if found.x is not None else best
    return found.x.reshape(n, m).argmax(1)
