"""A data set as documents in memory, and the account of what became of every row that was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_lightning.data.conversation import ChatRenderer, Encoded, Rendered, UnusableRow
from dflash_lightning.data.rows import ChatRow, PromptRow, Row, TokenRow, read_rows
from dflash_lightning.types import Document

ENCODE_ROWS = 256  # rows tokenised in one call
FEW_ANCHORS = 1000  # below this a drafter learns next to nothing

NO_RESPONSE = "a prompt without a response (make responses with `dflash regenerate`)"
CUT = "nothing supervised within max_length"
NO_ANCHOR = "no two supervised tokens in a row, so no block can start"


class DocumentStore:
    """Ids and masks of all documents in two flat arrays: small to fork, cheap to pickle, and nothing of the target."""

    def __init__(self, ids: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.bool_]]) -> None:
        lengths = [len(item) for item in ids]
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.ids: NDArray[np.int32] = np.concatenate(ids)
        self.mask: NDArray[np.bool_] = np.concatenate(masks)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample_id: int) -> Document:
        start, end = self.offsets[sample_id], self.offsets[sample_id + 1]
        ids = torch.from_numpy(self.ids[start:end].astype(np.int64))
        return Document(sample_id, ids, torch.from_numpy(self.mask[start:end].copy()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def used_ids(self) -> set[int]:
        """Ids that occur anywhere in the documents."""
        return set(np.unique(self.ids).tolist())


@dataclass
class DataSummary:
    """What became of the rows: ``kept + dropped = read``. A row may give several documents (one per assistant turn)."""

    sources: list[str] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    anchors: int = 0
    truncated: int = 0
    longest: int = 0
    empty_reasoning: int = 0
    first_supervised: str = ""

    @property
    def share(self) -> float:
        """Supervised tokens per token."""
        return self.supervised / max(1, self.tokens)

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, where)

    def reasons(self) -> list[str]:
        return [f"{count} x {reason} (first: {self.examples[reason]})" for reason, count in self.dropped.most_common()]

    def warnings(self) -> list[str]:
        """What is probably not meant; empty for healthy data."""
        found = []
        if self.empty_reasoning:
            found.append(
                f"{self.empty_reasoning} responses without reasoning, while the template's thinking is on, would teach "
                "an empty <think></think> block. Set data.chat_template_kwargs.enable_thinking=false, here and in "
                "evaluation, or train on responses with reasoning."
            )
        if not 0.01 <= self.share <= 0.99:
            found.append(f"{100 * self.share:.1f} % of the tokens are supervised: look at the masks before training.")
        if self.anchors < FEW_ANCHORS:
            found.append(
                f"{self.anchors} places where a block can start are few: enough for a test, not for a drafter."
            )
        return found

    def lines(self) -> list[str]:
        """The account, to be printed before training."""
        dropped = sum(self.dropped.values())
        lines = [
            f"data: {', '.join(self.sources)}",
            f"  rows: {self.read} read, {self.kept} kept as {self.documents} documents, {dropped} dropped",
            *(f"    dropped {reason}" for reason in self.reasons()),
            f"  tokens: {self.tokens}, {100 * self.share:.1f} % supervised; longest document {self.longest}, "
            f"{self.truncated} truncated; blocks can start at {self.anchors} places",
        ]
        if self.first_supervised:
            lines.append(f"  first supervised text: {self.first_supervised!r}")
        return lines + [f"  warning: {text}" for text in self.warnings()]


class DocumentMaker:
    """Reads files and turns rows into documents of at most ``max_length`` tokens, counting everything it drops.

    ``make_renderer`` is called when the first chat row turns up: tokenised data needs no chat template.
    """

    def __init__(self, make_renderer: Callable[[], ChatRenderer], *, max_length: int, vocab_size: int) -> None:
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.summary = DataSummary()
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.bool_]] = []

    @property
    def renderer(self) -> ChatRenderer:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    @property
    def has_chat_rows(self) -> bool:
        """Whether any row read so far had to be rendered."""
        return self._renderer is not None

    def read(self, path: str, *, limit: int | None, setting: str, progress: bool = False) -> None:
        """Add the documents of one file, or of its first ``limit`` rows."""
        self.summary.sources.append(path)
        rows = iter(tqdm(read_rows(path, limit=limit, setting=setting), desc=f"tokenise {path}", disable=not progress))
        while batch := list(islice(rows, ENCODE_ROWS)):
            self._add(batch)

    def store(self) -> DocumentStore:
        """Everything read so far.

        Raises:
            ValueError: no row could be used; the message says why, with counts.
        """
        summary = self.summary
        if not summary.read:
            raise ValueError(
                f"data: {', '.join(summary.sources)} holds no rows. Give a file with one JSON object a line."
            )
        if not self._ids:
            reasons = "; ".join(summary.reasons())
            name = repr(self.renderer.tokenizer.name_or_path) if self.has_chat_rows else "none used"
            raise ValueError(
                f"data: all {summary.read} rows of {', '.join(summary.sources)} were dropped: {reasons}. "
                f"Chat template: {name}. Correct the data, raise data.max_length ({self.max_length}), or give rows "
                "with 'input_ids' and 'loss_mask'."
            )
        summary.first_supervised = self._first_supervised()
        return DocumentStore(self._ids, self._masks)

    def _add(self, rows: list[Row]) -> None:
        """Rendering goes row by row, tokenising in one call for all of them; documents stay in file order."""
        rendered: list[list[Rendered] | None] = []
        for row in rows:
            self.summary.read += 1
            rendered.append(self._render(row))
        texts = [text for group in rendered if group is not None for text in group]
        encodings = iter(self.renderer.encode(texts) if texts else [])
        for row, group in zip(rows, rendered, strict=True):
            if isinstance(row, TokenRow):
                self._keep(row, [Encoded(self._check_ids(row), [bool(value) for value in row.loss_mask])])
            elif group is not None:
                self._keep_chat(row, list(islice(encodings, len(group))))

    def _render(self, row: Row) -> list[Rendered] | None:
        if isinstance(row, PromptRow):
            self.summary.drop(NO_RESPONSE, row.where)
        if not isinstance(row, ChatRow):
            return None
        try:
            rendered = self.renderer.rendered(row.messages, row.tools)
        except UnusableRow as reason:
            self.summary.drop(str(reason), row.where)
            return None
        self.summary.empty_reasoning += sum(turn.has_empty_reasoning for item in rendered for turn in item.turns)
        return rendered

    def _check_ids(self, row: TokenRow) -> list[int]:
        bad = next((token for token in row.input_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"{row.where}: input_ids holds {bad}, but the target has ids 0..{self.vocab_size - 1}. "
                "Was the row tokenised for another model?"
            )
        return row.input_ids

    def _keep_chat(self, row: Row, results: list[list[Encoded] | UnusableRow]) -> None:
        reason = next((result for result in results if isinstance(result, UnusableRow)), None)
        if reason is not None:
            self.summary.drop(str(reason), row.where)
        else:
            self._keep(row, [item for result in results if not isinstance(result, UnusableRow) for item in result])

    def _keep(self, row: Row, items: list[Encoded]) -> None:
        """Cut to ``max_length``; a row is dropped when none of its documents has a place to start a block."""
        summary, before = self.summary, len(self._ids)
        for item in items:
            ids = np.array(item.input_ids[: self.max_length], dtype=np.int32)
            mask = np.array(item.loss_mask[: self.max_length], dtype=np.bool_)
            anchors = int((mask[:-1] & mask[1:]).sum())  # supervised tokens with a supervised successor
            if not anchors:
                continue
            self._ids.append(ids)
            self._masks.append(mask)
            summary.documents += 1
            summary.tokens += len(ids)
            summary.supervised += int(mask.sum())
            summary.anchors += anchors
            summary.truncated += len(item.input_ids) > self.max_length
            summary.longest = max(summary.longest, len(ids))
        if len(self._ids) > before:
            summary.kept += 1
            return
        was_cut = any(any(item.loss_mask) and not any(item.loss_mask[: self.max_length]) for item in items)
        summary.drop(CUT if was_cut else NO_ANCHOR, row.where)

    def _first_supervised(self) -> str:
        """Text of the first document's first supervised span, shortened: the quickest check of a mask."""
        if not self.has_chat_rows:
            return ""
        ids, mask = self._ids[0], self._masks[0]
        start = int(mask.argmax())
        length = int((~mask[start:]).argmax()) if not mask[start:].all() else len(mask) - start
        text = str(self.renderer.tokenizer.decode(ids[start : start + length].tolist(), skip_special_tokens=False))
        return text if len(text) <= 100 else f"{text[:60]} ... {text[-35:]}"
