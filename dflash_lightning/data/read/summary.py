"""The account of what became of every row that was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_lightning.data.read.provenance import Draws, Labels
from dflash_lightning.data.read.store import MaskedIds
from dflash_lightning.errors import SettingError

FEW_ANCHORS = 1000  # below this a drafter learns next to nothing
_HIDDEN = 0.05  # share of rows that the template may leave out without a word more
_LISTED = 6  # reasons in the printed account

BAD = "bad record"


@dataclass
class DataSummary:
    """What became of the rows: ``kept + dropped = read``. A row may give several documents (one per assistant turn).

    ``bad`` rows are those dropped because the record itself is wrong (the last one of a file that was cut off is
    dropped but not counted as bad: there is at most one per file, and nothing to correct). ``left_out`` rows were not
    read because their source has a weight below 1. ``documents``, ``tokens``, ``supervised`` and ``anchors`` count what
    an epoch holds, so a row of a source with weight 2 counts twice. ``unusable`` counts documents of kept rows that
    have no place where a block can start (or none any more, once cut). ``lengths`` counts documents by the power of two
    that they do not exceed. ``rendering`` says with which settings chat rows were rendered. ``unlearned`` counts
    answers that are marked as not to be trained on, ``cut_answers`` those whose end is not supervised because a limit
    cut them off. ``labels``, ``draws`` and ``unfitting`` are what the files' sidecars say (see ``data.provenance``).
    """

    sources: list[str] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)
    left_out: int = 0
    chat_rows: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    anchors: int = 0
    truncated: int = 0
    unusable: int = 0
    longest: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    rendering: str = ""
    empty_reasoning: int = 0
    unlearned: int = 0
    cut_answers: int = 0
    first_supervised: str = ""
    labels: Labels = "unknown"
    draws: list[Draws] = field(default_factory=list)
    unfitting: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> DataSummary:
        """The inverse of ``dataclasses.asdict`` (after a trip through JSON)."""
        lengths = Counter({int(bound): count for bound, count in tree["lengths"].items()})
        draws = [Draws(**entry) for entry in tree["draws"]]
        return cls(**{**tree, "dropped": Counter(tree["dropped"]), "lengths": lengths, "draws": draws})

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain values, for a JSON file."""
        return {**asdict(self), "dropped": dict(self.dropped), "lengths": dict(self.lengths)}

    @property
    def num_dropped(self) -> int:
        """Rows that were dropped, for all reasons together."""
        return sum(self.dropped.values())

    @property
    def share(self) -> float:
        """Supervised tokens per token."""
        return self.supervised / max(1, self.tokens)

    def why_not_samples(self, temperature: float) -> str | None:
        """What responses there are that are no draws from the target's whole law at ``temperature``; null if none."""
        return next((str(draws) for draws in self.draws if not draws.are_samples(temperature)), None)

    def drop(self, reason: str, where: str, *, bad: bool = False, cut: bool = False) -> None:
        """Count a dropped row. Bad ones are counted together: their reasons name columns and values, so all differ."""
        text = f"{where}: {reason}"
        key, example = (BAD, text) if bad else (reason, where)
        self.dropped[key] += 1
        self.examples.setdefault(key, example)
        if bad and not cut:
            self.bad += 1
            self.bad_examples = [*self.bad_examples, text][:3]

    def keep(self, documents: Sequence[MaskedIds], copies: int) -> None:
        """Count a kept row with its documents, each used ``copies`` times per epoch."""
        self.kept += 1
        self.documents += copies * len(documents)
        for document in documents:
            length = len(document)
            self.tokens += copies * length
            self.supervised += copies * int(document.mask.sum())
            self.anchors += copies * document.anchors
            self.longest = max(self.longest, length)
            self.lengths[1 << (length - 1).bit_length()] += copies

    def histogram(self) -> str:
        """Documents by length, in words: how many have at most so many tokens, and more than the bound before."""
        return ", ".join(f"{count} <= {bound}" for bound, count in sorted(self.lengths.items()))

    def reasons(self) -> list[str]:
        """Why rows were dropped, with counts and an example each, the most frequent first."""
        return [f"{count} x {reason} (first: {self.examples[reason]})" for reason, count in self.dropped.most_common()]

    def check_bad(self, max_bad_rows: float, rejected: str | None) -> None:
        """Stop where more than this share of the rows is bad; ``rejected`` is the file that lists them.

        Raises:
            ValueError: with the first of them.
        """
        if self.bad <= max_bad_rows * self.read:
            return
        listed = f"All are listed in {rejected}. " if rejected is not None else ""
        raise SettingError(
            "data",
            f"{self.bad} of {self.read} rows ({100 * self.bad / self.read:.2g} %) cannot be used, and "
            f"data.max_bad_rows allows {100 * max_bad_rows:g} %",
            do=f"{' | '.join(self.bad_examples)} | {listed}Correct them, or raise data.max_bad_rows",
        )

    def warnings(self) -> list[str]:
        """What is probably not meant; empty for healthy data."""
        found = list(self.unfitting)
        if self.empty_reasoning:
            found.append(
                f"{self.empty_reasoning} responses without reasoning, while the template's thinking is on, would teach "
                "an empty <think></think> block. Set data.chat_template_kwargs.enable_thinking=false, here and in "
                "evaluation, or train on responses with reasoning."
            )
        hidden = sum(count for reason, count in self.dropped.items() if reason.startswith("the chat template"))
        if hidden > _HIDDEN * self.read:
            found.append(
                f"{100 * hidden / self.read:.0f} % of the rows are dropped because the target's chat template does not "
                "show all of them. Train for a target whose template does, or leave the column out (in data.train: "
                "ignore: [tools])."
            )
        if not 0.01 <= self.share <= 0.99:
            found.append(f"{100 * self.share:.1f} % of the tokens are supervised: look at the masks before training.")
        if self.anchors < FEW_ANCHORS:
            found.append(
                f"{self.anchors} places where a block can start are few: enough for a test, not for a drafter."
            )
        return found

    def lines(self, *, rejected: str | None = None) -> list[str]:
        """The account, to be printed before training; ``rejected`` is the file that lists the dropped rows."""
        weighted = f" ({self.left_out} more left out by weight)" if self.left_out else ""
        listed = f", listed in {rejected}" if rejected is not None and self.num_dropped else ""
        reasons = self.reasons()
        lines = [
            f"data: {', '.join(self.sources)}{'' if self.labels == 'unknown' else f' ({self.labels} labels)'}",
            f"  rows: {self.read} read{weighted}, {self.kept} kept as {self.documents} documents, "
            f"{self.num_dropped} dropped{listed}",
            *(f"    dropped {reason}" for reason in reasons[:_LISTED]),
            *([f"    and for {len(reasons) - _LISTED} other reasons"] if len(reasons) > _LISTED else []),
            f"  tokens: {self.tokens}, {100 * self.share:.1f} % supervised; blocks can start at {self.anchors} places",
            f"  documents by length: {self.histogram() or 'none'}; longest {self.longest}, {self.truncated} truncated",
        ]
        rendering = f" ({self.rendering})" if self.chat_rows else ""
        if self.first_supervised or rendering:
            lines.append(f"  first supervised text{rendering}: {self.first_supervised!r}")
        if self.unlearned:
            lines.append(f"  {self.unlearned} answers are marked as not to be trained on: shown as history only")
        if self.cut_answers:
            lines.append(f"  {self.cut_answers} answers were cut off (finish reason): their ends are not supervised")
        if self.unusable:
            lines.append(f"  {self.unusable} further documents of kept rows have no place where a block can start")
        return lines + [f"  warning: {text}" for text in self.warnings()]
