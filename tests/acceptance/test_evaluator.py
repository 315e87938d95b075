"""Expected rounds of real models against real decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dflash_lightning.acceptance import AcceptanceEvaluator, ExpectedRounds, why_not
from dflash_lightning.acceptance.responses import find_responses
from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import Carryover, InputFusion, KVInjection, TokenFusion
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder import BestFirstTree
from dflash_lightning.decoding.policy import ConfidencePolicy
from dflash_lightning.drafter import BlockTransformer, CausalTransformer, ConvTransformer, FeedbackTransformer
from dflash_lightning.head import LatticeHead, MarginalHead, MarkovHead, SelectorHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Document

MASK = 271
PROMPTS = [[7, 3, 9], [40, 41, 42, 43, 44], [200, 100], [65, 66, 67, 68]]


@pytest.fixture(scope="module")
def target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    """It ends the first text after eleven tokens, the third one with its first, and the others not within 24."""
    return make_target("llama", seed=3, eos_token_id=167)


def settings(**overrides: object) -> DecodingSettings:
    usual = {"max_new_tokens": 24, "batch_size": 4, "compile": False, "prepacked": False}
    return DecodingSettings(**{**usual, **overrides})  # type: ignore[arg-type]


def drafter(target: FrozenTarget, *, vocabulary: list[int] | None = None, **parts: object) -> DraftModel:
    """A drafter of one layer with random weights."""
    usual = {
        "block": Anchored(block_size=4),
        "conditioning": KVInjection(target_layer_ids=[1, 3]),
        "drafter": BlockTransformer(num_layers=1, init_std=0.2),
        "head": MarginalHead(),
    }
    usual |= parts
    config = make_draft_config(
        target.facts,
        **usual,  # type: ignore[arg-type]
        mask_token_id=MASK,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = DraftModel(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if vocabulary is not None:
        model.draft_vocab.copy_(torch.tensor(vocabulary))
    model.bind(target)
    return model.eval()


def taught(target: FrozenTarget, draft: DraftModel, documents: list[Document], steps: int = 24) -> DraftModel:
    """The drafter after a few steps on these texts: some of its drafts stand, some do not."""
    lm = draft.head_of(target.lm)
    kind = Anchored(
        block_size=draft.config.block_size,
        num_anchors=1000,
        label_layout=draft.config.label_layout,
        inputs=draft.drafter.inputs,
    )
    marks = None if lm.ids is None else torch.zeros(272, dtype=torch.bool).index_fill(0, lm.ids, True)
    optimizer = torch.optim.Adam(draft.train().parameters(), lr=1e-2)
    for step in range(steps):
        document = documents[step % len(documents)]
        layout = kind.blocks(document, draft.alignment, seed=0, epoch=0, vocabulary=marks)
        places = torch.arange(len(document.input_ids))[None]
        features = target.features(document.input_ids[None], places, draft.required())
        hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, places, lm)
        out = draft.outputs(hidden, dataclasses.replace(layout, rows=layout.valid.flatten().nonzero()[:, 0]), lm)
        found = [view.ask(LabelLogProb(layout.labels))[0].clamp(min=-50.0) for view in out.views.values()]
        loss = -torch.where(layout.valid, torch.stack(found), 0.0).sum() / layout.valid.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


def written(target: FrozenTarget, decoding: DecodingSettings, prompts: list[list[int]] = PROMPTS) -> list[Document]:
    """What the target answers by itself."""
    decoder = decoding.make_decoder(target, None, longest_prompt=max(map(len, prompts)))
    result = decoder.decode(prompts, max_new_tokens=decoding.max_new_tokens, stop_ids=target.stop_ids)
    documents = []
    for i, (prompt, generation) in enumerate(zip(prompts, result.generations, strict=True)):
        ids = torch.tensor([*prompt, *generation.output_ids])
        documents.append(Document(i, ids, torch.arange(len(ids)) >= len(prompt)))
    return documents


def decoded(target: FrozenTarget, draft: DraftModel, decoding: DecodingSettings, documents: list[Document]):
    """Rounds of real decoding of the same prompts, as the loop's generations."""
    prompts = [document.input_ids[~document.loss_mask].tolist() for document in documents]
    decoder = decoding.make_decoder(target, draft, longest_prompt=max(map(len, prompts)))
    return decoder.decode(prompts, max_new_tokens=decoding.max_new_tokens, stop_ids=target.stop_ids)


def evaluator(target, draft, documents: list[Document], decoding: DecodingSettings, **rest) -> AcceptanceEvaluator:
    return AcceptanceEvaluator(target, draft, {"code": documents}, decoding, **rest)


