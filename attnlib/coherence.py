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
from .errors import InputError, check_whole
from .scalogram import per_rms, rows_with_lag
from .wavelet import FOLD, OMEGA0, check_scales, scale_to_period, wavelet_hat

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
        On ``(layer, [head,] scale, lag, lag_)``, symmetric, in the precision of the fields, NaN
        where no cone holds the pair: ``coherence`` (0 for a lag without variance), ``floor``,
        ``threshold``; and ``significant`` (bool): above the threshold, outside the footprint.
        On ``(scale, lag, lag_)``: ``wavelet``; ``footprint`` (bool); ``rows``, how many are
        averaged.
        On (layer, [head,] scale): ``share`` of the pairs outside the footprint that pass
        wavelet + floor; ``share_by_chance``; ``p_value`` of the largest excess in the map;
        ``peak``, the coherence there, ``peak_lag`` and ``peak_lag_``; ``peak_documents``, how many
        documents make it, (sum c)^2 / sum c^2 with c the modulus of each one's part. NaN without
        such pairs.
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
    period = scale_to_period(scales, omega0)
    reach = np.ceil(FOLD * scales).astype(int)
    _check(scales, reach, t, convention, n_permutations, level, footprint_level)
    published = convention == "published"
    rng = np.random.default_rng(check_whole("seed", seed, 0))
    orders = np.stack([np.arange(n), *(rng.permutation(n) for _ in range(n_permutations))])
    orders = torch.from_numpy(orders)  # (1 + P, N); the first is the data as they are
    psi = [_wavelets(t, a, omega0, published) for a in scales]  # each (b, tau)
    if published:
        white = [_white_noise_in_rows(p) for p in psi]
    else:
        psi = [p[r : t - r] for p, r in zip(psi, reach, strict=True)]
        white = [_white_noise_in_cone(p, int(r)) for p, r in zip(psi, reach, strict=True)]

    def one(field: torch.Tensor) -> dict[str, np.ndarray]:
        check_convention(field, convention)
        if published:
            # Double: far from the diagonal single precision leaves nothing but its rounding.
            maps = [_published_maps(field.double(), p.to(field.device), orders, level) for p in psi]
        else:
            x, _ = lag_rows(field - field.mean(0))
            x = x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)  # squares underflow
            if standardize:
                count = rows_with_lag(t, convention).to(x)
                x = x * per_rms(x.square().sum((0, 1)) / (n * count))
            maps = [
                _causal_maps(x, p, int(r), w, footprint_level, orders, level)
                for p, r, w in zip(psi, reach, white, strict=True)
            ]
        return {name: np.stack([m[name] for m in maps]) for name in maps[0]}

    results, dims, coords = map_fields(fields, one, device)
    on_pairs = ("scale", "query", "key") if published else ("scale", "lag", "lag_")
    data, position = {}, np.arange(t)
    for name in results[0]:
        values = stack_leading([r[name] for r in results], tuple(len(coords[d]) for d in dims))
        data[name] = ((*dims, *on_pairs[: values.ndim - len(dims)]), values)
    if published:
        kernel = np.stack([w.numpy() for w in white])
    else:
        kernel = np.stack([_on_lags(w, int(r), t) for w, r in zip(white, reach, strict=True)])
        last = np.maximum(position[:, None], position) + reach[:, None, None]
        data["rows"] = (on_pairs, np.where(np.isnan(kernel), 0, t - last))
        data["pairs"] = ("scale", np.tril(kernel <= footprint_level).sum((1, 2)))
    data["wavelet"] = (on_pairs, kernel)
    data["footprint"] = (on_pairs, kernel > footprint_level)
    units = {"units": "tokens"}
    return xr.Dataset(
        data,
        coords={
            **coords,
            "scale": ("scale", scales, units),
            "period": ("scale", period, units),
            **{d: (d, position, units) for d in on_pairs[1:]},
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
        why = ": rows of a bidirectional field have two edges each, and no cone here knows that"
        raise InputError(
            f"coherence has the conventions {CONVENTIONS}, not {convention!r}"
            + (why if convention == "signed" else "")
        )
    if not (0 < level < 1 and 0 < footprint_level < 1):
        raise InputError(f"levels lie between 0 and 1, not at {level} and {footprint_level}")
    least = math.ceil(level / (1 - level) - 1e-9)
    if n_permutations < least:
        raise InputError(
            f"{n_permutations} permutations cannot tell a level of {level:g}: take at least {least}"
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


def _wavelets(t: int, a: float, omega0: float, published: bool) -> torch.Tensor:
    """psi with W(b) = sum over tau of psi[b, tau] x(tau): ``(T, T)``, complex double."""
    if published:  # the public code's own grid of 2 T frequencies
        omega = 2 * math.pi * torch.fft.fftfreq(2 * t, dtype=torch.float64)
        psi_hat = torch.exp(-0.5 * (a * omega - omega0) ** 2) * (omega > 0)
    else:
        like = torch.zeros(1, dtype=torch.float64)
        psi_hat = wavelet_hat(t, [a], omega0, "L1", like)[0]
    position = torch.arange(t)
    return torch.fft.ifft(psi_hat)[(position[:, None] - position) % len(psi_hat)]


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
    """The denominator of each pair, and the rms of its cross sum over all permutations.

    Both ``(B, B)``, lower triangle; the first is sqrt(sum abs(W(b))^2 sum abs(W(b'))^2).

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
        covariance = (w[now, i:] @ row.conj()[:, :, None]).squeeze(2)  # of row i with rows i ..
        covariance[:, 1:] *= math.sqrt(2)  # two different rows are a pair twice
        flat = torch.view_as_real(covariance).flatten(1)  # (k + 1, 2 (T - i))
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
    inverse, orders = _inverse(power), orders.to(w.device)
    spread = null * inverse  # rms of the coherence over all permutations
    possible = (spread > 0) & torch.ones_like(power, dtype=torch.bool).tril()
    judged = possible & (white <= footprint_level).to(w.device)
    some, white = bool(judged.any()), white.to(power)
    use = judged if some else possible

    at_once = max(1, CHUNK_BYTES // (w.element_size() * len(w) ** 2))
    permuted = [(_cross(w, reach, part) * inverse)[:, use] for part in orders[1:].split(at_once)]
    null = torch.cat(permuted) / spread[use]  # (P, pairs)
    null = null if null.numel() else null.new_zeros(len(orders) - 1, 1)  # nothing varies
    gamma = (_cross(w, reach, orders[:1])[0] * inverse).clamp(max=1)
    excess = (gamma - white)[judged] / spread[judged]
    often, top = _quantile(null.flatten(), level), null.amax(1)
    threshold = white + spread * _quantile(top, level)
    maps = {"coherence": gamma, "floor": spread * often, "threshold": threshold}
    maps["significant"] = judged & (gamma > threshold)
    numbers = dict.fromkeys(("share", "share_by_chance", "p_value"), np.nan)
    numbers |= dict.fromkeys(("peak", "peak_lag", "peak_lag_", "peak_documents"), np.nan)
    if some:
        numbers["share"] = float((excess > often).double().mean())
        numbers["share_by_chance"] = float(_quantile((null > often).double().mean(1), level))
        numbers["p_value"] = (1 + int((top >= excess.max()).sum())) / len(orders)
        b, c = judged.nonzero()[excess.argmax()].tolist()
        first = b + 2 * reach  # of the rows that hold both
        part = (w[b, first:].conj() * w[c, first:]).sum(0).abs().double()  # of each document
        numbers["peak"] = float(gamma[b, c])
        numbers["peak_lag"], numbers["peak_lag_"] = float(b + reach), float(c + reach)
        numbers["peak_documents"] = float(part.sum() ** 2 / part.square().sum())
    return {k: _on_lags(v, reach, x.shape[1]) for k, v in maps.items()} | numbers


def _inverse(power: torch.Tensor) -> torch.Tensor:
    """1 / power, and 0 where there is none but rounding."""
    least = torch.finfo(power.dtype).eps ** 2 * power.max()
    return torch.where(power > least, 1 / power, 0.0)


def _on_lags(lower: torch.Tensor, reach: int, t: int) -> np.ndarray:
    """A lower triangle ``(B, B)`` as a symmetric map over all lags, NaN (or False) outside."""
    lower = lower.cpu().numpy()
    out = np.full((t, t), False if lower.dtype == bool else np.nan, dtype=lower.dtype)
    out[reach : t - reach, reach : t - reach] = np.where(np.tri(len(lower)) > 0, lower, lower.T)
    return out


def _white_noise_in_rows(psi: torch.Tensor) -> torch.Tensor:
    """Coherence of positions i and j of row i, if its keys 0 .. i are white noise: ``(T, T)``."""
    past = torch.ones_like(psi.real).tril()
    cross = (psi * past) @ psi.mH
    power = past @ psi.abs().square().T
    return cross.abs() / (power.diagonal()[:, None] * power).sqrt()


def _published_maps(field, psi, orders, level) -> dict[str, np.ndarray]:
    """Coherence and floor of an ensemble of raw fields ``(N, T, T)``, row by row."""
    w = torch.complex(field @ psi.real.T, field @ psi.imag.T).transpose(0, 1)  # (query, N, key)
    query = torch.arange(len(w), device=w.device)
    own = w[query, :, query]  # (T, N): each row at its own position
    cross = own[:, orders.to(w.device)].conj() @ w  # (query, 1 + P, key)
    sums = w.abs().square().sum(1)
    power = (sums.diagonal()[:, None] * sums).sqrt()
    gamma = (cross.abs() * _inverse(power)[:, None]).clamp(max=1).movedim(1, 0)
    return {
        "coherence": gamma[0].cpu().numpy(),
        "floor": _quantile(gamma[1:], level).cpu().numpy(),
    }
