"""Correlations of large ensembles, straight from a model: fields are never all in memory."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from .errors import InputError, check_whole, check_windows
from .fields import count_layers, iter_fields
from .filters import all_lags, lag_window, scale_coords
from .gram import label_gram
from .wavelet import OMEGA0

CHUNK_BYTES = 64 * 2**20
ROWS = 256


def stream_gram(
    model,
    tokens: torch.Tensor,
    scales=(np.inf,),
    *,
    layers=None,
    width: float = 0.5,
    center: str = "period",
    omega0: float = OMEGA0,
    bank: bool = False,
    memory: int = 2**30,
    device: str | None = None,
    progress: bool = False,
) -> xr.DataArray:
    """:func:`attnlib.scale_gram` of a causal model, for ensembles too large to hold.

    The model runs once over all windows for each group of layers that fits into `memory`. Of a
    field only the part up to the query is kept, sorted by lag: 2 N T (T + 1) bytes a layer.

    Parameters
    ----------
    model : GPT or transformers.PreTrainedModel
        Causal.
    tokens : torch.Tensor
        Document windows ``(N, T)``.
    scales, width, center, omega0, bank
        As in :func:`attnlib.lag_window`; by default no filter.
    layers : sequence of int, optional
        Counted from 1; all by default.
    memory : int
        Bytes for the fields of a group of layers; one layer at least is held.
    device : str, optional
        Where to run the model; by default where it is. The sums are made in main memory.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.DataArray
        ``(layer, scale, snapshot, snapshot_)``, float64, of the fluctuation of the head average.

    Raises
    ------
    InputError
        As :func:`attnlib.iter_fields`; a layer that the model does not have; weights on keys
        after the query.
    """
    from tqdm import tqdm

    there = count_layers(model)
    check_windows(tokens)
    layers = list(range(1, there + 1)) if layers is None else list(layers)
    layers = [check_whole("a layer", n) for n in layers]
    check_whole("memory", memory)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(1, there + 1)):
        raise InputError(f"layers are different numbers from 1 to {there}, not {layers}")
    coords = scale_coords(scales, omega0)
    n, t = tokens.shape
    windows = lag_window(all_lags(t, "causal"), coords["scale"], width, center, omega0, bank=bank)
    query, key = _pairs_by_lag(t)
    weights = torch.from_numpy(windows)[:, query - key] ** 2  # (S, P)
    index = query * t + key
    at_once = max(1, memory // (4 * n * len(index)))
    results = {}
    with tqdm(total=n * len(layers), desc="fields", disable=not progress) as bar:
        for start in range(0, len(layers), at_once):
            group = layers[start : start + at_once]
            packed = {layer: torch.empty(n, len(index)) for layer in group}  # float32
            for layer, documents, field in iter_fields(model, tokens, device=device):
                if layer in packed:
                    if float(field.triu(1).abs().max()) > 1e-6:
                        raise InputError(
                            "these fields have weight on keys after the query: use scale_gram "
                            "with convention='signed'"
                        )
                    packed[layer][documents] = field.flatten(1)[:, index.to(field.device)].cpu()
                    bar.update(len(field))
            for layer in group:
                results[layer] = _gram_of(packed.pop(layer), weights)
    attrs = {"width": width, "center": center, "omega0": omega0, "bank": int(bank)}
    return label_gram(
        [results[layer] for layer in layers],
        ("layer",),
        {"layer": np.array(layers)},
        coords,
        {**attrs, "convention": "causal"},
    )


def _pairs_by_lag(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key of the P = T (T + 1) / 2 causal pairs, by lag and then by query."""
    query, key = torch.tril_indices(t, t)
    order = torch.argsort(query - key, stable=True)
    return query[order], key[order]


def _gram_of(packed: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """G_a ``(S, N, N)`` of packed fields ``(N, P)``, and its rounding ``(S,)``; see gram.py."""
    n, size = packed.shape
    total = torch.zeros(len(weights), n, n, dtype=torch.float64)
    rounding = torch.zeros(len(weights), dtype=torch.float64)
    for columns in torch.arange(size).split(max(1, CHUNK_BYTES // (8 * n))):
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        u, w = packed[:, part].double(), weights[:, part]
        rounding += torch.finfo(packed.dtype).eps ** 2 * (w @ u.square().mean(0))
        u -= u.mean(0)
        for one, of_scale in zip(total, w, strict=True):
            if bool((of_scale > 0).any()):
                weighted = u * of_scale
                for i in range(0, n, ROWS):  # up to the diagonal: the rest is its mirror image
                    rows = slice(i, min(i + ROWS, n))
                    one[rows, : rows.stop].addmm_(weighted[rows], u[: rows.stop].T)
    for one in total:
        one.tril_().add_(one.tril(-1).mT)
    return total, rounding
