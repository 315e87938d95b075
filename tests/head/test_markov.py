"""The Markov head: its law in training is its law in decoding, given the same tokens; and what it is trained with."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.policy import ConfidencePolicy
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import MarginalHead, MarkovHead
from dflash_lightning.loss import ConfidenceLoss, CrossEntropy, TotalVariation
from dflash_lightning.model import DraftModel, make_draft_config, save_draft
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.ops.lm_head import (
    Detached,
    HeadOutput,
    LabelLogProb,
    LanguageHead,
    Overlap,
    Request,
    Teacher,
    View,
)
from dflash_lightning.recipe import RecipeError, check_recipe, load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.training.requirements import check_signals
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext, gather_lanes

V, H, DEPTH, ROOT = 3, 4, 3, 2
VARIANTS = ["plain", "gated", "recurrent"]
PATHS = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))  # every text of three tokens


def make_head(variant: str = "plain", **settings: Any) -> MarkovHead:
    head = MarkovHead(rank=2, variant=variant, init_std=0.8, confidence=True, **settings)
    head.build(DraftConfig(hidden_size=H, vocab_size=V))
    torch.nn.init.normal_(head.following.weight)
    return head.double()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(
    variant: str, first_slot: int, every_text: Any
) -> None:
    """By enumeration: all 27 texts, each slot's probability and confidence, with a soft cap on the target's part."""
    head, layout = make_head(variant), every_text(first_slot=first_slot)
    lm = LanguageHead(torch.randn(V, H, dtype=torch.float64), softcap=2.0)
    hidden = torch.randn(1, 1, DEPTH + first_slot, H, dtype=torch.float64)
    out = head.outputs(hidden.expand(-1, len(PATHS), -1, -1), layout, lm)
    (trained,) = out.views["main"].ask(LabelLogProb(layout.labels))

    scores = head.open(hidden[0, :, first_slot:], torch.tensor([ROOT]), lm)
    assert scores.step is not None
    total = torch.zeros(len(PATHS), dtype=torch.float64)
    for n, path in enumerate(PATHS.tolist()):
        state, last = scores.state, ROOT
        for depth, token in enumerate(path):
            at, state = scores.step(state, torch.tensor([[last]]), depth)
            said = at.logits[0, 0].log_softmax(-1)[token]
            torch.testing.assert_close(trained[0, n, first_slot + depth], said)
            torch.testing.assert_close(
                out.signals["confidence"][0, n, first_slot + depth], at.signals["confidence"][0, 0]
            )
            total[n] += said
            last = token
    assert float(total.exp().sum().detach()) == pytest.approx(1.0), "the laws of all texts are no law"
    spread = trained[0, :, -1].view(-1, V)
    assert float((spread - spread[:1]).abs().max().detach()) > 0.1, (
        "no law depends on the token before: nothing is tested"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_lanes_step_as_if_each_were_alone(variant: str) -> None:
    """Two rows, lanes copied and crossed between the steps."""
    head, lm = make_head(variant), LanguageHead(torch.randn(V, H, dtype=torch.float64))
    scores = head.open(torch.randn(2, DEPTH, H, dtype=torch.float64), torch.tensor([ROOT, 0]), lm)
    assert scores.step is not None
    _, state = scores.step(scores.state, torch.tensor([[ROOT], [0]]), 0)
    tokens = torch.tensor([[1, 0, 1], [2, 2, 0]])
    _, state = scores.step(gather_lanes(state, torch.zeros(2, 3, dtype=torch.long)), tokens, 1)
    crossed, after = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[0, 1], [2, 1]])
    together, _ = scores.step(gather_lanes(state, crossed), after, 2)
    for b, w in itertools.product(range(2), range(2)):
        state = scores.state
        for depth, token in enumerate([[ROOT, 0][b], int(tokens[b, crossed[b, w]]), int(after[b, w])]):
            at, state = scores.step(state, torch.full((2, 1), token), depth)
        torch.testing.assert_close(together.logits[b, w], at.logits[b, 0])


def test_an_untrained_head_drafts_as_the_marginals_do(every_text: Any) -> None:
    head, layout = MarkovHead(rank=2), every_text(first_slot=0)
    head.build(DraftConfig(hidden_size=H, vocab_size=V))
    lm, hidden = LanguageHead(torch.randn(V, H)), torch.randn(1, len(PATHS), DEPTH, H)
    found, expected = (h.outputs(hidden, layout, lm).views["main"] for h in (head, MarginalHead()))
    torch.testing.assert_close(found.ask(LabelLogProb(layout.labels)), expected.ask(LabelLogProb(layout.labels)))


def test_the_published_size(make_layout: Any) -> None:
    """MT 3.2 f: 77 791 232 weights at the vocabulary of Qwen3 and rank 256."""
    with torch.device("meta"):
        head = MarkovHead()
        head.build(DraftConfig(hidden_size=2560, vocab_size=151936))
    assert head.previous.weight.numel() + head.following.weight.numel() == 77_791_232


def test_a_reduced_vocabulary_has_fewer_followers_and_every_predecessor(every_text: Any) -> None:
    """The root and the data's own tokens may be none of the drafter's."""
    head = MarkovHead(rank=2)
    head.build(DraftConfig(hidden_size=H, vocab_size=V, draft_vocab_size=2))
    lm = LanguageHead(torch.randn(V, H)).restrict(torch.tensor([0, 2]))
    layout = every_text(first_slot=0)
    hidden = torch.randn(1, len(PATHS), DEPTH, H)
    (found,) = head.outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    assert bool((found[layout.labels == 1] == 0).all()) and bool((found[layout.labels != 1] < 0).all())
    scores = head.open(hidden[:, 0], torch.tensor([1]), lm)
    assert scores.step is not None
    at, _ = scores.step(scores.state, torch.tensor([[1]]), 0)
    assert at.logits.shape == (1, 1, 2) and at.ids is lm.ids


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("detach", [False, True])
def test_both_losses_reach_every_weight_and_the_confidence_the_drafter_only_if_wanted(
    variant: str, detach: bool, every_text: Any
) -> None:
    head, layout = make_head(variant, detach_confidence=detach), every_text(first_slot=0)
    lm = LanguageHead(torch.randn(V, H, dtype=torch.float64))
    hidden = torch.randn(1, len(PATHS), DEPTH, H, dtype=torch.float64, requires_grad=True)
    out = head.outputs(hidden, layout, lm)
    signal = out.signals["confidence"].sum()
    (to_hidden,) = torch.autograd.grad(signal, hidden, retain_graph=True, allow_unused=True)
    assert (to_hidden is None) == detach
    (log_prob,) = out.views["main"].ask(LabelLogProb(layout.labels))
    (signal + log_prob.sum()).backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in head.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "head.rank: 0 knows nothing"), ({"variant": "rnn"}, r"'rnn'[^_]*'recurrent'")],
)
def test_settings_that_make_no_head_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):  # the shape hook knows the literals, too
        MarkovHead(**settings)


# -- losses -----------------------------------------------------------------------------------------------------------


class Known(View):
    """A view whose answers are given: log-probabilities of the labels, and overlaps with the target's law."""

    def __init__(self, log_prob: torch.Tensor, overlap: torch.Tensor) -> None:
        self.given = {LabelLogProb: log_prob, Overlap: overlap}

    def ask(self, *requests: Request) -> tuple[torch.Tensor, ...]:
        return tuple(
            self.given[type(request.request)].detach() if isinstance(request, Detached) else self.given[type(request)]
            for request in requests
        )


