"""A plan of `prescription` as it stands in memory or in a file: its checks, and as a table."""

from __future__ import annotations

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


def check_plan(plan) -> None:
    """Refuse what :func:`prescribe` did not make, or what is damaged."""
    wanted = {
        "recommendation", "head_size", "reference", "routing_rank", "cost", "cost_se",
        "window_cost", "cache", "flops",
    }  # fmt: skip
    whole = isinstance(plan, xr.Dataset) and wanted <= set(plan) and "action" in plan.coords
    if not whole or "architecture" not in plan.attrs:
        raise InputError("this is no plan: make one with prescribe(model, tokens)")
    if not np.isfinite(plan["routing_rank"]).all():
        raise InputError("the ranks of this plan are not finite: measure the model anew")
    known = set(plan["action"].values)
    strange = sorted(set(plan["recommendation"].values) - known)
    if strange:
        raise InputError(
            f"the plan recommends {', '.join(strange)}; known are {', '.join(sorted(known))}"
        )
