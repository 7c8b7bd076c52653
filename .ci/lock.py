"""Resolve the newest versions that pyproject.toml allows (``make lock``).

Writes ``requirements.lock`` for pip (hashes for all but torch and what only its CUDA builds need)
and ``environment.yml`` for conda (the same versions, by pip).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# Exact versions for Python 3.11 and newer, on every platform. Made by `make lock`; do not edit.
# torch has no hash, and what only its CUDA builds need is left out: the build that fits the
# machine is installed first (see the Makefile).
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


def resolve(torch: str) -> list[str]:
    """Blocks of the lock file, one a package, hashes included."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--quiet", "--constraint", "-"]
    text = subprocess.run(
        command, cwd=ROOT, input=f"{torch}\n", capture_output=True, text=True, check=True
    ).stdout
    return re.split(r"\n(?=[A-Za-z0-9])", text.strip())


def main() -> None:
    """Keep torch where it is pinned (its build is chosen by hand) and renew the rest."""
    lock = ROOT / "requirements.lock"
    torch = re.search(r"^torch==\S+", lock.read_text(), re.MULTILINE).group()
    blocks = [b for b in resolve(torch) if not CUDA_ONLY.match(b) and not b.startswith("torch==")]
    lock.write_text(f"{HEAD}{torch}\n" + "\n".join(blocks) + "\n")
    pins = [torch, *(b.splitlines()[0].rstrip(" \\") for b in blocks)]
    lines = [f"      - {json.dumps(pin)}\n" for pin in pins] + ["      - -e .\n"]
    (ROOT / "environment.yml").write_text(CONDA + "".join(lines))


if __name__ == "__main__":
    main()
