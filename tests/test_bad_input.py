"""Input that once ended in a library's error, or in a wrong result without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

import attnlib
from attnlib import InputError

SEEDED = {
    "shuffled_tokens": lambda seed: attnlib.shuffled_tokens(torch.zeros(3, 4).long(), seed),
    "phase_randomized": lambda seed: attnlib.phase_randomized(torch.rand(3, 4, 4).tril(), seed),
    "planted_fields": lambda seed: attnlib.planted_fields(4, 16, seed=seed),
    "windows": lambda seed: attnlib.windows(torch.arange(99), 3, 4, seed=seed),
    "coherence": lambda seed: attnlib.coherence(torch.rand(4, 24, 24).tril(), 2.0, seed=seed),
    "row_modes": lambda seed: attnlib.row_modes(torch.rand(8, 12, 12).tril(), 2, seed=seed),
    "bootstrap": lambda seed: attnlib.bootstrap(gram(), lambda v: v[:, 0], 20, seed=seed),
    "rank_curve": lambda seed: attnlib.rank_curve(gram(), [3, 6], seed=seed),
    "split_half": lambda seed: attnlib.split_half(gram(8), 1, 2, seed=seed),
    "bootstrap_power": lambda seed: attnlib.bootstrap_power(
        attnlib.scalogram(torch.rand(6, 24, 24).tril(), [2.0, 3.0, 4.0], n_blocks=3), 20, seed
    ),
    "rank_correlation": lambda seed: attnlib.rank_correlation([1, 2, 3], [1, 3, 2], seed),
    "token_share": lambda seed: attnlib.token_share(
        rows(), np.zeros((4, 9), dtype=int), [0], seed=seed
    ),
}


def gram(n=6):
    fields = torch.rand(n, 8, 8, generator=torch.Generator().manual_seed(0)).tril()
    return attnlib.scale_gram(fields, [np.inf]).isel(layer=0, scale=0, drop=True)


def rows():
    values = np.random.default_rng(0).normal(size=(4, 5))
    return xr.DataArray(values, {"query": np.arange(4, 9)}, ("snapshot", "query"))


@pytest.mark.parametrize("seed", [1.5, -1, "0", None])
@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_is_a_whole_number(name, seed):
    SEEDED[name](0)
    with pytest.raises(InputError, match="seed"):
        SEEDED[name](seed)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(8, 13), "whole numbers of shape"),
        (torch.zeros(8, dtype=torch.int64), "whole numbers of shape"),
        (np.zeros((8, 13), dtype=int), "a tensor"),
        (torch.full((8, 13), 1000), "made by another tokenizer"),
        (torch.full((8, 13), -1), "made by another tokenizer"),
        (torch.zeros(8, 26, dtype=torch.int64), "context of 24 and one more to score"),
        (torch.zeros(8, 1, dtype=torch.int64), "too short"),
        (torch.zeros(0, 13, dtype=torch.int64), "0 window"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        attnlib.window_losses,
        attnlib.pruning_losses,
        attnlib.pruning_curve,
        lambda model, tokens: attnlib.prefix_losses(model, tokens, [4]),
    ],
)
def test_tokens_that_cannot_be_scored(tiny_model, function, tokens, message):
    with pytest.raises(InputError, match=message):
        function(tiny_model(), tokens)


def test_fields_of_another_vocabulary(tiny_model):
    with pytest.raises(InputError, match="made by another tokenizer"):
        attnlib.attention_fields(tiny_model(), torch.full((3, 12), 1000))


@pytest.mark.parametrize("length", [0, 13, 2.5])
def test_prefix_lengths_that_are_none(tiny_model, length):
    with pytest.raises(InputError, match="prefix length"):
        attnlib.prefix_losses(tiny_model(), torch.zeros(3, 13, dtype=torch.int64), [length])


def test_an_unknown_precision(tiny_model):
    with pytest.raises(InputError, match="precision is one of"):
        attnlib.window_losses(
            tiny_model(), torch.zeros(3, 13, dtype=torch.int64), precision="float16"
        )


def test_a_signal_that_cannot_be_transformed():
    for bad, message in (
        (torch.ones(16, dtype=torch.float16), "float32 or float64"),
        (torch.full((16,), np.nan), "not finite"),
    ):
        with pytest.raises(InputError, match=message):
            attnlib.morlet_cwt(bad, [2.0])


@pytest.mark.parametrize("lag", [[0.0, np.nan], [], [[1.0]]])
def test_lags_that_are_none(lag):
    with pytest.raises(InputError, match="finite numbers"):
        attnlib.lag_window(lag, 2.0)


def test_a_basis_of_other_layers():
    u = xr.DataArray(
        np.random.default_rng(0).normal(size=(2, 5, 4, 4)),
        {"layer": [1, 2]},
        ("layer", "snapshot", "query", "key"),
    )
    basis = u.isel(snapshot=slice(3)).rename(snapshot="mode")
    attnlib.projection_error(u, basis)
    for other in (basis.assign_coords(layer=[2, 1]), basis.isel(layer=[0])):
        with pytest.raises(InputError, match="along layer"):
            attnlib.projection_error(u, other)


def test_coefficients_and_counts_of_something_else():
    counts = attnlib.text_counts(list("abcdefgh"))
    good = xr.DataArray(np.arange(8.0), dims="snapshot")
    attnlib.count_correlations(good, counts, 10)
    with pytest.raises(InputError, match="dimension snapshot"):
        attnlib.count_correlations(good.rename(snapshot="document"), counts)
    with pytest.raises(InputError, match="count, snapshot"):
        attnlib.count_correlations(good, counts.isel(count=0))
    with pytest.raises(InputError, match="tokens are ids"):
        attnlib.token_share(rows(), np.zeros((4, 9)), [0])
    with pytest.raises(InputError, match="those of rows"):
        attnlib.token_share(rows().drop_vars("query"), np.zeros((4, 9), dtype=int), [0])
    with pytest.raises(InputError, match="not finite"):
        attnlib.token_share(rows() * np.nan, np.zeros((4, 9), dtype=int), [0])
    with pytest.raises(InputError, match="snapshot, query"):
        attnlib.strongest_rows(rows().isel(query=0), 1)
    with pytest.raises(InputError, match="not finite"):
        attnlib.strongest_rows(rows() * np.nan, 1)
    with pytest.raises(InputError, match="one coefficient a document"):
        attnlib.strongest_rows(rows(), 1, rows().isel(snapshot=[0], query=0))


def test_documents_that_are_all_the_same():
    one = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)).tril().softmax(-1).tril()
    same = one.expand(6, 24, 24).contiguous()
    with pytest.raises(InputError, match="do not vary"):
        attnlib.pod(same, [np.inf], 1)
    found = attnlib.coherence(same, 2.0)
    assert not bool(found["significant"].any())
