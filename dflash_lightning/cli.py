"""The ``dflash`` command: what can be asked for. What is done is in ``commands``, loaded when it is needed."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.quiet import quiet
from dflash_lightning.recipe.faults import hint_for
from dflash_lightning.recipe.synonyms import meant


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 for success, 2 for what the user can mend, 1 for a run that failed.

    Ctrl-C is 130. A reader that went away is 141, as the shell has it: the work was cut off, except for lists.
    """
    _print_everything()
    args = _asked(argv)
    try:
        with quiet():
            status = _RUN[args.command](args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        _stop_printing()
        return 0 if args.command in ("show", "recipes") else _complain("the reader of the output went away", 141)
    except (RuntimeError, MemoryError) as error:
        if (advice := _memory_advice(error)) is None:
            raise
        return _refuse(advice, args.debug)
    except (ValueError, OSError) as error:
        return _refuse(_explain(error), args.debug)


def _refuse(message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    return _complain(message + ("" if debug else "\n(--debug shows where it came from)"), 2)


def _asked(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was typed; help that nobody reads to its end is no error."""
    try:
        return _parse(argv)
    except (SystemExit, BrokenPipeError):
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _stop_printing()
        raise


def _stop_printing() -> None:
    """Let what is still to be printed go nowhere, or Python complains of the reader when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory_advice(error: BaseException) -> str | None:
    from dflash_lightning.commands.memory_advice import memory_advice

    return memory_advice(error)


def _print_everything() -> None:
    """What a terminal of another encoding than UTF-8 cannot show is printed as an escape, and stops no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was typed; settings (``key=value``) may stand behind options too, which argparse alone does not allow."""
    parser, words = make_parser(), list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    if not words[0].startswith("-") and words[0] not in _RUN:
        parser.error(f"there is no command {words[0]!r}. {hint_for(words[0], _RUN)}")
    args, rest = parser.parse_known_args(words)
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    strange = [word for word in rest if word not in settings or "overrides" not in args]
    if strange:
        args.parser.error(f"{strange[0]}: {_about(strange[0], args.parser)}")
    elif settings:
        args.overrides = [*args.overrides, *settings]
    if "settings" in args:
        args.overrides = [*args.overrides, *args.settings]
    return args


def _about(word: str, parser: argparse.ArgumentParser) -> str:
    """What is wrong with a word that a command does not take."""
    if not word.startswith("-"):
        return "is one word too many. Settings are written key=value, for commands that take a recipe"
    if (ours := meant(word.partition("=")[0])) and any(action.dest == "recipe" for action in parser._actions):
        return f"there is no such option. Settings are written key=value: {ours}=VALUE"
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return f"there is no such option. {hint_for(word.partition('=')[0], known)}"


def _explain(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{place}. Nothing written before is lost: free some space and repeat the command."
    return str(error)


def _complain(message: str, status: int) -> int:
    print(f"dflash: {message}", file=sys.stderr)
    return status


# -- commands: imported when run, so that --help answers at once ------------------------------------------------------


def _fit(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import nothing_to_fit

    if nothing_to_fit(args.recipe, args.overrides, anew=args.fresh or args.dry_run or bool(args.extend)):
        return 0
    from dflash_lightning.commands.fit import fit

    return fit(args.recipe, args.overrides, fresh=args.fresh, extend=args.extend, dry_run=args.dry_run)


def _evaluate(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.evaluate import evaluate

    return evaluate(args)


def _report_run(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.report import report

    return report(args)


def _measure(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import finished_run
    from dflash_lightning.commands.measure_words import MeasureWords

    for name in MeasureWords.read(args.runs, args.overrides, to=args.to).runs:
        finished_run(name)
    from dflash_lightning.commands.measure import measure

    return measure(args)


def _sweep(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import checked_points

    points = checked_points(args)
    from dflash_lightning.commands.sweep import sweep

    return sweep(args, points)


def _compare(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import checked_runs

    runs = checked_runs(args)
    from dflash_lightning.commands.compare import compare

    return compare(args, runs, _comparison_page)


def _comparison_page(found: dict[str, Any]) -> str:
    from dflash_lightning.pages import compare_page

    return compare_page(found)


def _generate(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.generate import generate

    return generate(args)


def _regenerate(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.regenerate import regenerate

    return regenerate(args)


def _inspect(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.inspect_settings import read_settings

    tree = read_settings(args)
    from dflash_lightning.commands.inspect import inspect

    return inspect(args, tree)


def _export(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.export import export

    return export(args)


def _check_export(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.early import check_files

    check_files(args)
    from dflash_lightning.commands.check import check_export

    return check_export(args)


def _show(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.show import show

    return show(args.recipe, args.overrides, everything=args.all)


def _new(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.new import new

    return new(args)


def _smoke(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.smoke_words import smoke_words

    smoke_words(args.recipes)
    from dflash_lightning.commands.smoke import smoke

    return smoke(args)


def _bench(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.bench import bench

    return bench(args)


def _recipes(args: argparse.Namespace) -> int:
    from dflash_lightning.commands.listing import list_recipes

    return list_recipes(args.recipe, as_json=args.json)


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "fit": _fit,
    "evaluate": _evaluate,
    "report": _report_run,
    "measure": _measure,
    "sweep": _sweep,
    "compare": _compare,
    "generate": _generate,
    "regenerate": _regenerate,
    "inspect": _inspect,
    "export": _export,
    "check": _check_export,
    "show": _show,
    "recipes": _recipes,
    "new": _new,
    "smoke": _smoke,
    "bench": _bench,
}
