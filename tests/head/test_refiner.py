"""The refining head: one law in training and in decoding, Jacobi passes that end in it, its rounds and its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder import BestChain, SampledChain
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Round
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import RefinerHead
from dflash_lightning.loss import RefinedLoss, total_loss
from dflash_lightning.ops.lm_head import (
    Argmax,
    Detached,
    HeadOutput,
    LabelLogProb,
    LanguageHead,
    Overlap,
    Request,
    Teacher,
    View,
)
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.testing import toy_batch, toy_module
from dflash_lightning.types import Scores, SlotTotals, StepContext

V, DRAFTS, H = 7, 6, 5  # of the chains


def small(**settings: Any) -> RefinerHead:
    return RefinerHead(**{"rank": 3, **settings})


def opened(passes: int | None, rows: int = 4, drafts: int = DRAFTS, temper: float = 1.0) -> Scores:
    """Scores of a head with large random weights, which depend on neither ``passes`` nor ``rows``."""
    head = RefinerHead(rank=8, passes=passes)
    head.build(
        DraftConfig(hidden_size=H, vocab_size=V, block_size=DRAFTS, mask_token_id=0, label_layout="anchor_first")
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, weight in sorted(head.named_parameters()):
            weight.copy_(temper * torch.randn(weight.shape, generator=generator))
        lm = LanguageHead(torch.randn(V, H, generator=generator))
        hidden = torch.randn(64, DRAFTS, H, generator=generator)[:rows, :drafts]
    return head.requires_grad_(False).open(hidden, torch.arange(rows) % V, lm)


def chain(scores: Scores, temperature: float = 0.0, seed: int = 0) -> Any:
    rows = len(scores.logits)
    builder = SampledChain() if temperature else BestChain()
    where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 2)
    sampler = Sampler(SamplingSpec(temperature=temperature), Noise(seed))
    return builder.build(torch.arange(rows) % V, scores, where, sampler)


@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(world: Any, first_slot: int) -> None:
    head = world.randomise(world.build(small(), first_slot=first_slot))
    said = world.check_law(head, first_slot).view(3, 3, 3, 3)  # of each text, at each depth
    assert not torch.equal(said[:, :, 0, 2].exp()[0, 0], said[:, :, 0, 2].exp()[1, 0]), "slot 2 knows the first token"


def test_lanes_step_as_if_each_were_alone(world: Any) -> None:
    world.check_lanes(world.randomise(world.build(small())))


def test_an_untrained_head_is_the_marginal_one_bit_for_bit_unless_its_readout_is_drawn(world: Any) -> None:
    world.check_start(world.build(small()))
    drawn = world.build(small(zero_readout=False))
    assert not bool(drawn.mix.any()) and bool(drawn.readout.weight.any())
    with pytest.raises(AssertionError):
        world.check_start(drawn)


# -- Jacobi passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_i_passes_the_first_i_drafts_are_those_drawn_in_turn(temperature: float) -> None:
    """MT 3.5 f. As many passes as drafts give all of them, and the laws that they were drawn from."""
    rows = 32
    in_turn = chain(opened(None, rows), temperature)
    wrong = []
    for passes in range(1, DRAFTS + 1):
        found = chain(opened(passes, rows), temperature)
        assert torch.equal(found.tokens[:, : passes + 1], in_turn.tokens[:, : passes + 1])
        wrong.append(int((found.tokens != in_turn.tokens).any(1).sum()))
    assert wrong[0] > rows // 2 and wrong[-1] == 0 and wrong == sorted(wrong, reverse=True)
    if temperature:
        torch.testing.assert_close(found.law.mass, in_turn.law.mass)


def test_the_declared_law_is_that_of_the_last_pass_after_the_tokens_of_the_one_before() -> None:
    """Not the law after the drafts that are handed out: these differ while passes have not settled."""
    for passes in (1, 2):
        before = chain(opened(passes - 1 or None, 16), 1.0) if passes > 1 else None
        scores, found = opened(passes, 16), chain(opened(passes, 16), 1.0)
        if before is None:  # pass 0 is drawn from the marginals
            plain = Scores(scores.logits)
            before = chain(plain, 1.0)
        state, step = scores.state, scores.step
        for depth in range(DRAFTS):
            at, state = step(state, before.tokens[:, depth, None], depth)
            torch.testing.assert_close(found.law.mass[:, depth], at.logits[:, 0].softmax(-1), rtol=0, atol=1e-4)


def test_a_later_token_changes_later_slots_only() -> None:
    """MT 3.5 f: changing the token before slot 3 affects slots 3, 4 and 5."""
    scores = opened(1, rows=1)
    rows = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 4, 5]])
    laws = []
    for tokens in rows:
        state, found = scores.state, []
        for depth in range(DRAFTS):
            at, state = scores.step(state, tokens[depth].view(1, 1), depth)
            found.append(at.logits[0, 0])
        laws.append(torch.stack(found))
    assert (laws[0] != laws[1]).any(-1).tolist() == [False, False, False, True, True, True]


def test_slots_behind_those_of_the_training_mix_nothing() -> None:
    head = small(passes=None)
    head.build(DraftConfig(hidden_size=H, vocab_size=V, block_size=4, mask_token_id=0, label_layout="anchor_first"))
    torch.nn.init.normal_(head.mix)
    x = torch.randn(1, 1, 6, 3)
    assert torch.equal(head._refined(x[:, :, :4]), head._refined(x)[:, :, :4])
    alone = x[:, :, 5:] + head.mlp_down(torch.nn.functional.silu(head.mlp_gate(x[:, :, 5:])) * head.mlp_up(x[:, :, 5:]))
    torch.testing.assert_close(head._refined(x)[:, :, 5:], alone)
    torch.testing.assert_close(head._refined(x, last_only=True), head._refined(x)[:, :, -1:])


def test_expected_rounds_are_refused_where_passes_do_not_settle() -> None:
    settings = DecodingSettings(compile=False)
    for passes, settled in ((None, True), (3, True), (2, False)):
        draft = toy_module(head=small(passes=passes)).draft_model  # blocks of 4: three drafts
        if settled:
            AcceptanceRule.of(settings, draft)
            continue
        with pytest.raises(ValueError, match=r"head\.passes: RefinerHead draws late drafts from laws after other tok"):
            AcceptanceRule.of(settings, draft)


# -- rounds and loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_slot", [0, 1])
def test_rounds_follow_the_likeliest_tokens_of_the_round_before(world: Any, first_slot: int) -> None:
    """Each is what ``step`` says after those tokens; of a slot without a label the data's token stands in."""
    head = world.randomise(world.build(small(rounds=2), first_slot=first_slot), 1.5)
    lm, layout = world.lm(), world.layout(first_slot)
    hole = layout.rows[torch.arange(len(layout.rows)) != 1]  # the second slot of the first text is not scored
    layout.rows = hole
    hidden = world.hidden(1, 3 + first_slot).expand(-1, 27, -1, -1)
    views = head.outputs(hidden, layout, lm).views
    assert list(views) == ["main", "base", "round_1", "round_2"] == list(head.distributions)
    scores = head.open(hidden[0, :1, first_slot:], torch.tensor([world.root]), lm)
    for name, last in (("round_1", "base"), ("round_2", "round_1")):
        (drafted,), (log_prob,) = views[last].ask(Argmax()), views[name].ask(LabelLogProb(layout.labels))
        for block in (0, 1, 26):
            path = drafted[0, block, first_slot:].tolist()
            if block == 0:
                assert path[1] == -1
                path[1] = int(layout.labels[0, 0, first_slot + 1])
            said = torch.stack([x.log_softmax(-1) for x in world.stepped(scores, path)])
            want = said.gather(1, layout.labels[0, block, first_slot:, None])[:, 0]
            scored = [0, 2] if block == 0 else [0, 1, 2]
            torch.testing.assert_close(log_prob[0, block, first_slot:][scored], want[scored])


