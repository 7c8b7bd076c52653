"""The command line: parameters are checked before anything runs."""

import json
import subprocess
import sys
import textwrap

import pytest

from attnlib import InputError
from attnlib.__main__ import main
from attnlib.runner import (
    check_parameters,
    find_notebook,
    modules_used,
    notebook_names,
    notebook_parameters,
    preset_parameters,
    project_root,
    results_folder,
    results_read,
    run_notebook,
    sync,
    used_parameters,
)

NOTEBOOK = textwrap.dedent(
    """\
    ---
    kernelspec:
      display_name: Python 3
      language: python
      name: python3
    ---

    # Small

    ```{code-cell} ipython3
    :tags: [parameters]

    size: int = 3  # how large
    rate: float = 0.5  # how fast
    names: list[str] = ["a"]  # which
    limit: int | None = None  # at most
    loud: bool = False  # whether
    out: str = "results/quick"  # folder
    ```

    ```{code-cell} ipython3
    from attnlib import store

    if size == 13:
        raise ValueError("thirteen is not allowed")
    if size == 14:
        import time
        time.sleep(60)
    if size == 15:
        import os
        os._exit(1)
    print(size * rate, names, limit, loud, out)
    ```
    """
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository of one notebook; the real runner, papermill and kernel."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_small.md").write_text(NOTEBOOK)
    (tmp_path / "_toc.yml").write_text("")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "quick.yaml").write_text("common:\n  size: 4\n01_small:\n  rate: 2.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(path):
    cells = json.loads(path.read_text())["cells"]
    return "".join(
        "".join(o.get("text", "")) for c in cells for o in c.get("outputs", []) if o.get("text")
    )


def test_parameters_are_read_with_type_default_and_comment(project):
    assert notebook_parameters("01_small")["limit"] == {
        "type": "int | None",
        "default": None,
        "comment": "at most",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"size": "7"}, {"size": 7}),
        ({"rate": "1e-3"}, {"rate": 0.001}),
        ({"rate": "2"}, {"rate": 2}),
        ({"names": '["x", "y"]'}, {"names": ["x", "y"]}),
        ({"names": "['x']"}, {"names": ["x"]}),
        ({"limit": "null"}, {"limit": None}),
        ({"limit": "5"}, {"limit": 5}),
        ({"loud": "true"}, {"loud": True}),
        ({"loud": "True"}, {"loud": True}),
        ({"out": "5"}, {"out": "5"}),
        ({"size": 8, "loud": True}, {"size": 8, "loud": True}),
    ],
)
def test_text_is_read_as_the_type_says(project, given, expected):
    assert check_parameters("01_small", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sise": "1"}, "Did you mean 'size'"),
        ({"n_heads": "1"}, "It has: size: int, rate: float"),
        ({"size": "1.5"}, "of type int, not '1.5'"),
        ({"size": "True"}, "of type int"),
        ({"size": "many"}, "of type int"),
        ({"rate": "fast"}, "of type float"),
        ({"rate": "nan"}, "of type float"),
        ({"names": "[1]"}, r"of type list\[str\]"),
        ({"loud": "1"}, "of type bool"),
        ({"limit": "x"}, r"int \| None"),
    ],
)
def test_misspelt_or_mistyped_parameters_are_refused(project, given, message):
    with pytest.raises(InputError, match=message):
        run_notebook("01_small", given, project / "results")
    assert not (project / "results").exists()  # nothing ran


def test_a_run_leaves_the_executed_notebook(project, capfd):
    assert main(["run", "1", "-p", "size=6", "--out", "here", "--no-progress"]) == 0
    path = project / "here" / "notebooks" / "01_small.ipynb"
    assert capfd.readouterr().out.strip() == str(path)
    assert printed(path) == "3.0 ['a'] None False here\n"


def test_presets_give_parameters_and_the_command_line_overrides(project):
    path = run_notebook("1", {"rate": "3"}, preset="quick", progress=False)
    assert path == project / "results" / "quick" / "notebooks" / "01_small.ipynb"
    assert printed(path).startswith("12.0 ['a']")


