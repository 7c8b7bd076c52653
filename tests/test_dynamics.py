"""Eigenvalues of interactions, the residual stream, embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnlib import (
    InputError,
    embedding_shift,
    iter_interactions,
    largest_real,
    residual_scale,
    truncate_routing,
)


def tokens_of(n=3, t=10, vocab=11):
    return torch.randint(0, vocab, (n, t), generator=torch.Generator().manual_seed(0))


def test_largest_real_is_that_of_the_full_matrices(tiny_model):
    model, tokens = tiny_model(), tokens_of()
    found = largest_real(model, tokens)
    for layer, _, query, key in iter_interactions(model, tokens):
        full = torch.linalg.eigvals((query @ key.mT).double()).real.amax(-1)  # (n, H)
        got = found["largest_real"].sel(layer=layer).transpose("snapshot", "head")
        np.testing.assert_allclose(got, full, rtol=1e-4, atol=1e-6)
    assert np.isinf(found["bound"]).all()


def test_s_d_attention_keeps_its_theorem(tiny_model):
    found = largest_real(tiny_model(attention="sd"), tokens_of())
    assert (found["largest_real"] <= found["bound"] + 1e-9).all()
    assert (found["largest_real"] < 0).all()


def test_residual_scale_is_that_of_the_stream(tiny_model):
    model, tokens = tiny_model(), tokens_of()
    found = residual_scale(model, tokens)
    with torch.no_grad():
        x = model.token_embedding(tokens) + model.position_embedding(torch.arange(10))
        for depth, block in enumerate([None, *model.blocks]):
            x = block(x)[0] if block else x
            wanted = x.square().mean((1, 2)).sqrt()
            np.testing.assert_allclose(found.sel(depth=depth), wanted, rtol=1e-5)
    with pytest.raises(InputError, match="Linear"):
        residual_scale(torch.nn.Linear(2, 2), tokens)


def test_embeddings_move_when_the_model_is_cut(hugging_face):
    model = hugging_face("bert")
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    shift = embedding_shift(model, tokens)
    assert float(shift(model).abs().max()) < 1e-12
    with truncate_routing(model, 0):
        assert float(shift(model).min()) > 1e-6
