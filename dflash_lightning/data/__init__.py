"""Data: files to documents with honest masks, documents to micro-batches, prompts for evaluation.

Names load on first use (``lazy.py``): a command that needs one of them should not pay for all.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

if TYPE_CHECKING:
    from dflash_lightning.data.datamodule import DraftData
    from dflash_lightning.data.features.servers import Servers
    from dflash_lightning.data.read.conversation import ChatRenderer, UnusableRow
    from dflash_lightning.data.read.documents import DocumentMaker, RowOutcome
    from dflash_lightning.data.read.prompts import Prompt, left_out_line, load_prompts, render_prompt
    from dflash_lightning.data.read.rows import ChatRow, PromptRow, TextRow, TokenRow, read_rows
    from dflash_lightning.data.read.sources import Source, make_sources
    from dflash_lightning.data.read.store import DocumentStore
    from dflash_lightning.data.read.summary import DataSummary
    from dflash_lightning.files import find_file

_HOME = {
    "ChatRenderer": "dflash_lightning.data.read.conversation",
    "ChatRow": "dflash_lightning.data.read.rows",
    "DataSummary": "dflash_lightning.data.read.summary",
    "DocumentMaker": "dflash_lightning.data.read.documents",
    "DocumentStore": "dflash_lightning.data.read.store",
    "DraftData": "dflash_lightning.data.datamodule",
    "Prompt": "dflash_lightning.data.read.prompts",
    "PromptRow": "dflash_lightning.data.read.rows",
    "RowOutcome": "dflash_lightning.data.read.documents",
    "Servers": "dflash_lightning.data.features.servers",
    "Source": "dflash_lightning.data.read.sources",
    "TextRow": "dflash_lightning.data.read.rows",
    "TokenRow": "dflash_lightning.data.read.rows",
    "UnusableRow": "dflash_lightning.data.read.conversation",
    "find_file": "dflash_lightning.files",
    "left_out_line": "dflash_lightning.data.read.prompts",
    "load_prompts": "dflash_lightning.data.read.prompts",
    "make_sources": "dflash_lightning.data.read.sources",
    "read_rows": "dflash_lightning.data.read.rows",
    "render_prompt": "dflash_lightning.data.read.prompts",
}

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
    "Servers",
    "Source",
    "TextRow",
    "TokenRow",
    "UnusableRow",
    "find_file",
    "left_out_line",
    "load_prompts",
    "make_sources",
    "read_rows",
    "render_prompt",
]

__getattr__ = lazy_names(__name__, _HOME)
