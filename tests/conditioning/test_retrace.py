"""Drafts of the round before as a memory of slots: the formula, which slot remembers which draft, how it starts."""

import math

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection, ReTrace
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import WeightedLoss
from dflash_lightning.model import DraftModel, make_draft_config, save_draft
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.schedule import decay_weights
from dflash_lightning.testing import check_conditioning
from dflash_lightning.types import Carried, SlotTotals, TargetFeatures


def fill(seed, shape):
    return (0.5 * torch.sin(seed + torch.arange(math.prod(shape)).double())).view(shape)


@pytest.fixture
def part():
    """The sheet's fusion of width 2 (MH 4.5), in float64."""
    part = ReTrace(target_layer_ids=[0])
    part.build(
        DraftConfig(
            block_size=8, mask_token_id=0, target_layer_ids=[0], target_hidden_size=2, vocab_size=8, hidden_size=2,
            rms_norm_eps=1e-6,
        )
    )  # fmt: skip
    part.double()
    part.combine.weight.data = fill(1, [2, 4])
    part.value.weight.data = fill(2, [2, 2])
    part.gate.weight.data = fill(3, [2, 4])
    return part


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.0, (0.139374, 0.537358)), (0.5, (0.125465, 0.500998)), (1.0, (0.111235, 0.466469))],
)
def test_the_sheet_s_fusion(part, beta, expected):
    part.beta.fill_(beta)
    m, u, e = (torch.tensor([x], dtype=torch.float64) for x in ((0.3, -0.7), (1, 0.2), (0.1, 0.4)))
    found = part.fuse_memory(e, m, u)[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("beta", "expected"), [(0.5, (0.201423, -0.509307)), (1.0, (0.102846, -0.318614))])
def test_the_sheet_s_memory(part, beta, expected):
    """With a value projection of the identity and an open gate, the input gains ``r``."""
    part.beta.fill_(beta)
    part.value.weight.data = torch.eye(2, dtype=torch.float64)
    part.gate.weight.data.zero_()  # a gate of one half
    m, u, e = (torch.tensor([x], dtype=torch.float64) for x in ((0.3, -0.7), (1, 0.2), (0.1, 0.4)))
    found = 2 * (part.fuse_memory(e, m, u) - e)[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def carried_after(accepted, num_drafts=7, anchor=10):
    """Rows of one round: the root at ``anchor`` and the drafts; those behind the accepted ones are carried."""
    count = num_drafts + 1
    rows = torch.zeros(1, count, 1, 2, dtype=torch.float64)
    own = torch.arange(2.0 * count, dtype=torch.float64).view(1, count, 2)
    features = TargetFeatures((0,), rows, last_hidden=own)
    places = anchor + torch.arange(count)[None]
    return Carried(features, places, torch.tensor([[accepted + 1]]), torch.tensor([[count]]), own + 100)


@pytest.mark.parametrize(("accepted", "live"), [(0, 6), (2, 4), (5, 1), (6, 0), (7, 0)])
def test_which_slot_remembers_which_draft(part, accepted, live):
    """MH 4.5's map: K 8, anchor 10; draft ``i`` (from 0) was judged at row ``i`` and stands at position ``11 + i``."""
    carried = carried_after(accepted)
    row, alive = part.remembered(carried, 8)
    assert int(alive.sum()) == live and not alive[0, 0, 0]
    slots = alive[0, 0].nonzero().flatten().tolist()
    anchor = 10 + accepted + 1
    assert [(s, int(row[0, 0, s]), anchor + s) for s in slots] == [
        (s, s + accepted, 11 + s + accepted) for s in range(1, live + 1)
    ]
    if accepted == 2:
        assert [(s, int(row[0, 0, s]), anchor + s) for s in slots] == [(1, 3, 14), (2, 4, 15), (3, 5, 16), (4, 6, 17)]


def test_slots_without_memory_are_untouched_whatever_stands_there(part):
    """Selected, not multiplied: rows that mean nothing may hold NaN, and pass none into the gradients."""
    part.beta.fill_(1.0)
    carried = carried_after(2)
    dead = torch.tensor([0, 1, 2, 7])  # accepted ones, and the last row, behind which nothing was drafted
    for states in (carried.features.last_hidden, carried.recalled):
        states[:, dead] = torch.nan
    embeddings = torch.randn(1, 1, 8, 2, dtype=torch.float64, requires_grad=True)
    found = part.recall(embeddings, carried)
    same = (found == embeddings).all(-1)[0, 0]
    assert same.tolist() == [True, False, False, False, False, True, True, True]
    found.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (part.combine.weight, part.gate.weight, embeddings))


