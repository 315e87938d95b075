"""Options that several commands share."""

from __future__ import annotations

import argparse

from dflash_lightning.commands.argument_types import count, probability, temperature

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


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Length and law of the answers."""
    parser.add_argument(
        "--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (the default)")
    parser.add_argument("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=probability, metavar="P", help="sample among the likeliest tokens that hold probability P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sampling; default: 0")
