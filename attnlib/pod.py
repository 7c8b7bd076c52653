"""Scale-selective proper orthogonal decomposition (POD) of attention fields."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .ensemble import ensemble_size, map_fields, stack_leading
from .errors import InputError
from .filters import all_lags, lag_window, scale_coords
from .gram import GRAM_ONLY, check_gram, gram_and_sums, label_gram, scale_gram
from .wavelet import OMEGA0


def pod(
    fields_or_gram,
    scales,
    n_modes: int | str = 5,
    *,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    bank: bool = False,
    convention: str = "causal",
    fields_of_modes: bool = True,
    with_gram: bool = False,
    device: str | None = None,
) -> xr.Dataset:
    """Scale-selective POD by the method of snapshots.

    At each scale the fluctuation u_s(i, j) is weighted by w_a(i - j), and the ensemble is expanded
    in the modes phi_k that minimise the mean square error of every truncation:
    u_s = sum over k of a_k(s) phi_k.

    Parameters
    ----------
    fields_or_gram : xarray.DataArray or torch.Tensor
        Attention fields ``(layer, [head,] snapshot, query, key)``. A Gram from :func:`lag_gram` or
        :func:`scale_gram` gives eigenvalues and coefficients, but no modes.
    scales : sequence of float
        a, in tokens; infinity for the raw POD. (Ignored for a Gram that has scales.)
    n_modes : int or "all"
        Modes to keep. ``"all"``: as many as the lowest rank among layers and scales.
    width, center, omega0, bank, convention
        As in :func:`lag_window` and :func:`lag_gram`.
    fields_of_modes : bool
        Compute ``mode_field`` (the largest part of the result).
    with_gram : bool
        Return ``gram`` as well, as from :func:`scale_gram`, for :func:`spectrum` and
        :func:`attnlib.bootstrap`.
    device : str, optional

    Returns
    -------
    xarray.Dataset
        On ``(layer, [head,] scale, mode, ...)``, modes counted from 1:

        ``eigenvalue``
            lambda_k of C = G_a / N, descending.
        ``eigenvalue_error``
            North's rule of thumb, lambda_k sqrt(2 / N).
        ``multiplet``
            Modes with overlapping errors share a number: compare their subspaces
            (:func:`subspace_overlap`), not the vectors.
        ``multiplet_open`` (..., scale)
            True where the last multiplet goes on beyond the modes kept: then the subspace that
            they span was cut at an arbitrary place, and is not determined by the data either.
        ``coefficient`` (..., snapshot)
            a_k(s) = sqrt(N lambda_k) v_k(s).
        ``total_variance`` (..., scale), ``rank`` (..., scale)
            Sum of all eigenvalues; number of those above rounding, at most N - 1.
        ``lag_profile`` (..., lag)
            Mean of phi_k along the diagonal of each lag.
        ``mode_field`` (..., query, key)
            phi_k, unit norm, float32.

        Sign rule: the sum of the cubed coefficients is positive, so a mode points to its rarer,
        larger excursions. (Where it vanishes, as for symmetric ensembles: the first coefficient
        of at least half the largest size is positive.)

    Raises
    ------
    InputError
        More modes than the rank (naming it), fewer than 3 snapshots, NaN (naming layer and
        snapshot), an empty window (naming the scale).

    References
    ----------
    Zeris 2026: C = U U^T / N, phi_k = U^T v_k / sqrt(N lambda_k), Theorem 1. Sirovich 1987 (method
    of snapshots); North et al. 1982 (errors).
    """
    options = {"width": width, "center": center, "omega0": omega0, "bank": bank}
    if isinstance(fields_or_gram, xr.DataArray) and "snapshot_" in fields_or_gram.dims:
        gram = fields_or_gram
        if "lag" in gram.dims:
            gram = scale_gram(gram, scales, **options)
        data, _ = _decompose(gram, n_modes)
        return data.assign(gram=gram) if with_gram else data
    coords = scale_coords(scales, omega0)
    _, t = ensemble_size(fields_or_gram)
    lags = all_lags(t, convention)
    windows = lag_window(lags, coords["scale"], **options)
    attrs = {**options, "bank": int(bank), "convention": convention}
    done, dims, lead = map_fields(
        fields_or_gram, lambda field: gram_and_sums(field, windows, convention), device
    )
    gram = label_gram(done, dims, lead, coords, attrs)
    data, weights = _decompose(gram, n_modes)  # weights (..., S, N, K)
    shape = tuple(len(lead[d]) for d in dims)
    weights = weights.reshape(-1, *weights.shape[-3:])  # (layers, S, N, K)
    reach = t - np.abs(lags)
    profiles = [
        w.mT @ sums.cpu() * torch.from_numpy(windows[:, None] / reach)  # (S, K, L)
        for w, (_, _, sums) in zip(weights, done, strict=True)
    ]
    data["lag_profile"] = ((*dims, "scale", "mode", "lag"), stack_leading(profiles, shape))
    data = data.assign_coords(lag=("lag", lags, {"units": "tokens"}))
    if fields_of_modes:
        each = iter(weights)
        modes, _, _ = map_fields(
            fields_or_gram,
            lambda field: _mode_fields(field, next(each), windows, convention),
            device,
        )
        data["mode_field"] = ((*dims, "scale", "mode", "query", "key"), stack_leading(modes, shape))
    return data.assign(gram=gram) if with_gram else data


def _decompose(gram: xr.DataArray, n_modes) -> tuple[xr.Dataset, torch.Tensor]:
    """Eigenvalues, coefficients and ranks of Grams, and the weights of snapshots in unit modes.

    The weights, v_k(s) / sqrt(N lambda_k), are ``(..., scale, N, K)``.
    """
    n = check_gram(gram).sizes["snapshot"]
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram.values) / n)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    floor = n * torch.finfo(values.dtype).eps * values[..., :1].numpy()
    if "rounding" in gram.coords:
        floor = np.maximum(floor, gram["rounding"].values[..., None])
    rank = np.minimum((values.numpy() > floor).sum(-1), n - 1)
    kept = _check_number(n_modes, rank, n, gram)
    vectors = vectors[..., :kept] * _signs(vectors[..., :kept]).unsqueeze(-2)
    size = (n * values[..., :kept]).sqrt().unsqueeze(-2)  # (..., 1, K)
    eigenvalue = values.numpy()
    error = eigenvalue * np.sqrt(2 / n)
    apart = (eigenvalue - error)[..., :-1] > (eigenvalue + error)[..., 1:]
    apart |= np.arange(1, n) >= rank[..., None]  # nothing but rounding beyond the rank
    number = 1 + np.concatenate([np.zeros_like(apart[..., :1]), apart], -1).cumsum(-1)
    dims = gram.dims[:-2]
    mode_dims = (*dims, "mode")
    coords = {k: v for k, v in gram.coords.items() if k not in GRAM_ONLY}
    data = xr.Dataset(
        {
            "eigenvalue": (mode_dims, eigenvalue[..., :kept]),
            "eigenvalue_error": (mode_dims, error[..., :kept]),
            "multiplet": (mode_dims, number[..., :kept]),
            "multiplet_open": (dims, ~apart[..., kept - 1]),
            "coefficient": ((*mode_dims, "snapshot"), (vectors * size).mT.numpy()),
            "total_variance": (dims, eigenvalue.sum(-1)),
            "rank": (dims, rank),
        },
        coords={**coords, "mode": np.arange(1, kept + 1)},
        attrs=gram.attrs,
    )
    data["eigenvalue"].attrs["modes_in_all"] = n - 1  # what needs them all can refuse
    return data, vectors / size


def _signs(vectors: torch.Tensor) -> torch.Tensor:
    """Signs that make the sum of cubes of each column positive: ``(..., N, K)`` -> ``(..., K)``."""
    cubes, size = vectors.pow(3).sum(-2), vectors.abs()
    first = (size >= 0.5 * size.amax(-2, keepdim=True)).int().argmax(-2, keepdim=True)
    fallback = vectors.gather(-2, first).squeeze(-2)
    symmetric = cubes.abs() < 1e-6 * size.pow(3).sum(-2)
    return torch.where(symmetric, fallback, cubes).sign()


def _check_number(n_modes, rank: np.ndarray, n: int, gram: xr.DataArray) -> int:
    """How many modes to keep, or an error that names the rank and where it is lowest."""
    lowest = int(rank.min())
    where = np.unravel_index(int(rank.argmin()), rank.shape)
    at = ", ".join(
        f"{d} {gram.coords[d].values[i]}" if d in gram.coords else f"{d} {i}"
        for d, i in zip(gram.dims, where, strict=False)
    )
    if lowest == 0:
        raise InputError(f"the fields do not vary from snapshot to snapshot: rank 0 at {at}")
    if n_modes == "all":
        return lowest
    if isinstance(n_modes, bool) or not isinstance(n_modes, (int, np.integer)) or n_modes < 1:
        raise InputError(f"n_modes is a whole number from 1, or 'all', not {n_modes!r}")
    if n_modes > lowest:
        raise InputError(
            f"{n_modes} modes asked for, but {n} snapshots have rank {lowest} at {at}: "
            f"ask for at most {lowest}, or for 'all'"
        )
    return int(n_modes)


def _mode_fields(field, weights, windows, convention) -> torch.Tensor:
    """phi_k = w_a u^T v_k / sqrt(N lambda_k): ``(S, K, T, T)``, all scales in one product."""
    n, t, _ = field.shape
    n_scales, _, kept = weights.shape
    flat = weights.permute(0, 2, 1).reshape(-1, n).to(field.device)  # (S K, N)
    # The weights sum to 0 over snapshots but for rounding; take what is left off the mean field.
    flat = (flat - flat.mean(1, keepdim=True)).to(field.dtype)
    modes = (flat @ field.reshape(n, -1)).view(n_scales, kept, t, t)
    position = torch.arange(t, device=field.device)
    lag = position[:, None] - position[None, :]
    if convention == "published":
        lag = -lag
    shift = t - 1 if convention == "signed" else 0
    inside = (lag + shift >= 0).to(field.dtype)
    table = torch.from_numpy(windows).to(field)  # (S, L)
    modes *= (table[:, (lag + shift).clamp(min=0)] * inside)[:, None]
    return modes


def spectrum(gram: xr.DataArray) -> xr.DataArray:
    """All eigenvalues of C = G_a / N.

    Parameters
    ----------
    gram : xarray.DataArray
        ``(..., scale, snapshot, snapshot_)`` from :func:`scale_gram`.

    Returns
    -------
    xarray.DataArray
        ``(..., scale, mode)``: the N - 1 that can differ from 0, descending, float64.
    """
    values = torch.linalg.eigvalsh(torch.from_numpy(check_gram(gram).values)).numpy()
    values = values[..., :0:-1] / gram.sizes["snapshot"]
    coords = {k: v for k, v in gram.coords.items() if k not in GRAM_ONLY}
    return xr.DataArray(
        values.clip(min=0),
        {**coords, "mode": np.arange(1, values.shape[-1] + 1)},
        (*gram.dims[:-2], "mode"),
        name="eigenvalue",
    )


# ------------------------------------------------------------------ what modes are for


def reconstruct(modes: xr.Dataset, n_modes: int | None = None) -> xr.DataArray:
    """Filtered fluctuation from its first modes, sum over k of a_k(s) phi_k(i, j).

    Parameters
    ----------
    modes : xarray.Dataset
        From :func:`pod`, with mode fields; select a layer and scale first to save memory.
    n_modes : int, optional
        All that are there by default.

    Raises
    ------
    InputError
        No mode fields in `modes`, or fewer modes than asked for.

    Returns
    -------
    xarray.DataArray
        ``(..., scale, snapshot, query, key)``. With all N - 1 modes it is w_a(i - j) u_s(i, j).
    """
    if "mode_field" not in modes:
        raise InputError("no mode fields here: call pod with fields and fields_of_modes=True")
    there = modes.sizes["mode"]
    n_modes = there if n_modes is None else n_modes
    if not 1 <= n_modes <= there:
        raise InputError(f"n_modes lies between 1 and the {there} modes that are there")
    some = modes.isel(mode=slice(n_modes))
    return some["coefficient"].dot(some["mode_field"], dim="mode").rename("reconstruction")


def subspace_overlap(first: xr.DataArray, second: xr.DataArray) -> float:
    """How far two sets of modes span the same space: mean squared cosine of the principal angles.

    Parameters
    ----------
    first, second : xarray.DataArray
        ``mode_field`` of one layer and scale, ``(mode, query, key)``, same number of modes.

    Returns
    -------
    float
        trace(P Q) / K for the projectors P, Q: 1 for one space, 0 for orthogonal ones. It does
        not depend on signs, or on how a near-equal pair is rotated.
    """
    for one in (first, second):
        if set(one.dims) != {"mode", "query", "key"} or one.sizes != first.sizes:
            raise InputError(
                "sets of modes have the dimensions mode, query, key and one size (select a layer "
                f"and a scale), not {dict(one.sizes)}"
            )
    a, b = (
        one.transpose("mode", "query", "key").values.reshape(one.sizes["mode"], -1)
        for one in (first.astype(np.float64), second.astype(np.float64))
    )
    a, b = np.linalg.qr(a.T)[0], np.linalg.qr(b.T)[0]
    return float(np.square(a.T @ b).sum() / a.shape[1])
