"""Fixtures that more than one test file uses."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import settings

from attnlib import GPT, GPTConfig
from attnlib.runner import project_root

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("repeatable")

TINY = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 24, "vocab_size": 11, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are faster on one thread, and results do not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny_model():
    """A GPT small enough to run in a millisecond, with weights large enough to attend unevenly."""

    def make(**changes):
        model = GPT(GPTConfig(**{**TINY, **changes}), seed=3).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embedding" not in name:
                    parameter.mul_(8)
        return model

    return make


def random_fields(n_layer=2, n=12, t=20, seed=0, rank=None):
    """Causal row-stochastic fields, optionally with few directions of variation."""
    rng = np.random.default_rng(seed)
    if rank is None:
        logits = rng.normal(size=(n_layer, n, t, t))
    else:
        patterns = rng.normal(size=(n_layer, rank, t, t))
        logits = np.einsum("lrij,lnr->lnij", patterns, rng.normal(size=(n_layer, n, rank)))
    values = np.exp(logits) * np.tri(t)
    values /= values.sum(-1, keepdims=True)
    return xr.DataArray(
        values.astype(np.float32),
        {"layer": np.arange(1, n_layer + 1)},
        ("layer", "snapshot", "query", "key"),
    )


@pytest.fixture
def make_fields():
    return random_fields


def run_graph(target, *options, cwd=None):
    """Run Snakemake on a target as `make` does, with options; returns the completed process."""
    command = [sys.executable, "-m", "snakemake", "--cores", str(os.cpu_count())]
    command += ["--quiet", "rules", "host", "reason", "--rerun-incomplete", *options]
    command += ["--config", "preset=smoke", "--", target]
    return subprocess.run(
        command, cwd=cwd or project_root(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="session")
def smoke():
    """The whole graph at smoke size, book included; the folder of its results."""
    command = [sys.executable, "-m", "attnlib", "make", "book", "--preset", "smoke"]
    done = subprocess.run(
        command, cwd=project_root(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return project_root() / "results" / "smoke"


@pytest.fixture(scope="session")
def hugging_face():
    """Small transformers models with random weights and uneven attention."""
    return _hugging_face


def _hugging_face(kind):
    from transformers import AutoConfig, AutoModel

    shapes = {
        "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 50},
        "llama": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32,
            "vocab_size": 50,
        },
        "gpt_neox": {
            "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
            "intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": 50,
        },
        "bert": {
            "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
            "intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": 50,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **shapes[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)  # uneven attention
    return model
