"""What a text and a coefficient have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from scipy.stats import rankdata

from .errors import InputError, check_whole

# Name of a count -> how it is counted in a string.
COUNTS = {
    "line breaks": lambda text: text.count("\n"),
    "capital letters": lambda text: sum(c.isupper() for c in text),
    "spaces": lambda text: text.count(" "),
    "punctuation": lambda text: sum(not c.isalnum() and not c.isspace() for c in text),
    "distinct characters": lambda text: len(set(text)),
    "repeated trigrams": lambda text: (
        max(len(text) - 2, 0) - len({text[i : i + 3] for i in range(len(text) - 2)})
    ),
}


def text_counts(texts: Sequence[str]) -> xr.DataArray:
    """Simple counts of each of several texts.

    Parameters
    ----------
    texts : sequence of str
        One a document.

    Returns
    -------
    xarray.DataArray
        ``(count, snapshot)``: line breaks, capital letters, spaces, punctuation, distinct
        characters, and trigrams that occurred before in the same text.
    """
    if isinstance(texts, str) or not len(texts) or not all(isinstance(t, str) for t in texts):
        raise InputError("texts are one or more strings")
    table = [[count(text) for text in texts] for count in COUNTS.values()]
    return xr.DataArray(np.array(table), {"count": list(COUNTS)}, ("count", "snapshot"))


def count_correlations(
    coefficient: xr.DataArray, counts: xr.DataArray, n_permutations: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Rank correlation of coefficients with counts, corrected for the number of tests.

    Documents are permuted, all coefficients together, and the largest correlation of all tests in
    a permutation is what each observed one is compared with (the single-step max-T method). The
    chance that *any* p-value falls below 0.05 is then 5% where no coefficient has to do with any
    count, however the coefficients and the counts hang together among themselves.

    Parameters
    ----------
    coefficient : xarray.DataArray
        ``(..., snapshot)``, such as those of :func:`attnlib.pod`.
    counts : xarray.DataArray
        ``(count, snapshot)`` from :func:`text_counts`.
    n_permutations, seed : int

    Returns
    -------
    xarray.Dataset
        ``correlation`` (..., count), Spearman's; 0 for a count that does not vary. ``p_value``
        (..., count), corrected, two-sided, at least 1 / (n_permutations + 1).

    Raises
    ------
    InputError
        Different documents, fewer than 5, or a value that is not finite.

    References
    ----------
    Westfall & Young 1993 (max-T); Phipson & Smyth 2010 (the 1 that is added).
    """
    if "snapshot" not in coefficient.dims or set(counts.dims) != {"count", "snapshot"}:
        raise InputError(
            "coefficients have a dimension snapshot, and counts are (count, snapshot): not "
            f"{coefficient.dims} and {counts.dims}"
        )
    n = coefficient.sizes["snapshot"]
    if counts.sizes["snapshot"] != n or n < 5:
        raise InputError(
            f"coefficients of {n} documents and counts of {counts.sizes['snapshot']}: these are "
            "the same documents, at least 5"
        )
    check_whole("n_permutations", n_permutations)
    check_whole("seed", seed, 0)
    ordered = coefficient.transpose(..., "snapshot")
    a = _unit_ranks(ordered.values.reshape(-1, n))
    b = _unit_ranks(counts.transpose("count", "snapshot").values)
    observed = a @ b.T  # (tests, counts)
    rng = np.random.default_rng(seed)
    beyond = np.ones(observed.shape)
    for _ in range(n_permutations):
        # The same correlation computed in another order may differ in its last digits.
        beyond += np.abs(a @ b[:, rng.permutation(n)].T).max() >= np.abs(observed) - 1e-12
    dims = (*ordered.dims[:-1], "count")
    shape = (*ordered.shape[:-1], len(b))
    coords = {k: v for k, v in coefficient.coords.items() if "snapshot" not in v.dims}
    return xr.Dataset(
        {
            "correlation": (dims, observed.reshape(shape)),
            "p_value": (dims, (beyond / (n_permutations + 1)).reshape(shape)),
        },
        {**coords, "count": counts["count"].values},
        {"n_permutations": n_permutations, "tests": observed.size},
    )


