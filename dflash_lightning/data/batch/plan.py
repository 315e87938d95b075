"""The plan of a data set: documents in which a block can start, as micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.data.batch.packing import Planner, PlanSettings
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.errors import SettingError


def plan_documents(
    documents: DocumentStore, block: BlockConstructor, settings: PlanSettings, *, say: Callable[[str], None]
) -> Planner:
    """Plan the documents that ``block`` finds a place in; ``say`` hears what is left out, and what packs badly.

    Raises:
        SettingError: there is no such document.
    """
    blocks = [block.num_blocks(documents[d].loss_mask) for d in range(len(documents))]
    usable = [d for d, count in enumerate(blocks) if count]
    left_out = len(blocks) - len(usable)
    if not usable:
        raise SettingError(
            "data",
            f"block {block.name!r} finds no place to start a block in any of {left_out} documents",
            do="Look at the masks, or use longer responses",
        )
    if left_out:
        say(f"data: {left_out} of {len(documents)} documents have no place to start a block: left out")
    plan = Planner(usable, documents.lengths[usable].tolist(), [blocks[d] for d in usable], settings)
    if plan.blocks_forbid_packing():
        say(
            f"data.row_blocks: {settings.row_blocks} blocks are less than any two documents have, so that every row "
            "holds one document. Raise it, or set it to null, to pack rows"
        )
    return plan
