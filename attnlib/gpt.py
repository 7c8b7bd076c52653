"""A GPT in one short file: pre-LN decoder with the kinds of attention that the book compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import nn

from .attention import NORMALIZE_OVER, EnergyGatedAttention, SoftmaxAttention
from .device import in_evaluation
from .errors import InputError, check_whole
from .linear import LinearAttention, LinearSDAttention, LinearState
from .sd import SDAttention

PLAIN_KINDS = {
    "softmax": SoftmaxAttention,
    "sd": SDAttention,
    "linear": LinearAttention,
    "linear-sd": LinearSDAttention,
}
ATTENTION_KINDS = ("softmax", "ega-1", "ega-2", "ega-c", "sd", "linear", "linear-sd")
EGA_C_FILTERS = (3, 7, 15, 31)


def _check_whole(name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is a positive whole number, not {value!r}")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. The defaults are the exact shape of Zeris 2026 (BASE, 4,816,640 parameters).

    Parameters
    ----------
    n_layer, d_model, context, vocab_size : int
        Layers, width, longest window in tokens, vocabulary.
    n_head : int or tuple of int
        Heads a layer; a tuple gives one number per layer (and then `head_size` is required).
    attention : str or tuple of str
        ``"softmax"``, ``"ega-1"``, ``"ega-2"`` (1 or 2 linear gate scales), ``"ega-c"`` (causal
        convolutions of lengths 3, 7, 15, 31), ``"sd"`` (skew routing less positive damping),
        ``"linear"`` or ``"linear-sd"`` (ELU + 1 in the place of the exponential); a tuple gives one
        kind per layer.
    head_size : int or tuple of int, optional
        ``d_model // n_head`` by default; a tuple gives one size per layer.
    dropout : float
        On embeddings, attention weights and both residual branches.
    norm : bool
        Layer normalisation (pre-LN and final); False leaves it out.
    normalize_over : str
        What energy-gated attention standardises its energies over.
    init_std, embedding_std, residual_std : float
        Deviation of the initial weights of layers, of embeddings, and of the layers that write
        into the residual stream (by default that of the others). The published 0.02 suits wide
        models; narrow ones learn much sooner with more.
    """

    n_layer: int = 6
    n_head: int | tuple[int, ...] = 8
    d_model: int = 256
    context: int = 256
    vocab_size: int = 65
    attention: str | tuple[str, ...] = "softmax"
    head_size: int | tuple[int, ...] | None = None
    dropout: float = 0.1
    norm: bool = True
    normalize_over: str = "sequence"
    init_std: float = 0.02
    embedding_std: float = 0.02
    residual_std: float | None = None

    def __post_init__(self):
        for name in ("n_layer", "d_model", "context", "vocab_size"):
            _check_whole(name, getattr(self, name))
        for value in self.per_layer("n_head"):
            _check_whole("n_head", value)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout lies in [0, 1), not {self.dropout!r}")
        residual = self.init_std if self.residual_std is None else self.residual_std
        for std in (self.init_std, self.embedding_std, residual):
            if not isinstance(std, (int, float)) or not 0 < std < 10:
                raise InputError(f"deviations of weights are positive, and below 10, not {std}")
        if self.normalize_over not in NORMALIZE_OVER:
            raise InputError(f"normalize_over is one of {NORMALIZE_OVER}")
        for kind in self.per_layer("attention"):
            if kind not in ATTENTION_KINDS:
                raise InputError(f"attention is one of {ATTENTION_KINDS}, not {kind!r}")
        for value in self.per_layer("head_size"):
            if value is not None:
                _check_whole("head_size", value)
        if self.head_size is None and not isinstance(self.n_head, int):
            raise InputError("with a number of heads per layer, give head_size as well")
        if self.head_size is None and self.d_model % self.n_head:
            raise InputError(
                f"d_model={self.d_model} is not a multiple of n_head={self.n_head}: "
                "choose one that is, or give head_size"
            )

    def per_layer(self, name: str) -> tuple:
        """The value of `attention`, `n_head` or `head_size` for each layer."""
        value = getattr(self, name)
        if not isinstance(value, (tuple, list)):
            return (value,) * self.n_layer
        if len(value) != self.n_layer:
            raise InputError(f"{name} names {len(value)} layers, but the model has {self.n_layer}")
        return tuple(value)

    def sized(self, size: str) -> GPTConfig:
        """The same model at another size, "LAYERSxWIDTHxHEADS", as in "12x768x12"."""
        parts = str(size).split("x")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise InputError(f"a size is layers x width x heads, as in 12x768x12, not {size!r}")
        n_layer, d_model, n_head = map(int, parts)
        return replace(self, n_layer=n_layer, d_model=d_model, n_head=n_head, head_size=None)

    @classmethod
    def from_plan(cls, plan, base: GPTConfig | None = None) -> GPTConfig:
        """The model that a plan of :func:`attnlib.prescribe` asks for, to be trained.

        Parameters
        ----------
        plan : xarray.Dataset
            Layers that it recommends to be linear are; all have the head sizes that it gives. A
            recommended rank is left out: it is a cut of trained weights.
        base : GPTConfig, optional
            What the plan leaves open; by default the model that it was made for, if that was a GPT.

        Returns
        -------
        GPTConfig

        Raises
        ------
        InputError
            No plan, a plan of another number of layers than `base`, one that makes gated layers of
            `base` linear, or one for a transformers model without a `base`.
        """
        from .plans import planned_config

        return planned_config(plan, base)

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> GPTConfig:
        """Inverse of :meth:`to_dict`; an unknown name is refused."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise InputError(f"unknown model parameter(s): {', '.join(unknown)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _make_attention(config: GPTConfig, layer: int) -> nn.Module:
    names = ("attention", "n_head", "head_size")
    kind, n_head, size = (config.per_layer(name)[layer] for name in names)
    shape = (config.d_model, n_head, size, config.dropout)
    if kind in PLAIN_KINDS:
        return PLAIN_KINDS[kind](*shape)
    gate = {"filters": EGA_C_FILTERS} if kind == "ega-c" else {"n_scales": int(kind[-1])}
    return EnergyGatedAttention(*shape, **gate, normalize_over=config.normalize_over)


class Block(nn.Module):
    """Attention and a GELU feed-forward of four times the width, each in a residual branch."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        d = config.d_model
        self.norm_1 = nn.LayerNorm(d) if config.norm else nn.Identity()
        self.attention = _make_attention(config, layer)
        self.norm_2 = nn.LayerNorm(d) if config.norm else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, need_weights: bool = False):
        y, weights = self.attention(self.norm_1(x), need_weights)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm_2(x))), weights

    def decode(self, x, cache):
        """``(B, T, d)`` of tokens that follow on those in `cache`, and the new cache."""
        y, cache = self.attention.decode(self.norm_1(x), cache)
        x = x + y
        return x + self.mlp(self.norm_2(x)), cache


