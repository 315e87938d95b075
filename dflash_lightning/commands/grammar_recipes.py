"""Grammar of the commands that only look at recipes."""

from __future__ import annotations

from dflash_lightning.commands.parser import Commands, add, add_recipe_arguments


def add_show(commands: Commands) -> None:
    text = """\
Print the recipe with every value resolved. Saved to a file, it reruns to the same run. With --all: one line for every
setting that there is, with its value, default, range and what it does.

  dflash show quickstart
  dflash show mine.yaml --all | grep lr

Loss terms and callbacks have names, and are added up: ~loss.NAME takes one out (in a file: NAME: null under loss), and
loss=OPTION replaces them all. What is wrong with the recipe goes to standard error, and the exit status is then 2."""
    parser = add(commands, "show", "print the resolved recipe", text)
    add_recipe_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every setting, with default, range and a line of help")


def add_recipes(commands: Commands) -> None:
    text = """\
List recipes and the options of each group, each with a line of what it is.

  dflash recipes
  dflash recipes mine.yaml     also those beside a recipe of your own: mine.yaml finds loss/focal.yaml as loss=focal"""
    parser = add(commands, "recipes", "list recipes and the options of each group", text)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe file of your own, or a folder of them")
