"""What comparing reads as text is what the classes and files say."""

from __future__ import annotations

from dataclasses import fields

from dflash_lightning.bench import alike
from dflash_lightning.bench.differences import differences
from dflash_lightning.decoding import DecodingSettings


def test_defaults_of_decoding_read_as_text_are_those_of_the_class() -> None:
    assert {field.name: field.default for field in fields(DecodingSettings)} == alike._DEFAULTS


def test_a_part_is_named_by_its_option() -> None:
    found = differences({"head": None}, {"head": {"_target_": "dflash_lightning.head.MarkovHead", "rank": 7}})
    assert len(found) == 1 and found[0].startswith("head: without markov (rank 7")