def make_model(target, conditioning):
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=5),
        conditioning=conditioning,
        drafter=BlockTransformer(num_layers=2, init_std=0.2),
        head=MarginalHead(),
        mask_token_id=262,
    )
    torch.manual_seed(0)
    return DraftModel(config).eval()


def test_at_the_start_it_drafts_as_the_drafter_it_starts_from_bit_for_bit(tiny_target, make_layout, tmp_path):
    plain = make_model(tiny_target, KVInjection(target_layer_ids=[0, 2]))
    save_draft(plain, tmp_path / "draft")
    stated = {"path": str(tmp_path / "draft"), "change": ["conditioning"]}
    block, drafter = Anchored(block_size=5), BlockTransformer(num_layers=2)
    plan = DraftPlan(block, ReTrace(target_layer_ids=[0, 2]), drafter, MarginalHead(), init_from=stated)
    ours = plan.make(tiny_target, {}).eval()
    ours.conditioning.at_step(1000)
    assert float(ours.conditioning.beta) == 1.0
    ids = torch.randint(250, (1, 30))
    layout, positions = make_layout([[4, 9, 20]], block_size=5, ids=ids), torch.arange(30)[None]
    features = tiny_target.features(ids, positions, ours.required())
    carried = Carried(features, positions, torch.tensor([[3, 5, 5]]), torch.tensor([[8, 5, 9]]), torch.randn(1, 30, 32))
    found, expected = (
        model.block_hidden(tiny_target.embed(layout.input_ids), layout, features, positions, tiny_target.lm, extra)
        for model, extra in ((ours, carried), (plain, None))
    )
    assert torch.equal(found, expected)


def test_training_and_decoding_agree():
    check_conditioning(ReTrace(target_layer_ids=[1, 3]))


@pytest.mark.parametrize(("warmup", "step", "beta"), [(50, 0, 0.0), (50, 25, 0.5), (50, 80, 1.0), (0, 0, 1.0)])
def test_beta_rises_with_the_optimizer_steps(tiny_target, warmup, step, beta):
    part = make_model(tiny_target, ReTrace(target_layer_ids=[0, 2], warmup=warmup)).conditioning
    part.at_step(step)
    assert float(part.beta) == beta and "beta" in part.state_dict()


def test_the_port_s_loss_divides_by_the_number_of_slots():
    """MH 4.5: cross entropies .5, 1, 2 with weights exp(-d/4)."""
    losses = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    weights = decay_weights(4, 4.0).double()
    torch.testing.assert_close(weights, torch.tensor([1, 0.778801, 0.606531, 0.472367]).double(), rtol=0, atol=1e-6)
    counts = torch.tensor([1.0, 1.0, 1.0, 0.0])
    totals = SlotTotals(counts, counts, torch.ones(()), torch.ones(()))
    by_count, by_weights = (
        float((weights[:3] * losses).sum() / WeightedLoss(decay=4.0, normalize=kind).denominator(totals))
        for kind in ("slots", "weights")
    )
    assert by_count == pytest.approx(0.830621, abs=1e-6) and by_weights == pytest.approx(1.044661, abs=1e-6)


@pytest.mark.parametrize(("setting", "value"), [("fresh", 1.0), ("warmup", -1)])
def test_a_share_of_everything_and_a_negative_warm_up_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"conditioning\.{setting}: "):
        ReTrace(**{setting: value})
