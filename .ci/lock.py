"""Resolve the newest versions that pyproject.toml allows (``make lock``).

Writes ``requirements.lock`` for pip (hashes for all but torch and what only its CUDA builds need),
``environment.yml`` for conda (the same versions, by pip), and ``requirements-bench.lock``: what the
extra `bench` needs besides, at versions that go with the first.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# Exact versions for Python 3.11 and newer, on every platform. Made by `make lock`; do not edit.
# torch has no hash, and what only its CUDA builds need is left out: the build that fits the
# machine is installed first (see the Makefile).
"""
BENCH_HEAD = """\
# Exact versions of what the benchmarks compare with, to be installed after requirements.lock and
# without dependencies (`make bench` does). Made by `make lock`; do not edit.
"""
CUDA_ONLY = re.compile(r"^(nvidia-|cuda-|triton==)")
CONDA = """\
# The versions of requirements.lock for conda, made by `make lock`; do not edit.
#   conda env create -f environment.yml && conda activate attention-measured
#   snakemake --cores all --config preset=quick -- book
name: attention-measured
channels: [conda-forge]
dependencies:
  - python=3.11
  - make
  - pip
  - pip:
"""


def resolve(extras: list[str], constraint: str) -> list[str]:
    """Blocks of a lock file, one a package, hashes included; torch and its CUDA are left out."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml"]
    command += [part for extra in extras for part in ("--extra", extra)]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--quiet", "--constraint", "-"]
    text = subprocess.run(
        command, cwd=ROOT, input=constraint, capture_output=True, text=True, check=True
    ).stdout
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
    return [b for b in blocks if not CUDA_ONLY.match(b) and not b.startswith("torch==")]


def pin(block: str) -> str:
    """``name==version ; marker``"""
    return block.splitlines()[0].rstrip(" \\")


def lock_bench(locked: str) -> None:
    """Write the lock of the extra `bench`, less what the text of requirements.lock holds.

    A package stays in both where the first lock has it on some platforms only.
    """
    there = {pin(b) for b in re.split(r"\n(?=[A-Za-z0-9])", locked)}
    blocks = [b for b in resolve(["bench"], locked) if not {pin(b), pin(b).split(" ;")[0]} & there]
    (ROOT / "requirements-bench.lock").write_text(BENCH_HEAD + "\n".join(blocks) + "\n")


def main() -> None:
    """Keep torch where it is pinned (its build is chosen by hand) and renew the rest."""
    lock = ROOT / "requirements.lock"
    torch = re.search(r"^torch==\S+", lock.read_text(), re.MULTILINE).group()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [extra for extra in project["optional-dependencies"] if extra != "bench"]
    blocks = resolve(extras, f"{torch}\n")
    text = f"{HEAD}{torch}\n" + "\n".join(blocks) + "\n"
    lock.write_text(text)
    pins = [torch, *map(pin, blocks)]
    lines = [f"      - {json.dumps(one)}\n" for one in pins] + ["      - -e .\n"]
    (ROOT / "environment.yml").write_text(CONDA + "".join(lines))
    lock_bench(text)


if __name__ == "__main__":
    main()
