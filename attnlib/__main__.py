"""The command line: ``python -m attnlib run|list|corpus|sync``."""

from __future__ import annotations

import argparse
import sys

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
    commands.add_parser("sync", help="pair the text notebooks with .ipynb in build/ipynb")
    return parser


def _run(arguments) -> None:
    from .runner import run_notebook

    pairs = [pair.partition("=") for pair in arguments.p]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InputError(f"-p takes NAME=VALUE, not '{name}'")
    print(
        run_notebook(
            arguments.notebook,
            {name: value for name, _, value in pairs},
            arguments.out,
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
        else:
            from .runner import sync

            for path in sync():
                print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
