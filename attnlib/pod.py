"""Scale-selective proper orthogonal decomposition (POD) of attention fields."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .errors import InputError
from .fields import ensemble_size, map_fields, stack_leading
from .gram import OMEGA0, all_lags, gram_and_sums, lag_window, scale_coords, scale_gram


def pod(
    fields_or_gram,
    scales,
    n_modes: int | str = 5,
    *,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    convention: str = "causal",
    fields_of_modes: bool = True,
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
    width, center, omega0, convention
        As in :func:`lag_window` and :func:`lag_gram`.
    fields_of_modes : bool
        Compute ``mode_field`` (the largest part of the result).
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
    if isinstance(fields_or_gram, xr.DataArray) and "snapshot_" in fields_or_gram.dims:
        gram = fields_or_gram
        if "lag" in gram.dims:
            gram = scale_gram(gram, scales, width=width, center=center, omega0=omega0)
        stacked = torch.from_numpy(gram.values).flatten(0, -3)  # (layers x scales, N, N)
        flat = _decompose(stacked)
        shape = gram.shape[:-2]
        parts = [torch.as_tensor(p).view(*shape, *p.shape[1:]) for p in flat]
        return _dataset(
            *parts, n_modes, gram.dims[:-2], {d: gram.coords[d] for d in gram.coords}, gram.attrs
        )
    coords = scale_coords(scales, omega0)
    _, t = ensemble_size(fields_or_gram)
    lags = all_lags(t, convention)
    windows = lag_window(lags, coords["scale"], width, center, omega0)
    attrs = {"width": width, "center": center, "omega0": omega0, "convention": convention}
    done, dims, lead = map_fields(
        fields_or_gram, lambda field: gram_and_sums(field, windows, convention), device
    )
    solved = [_decompose(gram) for gram, _ in done]
    shape = tuple(len(lead[d]) for d in dims)
    stacked = [torch.stack(p).cpu().view(*shape, *p[0].shape) for p in zip(*solved, strict=True)]
    data = _dataset(*stacked, n_modes, (*dims, "scale"), {**lead, **coords}, attrs)
    kept = data.sizes["mode"]
    reach = torch.as_tensor(t - np.abs(lags))
    profiles = []
    for (_, sums), (values, vectors, _) in zip(done, solved, strict=True):
        v = _unit_weights(values, vectors, kept)  # (S, N, K)
        profile = v.mT @ sums  # (S, K, L)
        w = torch.from_numpy(windows).to(profile)
        profiles.append(profile * w[:, None] / reach.to(profile))
    data["lag_profile"] = ((*dims, "scale", "mode", "lag"), stack_leading(profiles, shape))
    data = data.assign_coords(lag=("lag", lags, {"units": "tokens"}))
    if fields_of_modes:
        weights = iter([_unit_weights(values, vectors, kept) for values, vectors, _ in solved])
        modes, _, _ = map_fields(
            fields_or_gram,
            lambda field: _mode_fields(field, next(weights), windows, convention),
            device,
        )
        data["mode_field"] = ((*dims, "scale", "mode", "query", "key"), stack_leading(modes, shape))
    return data


def _decompose(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eigenvalues of G / N (descending), signed unit eigenvectors ``(..., N, N)``, ranks."""
    n = gram.shape[-1]
    values, vectors = torch.linalg.eigh(gram / n)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    rounding = n * torch.finfo(values.dtype).eps * values[..., :1]
    rank = (values > rounding).sum(-1).clamp(max=n - 1)
    cubes = vectors.pow(3).sum(-2)
    size = vectors.abs()
    first = (size >= 0.5 * size.amax(-2, keepdim=True)).int().argmax(-2, keepdim=True)
    fallback = vectors.gather(-2, first).squeeze(-2)
    symmetric = cubes.abs() < 1e-6 * size.pow(3).sum(-2)
    sign = torch.where(symmetric, fallback, cubes).sign()
    return values, vectors * sign.unsqueeze(-2), rank


def _unit_weights(values, vectors, kept: int) -> torch.Tensor:
    """Weights of the snapshots in each unit mode, v_k(s) / sqrt(N lambda_k): ``(S, N, K)``."""
    n = vectors.shape[-1]
    return vectors[..., :kept] / (n * values[..., None, :kept]).sqrt()


def _mode_fields(field, weights, windows, convention) -> torch.Tensor:
    """phi_k = w_a u^T v_k / sqrt(N lambda_k): ``(S, K, T, T)``, all scales in one product."""
    n, t, _ = field.shape
    n_scales, _, kept = weights.shape
    flat = weights.permute(0, 2, 1).reshape(-1, n)  # (S K, N)
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
    return modes * (table[:, (lag + shift).clamp(min=0)] * inside)[:, None]


def _dataset(values, vectors, rank, n_modes, dims, coords, attrs) -> xr.Dataset:
    n = vectors.shape[-1]
    lowest = int(rank.min())
    if n_modes == "all":
        n_modes = lowest
    if not isinstance(n_modes, int) or isinstance(n_modes, bool) or n_modes < 1:
        if lowest == 0:
            raise InputError("the fields do not vary from snapshot to snapshot: rank 0, no modes")
        raise InputError(f"n_modes is a whole number from 1, or 'all', not {n_modes!r}")
    if n_modes > lowest:
        where = np.unravel_index(int(rank.flatten().argmin()), tuple(rank.shape))
        at = ", ".join(
            f"{d} {float(np.asarray(coords[d])[i]):g}" for d, i in zip(dims, where, strict=True)
        )
        raise InputError(
            f"{n_modes} modes asked for, but {n} snapshots have rank {lowest} at {at}: "
            f"ask for at most {lowest}, or for 'all'"
        )
    eigenvalue = values[..., :n_modes].numpy()
    coefficient = vectors[..., :n_modes].mT * (n * values[..., :n_modes, None]).sqrt()
    error = eigenvalue * np.sqrt(2 / n)
    apart = (eigenvalue - error)[..., :-1] > (eigenvalue + error)[..., 1:]
    multiplet = np.concatenate([np.ones_like(eigenvalue[..., :1], dtype=bool), apart], -1).cumsum(
        -1
    )
    mode_dims = (*dims, "mode")
    return xr.Dataset(
        {
            "eigenvalue": (mode_dims, eigenvalue),
            "eigenvalue_error": (mode_dims, error),
            "multiplet": (mode_dims, multiplet),
            "coefficient": ((*mode_dims, "snapshot"), coefficient.numpy()),
            "total_variance": (dims, values.sum(-1).numpy()),
            "rank": (dims, rank.numpy()),
        },
        coords={**coords, "mode": np.arange(1, n_modes + 1)},
        attrs=attrs,
    )


def spectrum(gram: xr.DataArray) -> xr.DataArray:
    """All N - 1 eigenvalues of a Gram from :func:`scale_gram`, descending: ``(..., mode)``."""
    values = np.linalg.eigvalsh(gram.values)[..., :0:-1] / gram.sizes["snapshot"]
    coords = {k: v for k, v in gram.coords.items() if not k.startswith("snapshot")}
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
    a = first.values.reshape(first.sizes["mode"], -1).astype(np.float64)
    b = second.values.reshape(second.sizes["mode"], -1).astype(np.float64)
    if a.shape != b.shape:
        raise InputError(f"sets of modes of one shape, not {a.shape} and {b.shape}")
    a, b = np.linalg.qr(a.T)[0], np.linalg.qr(b.T)[0]
    return float(np.square(a.T @ b).sum() / a.shape[1])
