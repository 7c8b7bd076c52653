"""The command line: ``python -m attnlib run|list|corpus|specimens|sync|make|prescribe``."""

from __future__ import annotations

import argparse
import os
import signal
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
    kept = commands.add_parser("specimens", help="train the models that the book keeps")
    kept.add_argument("name", nargs="*", help="base, or base/seed-1; by default all of them")
    kept.add_argument("--check", action="store_true", help="hashes and losses of what is there")
    kept.add_argument("--jobs", type=int, help="trainings side by side")
    kept.add_argument("--no-progress", action="store_true", help="no progress bars")
    commands.add_parser("sync", help="pair the text notebooks with .ipynb in build/ipynb")
    plan = commands.add_parser("prescribe", help="which layers of a model need less attention")
    plan.add_argument("model", help="a pretrained model by name, or a folder with a checkpoint")
    plan.add_argument("--text", required=True, help="a text file, or a corpus by name")
    plan.add_argument("--windows", type=int, default=8, help="windows of the text")
    plan.add_argument("--length", type=int, default=96, help="tokens in a window")
    plan.add_argument("--tolerance", type=float, default=0.05, help="rise of the loss, nats")
    plan.add_argument("--factor", type=float, default=1.0, help="costs count this many times")
    plan.add_argument("--caution", type=float, default=1.0, help="standard errors added to costs")
    plan.add_argument("--rank", type=int, nargs="+", help="candidate ranks of the logits")
    plan.add_argument("--no-linear", action="store_true", help="linear attention is no candidate")
    plan.add_argument("--layers", type=int, nargs="+", help="where to try candidates, from 1")
    plan.add_argument("--save", default="cache", choices=["cache", "flops"], help="what to save")
    plan.add_argument("--context", type=int, help="tokens at which savings are counted")
    plan.add_argument("--seed", type=int, default=0, help="of the windows")
    plan.add_argument("--device", default="auto")
    plan.add_argument("--check", action="store_true", help="carry the plan out and measure it")
    plan.add_argument("--out", help="write the plan to this .nc file, and continue after a kill")
    plan.add_argument("--no-progress", action="store_true", help="no progress bar")
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


def _prescribe(arguments) -> None:
    import torch

    from .corpus import load_text, text_hash, windows
    from .device import pick_device
    from .evaluation import paired_difference, window_losses
    from .plans import plan_table
    from .prescription import apply, prescribe
    from .store import check_writable, save

    where = pick_device(arguments.device)
    text = load_text(arguments.text)
    out = arguments.out and check_writable(arguments.out)
    begun = out and out.with_suffix(".begun.nc")
    model, encode = _model(arguments.model)
    n = arguments.windows
    drawn = 2 * n if arguments.check else n
    tokens = windows(encode(text), drawn, arguments.length + 1, seed=arguments.seed)
    model.to(where)
    plan = prescribe(
        model,
        tokens[:n],
        tolerance=arguments.tolerance,
        factor=arguments.factor,
        caution=arguments.caution,
        ranks=arguments.rank,
        linear=not arguments.no_linear,
        layers=arguments.layers,
        save=arguments.save,
        context=arguments.context,
        keep=begun,
        progress=not arguments.no_progress,
    )
    print(plan_table(plan).to_string())
    print(
        f"\nsaves {plan.attrs['saving']:.1%} of the {arguments.save} at {plan.attrs['context']} "
        f"tokens; predicted: loss {plan.attrs['loss']:.3f} "
        f"{plan.attrs['predicted_cost']:+.3f} +- {plan.attrs['predicted_se']:.3f} nats a token"
    )
    if arguments.check:
        losses = [window_losses(m, tokens[n:]) for m in (model, apply(plan, model))]
        mean, error = (float(x[1]) for x in paired_difference(torch.stack(losses)))
        plan = plan.assign_attrs(measured_cost=mean, measured_se=error)
        print(f"measured on {n} other windows: {mean:+.3f} +- {error:.3f} nats a token")
    if out:
        asked = {k: v for k, v in vars(arguments).items() if k != "command"}
        print(save(plan, out, parameters=asked, corpus_hash=text_hash(text), device=str(where)))
        begun.unlink(missing_ok=True)


def _specimens(arguments) -> None:
    from .specimens import check_specimens, make_specimens

    if arguments.check:
        print("\n".join(check_specimens(arguments.name)))
        return
    trained = make_specimens(
        arguments.name, jobs=arguments.jobs, progress=not arguments.no_progress
    )
    print("\n".join(recipe.label for recipe in trained) or "all specimens are there")


def _model(name: str):
    """A model and what turns a text into its tokens."""
    if Path(name).is_dir():
        from .checkpoints import load_checkpoint
        from .corpus import CharTokenizer, make_tokenizer

        model, meta = load_checkpoint(name)
        if meta.get("characters"):
            return model, CharTokenizer(meta["characters"]).encode
        return model, make_tokenizer("gpt2", "").encode
    import torch

    from .hub import PRETRAINED, pretrained

    if name not in PRETRAINED and "/" in name:
        raise InputError(f"there is no folder {name} with a checkpoint")

    model, tokenizer = pretrained(name)
    return model, lambda text: torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )


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
        elif arguments.command == "prescribe":
            # A kill unwinds, so that no half-written file stays behind.
            before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            try:
                _prescribe(arguments)
            finally:
                signal.signal(signal.SIGTERM, before)
        elif arguments.command == "specimens":
            _specimens(arguments)
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
        kept = arguments.command in ("run", "make", "specimens") or getattr(arguments, "out", None)
        again = "to continue" if kept else "from its start"
        print(f"interrupted; run the same command again {again}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
