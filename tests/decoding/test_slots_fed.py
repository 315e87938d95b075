"""A drafter that is fed fewer or more slots than it was trained with: the text stays, the drafts are those of a block
of that size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead, MarkovHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.target import FrozenTarget
from dflash_lightning.testing import toy_target

TRAINED, NEW = 6, 12
PROMPTS = [[3, 9, 1, 4, 1, 5], [2, 7], [11, 0, 6, 6, 2, 8, 8, 12, 3, 5]]
HEADS: dict[str, tuple[Any, Any]] = {
    "marginal": (MarginalHead, "same_position"),
    "markov": (lambda: MarkovHead(rank=4), "anchor_first"),
}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return toy_target()


def make(target: FrozenTarget, kind: str, block_size: int) -> DraftModel:
    """The same weights whatever the block size: none of them depends on it."""
    head, layout = HEADS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = make_draft_config(
            target.facts,
            block=Anchored(block_size=block_size, label_layout=layout),
            conditioning=KVInjection(target_layer_ids=[0, 2]),
            drafter=BlockTransformer(num_layers=2, init_std=0.3),
            head=head(),
            mask_token_id=31,
        )
        model = DraftModel(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model


def decoded(target: FrozenTarget, draft: DraftModel, **settings: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Answers, and the drafts of every round."""
    asked = DecodingSettings(max_new_tokens=NEW, batch_size=3, compile=False, prepacked=False, **settings)
    decoder = asked.make_decoder(target, draft, longest_prompt=10)
    builder: Any = decoder.parts.builder
    build, seen = builder.build, []

    def listen(*given: Any, **named: Any) -> Any:
        made = build(*given, **named)
        seen.append(made.tokens.clone())
        return made

    builder.build = listen
    found = decoder.decode(PROMPTS, max_new_tokens=NEW, stop_ids=())
    del builder.build  # the settings' own builder, which others decode with too
    return [g.output_ids for g in found.generations], seen


@pytest.mark.parametrize(
    ("kind", "fed", "temperature"), [("marginal", 3, 0.0), ("marginal", 9, 1.0), ("markov", 3, 1.0), ("markov", 9, 0.0)]
)
def test_the_drafts_are_those_of_a_block_of_that_size(
    target: FrozenTarget, kind: str, fed: int, temperature: float
) -> None:
    law = {"temperature": temperature}
    answers, drafts = decoded(target, make(target, kind, TRAINED), block_size=fed, untrained_slots=fed > TRAINED, **law)
    expected, theirs = decoded(target, make(target, kind, fed), **law)
    assert answers == expected and len(drafts) == len(theirs) > 3
    assert all(torch.equal(one, other) for one, other in zip(drafts, theirs, strict=True))
    width = fed if HEADS[kind][1] == "anchor_first" else fed - 1
    assert {draft.shape[1] for draft in drafts} == {1 + width}  # the root stands first
    if temperature == 0:
        assert answers == plain(target)


def plain(target: FrozenTarget) -> list[list[int]]:
    settings = DecodingSettings(max_new_tokens=NEW, batch_size=3, compile=False, prepacked=False)
    decoder = settings.make_decoder(target, None, longest_prompt=10)
    return [g.output_ids for g in decoder.decode(PROMPTS, max_new_tokens=NEW, stop_ids=()).generations]


def test_more_slots_than_trained_must_be_asked_for(target: FrozenTarget) -> None:
    settings = DecodingSettings(block_size=9)
    with pytest.raises(ValueError, match=r"block_size: 9 slots, .* with 6\. .* set decoding\.untrained_slots=true"):
        settings.num_drafts(make(target, "marginal", TRAINED))