CTX = StepContext(0, 1, 0)


def teacher(layout: BlockLayout) -> Teacher:
    return Teacher(torch.zeros(1, 1, 1), layout, LanguageHead(torch.zeros(2, 1)))


def worked_example(make_layout: Any) -> tuple[BlockLayout, SlotTotals, HeadOutput]:
    """MT 3.2 f: one block of three predicting slots with cross-entropies, L1 distances and confidences."""
    layout = make_layout([[5]], block_size=3)
    yes = torch.ones(1, 1, 3, dtype=torch.bool)
    layout = replace(layout, predicts=yes, scored=yes, valid=yes, rows=torch.arange(3))
    ce, l1, confidence = torch.tensor([[[[0.2, 0.7, 1.5]]], [[[0.3, 0.8, 1.2]]], [[[0.9, 0.5, 0.4]]]])
    view = Known(-ce, 1.0 - l1 / 2)
    ones = torch.ones(3)
    return (
        layout,
        SlotTotals(ones, ones, torch.tensor(1.0), torch.tensor(1.0)),
        HeadOutput({"main": view}, {"confidence": confidence}),
    )


def test_the_recipes_loss_is_the_published_sum(make_layout: Any) -> None:
    """Its terms, coefficients and decay on the worked example: .693806, .692096 and .579781 make 1.272048."""
    layout, totals, out = worked_example(make_layout)
    stated = OmegaConf.to_container(load_recipe("dspark").loss, resolve=True)
    terms = {name: make(node) for name, node in stated.items()}
    parts = {n: t.numerator(out, layout, teacher(layout), CTX) / t.denominator(totals) for n, t in terms.items()}
    assert float(parts["cross_entropy"]) == pytest.approx(0.693806, abs=1e-6)
    assert 2 * float(parts["tv"]) == pytest.approx(0.692096, abs=1e-6)
    assert float(parts["confidence"]) == pytest.approx(0.579781, abs=1e-6)
    total = sum(terms[name].coef(CTX) * float(part) for name, part in parts.items())
    assert total == pytest.approx(1.272048, abs=1e-6)
    assert {type(t) for t in terms.values()} == {CrossEntropy, TotalVariation, ConfidenceLoss}