class GPT(nn.Module):
    """Decoder-only transformer: learned positions, pre-LN, tied output head.

    Parameters
    ----------
    config : GPTConfig
    seed : int
        Seeds the initial weights, without touching the global random state.
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # the layers' own initialisation draws numbers
            self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
            self.position_embedding = nn.Embedding(config.context, config.d_model)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.norm = nn.LayerNorm(config.d_model) if config.norm else nn.Identity()
        generator = torch.Generator().manual_seed(check_whole("seed", seed, 0))
        residual = config.init_std if config.residual_std is None else config.residual_std
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
                std = config.init_std
                if isinstance(module, nn.Embedding):
                    std = config.embedding_std
                elif name.endswith(("attention.proj", "mlp.2")):
                    std = residual
                nn.init.normal_(module.weight, std=std, generator=generator)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def n_parameters(self) -> int:
        """Number of weights; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        on_attention: Callable[[int, torch.Tensor], None] | None = None,
    ):
        """Next-token logits.

        Parameters
        ----------
        tokens : torch.Tensor
            ``(B, T)`` int64, T at most ``config.context``.
        targets : torch.Tensor, optional
            ``(B, T)``; then the mean cross-entropy in nats comes back as well.
        on_attention : callable, optional
            Called as ``on_attention(layer, weights)`` with layer counted from 0 and weights
            ``(B, H, T, T)``, one layer at a time, so that no more than one is held.

        Returns
        -------
        logits ``(B, T, vocab_size)``, loss (scalar or None)
        """
        n_tokens = tokens.shape[1]
        if n_tokens > self.config.context:
            raise InputError(
                f"a window of {n_tokens} tokens is longer than the model's context of "
                f"{self.config.context}: shorten it, or train with a longer context"
            )
        positions = torch.arange(n_tokens, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for layer, block in enumerate(self.blocks):
            x, weights = block(x, need_weights=on_attention is not None)
            if on_attention is not None:
                on_attention(layer, weights)
        logits = F.linear(self.norm(x), self.token_embedding.weight)  # (B, T, vocab)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, caches: list | None = None, start: int = 0):
        """Next-token logits of tokens that follow on others, each layer looking them up in a cache.

        Parameters
        ----------
        tokens : torch.Tensor
            ``(B, T)``: new tokens. The model is taken to be in evaluation mode.
        caches : list, optional
            Of each layer, as the call on the tokens before these returned them.
        start : int
            How many tokens came before.

        Returns
        -------
        logits : torch.Tensor
            ``(B, vocab_size)``, of the token after the last.
        caches : list
            Keys and values, growing with the tokens; of linear attention a state that does not.

        Raises
        ------
        InputError
            More tokens than the context, caches that are not of each layer and of `start` tokens,
            or energy-gated attention, whose gates look ahead.
        """
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise InputError(
                f"tokens are (B, T), with at least one to go on from, not {tuple(tokens.shape)}"
            )
        start = check_whole("start", start, 0)
        self._check_caches(caches, start)
        stop = start + tokens.shape[1]
        if stop > self.config.context:
            raise InputError(f"{stop} tokens are more than the context of {self.config.context}")
        if any(block.attention.attend_cached is None for block in self.blocks):
            raise InputError("energy-gated attention has no cache: its gates look at later tokens")
        positions = torch.arange(start, stop, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        new = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block.decode(x, cache)
            new.append(cache)
        return F.linear(self.norm(x[:, -1]), self.token_embedding.weight), new

    def _check_caches(self, caches, start: int) -> None:
        if (caches is None) != (start == 0):
            raise InputError(
                f"{start} token(s) came before, but there are caches of others or none"
            )
        if caches is not None and len(caches) != len(self.blocks):
            raise InputError(f"{len(caches)} caches for {len(self.blocks)} layers")
        for block, cache in zip(self.blocks, caches or (), strict=False):
            linear = isinstance(cache, LinearState)
            if linear != getattr(block.attention, "is_linear", False):
                raise InputError("the caches are of a model of another kind of attention")
            if not linear and cache[0].shape[2] != start:
                raise InputError(f"the caches are of {cache[0].shape[2]} tokens, not of {start}")

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        n_new: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Continue ``tokens`` ``(T,)`` by `n_new` sampled tokens; returns ``(T + n_new,)``.

        Within the context each new token is one step with caches (:meth:`decode`). Beyond it the
        window slides, every position changes, and the whole window is computed anew.
        """
        if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
            raise InputError(
                "tokens to go on from are whole numbers (int64) of shape (T,), at least one, not "
                f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        if not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
            raise InputError(f"temperature is a positive number, not {temperature!r}")
        if top_k is not None:
            top_k = min(check_whole("top_k", top_k), self.config.vocab_size)
        n_new = check_whole("n_new", n_new, 0)
        generator = torch.Generator(device=tokens.device).manual_seed(check_whole("seed", seed, 0))
        with in_evaluation(self):
            return self._generate(tokens, n_new, temperature, top_k, generator)

    def _generate(self, tokens, n_new, temperature, top_k, generator):
        cached = all(block.attention.attend_cached is not None for block in self.blocks)
        caches, done = None, 0
        for _ in range(n_new):
            if cached and len(tokens) <= self.config.context:
                logits, caches = self.decode(tokens[None, done:], caches, done)
                done = len(tokens)
            else:
                logits = self(tokens[None, -self.config.context :])[0][:, -1]
            logits = logits[0].float() / temperature
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, new])
        return tokens
