"""The graph reruns what a change concerns, and nothing else (dry runs on a copy)."""

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import run_graph

from attnlib.runner import notebook_names, project_root

NOTEBOOKS = {f"notebook_{name}" for name in notebook_names()}
PAGES = {"pages", "book"}


def rules(*numbers):
    """Rules of the notebooks with these numbers, and of what reads them: the ledger, the book."""
    return {n for n in NOTEBOOKS if n.split("_")[1] in {*numbers, "20"}} | PAGES


@pytest.fixture(scope="module")
def built(smoke, tmp_path_factory):
    """A copy of the tree with everything built; times are kept."""
    copy = tmp_path_factory.mktemp("graph") / "tree"
    leave = shutil.ignore_patterns(".git", ".venv", "mathjax", "quick", "paper", "log", "*cache*")
    shutil.copytree(project_root(), copy, ignore=leave)
    return copy


@pytest.fixture
def tree(built, tmp_path):
    shutil.copytree(built, tmp_path / "tree")
    return tmp_path / "tree"


def planned(tree):
    """Rules that a dry run would execute."""
    done = run_graph("book", "--dry-run", cwd=tree)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    if "Nothing to be done" in text:
        return set()
    return set(re.findall(r"^(notebook_\w+|pages|book) +\d+$", text, re.MULTILINE))


def append(path, text="\n"):
    with open(path, "a") as file:
        file.write(text)


def test_nothing_changed_nothing_runs(tree):
    assert planned(tree) == set()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("attnlib/stability.py", rules("06")),
        ("attnlib/resampling.py", rules("05", "07", "10")),
        ("attnlib/surgery.py", rules("14", "15", "16", "18")),
        ("attnlib/plots/ranks.py", NOTEBOOKS | PAGES),
        ("notebooks/07_complexity.md", rules("07")),
        ("notebooks/03_lag_and_sign.md", rules("03") - rules() | PAGES),
        ("book/notation.md", PAGES),
    ],
)
def test_a_changed_file_reruns_what_depends_on_it(tree, file, expected):
    append(tree / file)
    assert planned(tree) == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("n_fine: 6", "n_fine: 7", rules("05")),
        ("steps: 20", "steps: 21", NOTEBOOKS | PAGES),
    ],
)
def test_a_changed_parameter_reruns_what_it_concerns(tree, old, new, expected):
    path = tree / "config" / "smoke.yaml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert planned(tree) == expected


def test_a_missing_result_is_made_again(tree):
    (tree / "results" / "smoke" / "04_scalogram.nc").unlink()
    assert planned(tree) == rules("04")


def test_a_mistake_in_the_preset_stops_the_graph_before_anything_runs(tree):
    append(tree / "config" / "smoke.yaml", "  few_tolerancez: [3]\n")
    done = run_graph("book", "--dry-run", cwd=tree)
    assert done.returncode != 0
    assert "Did you mean 'few_tolerances'" in done.stdout + done.stderr


def test_a_killed_build_continues(tree):
    """Snakemake's lock outlives a kill; ours does not, and clears the way."""
    (tree / "results" / "smoke" / "07_complexity.nc").unlink()
    command = [sys.executable, "-m", "attnlib", "make", "notebooks", "--preset", "smoke"]
    process = subprocess.Popen(
        command, cwd=tree, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stderr:
        if "07_complexity: running" in line:
            break
    time.sleep(2)
    process.send_signal(signal.SIGKILL)  # Snakemake itself: the command has become it
    process.wait()
    process.stderr.close()
    assert list((tree / ".snakemake" / "locks").iterdir())
    again = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert (tree / "results" / "smoke" / "07_complexity.nc").is_file()