KINDS = {
    "dflash": {},
    "dspark": {"head": MarkovHead(rank=8), "block": Anchored(block_size=4, label_layout="anchor_first")},
    "dspark-recurrent": {
        "head": MarkovHead(rank=8, variant="recurrent"),
        "block": Anchored(block_size=4, label_layout="anchor_first"),
    },
    "lilicorr": {"head": LatticeHead(candidates=4, hidden_size=8, num_heads=2, factor_dim=8, init_std=0.3)},
    "dflash2": {
        "head": SelectorHead(candidates=4, rank=8),
        "drafter": ConvTransformer(num_layers=1, init_std=0.2, group_size=8),
    },
    "reduced": {"vocabulary": list(range(0, 272, 2))},
    "input fusion": {"conditioning": InputFusion(target_layer_ids=[1, 3])},
    "one after the other": {
        "drafter": CausalTransformer(num_layers=1, init_std=0.2),
        "block": Anchored(block_size=4, label_layout="anchor_first", inputs="tokens"),
    },
    "feedback": {
        "drafter": FeedbackTransformer(num_layers=1, init_std=0.2),
        "conditioning": TokenFusion(target_layer_ids=[1, 3]),
        "block": Anchored(block_size=4, label_layout="anchor_first", inputs="tokens"),
    },
}


@pytest.fixture(scope="module")
def greedy_documents(target: FrozenTarget) -> list[Document]:
    return written(target, settings())