def _unit_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, centred and of unit norm; zeros where nothing varies."""
    if not np.isfinite(values).all():
        raise InputError("a coefficient or a count is not finite")
    ranks = rankdata(values, axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    norm = np.linalg.norm(ranks, axis=-1, keepdims=True)
    return np.divide(ranks, norm, out=np.zeros_like(ranks), where=norm > 0)


def token_share(
    coefficient: xr.DataArray, tokens, offsets: Sequence[int], *, seed: int = 0
) -> xr.DataArray:
    """Part of a coefficient's variance that one token explains, on documents not used to learn it.

    For each offset d, the coefficient of a row is predicted by the mean of all rows of half of the
    documents with the same token d places before the query; the share is 1 less the mean square
    error on the other half over the variance there, averaged over both directions. Below 0 where
    the token only teaches noise.

    Parameters
    ----------
    coefficient : xarray.DataArray
        ``(..., snapshot, query)``, from :func:`attnlib.row_modes`.
    tokens : array-like
        Token ids ``(snapshot, position)``.
    offsets : sequence of int
        d: 0 for the query's own token, 1 for the one before it, and so on.
    seed : int
        Of the split of the documents.

    Returns
    -------
    xarray.DataArray
        ``(..., offset)``

    Raises
    ------
    InputError
        Other documents, or offsets beyond the first query.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or tokens.min() < 0:
        raise InputError(
            f"tokens are ids (snapshot, position), not {tokens.dtype} of shape {tokens.shape}"
        )
    if {"snapshot", "query"} - {*coefficient.dims} or "query" not in coefficient.coords:
        raise InputError(
            f"coefficients are those of rows, (..., snapshot, query), not {coefficient.dims}"
        )
    if not np.isfinite(coefficient.values).all():
        raise InputError("a coefficient is not finite")
    query = coefficient["query"].values
    n = coefficient.sizes["snapshot"]
    if len(tokens) != n or n < 4 or query.max() >= tokens.shape[1]:
        raise InputError("coefficients and tokens are of the same documents, at least 4")
    if not len(offsets) or min(offsets) < 0 or max(offsets) > query.min():
        raise InputError(f"offsets lie between 0 and the first query, {query.min()}")
    ordered = coefficient.transpose(..., "snapshot", "query")
    flat = ordered.values.reshape(-1, n, len(query)).astype(np.float64)
    rng = np.random.default_rng(check_whole("seed", seed, 0))
    half = rng.permutation(n) < n // 2
    shares = np.empty((len(flat), len(offsets)))
    for j, offset in enumerate(offsets):
        ids = tokens[:, query - offset]
        for i, one in enumerate(flat):
            shares[i, j] = np.mean([_explained(one, ids, part) for part in (half, ~half)])
    coords = {k: v for k, v in coefficient.coords.items() if not {"snapshot", "query"} & {*v.dims}}
    return xr.DataArray(
        shares.reshape(*ordered.shape[:-2], len(offsets)),
        {**coords, "offset": list(offsets)},
        (*ordered.dims[:-2], "offset"),
        name="token_share",
    )


def strongest_rows(
    contribution: xr.DataArray, n: int, by: xr.DataArray | None = None
) -> list[tuple[int, int]]:
    """Where a mode fires: the documents with the largest coefficients, and a query in each.

    Parameters
    ----------
    contribution : xarray.DataArray
        ``(snapshot, query)``: what each row adds to the coefficient, or the coefficient of rows.
    n : int
        Documents wanted.
    by : xarray.DataArray, optional
        ``(snapshot,)``, coefficients that choose the documents, largest size first, of whichever
        sign. By default the largest contribution in each.

    Returns
    -------
    list of (snapshot, query)
        Positions of the documents, and the query whose contribution has the largest size among
        those with the sign of `by`, from the coordinate `query` where there is one.

    Raises
    ------
    InputError
        Fewer documents than wanted.
    """
    if set(contribution.dims) != {"snapshot", "query"}:
        raise InputError(f"contributions are (snapshot, query), not {contribution.dims}")
    table = contribution.transpose("snapshot", "query").values.astype(np.float64)
    if by is not None and by.shape != (len(table),):
        raise InputError(f"one coefficient a document chooses them, not {by.shape}")
    if not np.isfinite(table).all() or (by is not None and not np.isfinite(by.values).all()):
        raise InputError("a contribution or a coefficient is not finite")
    if check_whole("n", n) > len(table):
        raise InputError(f"n lies between 1 and the {len(table)} documents, not {n}")
    if by is None:
        documents = np.argsort(-np.abs(table).max(1), kind="stable")[:n]
        chosen = np.abs(table[documents]).argmax(1)
    else:
        documents = np.argsort(-np.abs(by.values), kind="stable")[:n]
        chosen = (table[documents] * np.sign(by.values[documents])[:, None]).argmax(1)
    query = contribution["query"].values  # counts from 0 where there is no coordinate
    return [(int(s), int(query[i])) for s, i in zip(documents, chosen, strict=True)]


def _explained(values: np.ndarray, ids: np.ndarray, known: np.ndarray) -> float:
    """Share of the variance in the other documents that token means of the known ones explain."""
    learnt, seen = values[known].ravel(), ids[known].ravel()
    size = int(ids.max()) + 1
    count = np.bincount(seen, minlength=size)
    mean = np.where(
        count > 0, np.bincount(seen, learnt, size) / np.maximum(count, 1), learnt.mean()
    )
    new = values[~known]
    variance = np.square(new - new.mean()).mean()
    return 1 - np.square(new - mean[ids[~known]]).mean() / variance if variance > 0 else 0.0
