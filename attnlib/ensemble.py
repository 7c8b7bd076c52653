"""Fields as an ensemble: layout, checks, mean and fluctuation, and the lag."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import xarray as xr

from .device import pick_device
from .errors import InputError

CONVENTIONS = ("causal", "published", "signed")


def check_finite(values: torch.Tensor, label, first: int = 0) -> None:
    """Refuse snapshots ``(N, ...)`` with a value that is not finite, naming layer and snapshot."""
    if bool(values.sum().isfinite()):  # fast; a sum of finite numbers can overflow, so look again
        return
    finite = torch.stack([torch.isfinite(one).all() for one in values])
    if not bool(finite.all()):
        snapshot = first + int((~finite).nonzero()[0, 0])
        raise InputError(
            f"layer {label}, snapshot {snapshot} holds a value that is not finite: leave that "
            "document out, or look for the overflow in the model"
        )


def each_field(
    fields: xr.DataArray | torch.Tensor, device: str | None = None
) -> Iterator[torch.Tensor]:
    """Ensembles ``(N, T, T)`` of a field array, one (layer[, head]) at a time, checked.

    A tensor stays on its device unless `device` names another; a DataArray is read from main
    memory onto `device` (default: the CPU). From mps, which has no float64, to the CPU. Integers
    and half precision become float32.
    """
    fields = as_fields(fields)
    labels = fields.coords["layer"].values if isinstance(fields, xr.DataArray) else None
    values = fields.values if isinstance(fields, xr.DataArray) else fields
    n, t, t_key = values.shape[-3:]
    if t != t_key or t < 2:
        raise InputError(f"fields are square, query x key; these are {t} x {t_key}")
    if n < 3:
        raise InputError(f"{n} snapshot(s): an ensemble needs at least 3")
    for index in np.ndindex(values.shape[:-3]):
        one = values[index]
        if isinstance(one, np.ndarray):
            one = torch.from_numpy(np.require(one, requirements=["C", "W"]))
        if one.dtype not in (torch.float32, torch.float64):
            one = one.float()
        if device is not None:
            one = one.to(pick_device(device))
        if one.device.type == "mps":
            one = one.cpu()
        check_finite(one, index[0] + 1 if labels is None else labels[index[0]])
        yield one


def as_fields(fields: xr.DataArray | torch.Tensor) -> xr.DataArray | torch.Tensor:
    """Fields as the analysis wants them, (layer, [head,] snapshot, query, key), or an error.

    A DataArray may have any layout; a tensor ``(snapshot, query, key)`` is one layer.
    """
    if isinstance(fields, torch.Tensor):
        if not 3 <= fields.dim() <= 5:
            raise InputError(
                "a tensor of fields is ([layer, [head,]] snapshot, query, key), not of shape "
                f"{tuple(fields.shape)}"
            )
        fields = fields.detach()
        fields = fields[None] if fields.dim() == 3 else fields
        kind = "number" if not fields.is_complex() else "complex"
    elif isinstance(fields, xr.DataArray):
        if not {"snapshot", "query", "key"} <= set(fields.dims):
            raise InputError(f"fields have the dimensions snapshot, query, key, not {fields.dims}")
        if "layer" not in fields.dims:
            layer = fields.coords["layer"].values if "layer" in fields.coords else 1
            fields = fields.drop_vars("layer", errors="ignore").expand_dims(layer=[layer])
        lead = [d for d in ("layer", "head") if d in fields.dims]
        if set(fields.dims) != {*lead, "snapshot", "query", "key"}:
            raise InputError(f"fields have no dimensions but layer and head besides: {fields.dims}")
        fields = fields.transpose(*lead, "snapshot", "query", "key")
        for dim in lead:
            if dim not in fields.coords:
                fields = fields.assign_coords({dim: np.arange(1, fields.sizes[dim] + 1)})
        kind = "number" if fields.dtype.kind in "fiub" else fields.dtype
    else:
        raise InputError(f"fields are a DataArray or a tensor, not {type(fields).__name__}")
    if kind != "number":
        raise InputError(f"fields are real numbers, not {kind}")
    if 0 in fields.shape:
        raise InputError(f"fields of shape {tuple(fields.shape)} are empty")
    return fields


def ensemble_size(fields: xr.DataArray | torch.Tensor) -> tuple[int, int]:
    """Snapshots N and tokens T of a field array."""
    shape = as_fields(fields).shape
    return shape[-3], shape[-1]


def map_fields(
    fields: xr.DataArray | torch.Tensor, function: Callable, device: str | None = None
) -> tuple[list, tuple[str, ...], dict]:
    """Apply `function` to each ensemble; returns results, leading dims and their coordinates."""
    fields = as_fields(fields)
    results = [function(one) for one in each_field(fields, device)]
    if isinstance(fields, xr.DataArray):
        dims = fields.dims[:-3]
        coords = {d: fields.coords[d].values for d in dims}
    else:
        dims = ("layer", "head")[: fields.dim() - 3]
        coords = {d: np.arange(1, n + 1) for d, n in zip(dims, fields.shape, strict=False)}
    return results, dims, coords


def stack_leading(results: list, lead_shape: tuple[int, ...]) -> np.ndarray:
    """Stack per-ensemble arrays into ``lead_shape + array.shape``, in NumPy."""
    arrays = [r.cpu().numpy() if isinstance(r, torch.Tensor) else np.asarray(r) for r in results]
    return np.stack(arrays).reshape(*lead_shape, *arrays[0].shape)


def fluctuation(fields: xr.DataArray | torch.Tensor) -> xr.DataArray | torch.Tensor:
    """Fluctuating part of the field, u_s = A_s - mean over s (the Reynolds decomposition).

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        Any field array; at least 3 snapshots, all finite.

    Returns
    -------
    xarray.DataArray or torch.Tensor
        As given, ``([layer, [head,]] snapshot, query, key)``; its mean over snapshots is zero.

    References
    ----------
    Zeris 2026: A_s = Abar + u_s.
    """
    fields = as_fields(fields)
    for _ in each_field(fields):
        pass
    if isinstance(fields, torch.Tensor):
        return fields - fields.mean(-3, keepdim=True)
    return (fields - fields.mean("snapshot")).rename("fluctuation")


def reynolds(fields: xr.DataArray) -> xr.Dataset:
    """Mean, variance and energies of an ensemble (the Reynolds decomposition).

    Parameters
    ----------
    fields : xarray.DataArray
        With dimensions snapshot, query, key, at least 3 snapshots, all finite.

    Returns
    -------
    xarray.Dataset
        ``mean`` and ``variance`` (..., query, key), float64; ``mean_energy``, the sum of mean^2;
        ``fluctuation_energy``, the mean over snapshots of the sum of u^2; ``fluctuation_share``,
        its part of the sum of both, which is the mean energy of the field.

    References
    ----------
    Zeris 2026: A_s = Abar + u_s.
    """
    parts, dims, coords = map_fields(
        fields, lambda f: torch.stack([f.double().mean(0), f.double().var(0, correction=0)])
    )
    both = stack_leading(parts, tuple(len(coords[d]) for d in dims))
    mean, variance = (
        xr.DataArray(both[..., i, :, :], coords, (*dims, "query", "key")) for i in (0, 1)
    )
    space = ("query", "key")
    mean_energy, fluctuation_energy = (mean**2).sum(space), variance.sum(space)
    return xr.Dataset(
        {
            "mean": mean,
            "variance": variance,
            "mean_energy": mean_energy,
            "fluctuation_energy": fluctuation_energy,
            "fluctuation_share": fluctuation_energy / (mean_energy + fluctuation_energy),
        }
    )


def check_convention(fields: torch.Tensor, convention: str) -> None:
    """Refuse an unknown convention, and the causal one for fields that look ahead."""
    if convention not in CONVENTIONS:
        raise InputError(f"convention is one of {CONVENTIONS}, not {convention!r}")
    if convention == "causal" and _looks_ahead(fields):
        ahead, total = 0.0, 0.0
        for field in fields:
            ahead += float(field.triu(1).abs().sum(dtype=torch.float64))
            total += float(field.abs().sum(dtype=torch.float64))
        if ahead > 1e-6 * total:
            raise InputError(
                "these fields have weight on keys after the query (a bidirectional model?), which "
                "convention='causal' would drop: use convention='signed'"
            )


def _looks_ahead(fields: torch.Tensor, step: int = 32) -> bool:
    """Is any entry after the query not 0? Some queries at a time, and no copy of the fields."""
    for i in range(0, fields.shape[-1], step):
        near, far = fields[:, i : i + step, i : i + step], fields[:, i : i + step, i + step :]
        if near.triu(1).any() or (far.numel() and any(x != 0 for x in far.aminmax())):
            return True
    return False


def lag_rows(fields: torch.Tensor, convention: str = "causal") -> tuple[torch.Tensor, np.ndarray]:
    """Rows of a field as functions of the lag.

    Parameters
    ----------
    fields : torch.Tensor
        ``(N, T, T)``, query before key.
    convention : {"causal", "published", "signed"}
        ``"causal"``: lag = query - key, from 0 to T - 1; zero past the first key.
        ``"published"``: lag = key - query, from 0 to T - 1, the last key repeated past the end, as
        in the public code of the paper. Under a causal mask this leaves the diagonal and a
        constant last row.
        ``"signed"``: lag = query - key from -(T - 1) to T - 1, zero outside; for bidirectional
        models.

    Returns
    -------
    rows : torch.Tensor
        ``(N, T, L)``.
    lag : numpy.ndarray
        ``(L,)``
    """
    if convention not in CONVENTIONS:
        raise InputError(f"convention is one of {CONVENTIONS}, not {convention!r}")
    n, t, _ = fields.shape
    lag = np.arange(1 - t, t) if convention == "signed" else np.arange(t)
    rows = fields.new_zeros(n, t, len(lag))
    for i in range(t):
        row = row_by_lag(fields[:, i], i, convention)
        rows[:, i, : row.shape[1]] = row
    return rows, lag


def row_by_lag(row: torch.Tensor, query: int, convention: str) -> torch.Tensor:
    """One row of a field ``(N, T)`` as a function of the lag ``(N, L)``; see :func:`lag_rows`.

    Of a causal row only the ``query + 1`` lags that it has.
    """
    t = row.shape[-1]
    if convention == "causal":
        return row[:, : query + 1].flip(-1)
    if convention == "published":
        return torch.cat([row[:, query:], row[:, -1:].expand(-1, query)], 1)
    return torch.nn.functional.pad(row.flip(-1), (query, t - 1 - query))


def lag_mean(field: xr.DataArray) -> xr.DataArray:
    """Mean along each diagonal: a field (..., query, key) as a function of the lag query - key.

    Parameters
    ----------
    field : xarray.DataArray
        ``(..., query, key)``, causal.

    Returns
    -------
    xarray.DataArray
        ``(..., lag)``, lag from 0 to T - 1; lag tau averages T - tau entries.
    """
    t = field.sizes["key"]
    ordered = field.transpose(..., "query", "key")
    flat = torch.from_numpy(np.ascontiguousarray(ordered.values)).reshape(-1, t, t)
    rows, lag = lag_rows(flat)
    mean = rows.double().sum(1) / torch.arange(t, 0, -1)  # (..., L)
    dims = ordered.dims[:-2]
    coords = {c: v for c, v in field.coords.items() if set(v.dims) <= set(dims)}
    shape = (*ordered.shape[:-2], t)
    return xr.DataArray(mean.reshape(shape).numpy(), {**coords, "lag": lag}, (*dims, "lag"))
