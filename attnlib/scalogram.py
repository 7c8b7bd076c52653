"""Scalogram of attention rows along the lag, by the covariance of lags."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .ensemble import check_convention, ensemble_size, map_fields, row_by_lag, stack_leading
from .errors import InputError
from .wavelet import FOLD, OMEGA0, check_scales, scale_to_period, wavelet_hat

ROWS_AT_ONCE = 1024


def _kernel(t: int, scales, omega0: float, norm: str, like: torch.Tensor) -> torch.Tensor:
    """The transform as a convolution, W(a, b) = sum_tau k_a(b - tau) x(tau).

    Real and imaginary part of k at the offsets -(t - 1) to t - 1: ``(S, 2, 2 t - 1)``.
    """
    k = torch.fft.ifft(wavelet_hat(t, scales, omega0, norm, like[:0].double()))  # (S, n_fft)
    offsets = torch.arange(1 - t, t, device=like.device) % k.shape[-1]
    return torch.view_as_real(k[:, offsets]).movedim(-1, 1).to(like)


def _each_row(field: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor, convention: str):
    """Rows as functions of the lag, from the last up: ``i, (N, L)``, causal ones ``(N, i + 1)``.

    The mean field is taken off, and each lag is multiplied by its weight ``(L,)``. A row at a time
    stays in the cache, and no copy of the field is made.
    """
    for i in range(field.shape[-1] - 1, -1, -1):
        row = row_by_lag(field[:, i] - mean[i], i, convention)
        yield i, row.mul_(weight[: row.shape[1]])


def _covariance(rows, n: int, t: int, like: torch.Tensor) -> torch.Tensor:
    """Sum over rows and documents of x(a) x(b), ``(L, L)``, from :func:`_each_row`."""
    covariance, at_once = None, max(1, ROWS_AT_ONCE // n)  # so many that products run at full speed
    for some in torch.arange(t).split(at_once):
        block = [next(rows)[1] for _ in some]
        longest = block[0].shape[1]  # rows get shorter, or stay as they are
        if covariance is None:
            covariance = like.new_zeros(longest, longest)
            buffer = like.new_empty(at_once * n * longest)
        flat = buffer[: len(block) * n * longest].view(-1, longest)
        for row, into in zip(block, flat.split(n), strict=True):
            into[:, : row.shape[1]] = row
            into[:, row.shape[1] :] = 0
        covariance[:longest, :longest].addmm_(flat.T, flat)
    return covariance


def _power_of_all_rows(covariance: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Mean over rows and documents of abs(W(a, b))^2, ``(S, L)``, from the lag covariance C.

    It is the quadratic form psi C psi*: no row is transformed.
    """
    power = []
    for one in kernel.flip(-1):  # a scale at a time: L x L, not S x L x L
        psi = one.unfold(-1, len(covariance), 1)  # (2, L, tau): k(b - tau), the last b first
        power.append(((psi @ covariance) * psi).sum((0, 2)).flip(0))
    return torch.stack(power)


def _power_in_cone(rows, block_size, kernel: torch.Tensor, reach: np.ndarray) -> tuple:
    """As above, by blocks of documents: ``(B, S, T)``, and the sum of x(a) x(b), ``(T, T)``.

    Each (a, b) averages only the rows whose cone holds it.

    Row i has lags 0..i, so its cone holds (a, b) if reach_a <= b <= i - reach_a: the rows
    i >= b + reach_a. Going down in i, the covariance of the rows so far is the one that the
    pairs with b + reach_a = i need.
    """
    t, blocks, longest = (kernel.shape[-1] + 1) // 2, len(block_size), int(max(block_size))
    covariance = kernel.new_zeros(blocks, t, t)
    slots = np.concatenate([b * longest + np.arange(m) for b, m in enumerate(block_size)])
    slots = torch.from_numpy(slots).to(kernel.device)
    # What row i needs of k_a, read backwards, starts at t - 1 - i + reach_a: made the same for all.
    aligned = torch.zeros_like(kernel)  # (S, 2, 2 t - 1)
    for one, k, r in zip(aligned, kernel.flip(-1), reach, strict=True):
        one[:, : 2 * t - 1 - r] = k[:, r:]
    energy = kernel.new_full((blocks, t, len(reach)), float("nan"))
    for i, row in rows:
        if blocks > 1:  # short blocks are filled up with zeros, which add nothing
            row = row.new_zeros(blocks * longest, i + 1).index_copy_(0, slots, row)
        row = row.view(blocks, longest, i + 1)
        covariance[:, : i + 1, : i + 1].baddbmm_(row.mT, row)
        inside = int((2 * reach <= i).sum())  # scales ascend
        if inside:
            psi = aligned[:inside, :, t - 1 - i : 2 * t - 1 - i].reshape(2 * inside, t)
            form = ((psi @ covariance) * psi).view(blocks, inside, 2 * t).sum(-1)
            energy[:, i, :inside] = form / (t - i)
    power = torch.full_like(energy.mT, float("nan"))  # (B, S, T)
    for s, r in enumerate(reach):
        power[:, s, : t - r] = energy[:, r:, s]
    return power / torch.from_numpy(block_size).to(power)[:, None, None], covariance.sum(0)


