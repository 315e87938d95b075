"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from dflash_lightning.commands.argument_types import count, probability, temperature, whole
from dflash_lightning.recipe.words import is_decoding_word

DRAFT_HELP = "a run folder (its best checkpoint), a checkpoint file, or an exported folder"
TARGET_HELP = "path, hub id, GGUF file or name of a target option (see `dflash recipes`)"


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to decode: the target and its device."""
    parser.add_argument("--target", metavar="T", help=f"{TARGET_HELP}; default: the target the drafter was made for")
    add_other_target(parser)
    add_device_arguments(parser)


def add_other_target(parser: argparse.ArgumentParser) -> None:
    """The leave to use a drafter on a relative of its target."""
    parser.add_argument(
        "--other-target",
        action="store_true",
        help="--target is not the one the drafter was made for, but of the same shape (a fine-tuned one): use it there",
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Device and dtype of the target."""
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 ...; default: cuda where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the target")


def add_decoding_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """How to decode: settings as in a recipe, with the command's own ``defaults``, and the length of the answers."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="decoding...",
        help="how to decode, as in a recipe: decoding=OPTION (see `dflash recipes`), decoding.KEY=VALUE; options for "
        "lengths, batches and sampling are short for such settings",
    )
    parser.set_defaults(decoding_defaults=defaults)
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help=f"longest answer; default: {defaults['max_new_tokens']}"
    )


def add_batch_argument(parser: argparse.ArgumentParser, what: str, default: int) -> None:
    """How many prompts are decoded at once."""
    parser.add_argument("--batch-size", type=count, metavar="B", help=f"{what}; default: {default}")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Law of the answers."""
    parser.add_argument("--temperature", type=temperature, metavar="T", help="0 is greedy (the default)")
    parser.add_argument("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=probability, metavar="P", help="sample among the likeliest tokens that hold probability P"
    )
    parser.add_argument("--seed", type=whole, metavar="S", help="of the sampling; default: 0")


def add_eager_argument(parser: Any) -> None:
    """Not to compile; ``parser`` may be a group of options that exclude one another."""
    parser.add_argument(
        "--eager", dest="compiling", action="store_const", const=False, help="do not compile the draft step"
    )


class SplitSettings(argparse.Action):
    """Of the words behind an option that takes several, those that set decoding are settings; it keeps the others."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """See argparse."""
        settings = [word for word in values if is_decoding_word(word)]
        own = [word for word in values if word not in settings]
        if not own:
            parser.error(f"argument {option}: expected at least one argument")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *own])
        namespace.settings = [*namespace.settings, *settings]
