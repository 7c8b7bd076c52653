"""A plan for cheaper attention: what each layer can do without, what it saves, what it costs."""

from __future__ import annotations

import copy
import json
import math
import numbers
import sys
from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from .budgets import allocate, attention_budget, width_of
from .capture import LayerShape, reader_of
from .conversion import linearize, lower_rank
from .errors import InputError, check_whole, check_windows
from .evaluation import window_losses
from .fields import iter_fields
from .gpt import GPT
from .interactions import interaction_ranks
from .plans import check_plan
from .surgery import check_layers, reference_means

FULL, LINEAR = "full", "linear"
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
    progress: bool = False,
) -> xr.Dataset:
    """What to do with the attention of each layer, from one measurement of a model on a text.

    Half of the windows tell ranks and make the maps of lower rank; on the other half each candidate
    is tried in each layer alone. The plan is the choice, one candidate a layer, that saves most
    while the costs of its layers, added up, stay within the tolerance. That costs add up is an
    assumption, and in our models they come to more than their sum (notebook 18 tells by what
    factor): run :func:`apply` and measure.

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
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.Dataset
        By layer: ``routing_rank``, ``filtering_rank`` (participation) and ``potential_share``,
        means over heads and texts; ``entropy`` of the attention weights, nats, the mean over heads
        and queries; ``head_size``, from :func:`allocate` of the routing rank (it
        needs training); ``recommendation``; ``predicted_cost`` in nats and ``saving``, the share of
        its own cache or flops. On (layer, action): ``cost`` and ``cost_se`` over windows,
        ``cache``, ``flops``, ``parameters``. On window: ``loss``. ``reference``, the tokens that
        make the maps. On point: ``frontier_saving`` and ``frontier_cost``, of the best plans
        as the tolerance grows. Attributes: the model's shape, ``predicted_cost``,
        ``predicted_se``, ``saving`` of the whole.

    Raises
    ------
    InputError
        Too few or too short windows, candidates that do not fit, ranks that are not finite, a
        model that is gated, bidirectional or in part linear already.

    References
    ----------
    Jamil & Kapadia 2026, whose cascade says what may be linearised or made smaller.
    """
    if save not in SAVINGS:
        raise InputError(f"save is one of {SAVINGS}, not {save!r}")
    for name, value in (("tolerance", tolerance), ("caution", caution), ("factor", factor)):
        if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
            raise InputError(f"{name} is a number from 0 upwards, not {value!r}")
    if factor == 0:
        raise InputError("factor is positive: with 0 nothing would cost anything")
    if isinstance(model, xr.Dataset):
        if tokens is not None or ranks or layers is not None or context is not None or not linear:
            raise InputError(
                "candidates, layers and context of a plan are measured: another choice from it has "
                "only tolerance, caution, factor and save"
            )
        check_plan(model)
    else:
        model = _measured(model, tokens, ranks, linear, context, layers, progress)
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
    reference = torch.from_numpy(plan["reference"].values)
    cut = {layer: int(a.split()[1]) for layer, a in actions.items() if a.startswith("rank ")}
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


