"""argparse's parser with errors that say what would have been right."""

from __future__ import annotations

import argparse
from typing import NoReturn

from dflash_lightning.recipe_folders import recipe_names


class Parser(argparse.ArgumentParser):
    """Adds to argparse's errors what would have been right."""

    def error(self, message: str) -> NoReturn:
        if "required: RECIPE" in message:
            names = ", ".join(recipe_names())
            message += f". Give a shipped recipe ({names}), a YAML file or a run folder of your own (dflash recipes)"
        super().error(f"{message}\n(dflash {self._command()}--help shows what there is)")

    def _command(self) -> str:
        return "".join(f"{word} " for word in self.prog.split()[1:])
