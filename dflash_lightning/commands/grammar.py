"""What can be said to the ``dflash`` command."""

from __future__ import annotations

import argparse
from functools import partial
from typing import NoReturn, TypeAlias

from dflash_lightning import __version__
from dflash_lightning.commands.argument_types import count as _count
from dflash_lightning.commands.argument_types import mapping as _mapping
from dflash_lightning.commands.grammar_bench import add_bench
from dflash_lightning.commands.grammar_decode import add_evaluate, add_generate, add_regenerate, add_report
from dflash_lightning.commands.grammar_develop import NEW, SMOKE, add_new_arguments, add_smoke_arguments
from dflash_lightning.commands.grammar_speed import add_speed
from dflash_lightning.commands.shared_arguments import (
    DRAFT_HELP,
    TARGET_HELP,
    add_device_arguments,
)
from dflash_lightning.recipe.folders import recipe_names

_EPILOG = """\
a first session:
  dflash recipes                      what can be trained, and with which options
  dflash fit quickstart               train and evaluate a drafter for an embedded model
  dflash evaluate --draft runs/quickstart --prompts prompts.jsonl
  dflash generate --draft runs/quickstart --prompt "Write a Python function that adds two numbers."
"""

_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


class _Parser(argparse.ArgumentParser):
    """Adds to argparse's errors what would have been right."""

    def error(self, message: str) -> NoReturn:
        if "required: RECIPE" in message:
            names = ", ".join(recipe_names())
            message += f". Give a shipped recipe ({names}), a YAML file or a run folder of your own (dflash recipes)"
        super().error(f"{message}\n(dflash {self._command()}--help shows what there is)")

    def _command(self) -> str:
        return "".join(f"{word} " for word in self.prog.split()[1:])


def make_parser() -> argparse.ArgumentParser:
    """The whole grammar; ``command`` is the sub-command's name."""
    parser = _Parser(
        prog="dflash",
        description="Train block-diffusion drafters and decode with them, losslessly.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dflash-lightning {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_fit(commands)
    add_evaluate(partial(_add, commands))
    add_report(partial(_add, commands))
    add_bench(partial(_add, commands))
    add_generate(partial(_add, commands))
    add_regenerate(partial(_add, commands))
    _add_inspect(commands)
    _add_export(commands)
    _add_check(commands)
    _add_show(commands)
    _add_recipes(commands)
    add_new_arguments(_add(commands, "new", *NEW))
    add_smoke_arguments(_add(commands, "smoke", *SMOKE))
    add_speed(partial(_add, commands))
    return parser


def _add(commands: _Commands, name: str, help_: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=help_, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=name, parser=parser)
    return parser


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe, a YAML file of your own, or a run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings to change, such as optim.lr=1e-3 or trainer=gpu",
    )


def _add_fit(commands: _Commands) -> None:
    text = """\
Train a drafter. Everything goes to the run folder, runs/RECIPE unless run_dir=FOLDER is given: the resolved recipe,
versions, checkpoints (last and best by tokens per round) and TensorBoard logs.

The same command again resumes an interrupted run, and does nothing for a finished one. Ctrl-C, SIGTERM and
trainer.max_time save before they end it. The exit status is 130 for a run that was cut, 1 for one that failed.

  dflash fit quickstart
  dflash fit quickstart --dry-run
  dflash fit dflash target=qwen3_8b data.train=train.jsonl callbacks.speculative_eval.prompts=held_out.jsonl
  dflash fit mine.yaml optim.lr=1e-3 run_dir=runs/higher_lr
  dflash fit runs/mine --extend trainer.max_epochs=12"""
    parser = _add(commands, "fit", "train a drafter", text)
    _add_recipe_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="start anew; an earlier run is kept as FOLDER.old-N")
    parser.add_argument(
        "--extend",
        action="append",
        default=[],
        metavar="KEY=N",
        help="make a run longer, a finished one too: trainer.max_epochs=N or trainer.max_steps=N, in all",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load everything, measure one step, print sizes and the minutes to expect; writes no run folder",
    )


