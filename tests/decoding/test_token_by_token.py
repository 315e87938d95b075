"""Decoding with drafters that are run token by token: the law is the target's, the text is the target's own.

The first half is exact: every course of events is played through real drafters, builders and verifiers
(``enumeration.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection, TokenFusion
from dflash_lightning.decoding.builder import BestFirstTree, SampledChain, SampledTree
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier
from dflash_lightning.drafter import CausalTransformer, FeedbackTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.target import FrozenTarget
from dflash_lightning.testing import toy_target
from dflash_lightning.types import Document, Scores, TargetFacts, TargetFeatures

DEPTH, WIDTH, ROWS = 3, 8, 5
NAMES = ("causal", "feedback")


def build(name: str, facts: TargetFacts, *, mask: int, block_size: int, seed: int = 0) -> DraftModel:
    parts: dict[str, tuple[Any, Any]] = {
        "causal": (CausalTransformer(num_layers=2, init_std=0.3), KVInjection(target_layer_ids=[0, 2])),
        "feedback": (FeedbackTransformer(num_layers=1, init_std=0.3), TokenFusion(target_layer_ids=[0, 1, 2])),
    }
    drafter, conditioning = parts[name]
    block = Anchored(block_size=block_size, label_layout="anchor_first", inputs="tokens")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = make_draft_config(
            facts,
            block=block,
            conditioning=conditioning,
            drafter=drafter,
            head=MarginalHead(),
            mask_token_id=mask,
        )
        return DraftModel(config).eval()


@cache
def scores_of(name: str) -> Callable[[int], Scores]:
    """A drafter with random weights over three tokens, after a context of five rows, for as many rows as asked for."""
    small = {"vocab_size": 3, "hidden_size": WIDTH, "intermediate_size": 16, "num_layers": 3}
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    model = build(name, replace(toy_target().facts, **small, **heads), mask=2, block_size=DEPTH)
    generator = torch.Generator().manual_seed(1)
    lm = LanguageHead(
        0.5 * torch.randn(3, WIDTH, generator=generator), embedding=torch.randn(3, WIDTH, generator=generator)
    )
    rows = TargetFeatures(
        model.required().layer_ids,
        torch.randn(1, ROWS, len(model.required().layer_ids), WIDTH, generator=generator),
        ids=torch.tensor([[1, 0, 2, 2, 1]]),
    ).with_next(torch.tensor([ROWS]), torch.tensor([0]))

    @torch.no_grad()
    def scores(count: int) -> Scores:
        kept = model.make_cache(batch_size=count, max_length=ROWS, chunk_rows=ROWS)
        features = rows.map(lambda x: x.expand(count, *x.shape[1:]).contiguous())
        found = model.open_in_turn(
            torch.zeros(count, dtype=torch.long), DEPTH, features, torch.full((count,), ROWS), kept, lm
        )
        assert found.step is not None
        return replace(found, step=torch.no_grad()(found.step))

    return scores


def table(enumeration: ModuleType) -> Any:
    """A law for every text, not far from flat, so that chains of every length are accepted."""
    generator = torch.Generator().manual_seed(0)
    return enumeration.Table(
        lambda text: (0.7 * torch.randn(3, generator=generator)).softmax(-1).tolist(), 3, DEPTH + 1
    )


@pytest.mark.parametrize("name", NAMES)
def test_laws_depend_on_the_tokens_before(name: str) -> None:
    """Otherwise nothing below would tell a right state from a wrong one."""
    found = scores_of(name)(3)
    _, state = found.step(found.state, torch.zeros(3, 1, dtype=torch.long), 0)
    laws = found.step(state, torch.tensor([[0], [1], [2]]), 1)[0].logits[:, 0].softmax(-1)
    assert all(float((laws[i] - laws[j]).abs().sum()) > 0.05 for i in range(3) for j in range(i))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier])
def test_a_sampled_chain_gives_the_law_of_the_target(enumeration: ModuleType, name: str, verifier: type) -> None:
    outcome = enumeration.Play(table(enumeration), scores_of(name), SampledChain(), verifier()).outcome()
    assert outcome.gap < 1e-6
    assert min(outcome.accepted) > 0.01, "some length is hardly ever accepted: little is tested"


@pytest.mark.parametrize("name", NAMES)
def test_declaring_the_first_look_as_the_law_is_found(enumeration: ModuleType, name: str) -> None:
    scores = scores_of(name)

    def as_looked(draft: Draft) -> Draft:
        return replace(draft, law=Law(scores(len(draft.tokens)).logits.softmax(-1)))

    play = enumeration.Play(table(enumeration), scores, SampledChain(), RejectionVerifier(), change=as_looked)
    assert play.outcome().gap > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_trees_give_the_law_of_the_target(enumeration: ModuleType, name: str) -> None:
    """Lanes that part: drawn without replacement and rejected by chance, and the likeliest judged by equality."""
    trees = [(SampledTree(branching=[2, 1]), RejectionVerifier()), (BestFirstTree(budget=5), MatchVerifier())]
    for builder, verifier in trees:
        outcome = enumeration.Play(table(enumeration), scores_of(name), builder, verifier).outcome()
        assert outcome.gap < 1e-6 and outcome.mean_accepted > 0.3


@pytest.mark.parametrize("name", NAMES)
def test_the_best_tree_is_the_best_of_all_paths(name: str) -> None:
    """Against every path, each walked alone."""
    sampler = Sampler(SamplingSpec(), Noise(0))
    draft = BestFirstTree(budget=6).build(torch.zeros(1, dtype=torch.long), scores_of(name)(1), _round(), sampler)
    products: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(DEPTH):
        for path in [p for p in products if len(p) == length]:
            found = scores_of(name)(1)
            state, tokens = found.state, [0, *path]
            for depth, token in enumerate(tokens):
                law, state = found.step(state, torch.tensor([[token]]), depth)
            after = law.logits[0, 0].double().softmax(-1)
            products |= {(*path, token): products[path] * float(after[token]) for token in range(3)}
    best = sorted((p for p in products if p), key=lambda p: -products[p])[:6]
    made = set()
    for node in range(1, 7):
        path, at = [], node
        while at:
            path.append(int(draft.tokens[0, at]))
            at = int(draft.parents[0, at])
        made.add(tuple(reversed(path)))
    assert made == set(best)


def _round() -> Any:
    return Round(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)


# -- with a target ----------------------------------------------------------------------------------------------------

PROMPTS = [[3, 9, 1, 4, 1, 5], [2, 7], [11, 0, 6, 6, 2, 8, 8, 12, 3, 5]]
NEW = 24


@cache
def taught(name: str) -> tuple[FrozenTarget, DraftModel, list[list[int]]]:
    """A drafter that knows what the toy target answers, and these answers."""
    target = toy_target()
    plain = SpeculativeDecoder(target, None, max_length=64, batch_size=1)
    answers = [g.output_ids for g in plain.decode(PROMPTS, max_new_tokens=NEW, stop_ids=()).generations]
    draft = build(name, target.facts, mask=31, block_size=4).train()
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    block = Anchored(block_size=4, num_anchors=10, label_layout="anchor_first", inputs="tokens")
    batches = []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        ids = torch.tensor(prompt + answer)
        document = Document(number, ids, torch.arange(len(ids)) >= len(prompt))
        positions = torch.arange(len(ids))[None]
        layout = block.blocks(document, draft.alignment, seed=0, epoch=0)
        batches.append((layout, target.features(ids[None], positions, draft.required()), positions))
    for _ in range(30):
        for layout, features, positions in batches:
            hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)
            logits, labels = target.lm.logits(hidden[layout.scored]), layout.labels[layout.scored]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
    return target, draft.eval(), answers


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_own_alone_and_in_a_ragged_batch(name: str) -> None:
    """With chains and trees; batches give each prompt the drafts that it has alone."""
    target, draft, answers = taught(name)
    accepted = []
    for batch_size, builder in ((1, None), (3, None), (3, BestFirstTree(budget=6))):
        decoder = SpeculativeDecoder(
            target, draft, builder=builder, max_length=64, batch_size=batch_size, compile=False
        )
        found = decoder.decode(PROMPTS, max_new_tokens=NEW, stop_ids=())
        assert [g.output_ids for g in found.generations] == answers
        assert found.stats.tau > 1.4, "hardly a draft is accepted: little is tested"
        accepted.append([g.accepted for g in found.generations])
    assert accepted[0] == accepted[1]


def test_a_second_batch_is_drafted_as_if_it_were_the_first() -> None:
    """Caches, boundaries and lanes of another batch leave no trace: what differs would be accepted lengths."""
    target, draft, _ = taught("feedback")
    decoder = SpeculativeDecoder(target, draft, max_length=64, batch_size=3, compile=False)
    first, second = (decoder.decode(PROMPTS, max_new_tokens=NEW, stop_ids=()) for _ in range(2))
    assert [g.accepted for g in first.generations] == [g.accepted for g in second.generations]


def test_fewer_drafts_per_round_and_a_compilation_that_is_asked_for() -> None:
    """``block_size`` is a number of drafts here; nothing is compiled, and the statistics say so."""
    target, draft, answers = taught("causal")
    decoder = SpeculativeDecoder(target, draft, block_size=2, max_length=64, compile=True)
    found = decoder.decode(PROMPTS[:1], max_new_tokens=NEW, stop_ids=())
    assert found.generations[0].output_ids == answers[0]
    assert max(found.generations[0].accepted) == 2
    assert (decoder.compile_count, found.stats.compiled_cycles) == (0, 0)
