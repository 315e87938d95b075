"""Texts from files, with a look at how they were written: expected rounds are right for the target's own only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_lightning.data.read.conversation import Supervise
from dflash_lightning.data.read.process import Processing
from dflash_lightning.data.read.provenance import Draws, joint_provenance
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.errors import SettingError
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Document

ALONE = "all"  # the domain of a single file, and of all domains together
_FEW_OWN = 0.99  # of greedy tokens: rounding tips a near tie now and then


@dataclass
class Texts:
    """Documents by domain, and sentences about what makes them doubtful."""

    documents: dict[str, list[Document]]
    warnings: list[str] = field(default_factory=list)

    def shard(self, rank: int, world: int) -> dict[str, list[Document]]:
        """Every ``world``-th document of each domain; the same domains on all ranks."""
        return {domain: some[rank::world] for domain, some in self.documents.items()}


def read_texts(
    rows: str | Mapping[str, str],
    target: FrozenTarget,
    decoding: DecodingSettings,
    *,
    limit: int | None = None,
    max_length: int | None = None,
    supervise: Supervise = "all_turns",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    setting: str = "rows",
) -> Texts:
    """The documents of a file, or of one file per domain, that the target wrote as ``decoding`` decodes.

    Rows are read as training rows are; those that ``dflash regenerate`` writes hold the very ids that were decoded.

    Args:
        limit: rows of every file, the first ones; null uses all.
        max_length: longer documents are cut off; null is what the target can read.
        setting: what a message calls ``rows``.

    Raises:
        ValueError: a file cannot be read, or its sidecar says that its responses follow another law.
    """
    longest = target.facts.max_positions
    longest = longest if max_length is None else min(max_length, longest)
    processing = Processing(longest, "right", supervise, chat_template_kwargs or {}, seed=0)
    files = {ALONE: rows} if isinstance(rows, str) else rows
    if ALONE in files and len(files) > 1:
        raise SettingError(setting, f"{ALONE!r} names all domains together", do="Give this domain another name")
    texts = Texts({})
    for domain, file in files.items():
        where = setting if isinstance(rows, str) else f"{setting}.{domain}"
        maker = processing.maker(target.text)
        (source,) = make_sources(file, limit=limit, setting=where)
        maker.read(source, setting=where)
        store = maker.store()
        texts.documents[domain] = [store[i] for i in range(len(store))]
        made = joint_provenance(
            [None] if source.is_hub else source.files(where),
            target_digest=target.facts.digest,
            chat_template_kwargs=processing.chat_template_kwargs,
        )
        texts.warnings += made.warnings
        _check_draws(made.draws, decoding, file, where)
        if made.labels == "unknown":
            texts.warnings.append(f"{where}: nothing says how the responses in {file} were made.")
    return texts


def _check_draws(found: list[Draws], decoding: DecodingSettings, file: str, where: str) -> None:
    """Refuse responses that were drawn by another law than the one that decoding draws from."""
    wanted = _plain(Draws(decoding.temperature, decoding.top_k, decoding.top_p))
    for draws in found:
        if _plain(draws) != wanted:
            raise SettingError(
                where,
                f"{file} holds {draws}, but expected rounds of this decoding follow from {wanted}",
                do="Give responses that dflash regenerate made with the same temperature, top_k and top_p",
            )


def _plain(draws: Draws) -> Draws:
    return Draws(float(draws.temperature), draws.top_k, None if draws.top_p == 1.0 else draws.top_p)


def foreign_warning(own_share: float) -> str | None:
    """A sentence where some tokens are none that the target writes under these settings; null where all may be."""
    if not own_share < _FEW_OWN:
        return None
    return (
        f"warning: {1.0 - own_share:.1%} of the tokens are none that the target writes with these settings, so the "
        "expected tau is of other texts than it decodes. Make the rows with dflash regenerate, from this target."
    )
