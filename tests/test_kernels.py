"""Kernels of heads against the interactions that models make of them."""

from __future__ import annotations

import pytest
import torch

from attnlib import InputError, head_kernels, iter_interactions


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "bert"])
def test_kernels_make_the_interaction_of_one_position(hugging_face, kind):
    """At one position rotations cancel: x W_Q W_K^T x is the diagonal of the interaction."""
    model = hugging_face(kind)
    w_q, w_k = head_kernels(model)
    tokens = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    inputs: dict[int, torch.Tensor] = {}
    names = {"gpt2": "attn", "llama": "self_attn", "gpt_neox": "attention", "bert": "self"}
    modules = [
        m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] == names[kind] and "." in n
    ]
    hooks = [
        m.register_forward_pre_hook(
            lambda m, args, kwargs, i=i: inputs.update(
                {i: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
        for i, m in enumerate(modules)
    ]
    found = [(q, k) for _, _, q, k in iter_interactions(model, tokens)]
    for hook in hooks:
        hook.remove()
    assert len(found) == len(modules) == len(w_q)
    for layer, (query, key) in enumerate(found):
        x = inputs[layer]
        expected = torch.einsum("ntd,hdr,her,nte->nht", x, w_q[layer], w_k[layer], x)
        torch.testing.assert_close((query * key).sum(-1), expected, rtol=1e-3, atol=1e-4)


def test_kernels_of_our_model(tiny_model):
    model = tiny_model()
    w_q, w_k = head_kernels(model)
    assert w_q.shape == (2, 2, 16, 8)
    attention = model.blocks[1].attention
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    query, key = attention.factors(x)
    torch.testing.assert_close(x @ w_q[1] @ w_k[1].mT @ x.mT, (query @ key.mT)[0])


def test_models_without_kernels(tiny_model):
    with pytest.raises(InputError, match="Linear is neither"):
        head_kernels(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="different number or size"):
        head_kernels(tiny_model(n_head=(2, 3), head_size=5))