def test_a_failing_notebook_is_kept_and_the_error_is_short(project, capsys):
    out = project / "r"
    assert main(["run", "1", "-p", "size=13", "--out", str(out), "--no-progress"]) == 2
    shown = capsys.readouterr().err
    assert "ValueError: thirteen is not allowed" in shown
    assert len(shown.splitlines()) < 6
    assert (out / "notebooks" / "01_small.failed.ipynb").is_file()
    assert not (out / "notebooks" / "01_small.ipynb").exists()
    run_notebook("1", {}, out, progress=False)
    assert [p.name for p in (out / "notebooks").iterdir()] == ["01_small.ipynb"]


def test_another_build_is_refused_and_a_stale_lock_is_not_in_the_way(project):
    import fcntl

    from attnlib.graph import make

    with open(project / ".graph.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another build is running"):
            make("book", "quick")
    with pytest.raises(InputError, match="no preset 'fast'"):
        make("book", "fast")


def test_a_hung_cell_meets_its_limit(project):
    with pytest.raises(InputError, match="CellTimeoutError"):
        run_notebook("1", {"size": 14}, project / "r", time_limit=2, progress=False)


def test_a_dead_kernel_is_reported(project):
    with pytest.raises(InputError, match="DeadKernelError"):
        run_notebook("1", {"size": 15}, project / "r", progress=False)


def test_unknown_notebook_and_preset(project):
    with pytest.raises(InputError, match="did you mean '01_small'"):
        find_notebook("01_smal")
    with pytest.raises(InputError, match="there are: quick"):
        preset_parameters("fast", "01_small")


def test_a_preset_with_a_stranger_is_refused(project):
    path = project / "config" / "quick.yaml"
    path.write_text("common:\n  siz: 4\n02_other:\n  a: 1\n")
    with pytest.raises(InputError, match="02_other, siz"):
        preset_parameters("quick", "01_small")


