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
from .wavelet import OMEGA0, scale_to_period

CENTERS = ("period", "scale", "zero")
GRAM_ONLY = ("rounding", "snapshot", "snapshot_")  # coordinates that results leave behind
BLOCK_BYTES = 4 * 2**20


def lag_window(
    lag,
    scale,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    *,
    bank: bool = False,
) -> np.ndarray:
    """Gaussian window over the lag, w_a(lag) = exp(-(abs(lag) - c)^2 / (2 (width a)^2)).

    Windows of several octaves leave gaps: lag 0, and all lags beyond the largest scale, are in
    none of them. With ``bank=True`` the windows share out every lag instead: the first is open
    towards lag 0, the last towards the longest lag, and each is divided by the sum of all. Then
    the filtered fields of all scales add up to the field.

    Parameters
    ----------
    lag : array-like
        Lags, ``(L,)``.
    scale : float or sequence of float
        a, in tokens. An infinite scale gives w = 1: no filter (raw POD).
    width : float
        Standard deviation of the window in units of the scale.
    center : {"period", "scale", "zero"}
        c: the Fourier period of the wavelet at this scale (default), the scale, or 0. The last
        with width 1 is the published window, a low-pass rather than a band.
    omega0 : float
        Of the wavelet, for its period.
    bank : bool
        Make the finite scales a filter bank, whose windows sum to 1 at every lag. An infinite
        scale stands aside and stays unfiltered.

    Returns
    -------
    numpy.ndarray
        ``(S, L)`` float64, or ``(L,)`` for a single scale.

    Raises
    ------
    InputError
        A window that holds no lag at all, naming its scale; a bank with all centres at 0.
    """
    if bank and center == "zero":
        raise InputError("a filter bank needs a centre for each band: center='period' or 'scale'")
    if center not in CENTERS:
        raise InputError(f"center is one of {CENTERS}, not {center!r}")
    if not width > 0:
        raise InputError(f"width is positive, not {width}")
    lag = np.abs(np.asarray(lag, dtype=np.float64))
    scales = np.atleast_1d(np.asarray(scale, dtype=np.float64))
    if np.isnan(scales).any() or (scales <= 0).any():
        raise InputError("scales are positive numbers (in tokens); infinity means no filter")
    factor = {"period": scale_to_period(1.0, omega0), "scale": 1.0, "zero": 0.0}[center]
    band = np.isfinite(scales)
    centre, sigma = factor * scales[band, None], width * scales[band, None]
    offset = lag - centre  # (bands, lag)
    if bank and band.any():
        first, last = scales[band].argmin(), scales[band].argmax()
        offset[first] = offset[first].clip(min=0)
        offset[last] = offset[last].clip(max=0)
    exponent = -(offset**2) / (2 * sigma**2)
    if bank and band.any():
        exponent -= exponent.max(0)  # at least one band is 1, so the sum is safe far out
    windows = np.ones((len(scales), len(lag)))
    windows[band] = np.exp(exponent)
    if bank and band.any():
        windows[band] /= windows[band].sum(0)
    empty = np.zeros(len(scales), bool)
    empty[band] = (centre[:, 0] > lag.max()) | (windows[band].max(1) < 1e-3)
    if empty.any():
        a = scales[empty][0]
        raise InputError(
            f"scale {a:g} looks at lag {factor * a:g}, which these fields (lags up to "
            f"{lag.max():g}) do not have, or its window is narrower than a token: choose "
            "a smaller scale, longer windows of text, or a larger width"
        )
    return windows if np.ndim(scale) else windows[0]


def all_lags(t: int, convention: str) -> np.ndarray:
    """Every lag of a T x T field in a convention: 0 to T - 1, signed also -(T - 1) to -1."""
    return np.arange(-(t - 1), t) if convention == "signed" else np.arange(t)


def _each_block(field: torch.Tensor, convention: str):
    """Stream the field some lags at a time: ``(lags, energy, u (N, lag, longest))``.

    `lags` are indices, `energy` (lag,) is the mean over snapshots of the sum of squares of the
    field itself. `u` is the fluctuation along the diagonal of each lag, float64, zero past its
    end. (No row is repeated past its end here, in any convention: neither does the published
    POD.) It is a buffer of at most 4 MiB, or one lag, which the next step overwrites.
    """
    n, t, _ = field.shape
    lags = all_lags(t, convention)
    at_once = max(1, min(len(lags), BLOCK_BYTES // (8 * n * max(n, t))))
    buffer = torch.empty(at_once * n * t, dtype=torch.float64, device=field.device)
    for start in range(0, len(lags), at_once):
        index = np.arange(start, min(start + at_once, len(lags)))
        reach = t - np.abs(lags[index])
        u = buffer[: n * len(index) * reach.max()].view(n, len(index), reach.max()).zero_()
        for k, lag in enumerate(lags[index]):
            offset = int(lag) if convention == "published" else -int(lag)
            u[:, k, : reach[k]] = field.diagonal(offset, 1, 2)
        energy = torch.linalg.vector_norm(u, dim=(0, 2)).square() / n
        u -= u.mean(0)
        yield index, energy, u


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
        for index, e, u in _each_block(field, convention):
            some = u.movedim(1, 0)  # (lag, N, longest)
            gram[index], energy[index] = torch.bmm(some, some.mT).cpu(), e.cpu()
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


def scale_coords(scales, omega0) -> dict:
    """The coordinate `scale` and with it `period`."""
    scales = np.atleast_1d(np.asarray(scales, dtype=np.float64))
    if scales.ndim != 1 or len(np.unique(scales)) != len(scales) or not len(scales):
        raise InputError("scales are one or more different numbers")
    return {"scale": scales, "period": ("scale", scale_to_period(scales, omega0))}


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
    rounding, sums, gram = torch.zeros(len(windows)).to(total), [], None
    for index, energy, u in _each_block(field, convention):
        window = torch.from_numpy(windows[:, index]).to(u)  # (S, lag)
        rounding += window**2 @ _rounding(field, energy)
        sums.append(u.sum(-1).T)
        if len(windows) == 1:  # one product over all pairs of the block, and no G(lag)
            flat = u.mul_(window[0, :, None]).flatten(1)
            total[0].addmm_(flat, flat.T)
            continue
        if gram is None:
            gram = u.new_empty(len(index), n, n)
        some = u.movedim(1, 0)  # (lag, N, longest)
        some = torch.bmm(some, some.mT, out=gram[: len(index)])
        total.view(-1, n * n).addmm_(window**2, some.flatten(1))  # (S, lag) (lag, N N)
    return total, rounding, torch.cat(sums).T
