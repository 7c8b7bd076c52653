"""Modes as functions of the lag: those of single rows, and where a profile peaks and turns."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .ensemble import check_convention, map_fields, stack_leading
from .errors import InputError, check_whole


def row_modes(
    fields,
    n_modes: int,
    *,
    max_lag: int | None = None,
    n_splits: int = 20,
    seed: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """POD of rows: every query of every document is a snapshot, a function of the lag alone.

    A window starts anywhere in a text, so a pattern of the text turns up at every position. Modes
    over (query, key) see each of its positions as a pattern of its own: along a homogeneous
    direction POD modes are waves, not patterns, and each needs its own share of the documents.
    Rows that are aligned by the lag are T times as many samples of a T times smaller space.

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        Causal fields, ``(layer, [head,] snapshot, query, key)``. The mean field is subtracted.
    n_modes : int
    max_lag : int, optional
        Lags run from 0 to here, and rows are those of queries that have them all. By default half
        the window.
    n_splits, seed : int
        Random splits of the documents into halves, for the stability.
    device : str, optional

    Returns
    -------
    xarray.Dataset
        On ``(layer, [head,] mode, ...)``, modes counted from 1:

        ``profile`` (..., lag)
            Unit vectors; the value of largest size is positive.
        ``share``
            Of the variance.
        ``overlap``
            Mean over splits of the mean squared cosine between the first K modes of both halves,
            with ``low`` and ``high``, its 2.5% and 97.5% quantiles.
        ``half_profile`` (..., split, half, mode, lag)
            Modes of the halves, for what varies with the documents.
        ``coefficient`` (..., snapshot, query)
            Of each row, float32; `query` counts from 0 and starts at `max_lag`.

    Raises
    ------
    InputError
        Fewer than 6 documents, fields that look ahead, or lags or modes that are not there.

    References
    ----------
    Berkooz, Holmes & Lumley 1993, on homogeneous directions.
    """

    def one(field):
        check_convention(field, "causal")
        return _row_modes(field, n_modes, max_lag, n_splits, seed)

    for name, value, least in (
        ("n_modes", n_modes, 1),
        ("n_splits", n_splits, 1),
        ("seed", seed, 0),
    ):
        check_whole(name, value, least)
    if max_lag is not None:
        check_whole("max_lag", max_lag)
    results, dims, coords = map_fields(fields, one, device)
    lead = tuple(len(coords[d]) for d in dims)
    profile, share, draws, half, coefficient = (
        stack_leading([r[i] for r in results], lead) for i in range(5)
    )
    quantiles = np.quantile(draws, [0.025, 0.975], axis=-2)
    most = profile.shape[-1] - 1
    query = most + np.arange(coefficient.shape[-1])
    return xr.Dataset(
        {
            "profile": ((*dims, "mode", "lag"), profile),
            "share": ((*dims, "mode"), share),
            "overlap": ((*dims, "mode"), draws.mean(-2)),
            "low": ((*dims, "mode"), quantiles[0]),
            "high": ((*dims, "mode"), quantiles[1]),
            "half_profile": ((*dims, "split", "half", "mode", "lag"), half),
            "coefficient": ((*dims, "mode", "snapshot", "query"), coefficient),
        },
        {**coords, "mode": np.arange(1, n_modes + 1), "lag": np.arange(most + 1), "query": query},
    )


def _row_modes(field, n_modes, max_lag, n_splits, seed) -> tuple:
    n, t, _ = field.shape
    most = t // 2 - 1 if max_lag is None else max_lag
    if not 1 <= most < t:
        raise InputError(f"windows of {t} tokens have lags up to {t - 1}: max_lag is not {most}")
    if not 1 <= n_modes <= most + 1:
        raise InputError(f"n_modes lies between 1 and the {most + 1} lags, not {n_modes}")
    check_whole("n_splits", n_splits)
    check_whole("seed", seed, 0)
    if n < 6:
        raise InputError(f"{n} documents are too few for halves: take at least 6")
    u = (field - field.mean(0)).contiguous()
    # (N, rows, lag) without a copy: one row down is one key further, so T + 1 entries further.
    u = u.as_strided((n, t - most, most + 1), (t * t, t + 1, 1), most * t).flip(-1)
    product = torch.bmm(u.mT, u).double()  # (N, lag, lag)
    sums = u.double()
    rng, draws, half = np.random.default_rng(seed), [], []
    for _ in range(n_splits):
        order = torch.from_numpy(rng.permutation(n)[: n // 2 * 2].reshape(2, -1)).to(u.device)
        a, b = (_leading(product[i].sum(0), sums[i], n_modes)[1] for i in order)
        square = (a.mT @ b).square()
        number = torch.arange(1, n_modes + 1, device=u.device)
        draws.append(square.cumsum(0).cumsum(1).diagonal() / number)
        half.append(torch.stack([a.mT, b.mT]))
    size, modes = _leading(product.sum(0), sums, n_modes)
    floor = torch.finfo(field.dtype).eps ** 2 * field.double().square().sum()
    rank = int((size > floor).sum())
    if rank < n_modes:
        raise InputError(
            f"{n_modes} modes of rows asked for, but the rows vary in {rank} directions: ask for "
            "fewer modes"
        )
    share = size / torch.einsum("nll->", product)
    coefficient = (u @ modes.to(u.dtype)).permute(2, 0, 1)  # (K, N, rows)
    return modes.mT, share, torch.stack(draws), torch.stack(half), coefficient.float()


def _leading(product, rows, n_modes) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest eigenvalues and vectors ``(lag, K)`` of the rows' correlation, the mean removed.

    Each half removes its own mean field: sum over documents of (u - m)(u - m)', m by query.
    """
    mean = rows.mean(0)  # (rows, lag)
    size, vectors = torch.linalg.eigh(product - len(rows) * mean.mT @ mean)
    vectors = vectors.flip(-1)[:, :n_modes]
    top = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return size.flip(-1)[:n_modes], vectors * top.sign()


