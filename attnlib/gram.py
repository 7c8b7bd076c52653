"""Correlation of snapshots by lag and by scale.

The filter of a scale weights an entry of the field by its lag alone. So the N x N correlation
matrix at any scale is a weighted sum over lags of one tensor,

    G_a = sum over lags of w_a(lag)^2 G(lag),
    G(lag)[s, s'] = sum over i of u_s(i, i - lag) u_s'(i, i - lag),

which is computed once for all scales, widths and resamples.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .ensemble import check_convention, ensemble_size, map_fields, stack_leading
from .errors import InputError
from .filters import all_lags, lag_window, scale_coords
from .wavelet import OMEGA0

GRAM_ONLY = ("rounding", "snapshot", "snapshot_")  # coordinates that results leave behind
BLOCK_BYTES = 4 * 2**20
GRAM_BYTES = 4 * 2**20


def _copy_diagonals(field: torch.Tensor, lags: np.ndarray, convention: str, out) -> None:
    """Fill ``out (N, lag, longest)`` with the field along the diagonal of each lag, then zeros."""
    t = field.shape[-1]
    reach, done = t - np.abs(lags), 0
    if lags[0] >= 0:  # the entries that all of these diagonals have: in one copy
        done = int(reach[-1])
        document, query, key = field.stride()
        step, along = (key if convention == "published" else query), query + key
        shape = (len(field), len(lags), done)
        start = field.storage_offset() + int(lags[0]) * step
        out[..., :done] = field.as_strided(shape, (document, step, along), start)
    for k, lag in enumerate(lags):
        offset = int(lag) if convention == "published" else -int(lag)
        out[:, k, done : reach[k]] = field.diagonal(offset, 1, 2)[:, done:]
        out[:, k, reach[k] :] = 0


def _each_block(field: torch.Tensor, convention: str):
    """Stream the fluctuation some lags at a time: ``(lags, steady, u (N, lag, longest))``.

    `lags` are indices, `steady` (lag,) is the sum of squares of the mean field. `u` is the
    fluctuation along the diagonal of each lag, float64, zero past its end. (No row is repeated
    past its end here, in any convention: neither does the published POD.) It is a buffer of at
    most 4 MiB, or one lag, which the next step overwrites.
    """
    n, t, _ = field.shape
    lags = all_lags(t, convention)
    at_once = max(1, min(len(lags), BLOCK_BYTES // (8 * n * t)))
    buffer = torch.empty(at_once * n * t, dtype=torch.float64, device=field.device)
    ahead = int((lags < 0).sum())  # no block straddles lag 0
    starts = [*range(0, ahead, at_once), *range(ahead, len(lags), at_once)]
    for start, stop in zip(starts, [*starts[1:], len(lags)], strict=True):
        some = lags[start:stop]
        longest = t - int(np.abs(some).min())
        u = buffer[: n * len(some) * longest].view(n, len(some), longest)
        _copy_diagonals(field, some, convention, u)
        mean = u.mean(0)
        u -= mean
        yield np.arange(start, stop), mean.square().sum(-1), u


def lag_gram(fields, *, convention: str = "causal", device: str | None = None) -> xr.DataArray:
    """Correlation of snapshots lag by lag, G(lag)[s, s'] = sum over i of u_s u_s' at (i, i - lag).

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        ``(layer, [head,] snapshot, query, key)``; the mean field is subtracted here.
    convention : {"causal", "published", "signed"}
        What the lag is; see :func:`attnlib.lag_rows`.
    device : str, optional
        Where to compute; by default where the data are.

    Returns
    -------
    xarray.DataArray
        ``(layer, [head,] lag, snapshot, snapshot_)``, float64: 8 L T N^2 bytes. Where that is too
        much, :func:`scale_gram` sums over lags as it goes. The coordinate `rounding` bounds the
        eigenvalues of G / N that rounding of the fields alone can make.
    """

    def one(field):
        check_convention(field, convention)
        n, lags = len(field), all_lags(field.shape[-1], convention)
        gram = torch.empty(len(lags), n, n, dtype=torch.float64)
        energy = torch.empty(len(lags), dtype=torch.float64)
        for index, steady, u in _each_block(field, convention):
            some = u.movedim(1, 0)  # (lag, N, longest)
            here = torch.bmm(some, some.mT)
            gram[index], energy[index] = here.cpu(), _energy(here, steady).cpu()
        return gram, _rounding(field, energy)

    results, dims, coords = map_fields(fields, one, device)
    lead = tuple(len(coords[d]) for d in dims)
    lags = all_lags(ensemble_size(fields)[1], convention)
    rounding = stack_leading([r[1] for r in results], lead)
    return xr.DataArray(
        stack_leading([r[0] for r in results], lead),
        {**coords, "lag": lags, "rounding": ((*dims, "lag"), rounding)},
        (*dims, "lag", "snapshot", "snapshot_"),
        name="gram",
        attrs={"convention": convention},
    )


def scale_gram(
    fields_or_gram,
    scales,
    *,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    bank: bool = False,
    convention: str = "causal",
    device: str | None = None,
) -> xr.DataArray:
    """Correlation of snapshots at each scale, G_a = sum over lags of w_a(lag)^2 G(lag).

    Parameters
    ----------
    fields_or_gram : xarray.DataArray or torch.Tensor
        Attention fields, or what :func:`lag_gram` made of them.
    scales, width, center, omega0, bank
        As in :func:`lag_window`.
    convention, device
        As in :func:`lag_gram`.

    Returns
    -------
    xarray.DataArray
        ``(layer, [head,] scale, snapshot, snapshot_)``, float64, with the coordinate `rounding`
        as in :func:`lag_gram`. The paper's C is G_a / N.
    """
    coords = scale_coords(scales, omega0)
    attrs = {"width": width, "center": center, "omega0": omega0, "bank": int(bank)}
    options = {"width": width, "center": center, "omega0": omega0, "bank": bank}
    if isinstance(fields_or_gram, xr.DataArray) and "lag" in fields_or_gram.dims:
        gram = fields_or_gram
        weights = lag_window(gram["lag"].values, coords["scale"], **options) ** 2
        weights = xr.DataArray(weights, coords, ("scale", "lag"))
        summed = weights.dot(gram.drop_vars("rounding"), dim="lag")
        dims = [d for d in gram.dims if d not in ("lag", "snapshot", "snapshot_")]
        summed = summed.transpose(*dims, "scale", "snapshot", "snapshot_").rename("gram")
        rounding = weights.dot(gram["rounding"].drop_vars("rounding"), dim="lag")
        summed = summed.assign_coords(rounding=rounding.transpose(*dims, "scale"))
        return summed.assign_attrs(attrs, convention=gram.attrs["convention"])
    _, t = ensemble_size(fields_or_gram)
    windows = lag_window(all_lags(t, convention), coords["scale"], **options)
    results, dims, lead = map_fields(
        fields_or_gram, lambda field: gram_and_sums(field, windows, convention), device
    )
    return label_gram(results, dims, lead, coords, {**attrs, "convention": convention})


def check_gram(gram) -> xr.DataArray:
    """A Gram ``(..., snapshot, snapshot_)``: finite, symmetric, of at least 3 snapshots."""
    if not isinstance(gram, xr.DataArray) or gram.dims[-2:] != ("snapshot", "snapshot_"):
        raise InputError("a Gram is a DataArray (..., snapshot, snapshot_) from scale_gram")
    if gram.sizes["snapshot"] < 3:
        raise InputError("an ensemble needs at least 3 snapshots")
    values = gram.values
    if not np.isfinite(values).all():
        raise InputError("the Gram holds a value that is not finite: look at the fields")
    if not np.allclose(values, values.swapaxes(-1, -2), rtol=1e-6, atol=1e-12 * abs(values).max()):
        raise InputError("the Gram is not symmetric")
    return gram


def label_gram(results: list, dims, lead: dict, coords: dict, attrs: dict) -> xr.DataArray:
    """The Grams of :func:`gram_and_sums`, one a layer, as a DataArray."""
    shape = tuple(len(lead[d]) for d in dims)
    rounding = stack_leading([r[1] for r in results], shape)
    return xr.DataArray(
        stack_leading([r[0] for r in results], shape),
        {**lead, **coords, "rounding": ((*dims, "scale"), rounding)},
        (*dims, "scale", "snapshot", "snapshot_"),
        name="gram",
        attrs=attrs,
    )


def _energy(gram: torch.Tensor, steady: torch.Tensor) -> torch.Tensor:
    """Mean over snapshots of the field's sum of squares: fluctuation ``(..., N, N)`` and mean."""
    return gram.diagonal(dim1=-2, dim2=-1).mean(-1) + steady


def _rounding(field: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """Bound on eigenvalues of G / N that come from rounding the field to its own precision.

    Rounding adds to each entry an error of at most eps / 2 of its size; all its energy, taken
    four times for safety, is eps^2 times that of the field.
    """
    return torch.finfo(field.dtype).eps ** 2 * energy


def gram_and_sums(field, windows, convention) -> tuple[torch.Tensor, ...]:
    """G_a ``(S, N, N)``, its rounding ``(S,)``, and the sum of u_s along each lag, ``(N, L)``."""
    check_convention(field, convention)
    n = len(field)
    total = torch.zeros(len(windows), n, n, dtype=torch.float64, device=field.device)
    squares = torch.from_numpy(windows**2).to(total)  # (S, L)
    # A weight this far below the largest is lost in rounding the sum, unless its lag holds 1 / eps
    # times the energy of those that weigh.
    negligible = torch.finfo(squares.dtype).eps ** 2 * squares.amax(1, keepdim=True)
    squares = torch.where(squares < negligible, 0, squares)
    steady, sums, waiting = total.new_empty(squares.shape[1]), [], None
    for index, steady[index], u in _each_block(field, convention):
        sums.append(u.sum(-1).T)
        if len(windows) == 1:  # one product over all pairs of the block, and no G(lag)
            flat = u.mul_(squares[0, index, None].sqrt()).flatten(1)
            total[0].addmm_(flat, flat.T)
            continue
        if waiting is None:  # G(lag) of some blocks; adding them to every scale reads all of G_a
            waiting = u.new_empty(max(len(index), GRAM_BYTES // (8 * n * n)), n, n)
            first, last = 0, 0
        elif index[-1] >= first + len(waiting):
            _add_lags(total, squares[:, first:last], waiting)
            first = index[0]
        last = index[-1] + 1
        some = u.movedim(1, 0)  # (lag, N, longest)
        torch.bmm(some, some.mT, out=waiting[index[0] - first : last - first])
    if waiting is not None:
        _add_lags(total, squares[:, first:last], waiting)
    return total, _rounding(field, _energy(total, squares @ steady)), torch.cat(sums).T


def _add_lags(total: torch.Tensor, squares: torch.Tensor, gram: torch.Tensor) -> None:
    """Add the first L of the Grams ``(L or more, N, N)``, as weighted at each scale ``(S, L)``.

    A window far from its lags weighs nothing: scales before the first and after the last that has
    a weight here are passed over, which for scales in order are most of them.
    """
    live = squares.any(1).nonzero()
    if len(live):
        some = slice(int(live[0]), int(live[-1]) + 1)
        gram = gram[: squares.shape[1]].flatten(1)  # (lag, N N)
        total[some].flatten(1).addmm_(squares[some], gram)
