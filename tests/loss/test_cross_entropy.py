"""Weighted cross-entropy as sums over slots: worked numbers, a slow loop, and independence of how a batch is split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored, count_slots, merge_layouts
from dflash_lightning.loss import CrossEntropy, LossTerm
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead, View
from dflash_lightning.types import (
    Alignment,
    BlockLayout,
    Document,
    LabelLayout,
    SlotTotals,
    StepContext,
)

CTX = StepContext(step=0, total_steps=10, epoch=0)


def make_layout(valid: list[list[int]], *, scored: list[list[int]] | None = None, first_slot: int = 1) -> BlockLayout:
    """One row of blocks with the given slots valid; every label is token 0."""
    shape = (1, len(valid), len(valid[0]))
    slots, blocks = torch.zeros(shape, dtype=torch.long), torch.zeros(shape[:2], dtype=torch.long)
    ok = torch.tensor([valid], dtype=torch.bool)
    known = torch.tensor([scored], dtype=torch.bool) if scored is not None else ok
    return BlockLayout(
        anchors=blocks,
        keep=torch.ones(shape[:2], dtype=torch.bool),
        context_start=blocks,
        context_end=blocks,
        input_ids=slots,
        position_ids=slots,
        predicts=(torch.arange(shape[2]) >= first_slot).expand(shape),
        label_index=slots,
        labels=slots,
        prev_ids=slots,
        scored=known,
        valid=ok,
        rows=known.flatten().nonzero().squeeze(1),
    )


def outputs(hidden: Tensor, layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
    """The plain view of the scored slots, as the marginal head gives it."""
    return HeadOutput({"main": View.of(hidden, layout.rows, lm)})


def make_views(cross_entropies: list[list[float]], layout: BlockLayout) -> tuple[HeadOutput, Tensor]:
    """Views in which slot (n, k) has the given cross-entropy with token 0, and the hidden states behind them.

    Two tokens with logits x and 0: ``-log softmax = log(1 + exp(-x))``, so ``x = -log(exp(ce) - 1)``.
    """
    hidden = -torch.tensor([cross_entropies], dtype=torch.float64).expm1().log()[..., None]
    hidden.requires_grad_()
    head = LanguageHead(torch.tensor([[1.0], [0.0]], dtype=torch.float64))
    return outputs(hidden, layout, head), hidden


def value_of(loss: CrossEntropy, cross_entropies: list[list[float]], layout: BlockLayout) -> float:
    views, _ = make_views(cross_entropies, layout)
    denominator = loss.denominator(count_slots(layout))
    return (loss.numerator(views, layout, None, CTX) / denominator).item()


def test_one_block_with_decay_4_gives_the_paper_s_weighting() -> None:
    """(.1 + .5 exp(-1/4) + exp(-2/4)) / (1 + exp(-1/4) + exp(-2/4)); slot 0 predicts nothing."""
    layout = make_layout([[0, 1, 1, 1]])
    assert value_of(CrossEntropy(decay=4), [[9.0, 0.1, 0.5, 1.0]], layout) == pytest.approx(0.459446, abs=5e-7)


def test_two_blocks_are_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    layout = make_layout([[0, 1, 1, 1], [0, 1, 0, 0]])
    loss = CrossEntropy(decay=4)
    blocks = [[9.0, 0.1, 0.5, 1.0], [9.0, 2.0, 9.0, 9.0]]
    assert value_of(loss, blocks, layout) == pytest.approx(0.914513, abs=5e-7)
    each = [value_of(loss, [b], make_layout([v])) for b, v in zip(blocks, [[0, 1, 1, 1], [0, 1, 0, 0]], strict=True)]
    assert sum(each) / 2 == pytest.approx(1.229723, abs=5e-7)


@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_first_draft_weighs_one_in_both_label_layouts(first_slot: int) -> None:
    """Anchor-first moves every weight one slot to the left: slot 0 is then a draft."""
    layout = make_layout([[1 if k >= first_slot else 0 for k in range(4)]], first_slot=first_slot)
    views, hidden = make_views([[1.0, 1.0, 1.0, 1.0]], layout)
    (gradient,) = torch.autograd.grad(CrossEntropy(decay=2).numerator(views, layout, None, CTX), hidden)
    relative = (gradient / gradient[0, 0, first_slot]).flatten().tolist()
    want = [math.exp(-(k - first_slot) / 2) if k >= first_slot else 0.0 for k in range(4)]
    assert relative == pytest.approx(want, abs=1e-6)
    totals = count_slots(layout)
    assert float(CrossEntropy(decay=2).denominator(totals)) == pytest.approx(sum(want), abs=1e-6)


def test_a_hole_does_not_move_the_weights_behind_it() -> None:
    layout = make_layout([[0, 1, 0, 1]])
    want = (1.0 + 3.0 * math.exp(-1.0)) / (1.0 + math.exp(-1.0))
    assert value_of(CrossEntropy(decay=2), [[9.0, 1.0, 9.0, 3.0]], layout) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("decay", [None, 7.0])
def test_equal_cross_entropies_give_that_cross_entropy(decay: float | None) -> None:
    layout = make_layout([[0, 1, 1, 1], [0, 1, 0, 0]])
    assert value_of(CrossEntropy(decay=decay), [[2.0] * 4] * 2, layout) == pytest.approx(2.0, abs=1e-6)


def make_documents(lengths: list[int], *, supervised: float = 0.7) -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    return [
        Document(i, torch.randint(0, 20, (n,), generator=generator), torch.rand(n, generator=generator) < supervised)
        for i, n in enumerate(lengths)
    ]


def merge_documents(documents: list[Document], label_layout: LabelLayout, *, num_blocks: int) -> BlockLayout:
    alignment = Alignment(4, 19, label_layout)
    block = Anchored(block_size=4, num_anchors=6, label_layout=label_layout)
    placed, offset = [], 0
    for document in documents:
        placed.append((offset, block.blocks(document, alignment, seed=0, epoch=0)))
        offset += len(document.input_ids)
    return merge_layouts([placed], num_blocks=num_blocks, alignment=alignment)


@pytest.mark.parametrize("label_layout", ["same_position", "anchor_first"])
@pytest.mark.parametrize("decay", [None, 3.0])
def test_sum_and_gradient_equal_a_loop_over_slots(label_layout: LabelLayout, decay: float | None) -> None:
    layout = merge_documents(make_documents([14, 11, 9]), label_layout, num_blocks=20)
    head = LanguageHead(torch.randn(20, 6, dtype=torch.float64))
    hidden = torch.randn(1, 20, 4, 6, dtype=torch.float64, requires_grad=True)
    first = Alignment(4, 19, label_layout).first_slot
    slow, weight_sum = hidden.sum() * 0.0, 0.0
    for n, k in layout.valid[0].nonzero().tolist():
        weight = 1.0 if decay is None else float(torch.tensor(-(k - first) / decay).exp())
        slow = slow - weight * torch.log_softmax(head.weight @ hidden[0, n, k], -1)[layout.labels[0, n, k]]
        weight_sum += weight
    loss = CrossEntropy(decay=decay)
    fast = loss.numerator(outputs(hidden, layout, head), layout, None, CTX)
    assert weight_sum > 5 and fast.item() == pytest.approx(slow.item(), rel=1e-7)
    expected, gradient = (torch.autograd.grad(x, hidden)[0] for x in (slow, fast))
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)
    assert torch.equal(gradient.abs().amax(-1) > 0, layout.valid)
    assert float(loss.denominator(count_slots(layout))) == pytest.approx(weight_sum, rel=1e-6)


@pytest.mark.parametrize("scored", [[[0, 1, 1, 0]], [[0, 1, 1, 1]]])
def test_nan_in_an_invalid_slot_changes_neither_value_nor_gradient(scored: list[list[int]]) -> None:
    """Slot 3 is not valid: either no row at all, or a scored row whose label the draft vocabulary lacks."""
    layout = make_layout([[0, 1, 1, 0]], scored=scored)
    results = []
    for poison in (1.0, math.nan):
        views, hidden = make_views([[poison, 0.3, 0.8, poison]], layout)
        value = CrossEntropy(decay=4).numerator(views, layout, None, CTX)
        results.append((value, torch.autograd.grad(value, hidden)[0]))
    assert results[0][0] > 0 and torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1]) and (results[0][1][0, 0, 1:3] != 0).all()


def test_no_valid_slot_gives_zero_over_zero_and_still_reaches_every_parameter() -> None:
    layout = make_layout([[0, 0, 0, 0]])
    layer = torch.nn.Linear(3, 3)
    views = outputs(layer(torch.randn(1, 1, 4, 3)), layout, LanguageHead(torch.randn(7, 3)))
    loss = CrossEntropy(decay=4)
    numerator = loss.numerator(views, layout, None, CTX)
    numerator.backward()
    assert numerator.item() == 0.0 and loss.denominator(count_slots(layout)).item() == 0.0
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in layer.parameters())


def test_labels_outside_the_draft_vocabulary_are_left_out() -> None:
    """Tokens 0 and 2 of 3 are kept; the slot labelled 1 is scored, not valid, and adds nothing."""
    layout = make_layout([[0, 1, 0, 1]], scored=[[0, 1, 1, 1]])
    layout.labels = torch.tensor([[[0, 0, 1, 2]]])
    head = LanguageHead(torch.randn(3, 5, dtype=torch.float64)).restrict(torch.tensor([0, 2]))
    hidden = torch.randn(1, 1, 4, 5, dtype=torch.float64)
    log_probs = torch.log_softmax(hidden @ head.weight.T, -1)[0, 0]
    value = CrossEntropy().numerator(outputs(hidden, layout, head), layout, None, CTX)
    assert value.item() == pytest.approx(-(log_probs[1, 0] + log_probs[3, 1]).item(), rel=1e-9)


def accumulate(parts: list[tuple[list[list[float]], list[list[int]]]], *, ranks: int = 1) -> tuple[float, Tensor]:
    """Loss and gradient as the module makes them: every micro-batch's sum over the totals of all of them.

    With ``ranks`` the micro-batches are spread over that many processes, whose gradients DDP then averages.
    """
    loss, totals = CrossEntropy(), SlotTotals.zeros(4)
    for _, valid in parts:
        totals = totals + count_slots(make_layout(valid))
    value, gradients = 0.0, []
    for cross_entropies, valid in parts:
        layout = make_layout(valid)
        views, hidden = make_views(cross_entropies, layout)
        share = loss.numerator(views, layout, None, CTX) / loss.denominator(totals)
        (gradient,) = torch.autograd.grad(share * ranks, hidden)
        value += share.item()
        gradients.append(gradient.flatten(0, 1) / ranks)
    return value, torch.cat(gradients)


A = ([9.0, 1.0, 2.0, 3.0], [0, 1, 1, 1])
B = ([9.0, 5.0, 9.0, 9.0], [0, 1, 0, 0])
NOTHING = ([9.0, 9.0, 9.0, 9.0], [0, 0, 0, 0])


def test_t12_the_loss_does_not_depend_on_how_the_batch_is_split() -> None:
    """A: 3 tokens, sum 6; B: 1 token, sum 5: 11/4 = 2.75 in every split, never the mean of means 3.5."""
    value, gradient = accumulate([([A[0], B[0]], [A[1], B[1]])])
    assert value == pytest.approx(2.75, abs=1e-9)
    for ranks in (1, 2):
        split_value, split_gradient = accumulate([([A[0]], [A[1]]), ([B[0]], [B[1]])], ranks=ranks)
        assert split_value == pytest.approx(2.75, abs=1e-9)
        assert torch.allclose(split_gradient, gradient, rtol=0, atol=1e-12)


def test_t12_a_sample_without_scored_tokens_changes_nothing() -> None:
    with_it, gradient = accumulate([([A[0]], [A[1]]), ([NOTHING[0]], [NOTHING[1]]), ([B[0]], [B[1]])])
    without, expected = accumulate([([A[0]], [A[1]]), ([B[0]], [B[1]])])
    assert with_it == pytest.approx(without, abs=1e-12) == pytest.approx(2.75, abs=1e-9)
    assert torch.equal(gradient[[0, 2]], expected) and gradient[1].abs().max() == 0


def test_settings_make_an_equal_term() -> None:
    loss = CrossEntropy(decay=7, coefficient=0.5, view="main")
    again = LossTerm.from_settings("cross_entropy", loss.settings())
    assert (
        again.settings()
        == loss.settings()
        == {
            "decay": 7,
            "labels": "data",
            "prefix": False,
            "coefficient": 0.5,
            "view": "main",
        }
    )
    assert loss.coef(CTX) == 0.5


@pytest.mark.parametrize("decay", [0.0, -1.0, math.nan])
def test_a_decay_that_does_not_decay_is_refused_with_what_to_do(decay: float) -> None:
    with pytest.raises(ValueError, match=r"loss.decay: .* use a positive number .* or null"):
        CrossEntropy(decay=decay)


def test_an_unknown_view_is_refused_with_the_known_ones() -> None:
    layout = make_layout([[0, 1, 1, 1]])
    views, _ = make_views([[1.0] * 4], layout)
    with pytest.raises(ValueError, match=r"no view 'coarse'. Use one of \['main'\]"):
        CrossEntropy(view="coarse").numerator(views, layout, None, CTX)