def test_the_confidence_is_least_wrong_where_it_is_the_chance_of_acceptance(make_layout: Any) -> None:
    """At .85 the loss is the entropy .422709; its gradient there is 0, and nothing flows into the label."""
    layout, totals, _ = worked_example(make_layout)
    overlap = torch.full((1, 1, 3), 0.85, requires_grad=True)
    signal = torch.full((1, 1, 3), 0.85, requires_grad=True)
    view = Known(torch.zeros(1, 1, 3), overlap)
    term = ConfidenceLoss()
    loss = term.numerator(HeadOutput({"main": view}, {"confidence": signal}), layout, teacher(layout), CTX)
    loss.backward()
    assert float((loss / term.denominator(totals)).detach()) == pytest.approx(0.422709, abs=1e-6)
    assert overlap.grad is None and float(signal.grad.abs().max()) < 1e-5
    certain = torch.tensor([[[1.0, 0.0, torch.nan]]], requires_grad=True)
    some = replace(layout, valid=torch.tensor([[[True, True, False]]]))
    loss = term.numerator(HeadOutput({"main": view}, {"confidence": certain}), some, teacher(layout), CTX)
    loss.backward()
    assert torch.isfinite(loss) and bool(torch.isfinite(certain.grad).all())


def test_a_trained_confidence_is_the_chance_of_acceptance_on_drafts_it_has_not_seen(make_layout: Any) -> None:
    """Calibrated: where it says c, the share c of drafts stands. One that reads the next slot's token instead is not.

    The target writes a token that is never drafted, the more often the smaller the first feature of a slot is, and by
    the token before; else it writes what the draft's law says. So the chance of acceptance is known, and within reach.
    """
    size, width, blocks = 6, 6, 600
    generator = torch.Generator().manual_seed(0)
    head = MarkovHead(rank=6, confidence=True, detach_confidence=True)
    head.build(DraftConfig(hidden_size=width, vocab_size=size, mask_token_id=0))
    for parameter in head.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
    never = torch.nn.functional.one_hot(torch.tensor(size - 1), size) * -40.0
    lm, term = LanguageHead(torch.randn(size, width, generator=generator), never), ConfidenceLoss()
    by_token = 1.5 * torch.randn(size, generator=generator)

    def world() -> tuple[torch.Tensor, BlockLayout, Teacher]:
        yes = torch.ones(1, blocks, 3, dtype=torch.bool)
        before = torch.randint(size, (1, blocks, 3), generator=generator)
        layout = replace(
            make_layout([[5] * blocks], block_size=3),
            **{"predicts": yes, "scored": yes, "valid": yes, "prev_ids": before},
            **{"label_index": torch.arange(3 * blocks).view(1, blocks, 3) + 1, "rows": torch.arange(3 * blocks)},
        )
        hidden = torch.randn(1, blocks, 3, width, generator=generator)
        with torch.no_grad():
            draft = (lm.logits(hidden) + head.following(head.previous(before))).softmax(-1)
        chance = (1.5 * hidden[..., :1] + by_token[before][..., None]).sigmoid()
        target = (chance * draft + (1 - chance) * (never < 0)).clamp(min=1e-30).log()
        return hidden, layout, Teacher(target.view(1, -1, size), layout, LanguageHead(torch.eye(size)))

    def gap(shift: int) -> tuple[float, float]:
        """The largest distance of confidence and chance over quarters of the drafts, and how far these are apart."""
        hidden, layout, teacher = world()
        seen = replace(layout, prev_ids=layout.prev_ids.roll(-shift, 2))
        with torch.no_grad():
            said = head.outputs(hidden, seen, lm).signals["confidence"].flatten()
            (stands,) = head.outputs(hidden, layout, lm).views["main"].ask(Overlap(teacher))
        order = said.argsort()
        pairs = [(float(said[part].mean()), float(stands.flatten()[part].mean())) for part in order.chunk(4)]
        return max(abs(c - p) for c, p in pairs), pairs[-1][1] - pairs[0][1]

    untrained, _ = gap(0)
    hidden, layout, teacher = world()
    optimizer = torch.optim.LBFGS(head.certainty.parameters(), max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = term.numerator(head.outputs(hidden, layout, lm), layout, teacher, CTX) / (3 * blocks)
        value.backward()
        return value

    optimizer.step(loss)
    trained, apart = gap(0)
    assert trained < 0.05 < 0.15 < untrained and apart > 0.3, (untrained, trained, apart)
    assert gap(1)[0] > 0.1


def test_signals_are_offered_and_trained_or_refused() -> None:
    """Before weights are loaded; one that nobody trains would cut drafts at random."""
    terms = {"ce": CrossEntropy(), "confidence": ConfidenceLoss()}
    check_signals(terms, MarkovHead(confidence=True))
    check_signals({"ce": CrossEntropy()}, MarkovHead())
    with pytest.raises(
        ValueError, match=r"loss\.confidence: reads the signal 'confidence', but head 'marginal' offers \[\]"
    ):
        check_signals(terms, MarginalHead())
    with pytest.raises(
        ValueError, match=r"head\.confidence: no loss term trains this signal.*loss=\[\.\.,confidence\]"
    ):
        check_signals({"ce": CrossEntropy()}, MarkovHead(confidence=True))
    with pytest.raises(RecipeError, match=r"loss\.confidence: reads the signal"):
        check_recipe(load_recipe("dflash", ["loss=[cross_entropy,confidence]", "data.train=x"]))


# -- a whole drafter --------------------------------------------------------------------------------------------------


def build_draft(target: Any, **settings: Any) -> DraftModel:
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=4, label_layout="anchor_first"),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=1, init_std=0.2),
        head=MarkovHead(rank=4, init_std=0.5, confidence=True, **settings),
        mask_token_id=262,
    )
    draft = DraftModel(config)
    torch.nn.init.normal_(draft.head.following.weight, std=0.3)
    return draft.eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", [None, ConfidencePolicy(threshold=0.5)])