def profile_features(
    profiles: xr.DataArray, low: int, high: int, *, fraction: float = 0.25
) -> xr.Dataset:
    """Where a function of the lag peaks, and how often it turns and changes sign in a range.

    An extremum is a local maximum above 0 or a local minimum below 0 whose size is at least
    `fraction` of the largest size of that profile; the first and last lag may be one.

    Parameters
    ----------
    profiles : xarray.DataArray
        ``(..., lag)``. Leave out lags with few entries: their means are noise.
    low, high : int
        Range of lags, both ends included.
    fraction : float

    Returns
    -------
    xarray.Dataset
        ``peak_lag`` (...), of the largest size, over all lags; ``extrema`` and ``sign_changes``
        between successive extrema, both among those in the range.

    Raises
    ------
    InputError
        No such lags, or an impossible fraction.
    """
    lag = profiles["lag"].values
    if not 0 < fraction <= 1:
        raise InputError(f"fraction lies between 0 and 1, not {fraction}")
    if not low < high or not ((lag >= low) & (lag <= high)).any():
        raise InputError(f"these profiles have no lags from {low} to {high}")
    ordered = profiles.transpose(..., "lag")
    p = ordered.values
    size = np.abs(p)
    padded = np.pad(p, [(0, 0)] * (p.ndim - 1) + [(1, 1)])
    before, after = padded[..., :-2], padded[..., 2:]
    turn = ((p > 0) & (p >= before) & (p > after)) | ((p < 0) & (p <= before) & (p < after))
    turn &= (size >= fraction * size.max(-1, keepdims=True)) & (lag >= low) & (lag <= high)
    # The sign of the latest extremum up to each lag, 0 before the first.
    last = np.maximum.accumulate(np.where(turn, np.arange(1, len(lag) + 1), 0), -1)
    carried = np.where(last > 0, np.take_along_axis(np.sign(p), np.maximum(last - 1, 0), -1), 0)
    changes = (carried[..., 1:] * carried[..., :-1] < 0).sum(-1)
    dims = ordered.dims[:-1]
    return xr.Dataset(
        {
            "peak_lag": (dims, lag[size.argmax(-1)]),
            "extrema": (dims, turn.sum(-1)),
            "sign_changes": (dims, changes),
        },
        {k: v for k, v in profiles.coords.items() if "lag" not in v.dims},
        {"fraction": fraction, "low": low, "high": high},
    )
