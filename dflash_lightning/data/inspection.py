"""What to look at in training rows before training on them: supervised spans, places for blocks, shared prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from transformers import PreTrainedTokenizerBase

from dflash_lightning.block import BlockConstructor
from dflash_lightning.data.overlap import OverlapCounter
from dflash_lightning.data.read.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.read.messages import Message
from dflash_lightning.data.read.process import Processing, TrainingRows
from dflash_lightning.data.read.prompts import Prompt
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.data.read.store import MaskedIds
from dflash_lightning.types import Alignment

NGRAM = 13  # words; see ``data.overlap``


def training_rows(settings: Mapping[str, Any]) -> TrainingRows:
    """The rows of ``DraftData(target, **settings)``, without its side file and cache.

    ``settings`` name every argument, defaults included: Lightning, which ``DraftData`` is of, is not needed here.
    """
    values = dict(settings)
    values["chat_template_kwargs"] = dict(values["chat_template_kwargs"] or {})
    processing = Processing(**{field.name: values[field.name] for field in fields(Processing)})
    sources = make_sources(values["train"], limit=values["limit"])
    return TrainingRows(sources, processing, values["max_bad_rows"], rejected=None, cache=None)


def supervised_spans(mask: Bool[np.ndarray, " S"]) -> list[tuple[int, int]]:
    """First position and position after the last one of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def supervised_text(document: MaskedIds, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the document teaches to write, span after span, special tokens included."""
    return "".join(
        str(tokenizer.decode(document.ids[a:b].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for a, b in supervised_spans(document.mask)
    )


class BlockAccount:
    """How many blocks a block construction finds in documents."""

    def __init__(self, block: BlockConstructor) -> None:
        self.block = block
        self._drafts = Alignment(block.block_size, mask_token_id=0, label_layout=block.label_layout).num_drafts
        self._places = self._whole = self._blocks = self._without = 0
        self.masks = 0  # tokens of the documents that are the mask id which the block names

    def add(self, document: MaskedIds, copies: int = 1) -> list[int]:
        """Count a document; returns the positions at which its blocks can start."""
        mask = torch.from_numpy(document.mask)
        if self.block.mask_token_id is not None:
            self.masks += int((document.ids == self.block.mask_token_id).sum())
        anchors = self.block.eligible_anchors(mask).tolist()
        ends = {p: end for start, end in supervised_spans(document.mask) for p in range(start, end)}
        self._places += copies * len(anchors)
        self._whole += copies * sum(ends.get(anchor, 0) > anchor + self._drafts for anchor in anchors)
        self._blocks += copies * self.block.num_blocks(mask)
        self._without += copies * (not anchors)
        return anchors

    def lines(self) -> list[str]:
        """The account in words."""
        share = 100 * self._whole / max(1, self._places)
        name = f"block={self.block.name}, block_size={self.block.block_size}"
        lines = [
            f"  blocks ({name}): {self._blocks} per epoch at {self._places} places, {share:.1f} % of them with all "
            f"{self._drafts} drafts supervised"
        ]
        if self._without:
            lines.append(f"  {self._without} documents have no place for this kind of block: left out of training")
        return lines


class PromptOverlap:
    """What evaluation prompts share with training documents, which pass by one at a time.

    Two measures: prompts whose rendered ids open a document (the very same prompt, of any length), and word 13-grams of
    user messages that occur anywhere in a document's text. Short prompts have no 13-gram, template text is no user
    message.
    """

    def __init__(self, name: str, prompts: Sequence[Prompt | Sequence[Message]], renderer: ChatRenderer) -> None:
        """Raises ``ValueError`` where the chat template refuses a prompt."""
        self.name = name
        self._tokenizer = renderer.tokenizer
        self._opening: dict[int, set[bytes]] = {}
        self._rendered: list[bytes] = []
        asked = [Prompt.of(prompt) for prompt in prompts]
        for prompt in asked:
            ids = np.asarray(_encode(renderer, prompt, name), dtype=np.int32)
            self._opening.setdefault(len(ids), set()).add(ids.tobytes())
            self._rendered.append(ids.tobytes())
        self._found: set[bytes] = set()
        words = [m["content"].split() for prompt in asked for m in prompt.messages if m["role"] == "user"]
        self._counter = OverlapCounter(words, n=NGRAM)

    def see(self, document: MaskedIds) -> None:
        """Compare the prompts with one training document."""
        for length, prompts in self._opening.items():
            opening = document.ids[:length].tobytes()
            if opening in prompts:
                self._found.add(opening)
        self._counter.see(str(self._tokenizer.decode(document.ids.tolist(), skip_special_tokens=True)).split())

    @property
    def same(self) -> int:
        """How many prompts are a training document's prompt, token for token."""
        return sum(prompt in self._found for prompt in self._rendered)

    def lines(self) -> list[str]:
        """The account in words, with a warning where prompts were trained on."""
        overlap = self._counter.overlap()
        lines = [
            f"  evaluation prompts {self.name}: {self.same} of {len(self._rendered)} are training prompts; "
            f"{100 * overlap.ngram_share:.1f} % of their word {NGRAM}-grams occur in the training text"
        ]
        if self.same:
            lines.append(
                f"  warning: {self.same} evaluation prompts are trained on: figures of {self.name} say nothing about "
                "new prompts. Take them out of one of the two."
            )
        return lines


def _encode(renderer: ChatRenderer, prompt: Prompt, name: str) -> list[int]:
    try:
        return prompt.encode(renderer)
    except UnusableRow as error:
        where = prompt.where or f"{name}: {prompt.name}"
        raise ValueError(f"{where}: {error}. Change it, or leave it out.") from None
