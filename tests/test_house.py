"""The house: lock files agree, files are small, the README's commands exist."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from attnlib.runner import project_root

ROOT = project_root()


def pins(lock="requirements.lock"):
    text = (ROOT / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_locked_within_its_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, part in lists.items():
        locked = pins() | (pins("requirements-bench.lock") if extra == "bench" else {})
        for text in (t for t in part if not t.startswith("attnlib")):
            wanted = Requirement(text)
            assert locked[normal(wanted.name)] in wanted.specifier, text


def test_the_benchmarks_lock_adds_and_changes_nothing():
    locked, peers = pins(), pins("requirements-bench.lock")
    assert not [name for name in peers if locked.get(name, peers[name]) != peers[name]]
    assert not any(re.match("torch|nvidia|cuda|triton", name) for name in peers)


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-bench.lock"])
def test_all_but_torch_have_hashes(lock):
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / lock).read_text())[1:]
    for block in blocks:
        assert ("--hash=sha256:" in block) != block.startswith("torch=="), block[:60]
    assert not any(re.match("nvidia|cuda|triton", b) for b in blocks)


def test_conda_has_the_same_versions():
    pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    lock = (ROOT / "requirements.lock").read_text()
    lines = [ln.rstrip(" \\") for ln in lock.splitlines() if re.match(r"[A-Za-z0-9]", ln)]
    assert pip[:-1] == lines
    assert pip[-1] == "-e ."


def test_the_readme_commands_are_targets():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"make (book|specimens|test|lab|sync|bench)\b", (ROOT / "README.md").read_text())
    )
    assert named <= targets
    assert {"book", "test", "lab", "sync", "lint", "bench", "clean"} <= targets


def test_ci_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script
    assert "pip install" not in script


def test_importing_the_module_is_light():
    code = "import sys, attnlib; print({'torch', 'xarray', 'matplotlib'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("path", sorted((ROOT / "attnlib").rglob("*.py")), ids=lambda p: p.name)
def test_files_of_the_module_are_small(path):
    assert len(path.read_text().splitlines()) <= 450


def test_no_outputs_and_no_large_files_in_git():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    kept = [f for f in tracked if re.fullmatch(r"specimens/.*/model\.safetensors", f)]
    rest = sorted(set(tracked) - set(kept))
    assert not [f for f in rest if f.endswith((".ipynb", ".nc", ".safetensors"))]
    assert not [f for f in rest if (ROOT / f).is_file() and (ROOT / f).stat().st_size > 400_000]
