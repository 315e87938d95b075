"""What can be said to the commands for who adds a method: ``dflash smoke`` and ``dflash new``."""

from __future__ import annotations

import argparse

# Of each command: a line of help, and the text above its options.
SMOKE = (
    "try recipes at toy size: train, decode, save, load, resume, export",
    """\
Try recipes at toy size, in seconds, without a download: make a tiny random target, train the recipe on it for twenty
steps, decode held-out prompts (at temperature 0 equal to plain decoding and to transformers.generate, at temperature 1
distributed as the target), save, load, resume, and export in every format or say why not. A line per recipe; the exit
status is 1 if one fails. Nothing is left behind.

  dflash smoke                            every shipped recipe
  dflash smoke mine.yaml                  a recipe of your own
  dflash smoke dflash loss=my_loss        with other settings""",
)


def add_smoke_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipes, settings that are changed in each, and the form of the answer."""
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="shipped recipes, YAML files, run folders, or all (the default); key=value changes a setting in each",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: seconds, tau, refusals and failure of each")
