"""``dflash inspect``: rows as training will see them, the account that training prints, and what does not fit."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from dflash_lightning.commands.inspect_against import ServerIds
from dflash_lightning.commands.inspect_settings import evaluation_files, is_recipe, sets_length
from dflash_lightning.commands.inspect_text import TokenTable
from dflash_lightning.data import left_out_line, load_prompts
from dflash_lightning.data.inspection import BlockAccount, PromptOverlap, supervised_text, training_rows
from dflash_lightning.data.read.documents import DataSummary, DocumentMaker, RowOutcome
from dflash_lightning.data.read.process import TrainingRows
from dflash_lightning.data.read.sources import Source
from dflash_lightning.recipe.make import make, make_target
from dflash_lightning.target import TargetText, load_text
from dflash_lightning.target.mask_token import check_mask_of_text, check_mask_unused

_PIPE_WIDTH = 120  # columns where the output is no terminal
_LOADED_BY = "dflash_lightning.target.load_target"


def inspect(args: argparse.Namespace, tree: dict[str, Any]) -> int:
    """Show every row, then the account; the status is 1 where training would refuse the data, or ids differ.

    The rows go through the very objects that training makes of the same settings; only the tokenizer is loaded.

    ``tree`` is what ``read_settings`` made of the arguments.

    Raises:
        ValueError: a file as a whole cannot be read, or the target's tokenizer.
    """
    text = _open_text(tree["target"])
    if not is_recipe(args.data) and not sets_length(args):
        tree["data"]["max_length"] = min(tree["data"]["max_length"], text.max_positions)
    rows = training_rows(tree["data"])
    rows.processing.check_target(text)
    maker = rows.processing.maker(text)
    blocks = BlockAccount(make(tree["block"]))
    if blocks.block.mask_token_id is not None:
        check_mask_of_text(blocks.block.mask_token_id, text)
    prompts = {name: load_prompts(name) for name in evaluation_files(args, tree)}
    overlaps = [PromptOverlap(name, asked, maker.renderer) for name, asked in prompts.items()]
    server = None if args.against is None else ServerIds(args.against, _only_file(rows.sources))
    show = _JsonRows(text) if args.json else _TextRows(args, text)
    for outcome in _outcomes(maker, rows.sources, progress=args.json and sys.stderr.isatty()):
        for number, document in enumerate(outcome.documents):
            anchors = blocks.add(document, outcome.copies)
            show.document(outcome, number, anchors)
            for overlap in overlaps:
                overlap.see(document)
            if server is not None and (difference := server.compare(outcome.line, number, document, show.decode)):
                show.note(f"{outcome.file}:{outcome.line}: {difference}")
        if outcome.dropped is not None:
            show.dropped(outcome)
            if server is not None:
                server.skip(outcome.line)
    sys.stdout.flush()
    rows.add_provenance(maker.summary, None)
    refusals = _refusals(rows, maker.summary, blocks)
    lines = maker.summary.lines()
    if maker.summary.kept:
        lines += [*blocks.lines(), *(line for overlap in overlaps for line in overlap.lines())]
    lines += [f"  {line}" for asked in prompts.values() if (line := left_out_line(asked)) is not None]
    lines += [] if server is None else server.lines()
    print(*lines, *(f"  training would stop: {refusal}" for refusal in refusals), sep="\n", file=sys.stderr)
    return 1 if refusals or (server is not None and server.differing) else 0


def _outcomes(maker: DocumentMaker, sources: Sequence[Source], *, progress: bool) -> Iterator[RowOutcome]:
    for source in sources:
        yield from maker.outcomes(source, progress=progress)


def _refusals(rows: TrainingRows, summary: DataSummary, blocks: BlockAccount) -> list[str]:
    """Why training would not begin with these rows."""
    if not summary.kept:
        return ["no row can be used" if summary.read else f"{', '.join(summary.sources)} holds no rows"]
    found = []
    for check in (
        rows.processing.check_used,
        partial(DataSummary.check_bad, max_bad_rows=rows.max_bad_rows, rejected=None),
        lambda _: _check_masks(blocks),
    ):
        try:
            check(summary)
        except ValueError as error:
            found.append(str(error))
    return found


def _check_masks(blocks: BlockAccount) -> None:
    mask = blocks.block.mask_token_id
    if mask is not None and blocks.masks:
        check_mask_unused(mask, {mask: blocks.masks})


def _only_file(sources: Sequence[Source]) -> str:
    """The name of the one file that the data are; ids of a server are matched with it line by line."""
    files = [str(file) for source in sources for file in source.files()]
    if len(files) != 1:
        raise ValueError(f"--against: the data are {len(files)} files, but ids are matched by line. Inspect one file.")
    return files[0]


def _open_text(node: dict[str, Any]) -> TargetText:
    """Without weights where the target is loaded in the usual way."""
    if node["_target_"] != _LOADED_BY:
        return make_target(node).text
    known = {key: node[key] for key in ("revision", "trust_remote_code") if key in node}
    return load_text(node["source"], **known)


# -- output -----------------------------------------------------------------------------------------------------------


class _Rows:
    """Where rows are written: to standard output, and nothing else goes there."""

    def __init__(self, text: TargetText) -> None:
        self.tokenizer = text.tokenizer

    def decode(self, ids: list[int]) -> str:
        """Text of some ids; of a target without tokenizer, the ids."""
        if self.tokenizer is None:
            return str(ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def document(self, outcome: RowOutcome, number: int, anchors: list[int]) -> None: ...

    def dropped(self, outcome: RowOutcome) -> None: ...

    def note(self, text: str) -> None: ...


class _JsonRows(_Rows):
    """One JSON object a line; ``row`` counts the documents of a line from 0."""

    def document(self, outcome: RowOutcome, number: int, anchors: list[int]) -> None:
        document, tokenizer = outcome.documents[number], self.tokenizer
        row = {
            "line": outcome.line,
            "row": number,
            "input_ids": document.ids.tolist(),
            "loss_mask": document.mask.astype(int).tolist(),
            "supervised_text": None if tokenizer is None else supervised_text(document, tokenizer),
            "anchors": anchors,
        }
        print(json.dumps(row))

    def dropped(self, outcome: RowOutcome) -> None:
        print(json.dumps({"line": outcome.line, "dropped": outcome.dropped}))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


class _TextRows(_Rows):
    """Ids, texts and mask one under the other; supervised text in green in a terminal."""

    def __init__(self, args: argparse.Namespace, text: TargetText) -> None:
        super().__init__(text)
        coloured = args.color == "always" or (
            args.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        )
        width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if sys.stdout.isatty() else _PIPE_WIDTH
        self._table = TokenTable(None if text.tokenizer is None else self.decode, width=width, coloured=coloured)

    def document(self, outcome: RowOutcome, number: int, anchors: list[int]) -> None:
        document, total = outcome.documents[number], int(outcome.documents[number].mask.sum())
        which = f", document {number + 1} of {len(outcome.documents)}" if len(outcome.documents) > 1 else ""
        repeated = f", used {outcome.copies} times per epoch" if outcome.copies > 1 else ""
        first = int(document.mask.argmax())
        print(
            f"{outcome.file}:{outcome.line}{which}: {len(document)} tokens, {total} supervised "
            f"({100 * total / len(document):.1f} %), the first at {first}: "
            f"{self.decode([int(document.ids[first])])!r}, {len(anchors)} places for blocks{repeated}"
        )
        print(*self._table.lines(document), sep="\n")
        print()

    def dropped(self, outcome: RowOutcome) -> None:
        print(f"{outcome.file}:{outcome.line}: dropped: {outcome.dropped}\n")

    def note(self, text: str) -> None:
        print(f"{text}\n")
