"""The marginal head: the target's own language head on every slot, alone."""

from __future__ import annotations

import torch

from dflash_lightning.block import Anchored, merge_layouts
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, MarginalHead
from dflash_lightning.ops.lm_head import Argmax, LabelLogProb, LanguageHead
from dflash_lightning.types import Alignment, Document


def test_the_view_covers_the_scored_slots_with_the_same_logits_as_decoding() -> None:
    alignment = Alignment(4, 19)
    document = Document(0, torch.arange(12), torch.arange(12) >= 4)
    part = Anchored(block_size=4).blocks(document, alignment, seed=0, epoch=0)
    layout = merge_layouts([[(0, part)]], num_blocks=9, alignment=alignment)
    lm = LanguageHead(torch.randn(20, 6), softcap=3.0)
    hidden = torch.randn(1, 9, 4, 6)
    views = MarginalHead().outputs(hidden, layout, lm).views
    assert list(views) == ["main"]

    log_prob, best = views["main"].ask(LabelLogProb(layout.labels), Argmax())
    roots = torch.tensor([3])
    logits = torch.stack([MarginalHead().open(hidden[:, n], roots, lm).logits for n in range(9)], 1)
    want = torch.log_softmax(logits, -1).gather(-1, layout.labels[..., None]).squeeze(-1)
    assert layout.scored.sum() > 10
    assert torch.allclose(log_prob, want.where(layout.scored, 0.0), rtol=0, atol=1e-5)
    assert torch.equal(best, logits.argmax(-1).where(layout.scored, -1))


def test_a_reduced_head_gives_one_column_per_id() -> None:
    lm = LanguageHead(torch.randn(20, 6)).restrict(torch.tensor([2, 5, 19]))
    scores = MarginalHead().open(torch.randn(2, 3, 6), torch.tensor([5, 19]), lm)
    assert scores.logits.shape == (2, 3, 3) and scores.ids is lm.ids
    assert scores.step is None, "marginals are drawn all at once"


def test_it_has_no_weights_and_is_made_from_its_name() -> None:
    head = DraftHead.from_settings("marginal", MarginalHead().settings())
    head.build(DraftConfig())
    assert isinstance(head, MarginalHead) and not list(head.parameters()) and not head.required().layer_ids
