"""All causal language models of transformers at toy size: right as a target, or refused by name.

Right means: features are what hooks on the intact model see, packed or alone, and what decoding reads; greedy decoding
equals ``transformers.generate``, one prompt at a time and in a ragged batch; token trees are judged as their paths.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

TABLE = dict(
    line.split(maxsplit=2)[:2] for line in (Path(__file__).parent / "families.txt").read_text().splitlines() if line
)
# One of each kind: latent attention, routed experts, learned positions, parallel blocks, a norm used twice, windows,
# per-layer head sizes, attention that is not looked up by name, masks by rank, a scaled head, no positions at all.
FEW = (
    *("deepseek_v3", "glm4_moe", "gpt2", "gpt_neox", "nanochat", "cohere2", "exaone4", "gemma4_text", "falcon", "doge"),
    *("minicpm3", "smollm3"),
)


def check(sweep: ModuleType, family: str) -> None:
    outcome = sweep.judge(family)
    assert outcome.word in ("ok", "refused"), outcome
    assert family not in TABLE or outcome.word == TABLE[family], outcome


@pytest.mark.parametrize("family", FEW)
def test_families_of_every_kind_are_right(sweep: ModuleType, family: str) -> None:
    assert TABLE[family] == "ok"
    check(sweep, family)


@pytest.mark.slow
@pytest.mark.sweep
def test_every_family_is_right_or_refused_by_name(sweep: ModuleType, any_family: str) -> None:
    check(sweep, any_family)


def test_the_table_names_every_family_of_this_version(sweep: ModuleType) -> None:
    """Newer versions of transformers have more; those of the table must not vanish from the sweep unseen."""
    assert TABLE.keys() - set(sweep.FAMILIES) == set()
    assert len(TABLE) > 190 and sum(word == "ok" for word in TABLE.values()) > 90
