"""Do modes return on other documents?"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .errors import InputError
from .gram import GRAM_ONLY, check_gram

HALVES = ("a", "b")


def half_modes(gram: xr.DataArray, n_modes: int, n_splits: int = 20, seed: int = 0) -> xr.DataArray:
    """Modes of random halves of the documents, as weights of the documents in them.

    A mode of half A is phi_k = sum over s of w_k(s) u_s, with weights that vanish outside A and
    sum to 0, so that the mean of A drops out. From them and a Gram of the fluctuations follow, with
    no pass over the fields, inner products of modes (``w G w'``), their coefficients on any
    document (``G w``), and whatever else is linear in the field, such as their
    lag profiles.

    Parameters
    ----------
    gram : xarray.DataArray
        ``(..., snapshot, snapshot_)`` from :func:`attnlib.scale_gram`.
    n_modes : int
    n_splits, seed : int
        How many random splits, and which. The same for every layer and scale. Of an odd number of
        documents one is left out of each split.

    Returns
    -------
    xarray.DataArray
        ``(split, half, ..., mode, snapshot)``, float64, of unit modes. Their signs are arbitrary.

    Raises
    ------
    InputError
        Not a Gram, too few documents, or more modes than a half's rank (naming where).
    """
    n = check_gram(gram).sizes["snapshot"]
    half = n // 2
    whole = all(isinstance(v, (int, np.integer)) for v in (n_modes, n_splits, seed))
    if not whole or min(n_modes, n_splits) < 1 or seed < 0:
        raise InputError(
            "n_modes and n_splits are whole numbers from 1, and seed is not negative: not "
            f"{n_modes!r}, {n_splits!r} and {seed!r}"
        )
    if n_modes > half - 1:
        raise InputError(
            f"halves of {n} documents have {half}, and so at most {max(half - 1, 0)} modes, not "
            f"{n_modes}: ask for fewer modes, or take more documents"
        )
    values = torch.from_numpy(np.require(gram.values, np.float64, "CW"))
    lead = gram.shape[:-2]
    floor = np.zeros(lead)
    if "rounding" in gram.coords:
        floor = half * gram["rounding"].values
    weights = torch.zeros(n_splits, 2, *lead, n_modes, n, dtype=torch.float64)
    for split, halves in zip(weights, _halves(n, n_splits, seed), strict=True):
        for one, index in zip(split, halves, strict=True):
            some = _centred(values[..., index[:, None], index])  # (..., n/2, n/2)
            size, vectors = torch.linalg.eigh(some)
            size, vectors = size.flip(-1)[..., :n_modes], vectors.flip(-1)[..., :n_modes]
            _check_rank(size.numpy(), floor, half, gram)
            vectors = vectors - vectors.mean(-2, keepdim=True)  # exactly, not only to rounding
            one[..., index] = (vectors / size.sqrt().unsqueeze(-2)).mT
    dims = gram.dims[:-2]
    coords = {k: v for k, v in gram.coords.items() if k not in GRAM_ONLY}
    return xr.DataArray(
        weights.numpy(),
        {**coords, "half": list(HALVES), "mode": np.arange(1, n_modes + 1)},
        ("split", "half", *dims, "mode", "snapshot"),
        name="weight",
    )


def _halves(n: int, n_splits: int, seed: int):
    """Indices of the documents of both halves, split by split."""
    rng = np.random.default_rng(seed)
    for _ in range(n_splits):
        both = rng.permutation(n)[: n // 2 * 2].reshape(2, -1)
        yield torch.from_numpy(np.sort(both, axis=1))


def _centred(gram: torch.Tensor) -> torch.Tensor:
    rows, columns = gram.mean(-1, keepdim=True), gram.mean(-2, keepdim=True)
    return gram - rows - columns + rows.mean(-2, keepdim=True)


def _check_rank(size: np.ndarray, floor: np.ndarray, half: int, gram: xr.DataArray) -> None:
    """Refuse modes below rounding: their direction is that of the rounding."""
    floor = np.maximum(floor, half * np.finfo(float).eps * size[..., 0])
    rank = (size > floor[..., None]).sum(-1)
    if rank.min() < size.shape[-1]:
        where = np.unravel_index(int(rank.argmin()), rank.shape)
        at = ", ".join(
            f"{d} {gram.coords[d].values[i]}" if d in gram.coords else f"{d} {i}"
            for d, i in zip(gram.dims, where, strict=False)
        )
        raise InputError(
            f"{size.shape[-1]} modes are needed, but half of the documents have rank {rank.min()}"
            + (f" at {at}" if at else "")
            + ": ask for fewer"
        )


def split_half(gram: xr.DataArray, n_modes: int, n_splits: int = 20, seed: int = 0) -> xr.Dataset:
    """Stability of modes: how far do two halves of the documents have the same ones?

    For modes of halves A and B, M_kl = <phi_k of A, phi_l of B> comes from the Gram alone
    (:func:`half_modes`). The singular values of its leading K x K block are the cosines of the
    principal angles between the spaces of the first K modes; the overlap is their mean square.

    With modes that hold nothing but sampling noise the overlap is about K / D, the null, where D
    is the number of dimensions that the fluctuations fill: two documents of different halves share
    1 / D of their energy, 1 / D = tr(R^2) / tr(R)^2. Products of one half with the other estimate
    numerator and denominator without bias, whatever the distribution.

    Parameters
    ----------
    gram : xarray.DataArray
        ``(..., snapshot, snapshot_)`` from :func:`attnlib.scale_gram`.
    n_modes : int
        Largest K. Half the documents must have one mode more.
    n_splits, seed : int
        As in :func:`half_modes`.

    Returns
    -------
    xarray.Dataset
        On ``(..., mode)``, where `mode` is K, the mean over splits of

        ``overlap``
            Mean squared cosine for the first K modes; ``low`` and ``high`` are its 2.5% and 97.5%
            quantiles over splits. Splits share documents, so this is not a confidence interval.
        ``smallest_cosine``
            Of the largest principal angle: 0 if either half has a direction that the other lacks.
        ``single``
            Squared inner product of the K-th modes of both halves.
        ``pair``
            Mean squared cosine for the space of modes K and K + 1. Where it is large and `single`
            small, the data determine the pair but not its members.
        ``null``
            K / D, at most 1.

        and ``overlap_draws`` (split, ..., mode) and ``dimension`` (...), D.

        All this is about modes of N / 2 documents; those of all N are closer to their limit.

    Raises
    ------
    InputError
        As :func:`half_modes`.

    References
    ----------
    Björck & Golub 1973 (principal angles).
    """
    weights = half_modes(gram, n_modes + 1, n_splits, seed)
    dims = gram.dims[:-2]
    values = torch.from_numpy(np.require(gram.values, np.float64, "CW"))
    a, b = (torch.from_numpy(weights.sel(half=h).values) for h in HALVES)  # (split, ..., K + 1, N)
    inner = a @ values @ b.mT  # (split, ..., K + 1, K + 1)
    square = inner.square()
    number = torch.arange(1, n_modes + 1, dtype=torch.float64)
    blocks = square.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)[..., :n_modes]
    overlap = blocks / number
    diagonal = square.diagonal(dim1=-2, dim2=-1)
    beside = square.diagonal(1, -2, -1) + square.diagonal(-1, -2, -1)
    smallest = [torch.linalg.svdvals(inner[..., :k, :k])[..., -1] for k in range(1, n_modes + 1)]
    dimension = _dimension(values, _halves(values.shape[-1], n_splits, seed))
    of_mode = {
        "overlap": overlap.mean(0),
        "low": overlap.quantile(0.025, 0),
        "high": overlap.quantile(0.975, 0),
        "smallest_cosine": torch.stack(smallest, -1).mean(0),
        "single": diagonal[..., :-1].mean(0),
        "pair": (diagonal[..., :-1] + diagonal[..., 1:] + beside).mean(0) / 2,
        "null": (number / dimension[..., None]).clamp(max=1),
    }
    coords = {k: v for k, v in weights.coords.items() if k != "half"}
    return xr.Dataset(
        {
            **{k: ((*dims, "mode"), v.numpy()) for k, v in of_mode.items()},
            "overlap_draws": (("split", *dims, "mode"), overlap.numpy()),
            "dimension": (dims, dimension.numpy()),
        },
        {**coords, "mode": np.arange(1, n_modes + 1)},
        {"n_splits": n_splits, "documents": gram.sizes["snapshot"] // 2},
    )


def _dimension(gram: torch.Tensor, splits) -> torch.Tensor:
    """tr(R)^2 / tr(R^2) of the ensembles behind Grams ``(..., N, N)``."""
    traces, shared = 0.0, 0.0
    for a, b in splits:
        inside = [_centred(gram[..., i[:, None], i]).diagonal(dim1=-2, dim2=-1) for i in (a, b)]
        traces = traces + inside[0].sum(-1) * inside[1].sum(-1)
        shared = shared + _centred(gram[..., a[:, None], b]).square().sum((-2, -1))
    return traces / shared