def test_greedy_decoding_with_it_is_plain_decoding(
    variant: str, policy: ConfidencePolicy | None, tiny_target: Any
) -> None:
    prompts = [[72, 101, 108], [10, 11]]
    settings = DecodingSettings(max_new_tokens=12, compile=False, policy=policy)
    plain = DecodingSettings(max_new_tokens=12, compile=False)
    drafted, own = (
        s.make_decoder(tiny_target, draft, longest_prompt=3).decode(prompts, max_new_tokens=12, stop_ids=())
        for s, draft in ((settings, build_draft(tiny_target, variant=variant)), (plain, None))
    )
    assert [g.output_ids for g in drafted.generations] == [g.output_ids for g in own.generations]


def test_sampled_decoding_declares_its_laws_to_the_verifier(tiny_target: Any) -> None:
    """Real noise, rejection, the recipe's head: the rounds add up, and some drafts stand."""
    settings = DecodingSettings(temperature=1.0, max_new_tokens=24, compile=False)
    decoder = settings.make_decoder(tiny_target, build_draft(tiny_target), longest_prompt=2)
    found = decoder.decode([[i, i + 1] for i in range(8)], max_new_tokens=24, stop_ids=()).generations
    assert all(1 + sum(g.committed) == 24 for g in found)
    assert sum(sum(g.accepted) for g in found) > 0


def test_it_starts_fresh_on_a_trained_backbone_in_blocks_of_another_layout(
    tmp_path: Path, tiny_target: Any, make_draft: Any
) -> None:
    draft = make_draft(tiny_target, num_layers=1)
    save_draft(draft, tmp_path / "draft")
    start = {"path": str(tmp_path / "draft"), "parts": ["conditioning", "drafter"]}
    plan = DraftPlan(
        block=Anchored(block_size=7, label_layout="anchor_first"),
        conditioning=KVInjection(),
        drafter=BlockTransformer(num_layers=1),
        head=MarkovHead(rank=2),
        init_from=start | {"change": ["block_size", "label_layout"]},
    )
    model = plan.make(tiny_target, {})
    state = draft.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items() if not k.startswith("head."))
    assert model.alignment.num_drafts == 7 and float(model.head.following.weight.detach().abs().sum()) == 0.0
    with pytest.raises(ValueError, match=r"label_layout is 'anchor_first' in the recipe, 'same_position' there"):
        replace(plan, init_from=start | {"change": ["block_size"]}).make(tiny_target, {})


def test_it_is_not_exported_as_marginals(tiny_target: Any) -> None:
    config = build_draft(tiny_target).config
    for exporter in FORMATS.values():
        held = "DSpark" in exporter.holds
        assert held != any("'head': 'markov'" in reason for reason in exporter.limits(config))