def _measured(model, tokens, ranks, linear, context, layers, progress) -> xr.Dataset:
    """All of a plan but the choice."""
    from tqdm import tqdm

    reader = reader_of(model)
    check_windows(tokens, reader.context, extra=1, least=6, vocab=model.config.vocab_size)
    shapes = reader.layer_shapes()
    layers = check_layers(layers, reader.n_layer)
    narrowest = min(shape.width for shape in shapes)
    step = 2 if any(shape.kind == "sd" for shape in shapes) else 1
    if ranks is None:
        ranks = sorted({max(step, narrowest // n // step * step) for n in (4, 2)})
    if isinstance(ranks, numbers.Number) or not all(isinstance(r, numbers.Integral) for r in ranks):
        raise InputError(f"ranks are a list of whole numbers, not {ranks!r}")
    actions = [FULL, *(f"rank {rank}" for rank in ranks), *([LINEAR] if linear else [])]
    if len(set(actions)) < len(actions) or len(actions) == 1:
        raise InputError(f"candidates are at least one rank or linear attention, not {actions[1:]}")
    if context is not None:
        context = check_whole("context", context)
    half = len(tokens) // 2
    reference, held_out = tokens[:half, :-1], tokens[half:]
    found = interaction_ranks(model, reference, progress=progress)
    means = reference_means(model, reference)
    entropy = np.zeros(reader.n_layer)
    for layer, _, weights in iter_fields(model, reference, heads="all"):
        # (b, H, T, T) to the sum over its texts; 0 log 0 = 0
        entropy[layer - 1] += float(torch.special.entr(weights.double()).sum(-1).mean((1, 2)).sum())

    base = window_losses(model, held_out)
    cost = np.full((len(held_out), reader.n_layer, len(actions)), np.nan)
    cost[:, :, 0] = 0
    options = {"share_weights": True}
    total = len(layers) * (len(actions) - 1)
    with tqdm(total=total, desc="candidates", disable=not progress, file=sys.stderr) as bar:
        for layer in layers:
            for at, action in enumerate(actions[1:], start=1):
                if action == LINEAR:
                    changed = linearize(model, [layer], **options)
                else:
                    rank = int(action.split()[1])
                    changed = lower_rank(model, rank, [layer], reference=means, **options)
                cost[:, layer - 1, at] = window_losses(changed, held_out) - base
                bar.update()
    if context is None:
        context = reader.context or tokens.shape[1] - 1
    d_model = width_of(model)
    budgets = [[_budget_of(a, shape, d_model, context) for a in actions] for shape in shapes]
    if not isinstance(model, GPT):
        # Maps of lower rank come after rotary positions, so that no weight gets smaller.
        budgets = [[b | {"parameters": row[0]["parameters"]} for b in row] for row in budgets]
    mean_rank = found["routing_rank"].sel(rank_by="participation").mean(("head", "snapshot"))
    both = ("layer", "action")
    data = {
        "routing_rank": mean_rank,
        "filtering_rank": found["filtering_rank"]
        .sel(rank_by="participation")
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
    if np.isfinite(mean_rank).all():
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
    measured = xr.Dataset(data, coords, attributes).drop_vars("rank_by", errors="ignore")
    if "head_size" not in measured:
        raise InputError(
            "a layer has no routing at all, so its rank is not a number: no plan can be made"
        )
    return measured


def _budget_of(action: str, shape: LayerShape, d_model: int, context: int) -> dict[str, float]:
    if action == LINEAR:
        shape = shape._replace(kind="linear-sd" if shape.kind == "sd" else "linear")
    rank = int(action.split()[1]) if action.startswith("rank") else None
    return attention_budget(shape, d_model, context, rank)


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
    # Tolerances at which to look for the frontier: none, then up to all of the candidates' costs.
    most = np.nanmax(np.clip(feared, 0, None), 1).sum()
    points = [0.0, *np.geomspace(max(most, 1e-9) / 1e4, max(most, 1e-9), 24)]
    frontier = [_most_saved(feared, budget[:, :1] - budget, x) for x in points]
    plan = measured.assign(
        recommendation=("layer", measured["action"].values[picked].astype(str)),
        predicted_cost=("layer", cost[rows, picked]),
        saving=("layer", 1 - budget[rows, picked] / budget[:, 0]),
        frontier_saving=("point", [1 - budget[rows, p].sum() / total for p in frontier]),
        frontier_cost=("point", [cost[rows, p].sum() for p in frontier]),
    )
    return plan.assign_attrs(
        tolerance=tolerance,
        caution=caution,
        factor=factor,
        save=save,
        predicted_cost=float(by_window.mean()),
        predicted_se=float(by_window.std(ddof=1) / math.sqrt(len(by_window))),
        saving=float(1 - budget[rows, picked].sum() / total),
    )


def _most_saved(cost: np.ndarray, saved: np.ndarray, tolerance: float) -> np.ndarray:
    """One candidate a layer, ``(layer,)``: the most saved with costs of at most the tolerance.

    A cost below 0 counts as 0: noise in one layer pays for nothing in another.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, m = cost.shape
    there = np.isfinite(cost)
    price = np.clip(np.where(there, cost, 0.0), 0, None)
    if not (saved * there > 0).any():
        return np.zeros(n, int)
    one_each = LinearConstraint(np.kron(np.eye(n), np.ones(m)), 1, 1)
    within = LinearConstraint(price.ravel()[None], -np.inf, tolerance)
    options = {"integrality": np.ones(n * m), "bounds": Bounds(0, there.ravel())}
    exact = {"options": {"mip_rel_gap": 0.0}}
    goal = saved.ravel() / np.abs(saved).max()
    best = milp(-goal, constraints=[one_each, within], **options, **exact)
    # Of the plans that save as much, the cheapest.
    as_much = LinearConstraint(goal[None], -best.fun - 1e-9, np.inf)
    found = milp(price.ravel(), constraints=[one_each, within, as_much], **options, **exact)
    found = found if found.x is not None else best
    return found.x.reshape(n, m).argmax(1)
