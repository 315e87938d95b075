"""What can be said to the commands for who adds a method: ``dflash smoke`` and ``dflash new``."""

from __future__ import annotations

import argparse

_KINDS = ("loss", "head", "conditioning", "drafter", "block", "builder", "policy", "verifier")
# Of each command: a line of help, and the text above its options.
SMOKE = (
    "try recipes at toy size: train, decode, save, load, resume, export",
    """\
Try recipes at toy size, in seconds, without a download: make a tiny random target, train the recipe on it for twenty
steps, decode held-out prompts (at temperature 0 equal to plain decoding and to transformers.generate, at temperature 1
distributed as the target), save, load, resume, and export in every format or say why not. A line per recipe; the exit
status is 1 if one fails. Nothing is left behind.

  dflash smoke                            every shipped recipe but those in sub-folders
  dflash smoke ablation/all               those in a sub-folder
  dflash smoke mine.yaml                  a recipe of your own
  dflash smoke dflash loss=my_loss        with other settings""",
)
NEW = (
    "begin a method: a class, its option and a test that fails until the class is written",
    """\
Write the files that a method of your own begins with: a class on one axis, the option that a recipe chooses it by, and
a test of what every class of its kind must hold, which fails until the class is written. In the repository they go to
its folders; elsewhere the class goes to a package of your own, beside a recipe.

  dflash new loss focal --package my_methods      outside of the repository; also writes the recipe focal.yaml
  dflash new builder my_tree                      in the repository: dflash_lightning/decoding/builder/my_tree.py""",
)


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    """The axis, the name, and the package that the class goes to."""
    parser.add_argument("kind", metavar="KIND", choices=_KINDS, help=", ".join(_KINDS))
    parser.add_argument("name", metavar="NAME", help="in recipes, and of the files: lower-case with underscores")
    parser.add_argument("--package", metavar="DIR", help="folder of a Python package of your own, below this folder")


def add_smoke_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipes, settings that are changed in each, and the form of the answer."""
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="shipped recipes, YAML files, run folders, all (the default), FOLDER/all; key=value is set in each",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: seconds, tau, refusals and failure of each")
