"""A copy of a finished run that is decoded otherwise: the same weights, another method of a comparison."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from dflash_lightning.bench.settings import FED, fed_by
from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.decoding.draft_proposer import num_drafts
from dflash_lightning.files import LAST_CHECKPOINT, RECIPE_FILE, find_draft_place, write_atomic
from dflash_lightning.recipe.load import load_recipe, recipe_text
from dflash_lightning.recipe.tree import plain_tree
from dflash_lightning.run import RunFolder


def redecoded(run: RunFolder, folder: Path, words: Sequence[str]) -> RunFolder:
    """The run folder ``folder``: the drafter of ``run``, and its recipe with the decoding that ``words`` say.

    It is made once; the same words find it again. Its record names them beside what the run was asked for.

    Raises:
        ValueError: another setting than those of ``FED``, or one that the drafter cannot be fed by; the folder holds
            something else.
    """
    if strange := [word for word in words if word.partition("=")[0] not in {f"decoding.{key}" for key in FED}]:
        allowed = ", ".join(f"decoding.{key}" for key in FED)
        raise ValueError(f"{strange[0]}: is decoded by all methods alike on a bench. Allowed: {allowed}.")
    cfg = load_recipe(str(run.path), words)
    text = recipe_text(cfg)
    made, state = RunFolder(folder), run.state
    if folder.exists():
        if made.recipe.exists() and made.recipe.read_text(encoding="utf-8") == text:
            return made
        raise ValueError(f"--to: {folder} is there and holds something else. Name a new folder.")
    checkpoint = find_draft_place(run.path, setting="RUN")
    assert checkpoint is not None
    fed = fed_by(plain_tree(cfg, []))
    num_drafts(
        find_draft(str(run.path)).model, fed.get("block_size"), untrained_slots=fed.get("untrained_slots", False)
    )
    asked = state.get("asked") or {"recipe": str(run.path), "overrides": []}
    (folder / LAST_CHECKPOINT).parent.mkdir(parents=True)
    shutil.copyfile(checkpoint, folder / LAST_CHECKPOINT)
    write_atomic(folder / RECIPE_FILE, text)
    made.record({**state, "asked": {**asked, "overrides": [*asked["overrides"], *words]}})
    return made