def _add_inspect(commands: _Commands) -> None:
    text = """\
Show rows as training will see them: ids, text and mask of every document, what is dropped and why; then, on standard
error, the account that training prints, places for blocks, and what evaluation prompts share with the rows. Only the
tokenizer is loaded. The exit status is 1 where training would refuse the data, and where --against finds a difference.

  dflash inspect train.jsonl --target qwen3_4b --limit 3
  dflash inspect quickstart --limit 3                           a recipe: its data, target and evaluation prompts
  dflash inspect train.jsonl --target qwen3_4b --json > rows.jsonl
  dflash inspect train.jsonl --target qwen3_4b --against served.jsonl

--json prints {"line", "row", "input_ids", "loss_mask", "supervised_text", "anchors"} for every document ("row" counts
those of a line from 0, "anchors" are positions at which a block can start) and {"line", "dropped"} otherwise."""
    parser = _add(commands, "inspect", "show training rows with their masks, and count what is dropped", text)
    parser.add_argument("data", metavar="DATA", help="a data file, or a recipe (name, YAML file or run folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as data.truncate=left")
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; a recipe has its own")
    parser.add_argument("--limit", type=_count, metavar="N", help="read the first N rows of every source; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object per document or dropped row")
    parser.add_argument(
        "--against", metavar="FILE", help="JSONL of ids that a server made: input_ids, or prompt_token_ids"
    )
    parser.add_argument(
        "--eval", action="append", default=[], metavar="FILE", help="prompts to look for in the rows; may be repeated"
    )
    parser.add_argument("--max-length", type=_count, metavar="N", help="tokens of a document; default: the target's")
    parser.add_argument("--supervise", choices=["all_turns", "last_turn"], help="default: all_turns")
    parser.add_argument("--block-size", type=_count, metavar="K", help="slots of a block; default: the target's")
    parser.add_argument(
        "--chat-template-kwargs", type=_mapping, metavar="k=v", help="such as enable_thinking=false, or a JSON object"
    )
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="default: in a terminal")


def _add_export(commands: _Commands) -> None:
    text = """\
Write a drafter as a folder that another program serves: config.json and weights as that program reads them, a replay
to check any engine against, and a model card. What a format cannot hold is refused before anything is written.

  hf            transformers' generate(), with a modelling file of its own (trust_remote_code)
  zlab          z-lab's dflash package
  sglang        SGLang's DFLASH
  vllm          vLLM's method "dflash"
  speculators   the speculators library and vLLM; the only one that holds a reduced draft vocabulary"""
    parser = _add(commands, "export", "write a drafter for a server", text)
    parser.add_argument("--draft", required=True, metavar="PATH", help=DRAFT_HELP)
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; default: the target the drafter was made for")
    parser.add_argument("--format", required=True, choices=["hf", "zlab", "sglang", "vllm", "speculators", "specforge"])
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument("--replace", action="store_true", help="replace DIR if it exists")
    parser.add_argument(
        "--weights", choices=["bfloat16", "float32"], default="bfloat16", help="dtype to write; default: %(default)s"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSONL for the replay; default: the run's, or a few of ours")
    parser.add_argument("--max-new-tokens", type=_count, default=48, metavar="N", help="replayed; default: %(default)s")
    add_device_arguments(parser)


def _add_check(commands: _Commands) -> None:
    text = """\
Load an exported folder as its consumer would, draft its replay again, compare logits, drafts and committed tokens, and
say in words what differs. Where logits differ, single faults (RoPE, layer ids off by one, causality, attention scale,
mask id, norms, dtype ...) are tried, and the one that brings the recorded logits out is named. With --observed the
faults are those of an engine: a JSON file {"prompts": [{"prompt_ids": [..], "draft_ids": [..], "logits": [[..]]}]} of
what it drafted for the replay's prompts (logits are optional). The exit status is 1 when anything differs."""
    parser = _add(commands, "check", "hold an exported folder to its replay", text)
    parser.add_argument("folder", metavar="DIR", help="a folder that dflash export wrote")
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; default: the one that the replay names")
    parser.add_argument("--observed", metavar="FILE", help="what an engine drafted for the replay's prompts")
    add_device_arguments(parser)


def _add_show(commands: _Commands) -> None:
    text = """\
Print the recipe with every value resolved. Saved to a file, it reruns to the same run. With --all: one line for every
setting that there is, with its value, default, range and what it does.

  dflash show quickstart
  dflash show mine.yaml --all | grep lr

Loss terms and callbacks have names, and are added up: ~loss.NAME takes one out (in a file: NAME: null under loss), and
loss=OPTION replaces them all. What is wrong with the recipe goes to standard error, and the exit status is then 2."""
    parser = _add(commands, "show", "print the resolved recipe", text)
    _add_recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every setting, with default, range and a line of help")


def _add_recipes(commands: _Commands) -> None:
    text = """\
List recipes and the options of each group, each with a line of what it is.

  dflash recipes
  dflash recipes mine.yaml     also those beside a recipe of your own: mine.yaml finds loss/focal.yaml as loss=focal"""
    parser = _add(commands, "recipes", "list recipes and the options of each group", text)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe file of your own, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print JSON: systems, axes, options, classes and settings")