@pytest.fixture(scope="module")
def dspark(target: FrozenTarget, greedy_documents: list[Document]) -> DraftModel:
    return taught(target, drafter(target, **KINDS["dspark"]), greedy_documents[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rounds_are_those_of_real_decoding_text_by_text(target, greedy_documents, kind: str) -> None:
    greedy, documents = settings(), greedy_documents
    draft = taught(target, drafter(target, **KINDS[kind]), documents[:2])
    found = evaluator(target, draft, documents, greedy, slots_at_once=40)()
    real = decoded(target, draft, greedy, documents)
    assert [g.finish for g in real.generations] == ["stop", "length", "stop", "length"]
    rounds = {each.document: each.rounds for each in found.each}  # the third text is its first token: no round
    assert [rounds.get(i, 0.0) for i in range(4)] == [float(len(g.committed)) for g in real.generations]
    assert found.tau == pytest.approx(real.stats.tau) and found.tau > 1.0
    for k, count in enumerate(found.committing):
        assert count == sum(c > k for g in real.generations for c in g.committed)
    assert found.committing[1] > 0 and (found.own_share, found.cut) == (1.0, 2)


def test_likeliest_drafts_judged_by_equality_have_no_chance_left_at_a_temperature_either(target, dspark) -> None:
    """The text is the target's keyed draw, so its rounds are exact, text by text."""
    equal = settings(temperature=0.7, top_k=20, builder="best_chain", verifier="match", max_new_tokens=16, seed=5)
    documents = written(target, equal, PROMPTS[:2])
    real = decoded(target, dspark, equal, documents)
    found = evaluator(target, dspark, documents, equal)()
    assert [each.rounds for each in found.each] == [float(len(g.committed)) for g in real.generations]
    assert found.own_share == 1.0


def test_fewer_slots_than_trained_are_drafted_as_decoding_drafts_them(target, greedy_documents) -> None:
    short = settings(block_size=3)
    draft = taught(target, drafter(target), greedy_documents[:2])
    found = evaluator(target, draft, greedy_documents, short)()
    real = decoded(target, draft, short, greedy_documents)
    assert found.num_drafts == 2 and found.rounds == real.stats.rounds and found.committed == real.stats.committed


EQUAL = {"verifier": "match", "builder": "sampled_chain", "temperature": 0.3}
SAMPLING = {
    # A flat law is one that a random drafter is near to; a steep one it has to learn.
    "marginals": ({}, {}, 0.1),
    "laws by the token before": ({"top_p": 0.9, "temperature": 0.8}, KINDS["dspark"], 0.1),
    "a draw judged by equality": (EQUAL, KINDS["dspark"], 0.25),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_rounds_have_the_mean_of_real_decoding(make_target, name: str) -> None:
    """The mean over draws; chance is given four standard errors. Judged by equality, the texts are the same ones."""
    overrides, parts, scale = SAMPLING[name]
    target = make_target("llama", seed=3, initializer_range=scale)
    decoding = settings(**{"temperature": 1.0, "max_new_tokens": 10, "batch_size": 160, **overrides})
    prompts = [[65, 66, 67, 68]] * 160
    documents = written(target, decoding, prompts)
    draft = taught(target, drafter(target, **parts), documents[:3], steps=0 if scale == 0.1 else 24)
    same = decoding.repeatable
    real = decoded(target, draft, decoding if same else dataclasses.replace(decoding, seed=1), documents)
    found = evaluator(target, draft, documents, decoding, smooth=not same)()
    counts = torch.tensor([float(len(g.committed)) for g in real.generations])
    rounds = torch.zeros(len(documents))
    rounds[[each.document for each in found.each]] = torch.tensor([each.rounds for each in found.each])
    variance = (counts - rounds).var() if same else counts.var() + rounds.var()
    error = (variance / len(documents)) ** 0.5
    gap = abs(float(counts.mean() - rounds.mean()))
    assert gap < 4 * error < 0.7, f"{gap} with an error of {error}"
    assert rounds.var() < counts.var()  # what decoding leaves to chance is averaged here
    if not same:
        assert abs(found.smooth_rounds - found.rounds) / len(documents) < 4 * error
    assert found.own_share == 1.0
    assert found.tau > 1.1
    flatter = dataclasses.replace(decoding, temperature=2 * decoding.temperature)
    assert evaluator(target, draft, documents, flatter)().rounds != pytest.approx(found.rounds, rel=0.01)


def test_memory_is_bounded_without_another_figure_and_new_weights_need_no_new_features(
    target, greedy_documents, dspark, monkeypatch
) -> None:
    draft = taught(target, drafter(target, **KINDS["dspark"]), greedy_documents[:2], steps=8)
    calls, features = [], FrozenTarget.features
    monkeypatch.setattr(FrozenTarget, "features", lambda self, *a, **k: calls.append(1) or features(self, *a, **k))
    sampling = settings(temperature=1.0)
    whole = evaluator(target, draft, greedy_documents, sampling, smooth=True)
    pieces = evaluator(target, draft, greedy_documents, sampling, smooth=True, slots_at_once=20)
    first, other = whole(), pieces()
    assert len(pieces._layouts) > 10 and len(whole._layouts) == 1 and len(calls) == 6
    assert first.pack().tolist() == pytest.approx(other.pack().tolist(), rel=1e-4)
    state = torch.get_rng_state()
    draft.train().load_state_dict(dspark.state_dict())
    second = whole()
    assert len(calls) == 6 and second.rounds != pytest.approx(first.rounds, rel=1e-3)
    assert draft.training and torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in drafter(target).parameters())


def test_texts_of_somebody_else_are_known_by_what_the_target_would_have_written(
    target, greedy_documents, dspark
) -> None:
    documents = [
        dataclasses.replace(d, input_ids=d.input_ids.flip(0), loss_mask=torch.arange(len(d.input_ids)) > 2)
        for d in greedy_documents
    ]
    assert evaluator(target, dspark, documents, settings())().own_share < 0.5


def test_figures_add_up_over_texts_and_pass_through_a_vector(target, greedy_documents, dspark) -> None:
    whole, *parts = (
        evaluator(target, dspark, some, settings())()
        for some in (greedy_documents, greedy_documents[:1], greedy_documents[1:])
    )
    total = parts[0] + parts[1]
    assert total.tau == whole.tau and [e.rounds for e in total.each] == [e.rounds for e in whole.each]
    again = ExpectedRounds.unpack(3 + 1, whole.pack())
    assert dataclasses.replace(again, each=whole.each).summary() == whole.summary()
    assert ExpectedRounds(4).summary()["tau"] is None and (ExpectedRounds(4) + whole).tau == whole.tau


def test_what_does_not_follow_from_the_text_is_refused_by_name(target, dspark) -> None:
    refused = {
        "BestFirstTree does not draft a chain": settings(builder=BestFirstTree(budget=4)),
        "BlockVerifier judges the drafts of a round together": settings(temperature=1.0, verifier="block"),
        "ConfidencePolicy cuts drafts": settings(policy=ConfidencePolicy(threshold=0.5)),
    }
    for message, decoding in refused.items():
        with pytest.raises(ValueError, match=message):
            evaluator(target, dspark, [], decoding)
        assert message in (why_not(dspark, decoding) or "")
    assert why_not(dspark, settings()) is None
    carrying = drafter(target, conditioning=Carryover(target_layer_ids=[1, 3]))
    with pytest.raises(ValueError, match=r"conditioning: Carryover reads the drafts that the round before rejected"):
        evaluator(target, carrying, [], settings())
    assert evaluator(target, dspark, [], settings())().responses == 0


def test_responses_are_what_the_loop_would_have_written() -> None:
    ids = torch.tensor([1, 1, 5, 6, 9, 7, 1, 5, 5, 5, 1, 9])
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    found = find_responses(Document(0, ids, mask), [9], 3)
    assert [(r.first, r.end, r.stopped) for r in found] == [(2, 5, True), (7, 10, False), (11, 12, True)]
    assert [r.committed for r in found] == [2, 2, 0]
    short = find_responses(Document(0, ids, mask), [9], 2)
    assert [(r.first, r.end, r.stopped) for r in short] == [(2, 4, False), (7, 9, False), (11, 12, True)]


def test_a_text_of_several_answers_counts_each_by_itself(target, greedy_documents, dspark) -> None:
    """The second answer is to a prompt that holds the first one."""
    first = greedy_documents[0]
    prompt = [*first.input_ids.tolist(), 40, 41]
    second = written(target, settings(), [prompt])[0]
    both = dataclasses.replace(second, loss_mask=second.loss_mask.clone())
    both.loss_mask[: len(first.loss_mask)] = first.loss_mask
    apart = [evaluator(target, dspark, [d], settings())() for d in (first, second)]
    together = evaluator(target, dspark, [both], settings(), slots_at_once=24)()
    assert [e.rounds for e in together.each] == [apart[0].rounds, apart[1].rounds]
