"""From rows to documents; nothing that is read is lost without being counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.read.conversation import ChatRenderer, Encoded, Rendered, UnusableRow
from dflash_lightning.data.read.foreign_ids import foreign_token
from dflash_lightning.data.read.plain_text import encode_text
from dflash_lightning.data.read.records import BadRecord, Record
from dflash_lightning.data.read.row_count import count_rows
from dflash_lightning.data.read.rows import ChatRow, PromptRow, Row, TextRow, TokenRow
from dflash_lightning.data.read.sources import Draw, Source
from dflash_lightning.data.read.store import DocumentStore, MaskedIds
from dflash_lightning.data.read.summary import DataSummary
from dflash_lightning.data.read.truncation import Truncate, last_of_text, without_oldest
from dflash_lightning.errors import SettingError
from dflash_lightning.progress import Progress

__all__ = ["DataSummary", "DocumentMaker", "DocumentStore", "MaskedIds", "RowOutcome"]

ENCODE_ROWS = 256  # rows tokenised in one call

NO_RESPONSE = "a prompt without a response (make responses with `dflash regenerate`)"
CUT = "nothing supervised within max_length"
NO_ANCHOR = "no two supervised tokens in a row, so no block can start"
TOO_LONG = "longer than max_length"
NO_LEFT_CUT = (
    "longer than max_length, and a tokenised row cannot lose its oldest turns: it does not say where they begin"
)
LAST_TOO_LONG = "longer than max_length even with its last exchange alone"


@dataclass(frozen=True)
class RowOutcome:
    """What became of one row that was read: its documents, or the reason why it has none.

    Documents are at most ``max_length`` long and have a place where a block can start; each is used ``copies`` times
    per epoch. ``bad`` is a record that is wrong in itself, ``cut`` one that the end of the file cut off.
    """

    file: str
    line: int
    documents: tuple[MaskedIds, ...] = ()
    copies: int = 1
    dropped: str | None = None
    bad: bool = False
    cut: bool = False

    def rejection(self) -> dict[str, str | int]:
        """The entry of a dropped row in the file of rejected rows."""
        assert self.dropped is not None
        return {"file": self.file, "line": self.line, "reason": self.dropped}


@dataclass(frozen=True)
class _Drawn:
    """A record that is used, with the row it holds or what is wrong with it."""

    file: str
    line: int
    copies: int
    row: Row | BadRecord

    def dropped(self, reason: str, *, bad: bool = False) -> RowOutcome:
        return RowOutcome(self.file, self.line, dropped=reason, bad=bad)


class DocumentMaker:
    """Reads sources and turns rows into documents of at most ``max_length`` tokens, counting everything it drops.

    ``make_renderer`` is called when the first chat row turns up: tokenised data needs no chat template. ``tokenizer``
    is for plain text. ``truncate`` says what becomes of longer documents: ``"right"`` cuts off their end, ``"left"``
    the oldest exchanges of a conversation (see ``data.truncation``), ``"drop"`` leaves them out. ``seed`` decides which
    rows a weight leaves out or repeats.
    """

    def __init__(
        self,
        make_renderer: Callable[[], ChatRenderer],
        *,
        max_length: int,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        truncate: Truncate = "right",
        seed: int = 0,
    ) -> None:
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.truncate = truncate
        self.seed = seed
        self.summary = DataSummary()
        self.rejected: list[RowOutcome] = []
        self._documents: list[MaskedIds] = []

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer of chats, made when it is first asked for."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    @property
    def has_chat_rows(self) -> bool:
        """Whether any row read so far had to be rendered."""
        return self.summary.chat_rows > 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, source: str | Source, *, limit: int | None = None, setting: str = "data.train", progress: bool = False
    ) -> None:
        """Add the documents of one source; a path is a source of its first ``limit`` rows."""
        for outcome in self.outcomes(source, limit=limit, setting=setting, progress=progress):
            self._documents += outcome.documents * outcome.copies

    def outcomes(
        self, source: str | Source, *, limit: int | None = None, setting: str = "data.train", progress: bool = False
    ) -> Iterator[RowOutcome]:
        """What becomes of every row of a source, in file order and counted in ``summary``; nothing is stored.

        Raises:
            ValueError: the source as a whole cannot be read.
        """
        source = Source(source, limit=limit) if isinstance(source, str) else source
        draw = Draw(source.weight, seed=self.seed, place=len(self.summary.sources))
        self.summary.sources.append(source.name)
        drawn = self._draw(source.records(setting), source, draw)
        total = count_rows(source, setting) if progress else None
        with Progress(f"tokenising {source.path}", total, unit="rows", shown=progress) as bar:
            while batch := list(islice(drawn, ENCODE_ROWS)):
                for outcome in self._process(batch):
                    self._count(outcome)
                    yield outcome
                bar.update(len(batch))

    def store(self) -> DocumentStore:
        """Everything read so far.

        Raises:
            ValueError: no row could be used; the message says why, with counts.
        """
        summary = self.summary
        assert summary.kept + summary.num_dropped == summary.read, "a row was lost without being counted"
        if not summary.read:
            left_out = f" ({summary.left_out} were left out by weight)" if summary.left_out else ""
            raise SettingError(
                "data",
                f"{', '.join(summary.sources)} holds no rows{left_out}",
                do="Give a file with one JSON object a line",
            )
        if not self._documents:
            reasons = "; ".join(summary.reasons())
            name = repr(self.renderer.tokenizer.name_or_path) if self.has_chat_rows else "none used"
            raise SettingError(
                "data",
                f"all {summary.read} rows of {', '.join(summary.sources)} were dropped: {reasons}",
                do=f"Chat template: {name}. Correct the data, raise data.max_length ({self.max_length}), or give "
                "rows with 'input_ids' and 'loss_mask'",
            )
        return DocumentStore.join(self._documents)

    def _draw(self, records: Iterator[Record | BadRecord], source: Source, draw: Draw) -> Iterator[_Drawn]:
        for record in records:
            copies = draw.next()
            if isinstance(record, BadRecord):  # never left out, so that it is reported
                yield _Drawn(record.file, record.line, copies, record)
            elif copies:
                yield _Drawn(record.file, record.line, copies, self._parse(record, source))
            else:
                self.summary.left_out += 1

    def _parse(self, record: Record, source: Source) -> Row | BadRecord:
        row = source.parse(record)
        ids = row.input_ids if isinstance(row, TokenRow) else []
        foreign = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if foreign is None:
            return row
        reason = (
            f"input_ids holds {foreign}, but the target has ids 0..{self.vocab_size - 1}. "
            "Was the row tokenised for another model?"
        )
        return BadRecord(record.file, record.line, reason)

    # -- rows to documents --------------------------------------------------------------------------------------------

    def _process(self, batch: list[_Drawn]) -> Iterator[RowOutcome]:
        """Rendering goes row by row, tokenising in one call for all of them; outcomes stay in file order."""
        rendered = [self._render(item.row) if isinstance(item.row, ChatRow) else [] for item in batch]
        texts = [text for group in rendered if isinstance(group, list) for text in group]
        encodings = iter(self.renderer.encode(texts) if texts else [])
        for item, group in zip(batch, rendered, strict=True):
            row = item.row
            if isinstance(row, BadRecord):
                yield RowOutcome(item.file, item.line, dropped=row.reason, bad=True, cut=row.cut)
            elif isinstance(row, PromptRow):
                yield item.dropped(NO_RESPONSE)
            elif isinstance(group, UnusableRow):
                yield item.dropped(str(group))
            else:
                yield self._outcome(item, row, list(islice(encodings, len(group))))

    def _render(self, row: ChatRow) -> list[Rendered] | UnusableRow:
        summary = self.summary
        summary.chat_rows += 1
        try:
            rendered = self.renderer.of_row(row)
        except UnusableRow as reason:
            return reason
        turns = [turn for item in rendered for turn in item.turns]
        summary.empty_reasoning += sum(turn.has_empty_reasoning for turn in turns)
        summary.cut_answers += sum(turn.is_cut for turn in turns)
        summary.unlearned += len(row.unlearned)
        return rendered

    def _outcome(self, item: _Drawn, row: Row, encodings: list[list[Encoded] | UnusableRow]) -> RowOutcome:
        try:
            if isinstance(row, TokenRow):
                whole = [MaskedIds.of(row.input_ids, row.loss_mask)]
            else:
                whole = [self._encode_text(row)] if isinstance(row, TextRow) else _usable(encodings)
            for document in whole:
                if (foreign := foreign_token(document.ids, self.vocab_size, self.tokenizer)) is not None:
                    return item.dropped(f"{foreign}.", bad=True)
            fitting = self._fit(row, whole)
        except UnusableRow as reason:
            return item.dropped(str(reason))
        kept = tuple(document for document in fitting if document.anchors)
        if not kept:
            was_cut = any(document.mask.any() for document in whole) and not any(d.mask.any() for d in fitting)
            return item.dropped(CUT if was_cut else NO_ANCHOR)
        self.summary.truncated += item.copies * sum(all(document is not one for one in whole) for document in kept)
        self.summary.unusable += max(0, len(whole) - len(kept))
        return RowOutcome(item.file, item.line, kept, item.copies)

    def _encode_text(self, row: TextRow) -> MaskedIds:
        if self.tokenizer is None:
            raise ValueError(
                f"{row.where}: plain text needs a tokenizer, and this target has none. Use a target with a tokenizer, "
                "or rows with 'input_ids' and 'loss_mask'."
            )
        return encode_text(row.text, self.tokenizer)

    def _fit(self, row: Row, whole: list[MaskedIds]) -> list[MaskedIds]:
        """Documents of at most ``max_length``; raises ``UnusableRow`` where a way of cutting leaves none."""
        if all(len(document) <= self.max_length for document in whole):
            return whole
        if self.truncate == "right":
            return [document.first(self.max_length) for document in whole]
        if self.truncate == "drop":
            return _some([d for d in whole if len(d) <= self.max_length], TOO_LONG)
        if isinstance(row, TextRow):
            return [last_of_text(document, self.max_length) for document in whole]
        if isinstance(row, ChatRow):
            encode = lambda places: _usable(self.renderer.encode(self.renderer.of_row(row.only(places))))  # noqa: E731
            return _some(without_oldest(row.messages, encode, self.max_length), LAST_TOO_LONG)
        raise UnusableRow(NO_LEFT_CUT)

    # -- counting -----------------------------------------------------------------------------------------------------

    def _count(self, outcome: RowOutcome) -> None:
        summary = self.summary
        summary.read += 1
        if outcome.dropped is not None:
            summary.drop(outcome.dropped, f"{outcome.file}:{outcome.line}", bad=outcome.bad, cut=outcome.cut)
            self.rejected.append(outcome)
            return
        summary.keep(outcome.documents, outcome.copies)
        summary.first_supervised = summary.first_supervised or self._first_supervised(outcome.documents[0])

    def _first_supervised(self, document: MaskedIds) -> str:
        """Text of the first supervised span, shortened: the quickest check of a mask."""
        tokenizer = self.renderer.tokenizer if self.has_chat_rows else self.tokenizer
        if tokenizer is None:
            return ""
        mask, start = document.mask, int(document.mask.argmax())
        length = int((~mask[start:]).argmax()) if not mask[start:].all() else len(mask) - start
        ids = document.ids[start : start + length].tolist()
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
        return text if len(text) <= 100 else f"{text[:60]} ... {text[-35:]}"


def _usable(encodings: Sequence[list[Encoded] | UnusableRow]) -> list[MaskedIds]:
    """Documents of one row, or the first reason why it has none."""
    documents: list[MaskedIds] = []
    for encoded in encodings:
        if isinstance(encoded, UnusableRow):
            raise encoded
        documents += [MaskedIds.of(item.input_ids, item.loss_mask) for item in encoded]
    return documents


def _some(documents: list[MaskedIds], reason: str) -> list[MaskedIds]:
    if not documents:
        raise UnusableRow(reason)
    return documents
