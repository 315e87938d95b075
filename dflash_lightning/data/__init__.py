"""Data: files to documents with honest masks, documents to micro-batches, prompts for evaluation."""

from dflash_lightning.data.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.datamodule import DraftData
from dflash_lightning.data.documents import DataSummary, DocumentMaker, DocumentStore
from dflash_lightning.data.prompts import check_prompt_lengths, load_prompts, render_prompt
from dflash_lightning.data.rows import ChatRow, PromptRow, TokenRow, read_rows
from dflash_lightning.files import find_file

__all__ = [
    "ChatRenderer",
    "ChatRow",
    "DataSummary",
    "DocumentMaker",
    "DocumentStore",
    "DraftData",
    "PromptRow",
    "TokenRow",
    "UnusableRow",
    "check_prompt_lengths",
    "find_file",
    "load_prompts",
    "read_rows",
    "render_prompt",
]
