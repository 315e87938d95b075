"""What the commands' parsers share: errors that say what would have been right, and arguments of recipes."""

from __future__ import annotations

import argparse
from typing import NoReturn, TypeAlias

from dflash_lightning.recipe_folders import recipe_names

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Adds to argparse's errors what would have been right."""

    def error(self, message: str) -> NoReturn:
        if "required: RECIPE" in message:
            names = ", ".join(recipe_names())
            message += f". Give a shipped recipe ({names}), a YAML file or a run folder of your own (dflash recipes)"
        super().error(f"{message}\n(dflash {self._command()}--help shows what there is)")

    def _command(self) -> str:
        return "".join(f"{word} " for word in self.prog.split()[1:])


def add(commands: Commands, name: str, help_: str, text: str) -> argparse.ArgumentParser:
    """The parser of one command, with what every command takes."""
    parser = commands.add_parser(
        name, help=help_, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=name, parser=parser)
    return parser


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe and the settings behind it."""
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe, a YAML file of your own, or a run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings to change, such as optim.lr=1e-3 or trainer=gpu",
    )
