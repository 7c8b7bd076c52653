"""Wavelet coherence of attention rows: which lags fluctuate together, beyond the wavelet's reach.

Three things make a coherence high: structure, the wavelet (coefficients nearer to each other than
it is long share data) and the sample (a mean of few products is not zero). The last two are
computed here as well, so that the first can be told from them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import xarray as xr

from .ensemble import check_convention, ensemble_size, lag_rows, map_fields, stack_leading
from .errors import InputError
from .wavelet import FOLD, OMEGA0, check_scales, scale_to_period
from .wavelet import _kernel, _rows_with_lag, _unit_variance  # isort: skip

CHUNK_BYTES = 2**28
CONVENTIONS = ("causal", "published")


def coherence(
    fields,
    scale,
    omega0: float = OMEGA0,
    *,
    convention: str = "causal",
    standardize: bool = True,
    n_permutations: int = 20,
    seed: int = 0,
    level: float = 0.95,
    footprint_level: float = 0.05,
    device: str | None = None,
) -> xr.Dataset:
    """Coherence between the lags of attention rows at a scale, and what of it is a finding.

    gamma(b, b') = abs(<W(b) W*(b')>) / sqrt(<abs(W(b))^2> <abs(W(b'))^2>), where W(b) is the
    Morlet transform, at scale a and lag b, of a row of the fluctuation. The averages are over
    documents and over the rows whose own cone of influence holds both lags: row i if
    reach <= b, b' <= i - reach, with reach = ceil(sqrt(2) a).

    *What the wavelet makes.* White noise has the coherence exp(-(b - b')^2 / 4 a^2). Variable
    ``wavelet`` is that of white noise in the same rows, exactly. Where it exceeds
    `footprint_level` a pair belongs to the ``footprint`` and is not judged.

    *What the sample makes.* W(b) of document s is paired with W(b') of document pi(s), pi a
    random permutation. Rows of one document resemble each other, so they are no independent
    sample; they stay together, and only documents are exchanged. All permutations are allowed,
    fixed points too: with the mean over documents removed, those without would be biased. The
    mean square of gamma over all N! of them is known in closed form for each pair; the sampled
    ones give the shape of the distribution about it, taken over all pairs of a map.

    *How it is judged.* ``floor`` is passed by a share 1 - level of the pairs of unrelated
    documents. A map has thousands of pairs, so some always pass. Two yardsticks for that:
    ``share_by_chance`` is what the share that passes reaches by chance, and ``threshold`` is
    passed *anywhere* in a map (a layer at a scale) with probability 1 - level only, by the
    maxima over each permutation (Westfall & Young 1993). Both hold for coherence minus
    ``wavelet``: a modulus cannot exceed the sum of what the two causes make.

    Parameters
    ----------
    fields : xarray.DataArray or torch.Tensor
        ``(layer, [head,] snapshot, query, key)``, causal, at least 3 snapshots, all finite.
    scale : float or sequence of float
        a, in tokens, ascending.
    omega0 : float
        Centre frequency of the wavelet.
    convention : {"causal", "published"}
        ``"causal"``: as above. ``"published"``: as in the public code of the paper. Row i of the
        raw field is a signal over the key, and gamma_ij compares its transform at the query's own
        position i, where a causal row ends, with that at position j; averaged over documents
        alone. No cone, no mean removed, all i and j.
    standardize : bool
        Divide each lag by its rms over rows and documents, as in :func:`attnlib.scalogram`; only
        for ``"causal"``.
    n_permutations, seed : int
        Number of permutations, at least level / (1 - level), and their seed.
    level : float
        Of floor, threshold and share by chance, between 0 and 1.
    footprint_level : float
        Between 0 and 1. At 0.05 the footprint reaches 3.5 a to either side.
    device : str, optional
        Where to compute; by default where the data are.

    Returns
    -------
    xarray.Dataset
        On (layer, [head,] scale, lag, lag_), symmetric, in the precision of the fields, NaN where
        no cone holds the pair: ``coherence`` (0 for a lag without variance), ``floor``,
        ``threshold``; and ``significant`` (bool): above the threshold, outside the footprint.
        On (scale, lag, lag_): ``wavelet``; ``footprint`` (bool); ``rows``, how many are averaged.
        On (layer, [head,] scale): ``share`` of the pairs outside the footprint that pass
        wavelet + floor; ``share_by_chance``; ``p_value`` of the largest excess in the map.
        On (scale): ``pairs``, how many lie outside the footprint, each counted once.
        `scale` has the second coordinate `period`.

        With ``convention="published"``, float64: ``coherence`` and ``floor`` on (layer, [head,]
        scale, query, key), ``wavelet`` and ``footprint`` on (scale, query, key). There the floor
        is a quantile for each pair by itself, since the mean that is left in gives each its own.

    Raises
    ------
    InputError
        Fewer than 3 snapshots, a value that is not finite, weights after the query, a scale that
        no cone holds, too few permutations, or an option that does not exist. There is no
        ``"signed"`` reading: rows of a bidirectional field have two edges each.

    Notes
    -----
    Takes 8 N T^2 bytes in single precision for a layer at a scale, and up to 256 MiB (at least
    one map) for permuted maps. From the paper: gamma_ij(a) is ``coherence``, W_i is W(b) at b = i.

    References
    ----------
    Zeris 2026 (coherence of attention); Torrence & Compo 1998 (cone of influence); Westfall &
    Young 1993 (thresholds from maxima over permutations). The two yardsticks are ours.
    """
    scales = check_scales(scale)
    n, t = ensemble_size(fields)
    published = convention == "published"
    reach = np.ceil(FOLD * scales).astype(int)
    _check(scales, reach, t, convention, n_permutations, level, footprint_level)
    rng = np.random.default_rng(seed)
    orders = np.stack([np.arange(n), *(rng.permutation(n) for _ in range(n_permutations))])
    orders = torch.from_numpy(orders)  # (1 + P, N); the first is the data as they are

    if published:
        psi = [_wavelets_of_public_code(t, a, omega0) for a in scales]
        white = [_white_noise_in_rows(one) for one in psi]
    else:
        psi = [_wavelets(t, a, omega0)[r : t - r] for a, r in zip(scales, reach, strict=True)]
        white = [_white_noise_in_cone(one, int(r)) for one, r in zip(psi, reach, strict=True)]

    def one(field: torch.Tensor) -> dict[str, np.ndarray]:
        check_convention(field, convention)
        if published:
            # Double: far from the diagonal single precision leaves nothing but its rounding.
            maps = [_published_maps(field.double(), p.to(field.device), orders, level) for p in psi]
        else:
            x, _ = lag_rows(field - field.mean(0))
            x = x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)  # squares underflow
            if standardize:
                x = _unit_variance(x, _rows_with_lag(t, convention).to(x))
            maps = [
                _causal_maps(x, p, int(r), w, footprint_level, orders, level)
                for p, r, w in zip(psi, reach, white, strict=True)
            ]
        return {name: np.stack([m[name] for m in maps]) for name in maps[0]}

    results, dims, coords = map_fields(fields, one, device)
    pair, position = (("query", "key") if published else ("lag", "lag_")), np.arange(t)
    data = {}
    for name in results[0]:
        values = stack_leading([r[name] for r in results], tuple(len(coords[d]) for d in dims))
        own = ("scale", *pair)[: values.ndim - len(dims)]
        data[name] = ((*dims, *own), values)
    if published:
        kernel = np.stack([w.numpy() for w in white])
    else:
        kernel = np.stack([_on_lags(w, int(r), t) for w, r in zip(white, reach, strict=True)])
        last = np.maximum(position[:, None], position)
        rows = np.where(np.isnan(kernel), 0, t - (last + reach[:, None, None]))
        outside = (kernel <= footprint_level) & (rows > 0)
        data["rows"] = (("scale", *pair), rows)
        data["pairs"] = ("scale", np.tril(outside).sum((1, 2)))
    data["wavelet"] = (("scale", *pair), kernel)
    data["footprint"] = (("scale", *pair), kernel > footprint_level)  # NaN is not
    units = {"units": "tokens"}
    return xr.Dataset(
        data,
        coords={
            **coords,
            "scale": ("scale", scales, units),
            "period": ("scale", scale_to_period(scales, omega0), units),
            **{d: (d, position, units) for d in pair},
        },
        attrs={
            "omega0": omega0,
            "convention": convention,
            "standardized": int(standardize and not published),
            "n_permutations": n_permutations,
            "level": level,
            "footprint_level": footprint_level,
        },
    )


def _check(scales, reach, t, convention, n_permutations, level, footprint_level) -> None:
    if (np.diff(scales) <= 0).any():
        raise InputError("scales of a coherence ascend")
    if convention not in CONVENTIONS:
        hint = ""
        if convention == "signed":
            hint = " (rows of a bidirectional field have two edges each; scalogram can read them)"
        raise InputError(f"convention of a coherence is one of {CONVENTIONS}, not {convention!r}{hint}")
    for name, value in (("level", level), ("footprint_level", footprint_level)):
        if not 0 < value < 1:
            raise InputError(f"{name} lies between 0 and 1, not at {value}")
    least = math.ceil(level / (1 - level) - 1e-9)
    if n_permutations < least:
        raise InputError(
            f"{n_permutations} permutations cannot resolve a level of {level:g}: take {least} or more"
        )
    empty = scales[2 * reach > t - 1]
    if convention == "causal" and len(empty):
        raise InputError(
            f"scale {empty[0]:g} has no lag inside the cone of influence of windows of {t} "
            f"tokens: the largest that has is {(t - 1) // 2 / FOLD:.1f}"
        )


def _quantile(values: torch.Tensor, level: float) -> torch.Tensor:
    """The value, of P null ones (first axis), that one more passes with probability 1 - level.

    The k-th smallest with k = level (P + 1), rounded up. An interpolated quantile lies lower and
    is passed too often: by 1 in 10 of 20 + 1 values at a level of 0.95.
    """
    return values.kthvalue(math.ceil(level * (len(values) + 1) - 1e-9), dim=0).values


# ------------------------------------------------------------------ in the cone


def _wavelets(t: int, a: float, omega0: float) -> torch.Tensor:
    """psi with W(b) = sum over tau of psi[b, tau] x(tau): ``(T, T)``, complex double."""
    like = torch.zeros(1, dtype=torch.float64)
    k = _kernel(t, np.array([a]), omega0, "L1", like)[0]  # (2, 2 T - 1)
    position = torch.arange(t)
    offset = position[:, None] - position + t - 1
    return torch.complex(k[0][offset], k[1][offset])


def _white_noise_in_cone(psi: torch.Tensor, reach: int) -> torch.Tensor:
    """Coherence of white noise, lower triangle ``(B, B)`` over the lags reach .. T - 1 - reach.

    The pair (b, b' <= b) averages the rows i >= b + reach, of which those with i >= tau have
    data at tau: a sum over tau of psi psi*, weighted with their number.
    """
    b, t = psi.shape
    first_row = torch.arange(b) + 2 * reach
    count = (t - torch.maximum(first_row[:, None], torch.arange(t))).to(psi.real)  # (B, T)
    cross = (count * psi) @ psi.mH
    power = count @ psi.abs().square().T
    return (cross.abs() / (power.diagonal()[:, None] * power).sqrt()).tril()


def _transform(x: torch.Tensor, psi: torch.Tensor, reach: int) -> torch.Tensor:
    """W of rows ``(N, T, T)`` as ``(B, T, N)``: lag, row, document; zero outside a row's cone."""
    psi_re, psi_im = psi.real.to(x), psi.imag.to(x)
    n, t, _ = x.shape
    kind = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    w = torch.zeros(len(psi), t, n, dtype=kind, device=x.device)
    for i in range(2 * reach, t):
        row, lags = x[:, i, : i + 1].T, slice(0, i - 2 * reach + 1)
        w[lags, i] = torch.complex(psi_re[lags, : i + 1] @ row, psi_im[lags, : i + 1] @ row)
    return w


def _power_and_null(w: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pair: sqrt(sum abs(W(b))^2 sum abs(W(b'))^2), and the rms over all permutations
    of the modulus of its cross sum; both ``(B, B)``, lower triangle.

    With A[s, s'] = sum over rows of W_s(b) W_s'*(b'), whose rows and columns sum to zero, the
    cross sum of a permutation is the sum of A[s, pi(s)], and its mean square over all of them is
    sum abs(A)^2 / (N - 1) (Hoeffding 1951). As a sum over pairs of rows instead of documents,
    sum abs(A)^2 is the inner product of the row covariances at b and at b': one matrix product.

    Going down in the row i, all rows of the pair (b, b' <= b) have been added at i = b + reach.
    """
    b, t, n = w.shape
    sums, inner = w.real.new_zeros(b), w.real.new_zeros(b, b)
    power, null = torch.zeros_like(inner), torch.zeros_like(inner)
    for i in range(t - 1, 2 * reach - 1, -1):
        k = i - 2 * reach
        now = slice(0, k + 1)
        row = w[now, i]  # (k + 1, N)
        sums[now] += row.abs().square().sum(1)
        power[k, now] = (sums[k] * sums[now]).sqrt()
        covariance = (w[now, i:] @ row.conj()[:, :, None])[:, :, 0]  # with the rows i ..: (k + 1, .)
        covariance[:, 1:] *= math.sqrt(2)  # each such pair of rows comes twice
        flat = torch.view_as_real(covariance).flatten(1)
        inner[now, now] += flat @ flat.T
        null[k, now] = (inner[k, now] / (n - 1)).sqrt()
    return power, null


def _cross(w: torch.Tensor, reach: int, orders: torch.Tensor) -> torch.Tensor:
    """Modulus of the cross sum of each pair, documents of b' permuted: ``(P, B, B)``, lower."""
    b, t, _ = w.shape
    sums = w.new_zeros(len(orders), b, b)
    out = w.real.new_zeros(len(orders), b, b)
    for i in range(t - 1, 2 * reach - 1, -1):
        k = i - 2 * reach
        row = w[: k + 1, i]
        permuted = row[:, orders].movedim(1, 0)  # (P, k + 1, N)
        sums[:, : k + 1, : k + 1] += row.conj() @ permuted.mT
        out[:, k, : k + 1] = sums[:, k, : k + 1].abs()
    return out


def _causal_maps(x, psi, reach, white, footprint_level, orders, level) -> dict[str, np.ndarray]:
    """All that :func:`coherence` says of one layer at one scale."""
    w = _transform(x, psi, reach)
    power, null = _power_and_null(w, reach)
    white = white.to(power)
    floor_of_rounding = torch.finfo(power.dtype).eps * power.max()
    defined = power > floor_of_rounding
    inverse = torch.where(defined, 1 / power.clamp(min=floor_of_rounding), 0.0)
    spread = torch.where(defined, null * inverse, 0.0)  # rms of a permuted coherence
    lower = torch.ones_like(power, dtype=torch.bool).tril()
    judged = lower & (white <= footprint_level) & (spread > 0)
    some = bool(judged.any())
    use = judged if some else lower & (spread > 0)

    gamma, excess = None, []  # the data's own coherence; permuted ones over their spread
    for part in orders.to(w.device).split(max(1, CHUNK_BYTES // (w.element_size() * len(w) ** 2))):
        permuted = _cross(w, reach, part) * inverse
        if gamma is None:
            gamma, permuted = permuted[0].clamp(max=1), permuted[1:]
        excess.append(permuted[:, use] / spread[use])
    excess = torch.cat(excess)  # (P, pairs)
    if not excess.numel():
        excess = excess.new_ones(len(orders) - 1, 1)
    quantile = torch.quantile if excess.numel() < 2**24 else _quantile_of_many
    common = quantile(excess.flatten(), level)
    top = excess.amax(1)
    own = ((gamma - white) / spread.clamp(min=torch.finfo(spread.dtype).tiny))[judged]
    return {}