class Known(View):
    """A view whose answers are given: the cross entropy and the total variation of every slot."""

    def __init__(self, ce: float | list[float], tv: float | list[float]) -> None:
        ce, tv = ([x] * 3 if isinstance(x, float) else x for x in (ce, tv))
        self.given = {LabelLogProb: -torch.tensor([[ce]]), Overlap: 1.0 - torch.tensor([[tv]])}

    def ask(self, *requests: Request) -> tuple[torch.Tensor, ...]:
        return tuple(self.given[type(r.request if isinstance(r, Detached) else r)] for r in requests)


def share(term: RefinedLoss, out: HeadOutput, world: Any) -> float:
    layout = world.layout()
    layout.predicts, layout.valid = layout.predicts[:, :1], layout.valid[:, :1]
    ones, one = torch.ones(3), torch.tensor(1.0)
    totals = SlotTotals(ones, ones, one, one)
    teacher = Teacher(torch.zeros(1, 1, 1), layout, LanguageHead(torch.zeros(2, 1)))
    return float(term.numerator(out, layout, teacher, StepContext(0, 1, 0)) / term.denominator(totals))


def test_the_parts_are_composed_as_published(world: Any) -> None:
    """MT 3.5 f: 1.0, rounds (1.2, 1.1, 1.05), base 1.4 -> 2.175; each part .1 CE + .9 TV."""
    parts = {"main": 1.0, "base": 1.4, "round_1": 1.2, "round_2": 1.1, "round_3": 1.05}
    out = HeadOutput({name: Known(value, value) for name, value in parts.items()})
    assert share(RefinedLoss(), out, world) == pytest.approx(2.175)
    one = HeadOutput({"main": Known(2.0, 0.5), "base": Known(0.0, 0.0)})
    assert share(RefinedLoss(), one, world) == pytest.approx(0.1 * 2.0 + 0.9 * 0.5)
    assert share(RefinedLoss(ce=0), one, world) == pytest.approx(0.45)
    assert share(RefinedLoss(tv=0, labels="data"), one, world) == pytest.approx(0.2)


