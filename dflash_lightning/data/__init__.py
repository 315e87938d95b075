"""Data: files to documents with honest masks, documents to micro-batches, prompts for evaluation."""

from dflash_lightning.data.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.datamodule import DraftData
from dflash_lightning.data.documents import DocumentMaker, RowOutcome
from dflash_lightning.data.prompts import Prompt, check_prompt_lengths, left_out_line, load_prompts, render_prompt
from dflash_lightning.data.rows import ChatRow, PromptRow, TextRow, TokenRow, read_rows
from dflash_lightning.data.sources import Source, make_sources
from dflash_lightning.data.store import DocumentStore
from dflash_lightning.data.summary import DataSummary
from dflash_lightning.files import find_file

__all__ = [
    "ChatRenderer",
    "ChatRow",
    "DataSummary",
    "DocumentMaker",
    "DocumentStore",
    "DraftData",
    "Prompt",
    "PromptRow",
    "RowOutcome",
    "Source",
    "TextRow",
    "TokenRow",
    "UnusableRow",
    "check_prompt_lengths",
    "find_file",
    "left_out_line",
    "load_prompts",
    "make_sources",
    "read_rows",
    "render_prompt",
]