def scalogram(
    fields,
    scales,
    omega0: float = OMEGA0,
    *,
    norm: str = "L1",
    convention: str = "causal",
    rows: str = "cone",
    center: bool = True,
    standardize: bool = False,
    n_blocks: int = 1,
    device: str | None = None,
) -> xr.Dataset:
    """Wavelet power of attention rows along the lag, averaged over rows and documents.

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        ``(layer, [head,] snapshot, query, key)``.
    scales : sequence of float
        a, in tokens.
    omega0, norm
        As in :func:`morlet_cwt`.
    convention : {"causal", "published", "signed"}
        What the lag is; see :func:`attnlib.lag_rows`.
    rows : {"cone", "all"}
        ``"cone"``: each (a, b) averages the rows whose own cone of influence holds it; NaN where
        none does. ``"all"``: all rows, as published; edges of short rows then count as signal.
        Only ``"all"`` for the other two conventions.
    center : bool
        Subtract the mean field first (harmless for fluctuations).
    standardize : bool
        Divide each lag by its rms over rows and documents. Attention falls by orders of magnitude
        along the lag, so a plain average over lags sees little beyond the shortest lag that the
        cone of each scale still holds, and those differ; with unit variance at every lag scales
        can be compared.
    n_blocks : int
        Keep the power of this many blocks of documents (dimension `block`), so that
        :func:`bootstrap_power` can resample them without a second pass.
    device : str, optional
        Where to compute; by default where the data are.

    Returns
    -------
    xarray.Dataset
        ``power`` (..., [block,] scale, lag), float64: mean of abs(W)^2; ``block_size``;
        ``in_cone`` (scale, lag), true where the power can be trusted; ``rows`` (scale, lag), how
        many rows were averaged; ``autocorrelation`` (...), at lag distance 1, for the red-noise
        background. `scale` has the second coordinate `period`.

    References
    ----------
    Zeris 2026 (scalogram of attention, omega0 = 5, 20 scales); Torrence & Compo 1998 (cone of
    influence: sqrt(2) a). The average of abs(W)^2 as a quadratic form of the covariance is ours.
    """
    scales = check_scales(scales)
    if (np.diff(scales) <= 0).any():
        raise InputError("scales of a scalogram ascend")
    if rows not in ("cone", "all"):
        raise InputError(f"rows is 'cone' or 'all', not {rows!r}")
    if rows == "cone" and convention != "causal":
        raise InputError(f"convention={convention!r} has no cone of each row: use rows='all'")
    n, t = ensemble_size(fields)
    if not 1 <= n_blocks <= n:
        raise InputError(f"n_blocks lies between 1 and the {n} snapshots, not {n_blocks}")
    reach = np.ceil(FOLD * scales).astype(int)
    if rows == "cone" and (2 * reach > t - 1).any():
        raise InputError(
            f"scale {scales[2 * reach > t - 1][0]:g} has no lag inside the cone of influence of "
            f"windows of {t} tokens: the largest that has is {(t - 1) // 2 / FOLD:.1f}"
        )
    kernel = None
    block_size = np.array([len(b) for b in np.array_split(np.arange(n), n_blocks)])
    lag = np.arange(-(t - 1), t) if convention == "signed" else np.arange(t)

    def one(field: torch.Tensor):
        nonlocal kernel
        check_convention(field, convention)
        if kernel is None:
            kernel = _kernel(len(lag), scales, omega0, norm, field)
        # Squares of float32 under- and overflow: the transform is linear, so scale there and back.
        low, high = field.aminmax()
        size = torch.maximum(-low, high).clamp(min=torch.finfo(field.dtype).tiny)
        count = rows_with_lag(t, convention).to(field)
        mean = field.mean(0) if center else torch.zeros_like(field[0])
        weight = (1 / size).expand(len(lag))
        if standardize:
            squares = torch.zeros_like(count)
            for _, row in _each_row(field, mean, weight, convention):
                squares[: row.shape[1]] += row.square().sum(0)
            weight, size = per_rms(squares / (n * count)) * weight, 1.0
        if rows == "cone":
            each = _each_row(field, mean, weight, convention)
            power, covariance = _power_in_cone(each, block_size, kernel, reach)
        else:
            parts = [
                _covariance(_each_row(part, mean, weight, convention), len(part), t, field)
                for part in field.tensor_split(n_blocks)
            ]
            each = zip(parts, block_size, strict=True)
            power = torch.stack([_power_of_all_rows(c / float(m * t), kernel) for c, m in each])
            covariance = sum(parts)
        return power.double() * float(size) ** 2, _autocorrelation(covariance, count)

    results, dims, coords = map_fields(fields, one, device)
    lead = tuple(len(coords[d]) for d in dims)
    left, right = (lag + t - 1 if convention == "signed" else lag), t - 1 - lag
    in_cone = (left >= reach[:, None]) & (right >= reach[:, None])
    n_rows = np.full(in_cone.shape, t)
    if rows == "cone":
        n_rows = np.where(in_cone, t - (lag + reach[:, None]), 0)
    data = xr.Dataset(
        {
            "power": (
                (*dims, "block", "scale", "lag"),
                stack_leading([r[0] for r in results], lead),
            ),
            "block_size": ("block", block_size),
            "in_cone": (("scale", "lag"), in_cone),
            "rows": (("scale", "lag"), n_rows),
            "autocorrelation": (dims, stack_leading([r[1] for r in results], lead)),
        },
        coords={
            **coords,
            "scale": ("scale", scales, {"units": "tokens"}),
            "period": ("scale", scale_to_period(scales, omega0, norm), {"units": "tokens"}),
            "lag": ("lag", lag, {"units": "tokens"}),
        },
        attrs={
            "omega0": omega0,
            "norm": norm,
            "convention": convention,
            "row_average": rows,
            "standardized": int(standardize),
        },
    )
    return data if n_blocks > 1 else data.isel(block=0)


def rows_with_lag(t: int, convention: str) -> torch.Tensor:
    """How many of the T rows have each lag ``(L,)``; past its end a published row goes on."""
    if convention == "published":
        return torch.full((t,), float(t))
    lag = torch.arange(0 if convention == "causal" else 1 - t, t)
    return (t - lag.abs()).float()


def per_rms(mean_square: torch.Tensor) -> torch.Tensor:
    """1 / rms at each lag; 0 where there is nothing but rounding."""
    rms = mean_square.sqrt()
    floor = torch.finfo(rms.dtype).eps * rms.max()
    return torch.where(rms > floor, 1 / rms.clamp(min=torch.finfo(rms.dtype).tiny), 0.0)


def _autocorrelation(covariance: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Correlation between neighbouring lags, from their covariance ``(L, L)`` over all rows.

    Rows that have a lag but not its neighbour count in the variance alone, so each variance is
    taken for the rows that have both.
    """
    variance = covariance.diagonal().double() / count  # each over the rows that have the lag
    both = torch.minimum(count[1:], count[:-1]).double()
    norm = ((variance[1:] * both).sum() * (variance[:-1] * both).sum()).sqrt()
    together = covariance.diagonal(1).double().sum()
    return together / norm if norm > 0 else norm
