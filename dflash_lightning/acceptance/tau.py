"""Expected tau of a drafter on files of texts, by domain: what a table of methods shows beside the decoded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lightning.acceptance.evaluator import AcceptanceEvaluator
from dflash_lightning.acceptance.figures import ExpectedRounds
from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.acceptance.texts import ALONE, read_texts
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


def expected_tau(
    target: FrozenTarget,
    draft: DraftModel,
    rows: str | Mapping[str, str],
    decoding: DecodingSettings,
    *,
    limit: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    setting: str = "rows",
) -> dict[str, ExpectedRounds]:
    """Expected rounds of decoding ``draft`` on ``rows`` (a file, or one per domain), by domain and as ``"all"``.

    ``rows`` must be the target's own texts under ``decoding`` (``read_texts``). ``ExpectedRounds.tau`` is the figure to
    show, a pooled ratio as that of decoding is; ``summary`` has all of them for a JSON file.

    Args:
        limit: rows of every file, the first ones; null uses all.
        chat_template_kwargs: passed to the target's chat template, as in training; tokenised rows need none.
        setting: what a message calls ``rows``.

    Raises:
        ValueError: expected rounds do not follow from texts under these settings (``why_not``), or the files hold texts
            of another law.
    """
    texts = read_texts(rows, target, decoding, limit=limit, chat_template_kwargs=chat_template_kwargs, setting=setting)
    found = AcceptanceEvaluator(target, draft, texts.documents, decoding).by_domain()
    return with_total(found)


def why_not(draft: DraftModel, decoding: DecodingSettings) -> str | None:
    """Why its rounds do not follow from texts (drafts in a tree, block verification, ..); null where they do."""
    try:
        AcceptanceRule.of(decoding, draft)
    except SettingError as error:
        return f"{error.where}: {error.what}"
    return None


def with_total(domains: Mapping[str, ExpectedRounds]) -> dict[str, ExpectedRounds]:
    """The figures by domain, and all together as ``"all"``."""
    first, *others = domains.values()
    return {**domains, ALONE: sum(others, first)}
