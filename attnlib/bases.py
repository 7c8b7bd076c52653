"""How well does a basis represent an ensemble?"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .errors import InputError


def projection_error(fluctuation, basis):
    """Error that the first K vectors of a basis leave of an ensemble, for every K.

    E(K) = <norm(u - P_K u)^2> / <norm(u)^2>, with P_K the orthogonal projection on the span of the
    first K vectors, made orthonormal by QR. By Theorem 1 no basis leaves less than the POD modes
    *of this ensemble*.

    Parameters
    ----------
    fluctuation : xarray.DataArray or torch.Tensor
        ``([layer,] snapshot, query, key)``, about whichever mean; a tensor is ``(N, ...)``.
    basis : xarray.DataArray or torch.Tensor
        ``([layer,] mode, query, key)``, in order of use; one basis for all layers has no `layer`. A
        tensor is ``(K, ...)``. Not necessarily orthogonal, but linearly independent.

    Returns
    -------
    xarray.DataArray or torch.Tensor
        ``([layer,] kept)``, kept from 1 to K, or ``(K,)``; float64.

    Raises
    ------
    InputError
        Shapes that do not fit, a value that is not finite, an ensemble of zeros, or a vector that
        lies in the span of those before it (naming it).

    References
    ----------
    Zeris 2026, Theorem 1; Fan 1949.
    """
    if isinstance(fluctuation, torch.Tensor) and isinstance(basis, torch.Tensor):
        return _error_of(fluctuation, basis)
    if not isinstance(fluctuation, xr.DataArray) or not isinstance(basis, xr.DataArray):
        raise InputError("fluctuation and basis are both DataArrays, or both tensors")
    lead = [d for d in fluctuation.dims if d not in ("snapshot", "query", "key")]
    if {"snapshot", "query", "key"} - set(fluctuation.dims) or {"mode", "query", "key"} - set(
        basis.dims
    ):
        raise InputError(
            "a fluctuation has the dimensions snapshot, query, key, and a basis mode, query, key: "
            f"not {fluctuation.dims} and {basis.dims}"
        )
    if not {d for d in basis.dims if d not in ("mode", "query", "key")} <= set(lead):
        raise InputError(f"the basis has dimensions {basis.dims} that the fluctuation has not")
    for d in set(basis.dims) & set(lead):
        if basis.sizes[d] != fluctuation.sizes[d] or (
            d in basis.coords
            and d in fluctuation.coords
            and not np.array_equal(basis[d].values, fluctuation[d].values)
        ):
            raise InputError(f"fluctuation and basis have different values along {d}: select alike")
    u = fluctuation.transpose(*lead, "snapshot", "query", "key")
    shape = tuple(u.sizes[d] for d in lead)
    errors = []
    for index in np.ndindex(shape):
        at = dict(zip(lead, index, strict=True))
        one = basis.isel({d: i for d, i in at.items() if d in basis.dims})
        pair = u[at].values, one.transpose("mode", "query", "key").values
        errors.append(_error_of(*(torch.from_numpy(np.require(x, None, "CW")) for x in pair)))
    coords = {d: u.coords[d] for d in lead if d in u.coords}
    kept = basis.sizes["mode"]
    return xr.DataArray(
        torch.stack(errors).reshape(*shape, kept).numpy(),
        {**coords, "kept": np.arange(1, kept + 1)},
        (*lead, "kept"),
        name="error",
    )


def _error_of(fluctuation: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    if fluctuation.shape[1:] != basis.shape[1:] or fluctuation.dim() < 2:
        raise InputError(
            f"snapshots of shape {tuple(fluctuation.shape[1:])} have no basis of vectors of shape "
            f"{tuple(basis.shape[1:])}"
        )
    if fluctuation.is_complex() or basis.is_complex():
        raise InputError("fluctuation and basis are real")
    u, vectors = (x.flatten(1).double() for x in (fluctuation, basis))
    if not bool(torch.isfinite(u).all() and torch.isfinite(vectors).all()):
        raise InputError("the fluctuation or the basis holds a value that is not finite")
    if not bool(u.any()):
        raise InputError("the ensemble holds nothing but zeros: it has no relative error")
    if len(vectors) > vectors.shape[1]:
        raise InputError(f"{len(vectors)} vectors in {vectors.shape[1]} dimensions are dependent")
    q, r = torch.linalg.qr(vectors.T)  # (D, K), (K, K)
    new = r.diagonal().abs() / vectors.norm(dim=1)
    precision = torch.finfo(basis.dtype if basis.is_floating_point() else torch.float64).eps
    dependent = ~(new > 10 * precision)
    if bool(dependent.any()):
        raise InputError(
            f"vector {int(dependent.nonzero()[0, 0]) + 1} of the basis lies in the span of those "
            "before it"
        )
    energy = (u @ q).square().sum(0).cumsum(0)
    return (1 - energy / u.square().sum()).clamp(min=0)


def cosine_basis(t: int, n_modes: int, fluctuation: xr.DataArray | None = None) -> xr.DataArray:
    """Cosines in query and key on the causal triangle: a Fourier basis of attention fields.

    Products c_p(i) c_q(j) of the cosine transform, made symmetric in i and j and cut to j <= i:
    T (T + 1) / 2 of them span all causal fields.

    Parameters
    ----------
    t, n_modes : int
        Tokens in a window, functions wanted.
    fluctuation : xarray.DataArray, optional
        ``(snapshot, query, key)``. By default the functions come in the order of their frequency,
        lowest first. Given an ensemble, those come first that hold most of its energy.

    Returns
    -------
    xarray.DataArray
        ``(mode, query, key)``, float64, not orthogonal.
    """
    from scipy.fft import dctn, idct

    p, q = np.tril_indices(t)
    if not 1 <= n_modes <= len(p):
        raise InputError(f"n_modes lies between 1 and the {len(p)} functions there are")
    order = np.argsort(p**2 + q**2, kind="stable")
    if fluctuation is not None:
        u = fluctuation.transpose("snapshot", "query", "key").values.astype(np.float64)
        mirrored = u + np.tril(u, -1).swapaxes(-1, -2)
        energy = np.square(dctn(mirrored, axes=(-2, -1), norm="ortho")).mean(0)
        order = np.argsort(-np.where(p == q, 1, 2) * energy[p, q], kind="stable")
    p, q = p[order[:n_modes]], q[order[:n_modes]]
    wave = idct(np.eye(t), axis=0, norm="ortho").T  # (frequency, position)
    product = wave[p][:, :, None] * wave[q][:, None, :]
    both = np.tril(product + product.swapaxes(-1, -2))
    return xr.DataArray(both, {"mode": np.arange(1, n_modes + 1)}, ("mode", "query", "key"))
