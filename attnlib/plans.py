"""A plan of `prescription` as it stands in memory or in a file: its checks, and as a table."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import xarray as xr

from .errors import InputError


def plan_table(plan: xr.Dataset):
    """A plan as a table, ``pandas.DataFrame``, one row a layer."""
    check_plan(plan)
    columns = {
        "routing rank": plan["routing_rank"].round(2),
        "filtering rank": plan["filtering_rank"].round(2),
        "potential": plan["potential_share"].round(2),
        "head size": plan["head_size"],
        "recommendation": plan["recommendation"],
        "saving": plan["saving"].round(3),
        "predicted cost": plan["predicted_cost"].round(4),
    }
    table = xr.Dataset(columns).reset_coords(drop=True).to_dataframe()
    return table[list(columns)]


BY_LAYER = (
    "recommendation", "head_size", "routing_rank", "filtering_rank", "potential_share", "saving",
    "predicted_cost",
)  # fmt: skip
BY_ACTION = ("cost", "cost_se", "cache", "flops", "parameters")
FULL, LINEAR = "full", "linear"


def rank_of(action: str) -> int | None:
    """The rank of an action such as ``"rank 8"``; None for the others."""
    return int(action.split()[1]) if action.startswith("rank ") else None


def check_plan(plan) -> None:
    """Refuse what :func:`prescribe` did not make, or what is damaged."""
    shapes = dict.fromkeys(BY_LAYER, ("layer",)) | dict.fromkeys(BY_ACTION, ("layer", "action"))
    shapes |= {
        "window_cost": ("window", "layer", "action"),
        "reference": ("reference_window", "token"),
    }
    if (
        not isinstance(plan, xr.Dataset)
        or not set(shapes) <= set(plan)
        or any(plan[name].dims != dims for name, dims in shapes.items())
        or not {"layer", "action"} <= set(plan.coords)
        or not {"architecture", "context", "loss"} <= set(plan.attrs)
    ):
        raise InputError("this is no plan: make one with prescribe(model, tokens)")
    layers, actions = plan["layer"].values, [str(a) for a in plan["action"].values]
    if list(layers) != list(range(1, len(layers) + 1)):
        raise InputError(f"the layers of a plan are 1, 2, ..., each once, not {layers.tolist()}")
    if not np.isfinite(plan["routing_rank"]).all():
        raise InputError("the ranks of this plan are not finite: measure the model anew")
    known = re.compile(rf"{FULL}|{LINEAR}|rank [1-9][0-9]*")
    strange = [a for a in actions if not known.fullmatch(a)]
    if strange or FULL not in actions[:1] or len(set(actions)) < len(actions):
        raise InputError(
            f"the candidates of a plan are '{FULL}' first, '{LINEAR}' and 'rank N', each once, not "
            f"{', '.join(actions)}"
        )
    strange = sorted({str(x) for x in plan["recommendation"].values} - set(actions))
    if strange:
        raise InputError(
            f"the plan recommends {', '.join(strange)}; known are {', '.join(sorted(actions))}"
        )
    sizes = plan["head_size"].values
    if sizes.dtype.kind not in "iu" or not (sizes > 0).all():
        raise InputError(f"head sizes are positive whole numbers, not {sizes.tolist()}")
    if plan["reference"].dtype.kind not in "iu":
        raise InputError("the reference of a plan is tokens, whole numbers: measure the model anew")
    if plan["cost"].isel(action=0).values.any() or not np.isfinite(plan["cache"]).all():
        raise InputError("the costs or budgets of this plan are damaged: measure the model anew")


def planned_config(plan, base=None):
    """As :meth:`attnlib.GPTConfig.from_plan`."""
    from .gpt import GPTConfig
    from .linear import LINEAR_KIND

    check_plan(plan)
    if base is not None and not isinstance(base, GPTConfig):
        raise InputError(f"base is a GPTConfig, not {type(base).__name__}")
    if base is None and "config" not in plan.attrs:
        raise InputError(
            f"the plan is for {plan.attrs['architecture']}, which is not a GPT: give as `base` a "
            "GPTConfig with as many layers"
        )
    base = base or GPTConfig.from_dict(json.loads(plan.attrs["config"]))
    actions = plan["recommendation"].values
    if base.n_layer != len(actions):
        raise InputError(f"the plan has {len(actions)} layers, the model {base.n_layer}")
    kinds = list(base.per_layer("attention"))
    for layer, (action, kind) in enumerate(zip(actions, kinds, strict=True)):
        if action == LINEAR and kind not in LINEAR_KIND.values():
            if kind not in LINEAR_KIND:
                raise InputError(
                    f"layer {layer + 1} of `base` is of the kind {kind!r}, which cannot be made "
                    "linear as the plan says"
                )
            kinds[layer] = LINEAR_KIND[kind]
    sizes = tuple(int(x) for x in plan["head_size"].values)
    return replace(base, attention=tuple(kinds), head_size=sizes)