@pytest.mark.parametrize("text", ["no equals sign", "=3"])
def test_malformed_parameter(project, text, capsys):
    assert main(["run", "1", "-p", text]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written(project):
    (project / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        results_folder(project / "file")


def test_two_parameter_cells_are_refused(project):
    path = project / "notebooks" / "01_small.md"
    cell = path.read_text().split("```{code-cell} ipython3\n:tags: [parameters]")[1].split("```")[0]
    extra = f"\n```{{code-cell}} ipython3\n:tags: [parameters]{cell}```\n"
    path.write_text(path.read_text() + extra)
    with pytest.raises(InputError, match="has 2 cells"):
        notebook_parameters("01_small")


def edit(paired, text):
    """Edit a paired notebook as Jupyter does: cells, outputs, its own kernel name."""
    notebook = json.loads(paired.read_text())
    notebook["cells"][0]["source"] = text
    stream = {"output_type": "stream", "name": "stdout", "text": "x"}
    notebook["cells"][1].update(outputs=[stream], execution_count=1)
    notebook["metadata"]["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    paired.write_text(json.dumps(notebook))


def test_sync_goes_both_ways_and_loses_nothing(project):
    (paired,) = sync()
    text = project / "notebooks" / "01_small.md"
    original = text.read_text()
    sync()
    assert text.read_text() == original  # nothing was edited
    edit(paired, "# Edited in Jupyter")
    sync()
    assert "# Edited in Jupyter" in text.read_text()
    assert "ipykernel" not in text.read_text()
    assert notebook_parameters("01_small")["size"]["default"] == 3  # the tag survived
    sync()
    assert '"x"' in paired.read_text()  # outputs stay
    text.write_text(text.read_text().replace("Edited in Jupyter", "Edited as text"))
    sync()
    assert "Edited as text" in paired.read_text()
    assert '"x"' in paired.read_text()


def test_sync_refuses_when_both_sides_were_edited(project):
    (paired,) = sync()
    text = project / "notebooks" / "01_small.md"
    edit(paired, "# Edited in Jupyter")
    text.write_text(text.read_text().replace("# Small", "# Edited as text"))
    before = text.read_text(), paired.read_text()
    with pytest.raises(InputError, match="both sides were edited"):
        sync()
    assert (text.read_text(), paired.read_text()) == before


def test_a_notebook_runs_once_at_a_time_in_a_folder(project):
    from filelock import FileLock

    (project / "r").mkdir()
    with FileLock(project / "r" / ".01_small.lock"):
        with pytest.raises(InputError, match="running already"):
            run_notebook("1", {}, project / "r", progress=False)
        run_notebook("1", {}, project / "other", progress=False)


def test_pages_say_their_preset(project):
    (project / "config" / "smoke.yaml").write_text("common:\n  size: 1\n")
    path = run_notebook("1", {}, preset="smoke", progress=False)
    first = json.loads(path.read_text())["cells"][0]["source"]
    assert "".join(first).startswith("# Small\n\n:::{warning}\nComputed with the preset `smoke`.")
    assert "preset" not in (project / "notebooks" / "01_small.md").read_text()


def test_paths_count_from_where_the_command_is_given(project, monkeypatch, capfd):
    below = project / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    assert main(["run", "1", "--out", "mine", "--no-progress"]) == 0
    assert (below / "mine" / "notebooks" / "01_small.ipynb").is_file()
    assert "below/mine" in printed(below / "mine" / "notebooks" / "01_small.ipynb")


def test_used_parameters_are_those_of_the_cell(project):
    namespace = {"size": 1, "rate": 2, "names": [], "limit": None, "loud": True, "out": "x", "y": 1}
    used = used_parameters("01_small", namespace)
    assert set(used) == {"size", "rate", "names", "limit", "loud"}


def test_list_shows_every_parameter(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in notebook_names():
        assert name in shown
        for key, about in notebook_parameters(name).items():
            assert f"{key}: {about['type']} = {about['default']!r}  # {about['comment']}" in shown


@pytest.mark.parametrize("preset", ["smoke", "paper"])
def test_presets_have_the_same_keys_and_fit_the_notebooks(preset):
    import yaml

    contents = {
        p: yaml.safe_load((project_root() / "config" / f"{p}.yaml").read_text())
        for p in (preset, "quick")
    }
    keys = [{k: set(v) for k, v in content.items()} for content in contents.values()]
    assert keys[0] == keys[1]
    for name in notebook_names():
        preset_parameters(preset, name)


def test_defaults_of_the_notebooks_are_the_quick_preset():
    for name in notebook_names():
        known = notebook_parameters(name)
        for key, value in preset_parameters("quick", name).items():
            assert known[key]["default"] == value, (name, key)


def test_every_parameter_has_a_comment():
    for name in notebook_names():
        for key, about in notebook_parameters(name).items():
            assert about["comment"], (name, key)


def test_dependencies_are_read_from_the_code():
    assert results_read("01_data_and_models") == []
    assert results_read("04_scalogram") == ["01_data_and_models"]
    assert results_read("20_claims") == [
        "01_data_and_models",
        *(n for n in notebook_names() if "04" <= n[:2] < "20"),
    ]
    assert "attnlib/pod.py" in modules_used("05_scale_selective_pod")
    assert "attnlib/gram.py" in modules_used("05_scale_selective_pod")  # through pod
    for name in ("01_data_and_models", "02_the_attention_field", "04_scalogram"):
        assert "attnlib/pod.py" not in modules_used(name)
    assert "attnlib/training.py" in modules_used("01_data_and_models")
    assert "attnlib/fields.py" not in modules_used("01_data_and_models")
    # A room may be a folder; its parts count, and what they share a name with does not.
    assert "attnlib/plots/fields.py" in modules_used("01_data_and_models")
    assert "attnlib/plots/base.py" in modules_used("01_data_and_models")


def test_what_is_hidden_while_a_notebook_is_read_is_there_again():
    code = (
        "import sys; from attnlib import runner; runner.read_notebook('20_claims'); "
        "assert sys.modules.get('rfc3987_syntax', 'not imported') is not None; "
        "notebook = runner.read_notebook('20_claims'); notebook.cells.clear(); "
        "assert runner.read_notebook('20_claims').cells"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
