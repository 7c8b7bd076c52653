"""Results files: NetCDF, atomic, with provenance, and refused when damaged or foreign."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import xarray as xr

from .errors import InputError

FORMAT = "attnlib results 1"
VERSIONED = ("attnlib", "torch", "numpy", "scipy", "xarray", "pywavelets", "transformers")
_REAL, _IMAG = "__real", "__imag"


def values_digest(data: xr.Dataset) -> str:
    """SHA-256 over names, dimensions, types and values of all variables and coordinates.

    Two runs of the same command on the same machine have the same digest; times and provenance,
    which are attributes, do not enter.
    """
    digest = hashlib.sha256()
    for name in sorted(map(str, data.variables)):
        variable = data[name]
        digest.update(f"{name} {variable.dims} {variable.shape}".encode())
        values = variable.values
        if values.dtype.kind in "OUT":
            digest.update(json.dumps([str(v) for v in values.ravel()]).encode())
        else:
            # Booleans and integers by value: their width may change on the way through a file.
            kinds = {"b": "i8", "i": "i8", "u": "i8", "f": "f8", "c": "c16"}
            kind = kinds.get(values.dtype.kind)
            if kind is None:
                raise InputError(f"'{name}' holds {values.dtype}: numbers, booleans and text only")
            digest.update(np.ascontiguousarray(values).astype(f"<{kind}").tobytes())
    return digest.hexdigest()


def provenance(parameters: dict | None = None, corpus_hash: str = "", device: str = "") -> dict:
    """Attributes that say where a result comes from.

    Parameters
    ----------
    parameters : dict, optional
        What the run was asked for.
    corpus_hash, device : str

    Returns
    -------
    dict
        ``parameters`` and ``versions`` (JSON), ``git_commit`` (with ``+changes`` where the tree
        has some), ``corpus_hash``, ``device``.
    """
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "parameters": json.dumps(parameters or {}, sort_keys=True, default=str),
        "versions": json.dumps(versions),
        "git_commit": _git_commit(),
        "corpus_hash": corpus_hash,
        "device": str(device),
    }


def _git_commit() -> str:
    here = Path(__file__).resolve().parent

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _pack_complex(data: xr.Dataset) -> xr.Dataset:
    for name in [n for n in data.variables if data[n].dtype.kind == "c"]:
        if name in data.coords:
            raise InputError(f"coordinate '{name}' is complex: make it a variable")
        real, imag = data[name].real, data[name].imag
        data = data.drop_vars(name).assign({f"{name}{_REAL}": real, f"{name}{_IMAG}": imag})
    return data


def _unpack_complex(data: xr.Dataset) -> xr.Dataset:
    for packed in [n for n in data.data_vars if str(n).endswith(_REAL)]:
        name = packed.removesuffix(_REAL)
        whole = data[packed] + 1j * data[f"{name}{_IMAG}"]
        data = data.drop_vars([packed, f"{name}{_IMAG}"]).assign({name: whole})
    return data


def check_writable(path) -> Path:
    """The path of a results file that can be written, or the error that `save` would end in."""
    path = Path(path)
    if path.suffix != ".nc":
        raise InputError(f"a results file ends in .nc, not {path.name!r}")
    if path.is_dir():
        raise InputError(f"{path} is a folder: a results file needs another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # also tells of a full or read-only disk
            pass
    except OSError as error:
        raise InputError(f"cannot write to {path.parent}: {error}") from error
    return path


def save(
    dataset: xr.Dataset,
    path,
    *,
    parameters: dict | None = None,
    corpus_hash: str = "",
    device: str = "",
) -> Path:
    """Write a results file, whole or not at all.

    Parameters
    ----------
    dataset : xarray.Dataset
        Complex variables are stored as two real ones.
    path : path-like
        Ends in ``.nc``. Folders are made; an earlier file is replaced only once the new one is
        complete.
    parameters, corpus_hash, device
        Provenance; see :func:`attnlib.provenance`.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    InputError
        The folder cannot be written.
    """
    path = Path(path)
    packed = _pack_complex(dataset.drop_encoding())
    packed = packed.assign_attrs(
        **provenance(parameters, corpus_hash, device),
        attnlib_format=FORMAT,
        values_sha256=values_digest(packed),
    )
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        packed.to_netcdf(fresh, engine="h5netcdf")
        with xr.open_dataset(fresh, engine="h5netcdf") as written:
            if values_digest(written) != packed.attrs["values_sha256"]:
                raise InputError(f"the values of {path.name} do not survive NetCDF: see its attrs")
        with open(fresh, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}; choose another folder") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return path


def load(path) -> xr.Dataset:
    """Read a results file into memory, checking that it is ours and undamaged.

    Raises
    ------
    InputError
        No such file (naming the notebook to run), not a results file of ours, or values that do
        not match the hash stored with them.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"no results file {path}: run the notebook {path.stem} first, with the same results "
            "folder (python -m attnlib run ... --out DIR)"
        )
    try:
        with xr.open_dataset(path, engine="h5netcdf") as handle:
            data = handle.load()
    # HDF5 reports damage by whatever its layers happen to raise.
    except Exception as error:
        raise InputError(f"{path} cannot be read ({error}): delete it and run again") from error
    if data.attrs.get("attnlib_format") != FORMAT or "values_sha256" not in data.attrs:
        raise InputError(f"{path} is not a results file of this version of attnlib")
    if values_digest(data) != data.attrs["values_sha256"]:
        raise InputError(f"{path} is damaged (wrong hash): delete it and run again")
    return _unpack_complex(data)
