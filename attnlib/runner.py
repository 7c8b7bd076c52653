"""Run notebooks by papermill, with their parameters checked before anything starts."""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from .errors import InputError

KERNEL = "python3"
PACKAGE = Path(__file__).resolve().parent
TAIL = 4000  # characters of a failed cell's error to show
_TYPES = {t.__name__: t for t in (int, float, str, bool, list, dict, tuple)} | {"None": None}


def project_root() -> Path:
    """The repository: the first folder upwards from here that holds ``_toc.yml`` and notebooks.

    Upwards from the current folder, then from the installed module (an editable install).
    """
    for start in (Path.cwd(), PACKAGE):
        for folder in (start, *start.parents):
            if (folder / "_toc.yml").is_file() and (folder / "notebooks").is_dir():
                return folder
    raise InputError("not inside the repository: change into it, or install it with pip -e")


def results_folder(out: str | Path) -> Path:
    """Folder of the results, made if need be; a relative path counts from the repository."""
    folder = Path(out)
    folder = folder if folder.is_absolute() else project_root() / folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write there")
    except OSError as error:
        raise InputError(f"the results folder {folder} cannot be written: {error}") from error
    return folder


def notebook_names() -> list[str]:
    """Names of the notebooks in reading order."""
    return sorted(path.stem for path in (project_root() / "notebooks").glob("[0-9]*.md"))


def find_notebook(name: str) -> str:
    """Full name of a notebook from its name, its number (``04`` or ``4``) or its path."""
    names, wanted = notebook_names(), Path(name).stem
    if wanted in names:
        return wanted
    hits = [n for n in names if wanted.isdigit() and int(n[:2]) == int(wanted)]
    if len(hits) == 1:
        return hits[0]
    near = difflib.get_close_matches(wanted, names, 1, 0.4)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise InputError(f"no notebook '{name}'{hint} There are: {', '.join(names)}")


# ------------------------------------------------------------------ parameters


def read_notebook(name: str):
    """The text notebook as a notebook object (nbformat), without outputs."""
    return copy.deepcopy(_parsed(name))


def _parsed(name: str):
    """As `read_notebook`, to look at; the graph asks for each notebook dozens of times."""
    path = project_root() / "notebooks" / f"{name}.md"
    return _parsed_once(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _parsed_once(path: Path, changed: int):
    with _without_address_grammar():
        import jupytext

    return jupytext.read(path)


@contextlib.contextmanager
def _without_address_grammar():
    """Import what needs jsonschema without a grammar of web addresses, two seconds to compile.

    jsonschema takes it if it is there, and checks addresses with it. Notebooks have none to check.
    """
    name = "rfc3987_syntax"
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # an import of it fails, which jsonschema expects
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def notebook_parameters(name: str) -> dict[str, dict]:
    """Parameters of a notebook: name to ``type``, ``default`` and ``comment``.

    Read from the one cell tagged `parameters`, whose lines are ``name: type = value  # comment``.
    """
    cells = [c for c in _parsed(name).cells if "parameters" in c.metadata.get("tags", ())]
    if len(cells) != 1:
        raise InputError(f"{name} has {len(cells)} cells tagged 'parameters' instead of one")
    source, found = cells[0].source, {}
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign):
            raise InputError(f"{name}: write parameters as 'name: type = value  # comment'")
        comment = lines[node.end_lineno - 1][node.end_col_offset :].strip().lstrip("# ")
        found[node.target.id] = {
            "type": ast.unparse(node.annotation),
            "default": ast.literal_eval(node.value),
            "comment": comment,
        }
    return found