def test_both_published_denominators(world: Any) -> None:
    """MH 6.1: cross entropies .1, .5, 1 at decay 7 over the valid slots .428305, over the weights .490734."""
    out = HeadOutput({"main": Known([0.1, 0.5, 1.0], 0.0)})
    for normalize, expected in (("slots", 0.428305), ("weights", 0.490734)):
        term = RefinedLoss(ce=1, tv=0, base=0, rounds=0, decay=7.0, normalize=normalize)  # type: ignore[arg-type]
        assert share(term, out, world) == pytest.approx(expected, abs=1e-6)


def test_the_recipe_has_the_published_settings() -> None:
    cfg = load_recipe("xpress")
    head, loss = make(dict(cfg.head)), make(dict(cfg.loss.refined))
    assert (head.rank, head.expansion, head.passes, head.rounds) == (256, 2, 6, 3)
    assert (loss.ce, loss.tv, loss.base, loss.rounds, loss.decay) == (0.1, 0.9, 0.6, 0.3, 4.0)


def test_the_loss_trains_every_weight() -> None:
    module = toy_module(head=small(), loss={"refined": RefinedLoss()})
    batch = toy_batch(module)
    out, features = module.outputs(batch)
    shares = module.loss_shares(batch, out, features, StepContext(0, 1, 0), batch.window_totals)
    total_loss(shares).backward()
    for name, weight in module.draft_model.named_parameters():
        assert bool((weight.grad != 0).any()), name


@pytest.mark.parametrize(
    ("make_part", "message"),
    [
        (lambda: small(rank=0), r"head\.rank: 0 refines nothing"),
        (lambda: small(passes=0), r"head\.passes: 0 passes refine nothing"),
        (lambda: small(rounds=-1), r"head\.rounds: -1 is no number"),
        (lambda: RefinedLoss(base=-1), r"loss\.base: -1 would reward errors"),
        (lambda: RefinedLoss(ce=0, tv=0), r"loss\.ce: 0, and so is tv"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make_part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_part()


def test_it_is_not_exported_as_marginals() -> None:
    config = toy_module(head=small()).draft_model.config
    for exporter in FORMATS.values():
        held = "xPress" in exporter.holds
        assert held != any("'head': 'refiner'" in reason for reason in exporter.limits(config))
