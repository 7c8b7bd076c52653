"""The command line: ``python -m attnlib run|list|corpus|sync|make``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .errors import InputError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlib", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one notebook by papermill")
    run.add_argument("notebook", help="name, number or path")
    run.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter")
    run.add_argument("--preset", help="smoke, quick or paper: parameters from config/PRESET.yaml")
    run.add_argument("--out", help="results folder (default: results/PRESET)")
    run.add_argument("--time-limit", type=int, help="seconds that a cell may take")
    run.add_argument("--no-progress", action="store_true", help="no progress bars")
    commands.add_parser("list", help="list the notebooks and their parameters")
    corpus = commands.add_parser("corpus", help="fetch and check a corpus")
    corpus.add_argument("name", nargs="?", help="by default that of the preset")
    corpus.add_argument("--preset", default="quick")
    make = commands.add_parser("make", help="bring a target of the graph up to date")
    make.add_argument("target", choices=["book", "notebooks"])
    make.add_argument("--preset", default="quick")
    make.add_argument("--cores", type=int, default=os.cpu_count())
    commands.add_parser("sync", help="pair the text notebooks with .ipynb in build/ipynb")
    return parser


def _run(arguments) -> None:
    from .graph import exit_with_parent
    from .runner import run_notebook

    exit_with_parent()
    pairs = [pair.partition("=") for pair in arguments.p]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InputError(f"-p takes NAME=VALUE, not '{name}'")
    given = {name: value for name, _, value in pairs}
    if Path(given.get("corpus", "")).is_file():
        given["corpus"] = str(Path(given["corpus"]).absolute())  # the notebook runs elsewhere
    print(
        run_notebook(
            arguments.notebook,
            given,
            arguments.out and Path(arguments.out).absolute(),
            preset=arguments.preset,
            time_limit=arguments.time_limit,
            progress=not arguments.no_progress,
        )
    )


def _list() -> None:
    from .runner import notebook_names, notebook_parameters

    for name in notebook_names():
        print(name)
        for key, about in notebook_parameters(name).items():
            print(f"  {key}: {about['type']} = {about['default']!r}  # {about['comment']}")
        print()


def _corpus(arguments) -> None:
    from .corpus import load_text
    from .runner import notebook_names, preset_parameters

    name = arguments.name or preset_parameters(arguments.preset, notebook_names()[0])["corpus"]
    print(f"corpus {name}: {len(load_text(name)):,} characters", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Entry point; an `InputError` prints its message alone and exits with 2."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "run":
            _run(arguments)
        elif arguments.command == "list":
            _list()
        elif arguments.command == "corpus":
            _corpus(arguments)
        elif arguments.command == "make":
            from .graph import make

            make(arguments.target, arguments.preset, arguments.cores)
        else:
            from .runner import sync

            for path in sync():
                print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