def check_parameters(name: str, given: dict) -> dict:
    """Parameters as the notebook's types want them; an unknown name or a wrong type is refused.

    Values may be text, as from a command line, or Python objects, as from a preset.
    """
    from pydantic import TypeAdapter, ValidationError

    known, checked = notebook_parameters(name), {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            listing = ", ".join(f"{k}: {v['type']}" for k, v in known.items())
            raise InputError(f"{name} has no parameter '{key}'.{hint} It has: {listing}")
        kind = known[key]["type"]
        adapter = TypeAdapter(eval(kind, {"__builtins__": {}}, _TYPES))
        for candidate in _readings(value, kind):
            try:
                checked[key] = adapter.validate_python(candidate, strict=True)
                break
            except ValidationError:
                continue
        else:
            raise InputError(
                f"{name}: parameter '{key}' is of type {kind}, not {value!r}; "
                f"for example {key}={known[key]['default']!r}"
            )
    return checked


def used_parameters(name: str, namespace: dict) -> dict:
    """Values that the parameters of a notebook have in its namespace, for its results file."""
    return {k: namespace[k] for k in notebook_parameters(name) if k != "out"}


def _readings(value, kind: str):
    """Ways to read a value given as text: as a literal, as JSON, as it stands."""
    if isinstance(value, str) and kind != "str":
        for read in (ast.literal_eval, json.loads):
            try:
                yield read(value)
            except (ValueError, SyntaxError):
                continue
    yield value


def preset_parameters(preset: str, name: str) -> dict:
    """Parameters that ``config/PRESET.yaml`` gives a notebook: its own, and the common ones."""
    import yaml

    folder = project_root() / "config"
    path = folder / f"{preset}.yaml"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise InputError(f"no preset '{preset}'; there are: {there}")
    content = yaml.safe_load(path.read_text())
    known = {n: notebook_parameters(n) for n in notebook_names()}
    strangers = sorted(set(content) - {"common"} - set(known))
    strangers += sorted(set(content["common"]) - {k for ps in known.values() for k in ps})
    if strangers:
        raise InputError(f"{path}: neither notebook nor parameter: {', '.join(strangers)}")
    shared = {k: v for k, v in content["common"].items() if k in known[name]}
    return check_parameters(name, shared | (content.get(name) or {}))


# ------------------------------------------------------------------ running


def run_notebook(
    name: str,
    parameters: dict | None = None,
    out: str | Path | None = None,
    *,
    preset: str | None = None,
    time_limit: int | None = None,
    progress: bool = True,
) -> Path:
    """Run one notebook by papermill.

    Parameters
    ----------
    name : str
        Name, number or path.
    parameters : dict, optional
        Over those of the preset, over the notebook's defaults.
    out : path-like, optional
        Results folder: the Dataset goes to ``out/NAME.nc``, the executed notebook to
        ``out/notebooks/NAME.ipynb``. By default ``results/PRESET``.
    preset : str, optional
        ``"smoke"``, ``"quick"``, ``"paper"``; without it the notebook's own defaults count.
    time_limit : int, optional
        Seconds that a single cell may take.
    progress : bool
        Show the bar of cells, and the bars of the notebook's own long work, on stderr.

    Returns
    -------
    pathlib.Path
        The executed notebook.

    Raises
    ------
    InputError
        A parameter that does not fit (before anything runs), or an error inside the notebook; its
        executed part is then kept as ``NAME.failed.ipynb``.
    """
    with _without_address_grammar():
        import jupytext
        import papermill
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
        from papermill.exceptions import PapermillExecutionError

    name = find_notebook(name)
    values = preset_parameters(preset, name) if preset else {}
    values |= check_parameters(name, parameters or {})
    folder = results_folder(out or values.get("out") or f"results/{preset or 'quick'}")
    root = project_root()
    # Relative where it can be: the path is printed on the page.
    values["out"] = str(folder.relative_to(root) if folder.is_relative_to(root) else folder)
    done = folder / "notebooks" / f"{name}.ipynb"
    running, failed = done.with_suffix(".running.ipynb"), done.with_suffix(".failed.ipynb")
    done.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    print(f"{name}: running", file=sys.stderr)
    with (
        _only_run_of(name, folder),
        _bars(progress),
        tempfile.TemporaryDirectory() as temporary,
    ):
        source = Path(temporary) / f"{name}.ipynb"
        jupytext.write(_with_note(read_notebook(name), preset), source)
        try:
            papermill.execute_notebook(
                str(source),
                str(running),
                values,
                kernel_name=KERNEL,
                cwd=str(root),
                progress_bar=progress and sys.stderr.isatty(),
                execution_timeout=time_limit,
                start_timeout=120,
                extra_arguments=["--log-level=CRITICAL"],
            )
        except (PapermillExecutionError, CellTimeoutError, DeadKernelError) as error:
            os.replace(running, failed)
            kind = getattr(error, "ename", type(error).__name__)
            what = getattr(error, "evalue", str(error))
            where = f" in cell {error.exec_count}" if hasattr(error, "exec_count") else ""
            raise InputError(
                f"{name} failed{where}: {kind}: {what[-TAIL:]}\nWhat ran is kept in {failed}"
            ) from error
        os.replace(running, done)
    failed.unlink(missing_ok=True)
    print(f"{name}: done in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return done


@contextlib.contextmanager
def _only_run_of(name: str, folder: Path):
    """Hold the lock of a notebook in a results folder, or say that somebody else does."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / f".{name}.lock", timeout=0):
            yield
    except Timeout as error:
        raise InputError(f"{name} is running already in {folder}: wait, or use --out") from error


@contextlib.contextmanager
def _bars(shown: bool):
    """Progress bars of the kernel and its workers, on stderr, or none."""
    before = os.environ.get("TQDM_DISABLE")
    if not shown:
        os.environ["TQDM_DISABLE"] = "1"
    try:
        yield
    finally:
        if not shown and before is None:
            del os.environ["TQDM_DISABLE"]


def _with_note(notebook, preset: str | None):
    """Say below the title which preset a page was computed with."""
    import nbformat

    if preset:
        text = f"Computed with the preset `{preset}`."
        if preset == "smoke":
            text += " It only exercises the code: **the numbers on this page mean nothing.**"
        kind = "warning" if preset == "smoke" else "note"
        title, newline, rest = notebook.cells[0].source.partition("\n")
        note = f":::{{{kind}}}\n{text}\n:::\n"
        notebook.cells[0] = nbformat.v4.new_markdown_cell(f"{title}\n\n{note}{newline}{rest}")
    return notebook


def sync(into: str | Path = "build/ipynb") -> list[Path]:
    """Pair every text notebook with an .ipynb in a folder that git ignores (``make lab``).

    Whichever side was edited since the last time is carried over to the other: text to notebook
    with the outputs of cells that are the same, notebook to text without outputs.

    Raises
    ------
    InputError
        Both sides of a pair were edited. Nothing of that pair is changed.
    """
    import jupytext
    from jupytext.combine import combine_inputs_with_outputs

    folder, made = project_root() / into, []
    folder.mkdir(parents=True, exist_ok=True)
    record_path = folder / ".sync.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    conflicts = []
    for name in notebook_names():
        target, path = folder / f"{name}.ipynb", project_root() / "notebooks" / f"{name}.md"
        text = jupytext.read(path)
        if not target.is_file():
            jupytext.write(text, target)
        paired = jupytext.read(target)
        was = record.get(name)
        text_edited, paired_edited = _content(text) != was, _content(paired) != was
        if text_edited and paired_edited and _content(text) != _content(paired):
            conflicts.append(f"{path} and {target}")
            continue
        if paired_edited and _content(text) != _content(paired):
            paired.metadata = text.metadata  # kernel names and versions stay as they were
            jupytext.write(paired, path, fmt="md:myst")
        elif text_edited and _content(text) != _content(paired):
            jupytext.write(combine_inputs_with_outputs(text, paired), target)
        record[name] = _content(jupytext.read(path))
        made.append(target)
    record_path.write_text(json.dumps(record))
    if conflicts:
        raise InputError(
            f"both sides were edited since the last sync: {'; '.join(conflicts)}. "
            "Move one of the two out of the way and sync again"
        )
    return made


def _content(notebook) -> str:
    """Hash of what a notebook says, without outputs and metadata but tags."""
    cells = [
        (c.cell_type, c.source.strip(), sorted(c.metadata.get("tags", []))) for c in notebook.cells
    ]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


# ------------------------------------------------------------------ the graph's inputs


def modules_used(name: str) -> list[str]:
    """Files of attnlib that a notebook depends on, through its imports and theirs."""
    new, found, files = [_rooms(_code(name), 0)], set(), set()
    while new:
        for room in new.pop() - found:
            found.add(room)
            # A room is a file, or a folder of them (plots).
            for path in [PACKAGE / f"{room}.py", *(PACKAGE / room).glob("*.py")]:
                if path.is_file():
                    inside = path.relative_to(PACKAGE)
                    files.add(f"attnlib/{inside.as_posix()}")
                    new.append(_rooms(path.read_text(), len(inside.parts)))
    return sorted(files)


def results_read(name: str) -> list[str]:
    """Notebooks whose results a notebook reads: ``NN_name.nc`` in its code or its modules'."""
    sources = [_code(name), *((PACKAGE.parent / m).read_text() for m in modules_used(name))]
    named = set(re.findall(r"\"(\d\d_\w+)\.nc\"", "\n".join(sources)))
    return sorted(named - {name})


@functools.lru_cache(maxsize=256)
def _rooms(code: str, depth: int) -> frozenset[str]:
    """Rooms that a piece of code imports from; `depth` dots lead up to the package."""
    from . import ROOMS

    owner = {name: room for room, names in ROOMS.items() for name in names}
    rooms = set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom):
            continue
        relative = node.level > 0 and node.level == depth
        if node.module == "attnlib" or (relative and node.module is None):
            rooms |= {owner.get(a.name, a.name) for a in node.names}
        elif relative or (not node.level and node.module.startswith("attnlib.")):
            rooms.add(node.module.removeprefix("attnlib.").split(".")[0])
    return frozenset(rooms & set(ROOMS))


def _code(name: str) -> str:
    cells = [c.source for c in _parsed(name).cells if c.cell_type == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if line[:1] not in "%!")
