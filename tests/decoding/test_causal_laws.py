"""Causal drafters, through their own forward: drafts of them give the target's law, with either kind of inputs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.decoding.builder import FanTree, SampledChain
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier
from dflash_lightning.drafter import BlockTransformer, CausalTransformer
from dflash_lightning.module import DraftModule
from dflash_lightning.testing import toy_batch, toy_module
from dflash_lightning.types import Scores

DRAFTS, PROMPT = 2, 9


def masks() -> DraftModule:
    return toy_module(
        drafter=BlockTransformer(num_layers=1, init_std=0.2, is_causal=True),
        block=Anchored(block_size=DRAFTS + 1, num_anchors=24),
    )


def tokens() -> DraftModule:
    return toy_module(
        drafter=CausalTransformer(num_layers=1, init_std=0.2),
        block=Anchored(block_size=DRAFTS, num_anchors=24, label_layout="anchor_first", inputs="tokens"),
    )


@torch.no_grad()
def scores_of(module: DraftModule, rows: int) -> Scores:
    """The same block behind a prompt, for as many rows as asked for; three of the target's tokens can be drafted."""
    model, batch = module.draft_model.requires_grad_(False), toy_batch(module)
    lm = module.target.lm.restrict(torch.arange(3))
    features = module.target.features(batch.input_ids, batch.position_ids, module.required())
    features = features.map(lambda x: x.expand(rows, *x.shape[1:]))
    cache = model.make_cache(batch_size=rows, max_length=24, chunk_rows=24)
    keep, roots = torch.full((rows,), PROMPT), torch.zeros(rows, dtype=torch.long)
    if model.sequential:
        return model.open_in_turn(roots, DRAFTS, features, keep, cache, lm)
    slots = torch.full((rows, DRAFTS + 1), model.config.mask_token_id)
    slots[:, 0] = roots
    hidden = model.draft_hidden(module.target.embed(slots), features, keep, cache, lm)
    return model.open(hidden[:, 1:], roots, lm)


@pytest.mark.parametrize("make", [masks, tokens])
@pytest.mark.parametrize(
    ("builder", "verifier"),
    [
        (SampledChain(), RejectionVerifier()),
        (SampledChain(), BlockVerifier()),
        (FanTree(budget=3, fan=2), MatchVerifier()),
    ],
)
def test_the_output_has_the_law_of_the_target(
    enumeration: ModuleType, make: object, builder: object, verifier: object
) -> None:
    module = make()  # type: ignore[operator]
    target = enumeration.long_memory(DRAFTS + 1, scale=0.7)
    outcome = enumeration.Play(target, lambda rows: scores_of(module, rows), builder, verifier).outcome()
    assert outcome.gap < 1e-6
    assert min(outcome.accepted[: DRAFTS + 1]) > 0.005, "some length is hardly ever accepted: little is tested"


def test_only_the_second_knows_the_tokens_before(enumeration: ModuleType) -> None:
    """Laws of the second draft after each first one."""
    first, second = (scores_of(make(), 1) for make in (masks, tokens))
    assert first.step is None and second.step is not None
    _, state = second.step(second.state, torch.zeros(1, 1, dtype=torch.long), 0)
    laws = [second.step(state, torch.tensor([[token]]), 1)[0].logits[0, 0].softmax(-1) for token in range(3)]
    assert float((torch.stack(laws) - laws[0]).abs().max()) > 0.05
