"""Slots corrected by the token before them: a law with a memory of one token, its confidence, and who decodes it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import ResidualMix
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.policy import SharedBudget
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import CorrectedHead, MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead
from dflash_lightning.recipe import load_recipe

V, H, DEPTH = 3, 4, 3
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))


def make_head(seed: int = 0, **settings: Any) -> CorrectedHead:
    head = CorrectedHead(**settings)
    head.build(DraftConfig(hidden_size=H, vocab_size=V))
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data = weight.data + torch.randn(weight.shape, generator=generator)
    return head.double()


def make_lm(seed: int = 1) -> LanguageHead:
    generator = torch.Generator().manual_seed(seed)
    weight, embedding = (torch.randn(V, H, generator=generator, dtype=torch.float64) for _ in range(2))
    return LanguageHead(weight, embedding=embedding)


@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(first_slot: int, every_text: Any) -> None:
    """All 27 texts."""
    head, lm, layout = make_head(), make_lm(), every_text(first_slot)
    hidden = torch.randn(1, 1, DEPTH + first_slot, H, dtype=torch.float64)
    out = head.outputs(hidden.expand(-1, len(TEXTS), -1, -1), layout, lm)
    (trained,) = out.views["main"].ask(LabelLogProb(layout.labels))
    scores = head.open(hidden[0, :, first_slot:], torch.tensor([2]), lm)
    assert scores.step is not None
    total = torch.zeros(len(TEXTS), dtype=torch.float64)
    for n, text in enumerate(TEXTS.tolist()):
        for depth, (last, token) in enumerate(zip([2, *text], text, strict=False)):
            at, _ = scores.step(scores.state, torch.tensor([[last]]), depth)
            said = at.logits[0, 0].log_softmax(-1)[token].detach()
            torch.testing.assert_close(trained[0, n, first_slot + depth].detach(), said)
            total[n] += said
    assert float(total.exp().sum()) == pytest.approx(1.0)


def test_an_untrained_head_is_the_marginals_bit_for_bit(every_text: Any) -> None:
    head, layout = CorrectedHead(init_std=1.0), every_text()
    head.build(DraftConfig(hidden_size=H, vocab_size=V))
    lm, hidden = make_lm(), torch.randn(1, len(TEXTS), DEPTH + 1, H)
    lm = LanguageHead(lm.weight.float(), embedding=lm.embedding.float())
    found, plain = (h.outputs(hidden, layout, lm).views["main"] for h in (head, MarginalHead()))
    assert torch.equal(*(view.ask(LabelLogProb(layout.labels))[0] for view in (found, plain)))
    scores = head.open(hidden[:, 0, 1:], torch.tensor([2]), lm)
    for token, depth in itertools.product(range(V), range(DEPTH)):
        at, _ = scores.step(None, torch.tensor([[token]]), depth)
        assert torch.equal(at.logits[0, 0], lm.logits(hidden[:, 0, 1:])[0, depth])
    found.ask(LabelLogProb(layout.labels))[0].sum().backward()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    after = [scores.step(None, torch.tensor([[token]]), 0)[0].logits for token in range(V)]
    assert float((after[0] - after[1]).abs().min().detach()) > 1e-4, "after a step it knows the token"


def test_a_slot_knows_the_token_before_it_and_no_other(every_text: Any) -> None:
    """Changing the token before slot 3 moves slot 3 only, in training; gradients reach every weight and the drafter."""
    head, lm, layout = make_head(), make_lm(), every_text()
    hidden = torch.randn(1, len(TEXTS), DEPTH + 1, H, dtype=torch.float64, requires_grad=True)

    def log_probs(prev_ids: torch.Tensor) -> torch.Tensor:
        moved = replace(layout, prev_ids=prev_ids)
        return head.outputs(hidden, moved, lm).views["main"].ask(LabelLogProb(layout.labels))[0]

    before, other = log_probs(layout.prev_ids), layout.prev_ids.clone()
    other[..., 3] = (other[..., 3] + 1) % V
    change = (log_probs(other) - before).detach().abs()
    assert float(change[..., :3].max()) == 0.0 and bool((change[..., 3] > 0).all())
    before.sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in head.parameters())
    assert bool((hidden.grad[..., 1:, :] != 0).any())


def test_the_confidence_knows_no_token_and_its_gradient_stays_out_of_the_drafter(every_text: Any) -> None:
    head, lm, layout = make_head(confidence=True), make_lm(), every_text()
    hidden = torch.randn(1, 1, DEPTH + 1, H, dtype=torch.float64, requires_grad=True)
    signal = head.outputs(hidden.expand(-1, len(TEXTS), -1, -1), layout, lm).signals["confidence"]
    assert float((signal - signal[:, :1]).abs().max().detach()) == 0.0 and signal.dtype == torch.float32
    given = head.open(hidden[:, 0, 1:], torch.tensor([2]), lm).signals["confidence"]
    torch.testing.assert_close(given[0], signal[0, 0, 1:])
    assert not head.signals_in_turn and head.signals == ("confidence",)
    signal.sum().backward()
    assert hidden.grad is None and bool((head.certainty.weight.grad != 0).any())


# -- a whole drafter --------------------------------------------------------------------------------------------------


def test_it_decodes_losslessly_and_no_format_holds_it(tiny_target: Any) -> None:
    config = make_draft_config(
        tiny_target.facts,
        block=Anchored(block_size=4),
        conditioning=ResidualMix(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=1, init_std=0.2),
        head=CorrectedHead(confidence=True, init_std=0.3),
        mask_token_id=262,
    )
    draft = DraftModel(config).eval()
    torch.nn.init.normal_(draft.head.down.weight, std=0.3)
    prompts, fixed = [[72, 101, 108], [10, 11]], {"max_new_tokens": 8, "compile": False}
    texts = [
        [g.output_ids for g in decoder.decode(prompts, max_new_tokens=8, stop_ids=()).generations]
        for decoder in (
            DecodingSettings(**fixed, policy=policy).make_decoder(tiny_target, model, longest_prompt=3)
            for model, policy in ((draft, None), (draft, SharedBudget(costs=[1, 1.2, 1.5, 2])), (None, None))
        )
    ]
    assert texts[0] == texts[1] == texts[2]
    for exporter in FORMATS.values():
        assert any("'head': 'corrected" in reason and "residual_mix" in reason for reason in exporter.limits(config))


def test_the_recipe_states_the_published_settings() -> None:
    """MT 2.2 d: 5 layers and features, 128 anchors, lr 5e-4 to 5e-5, weight decay .1; LK-hybrid weighted by D-PACE."""
    cfg = load_recipe("dfly")
    assert (cfg.block.block_size, cfg.block.num_anchors, cfg.drafter.num_layers) == (16, 128, 5)
    assert (cfg.conditioning.num_features, cfg.optim.lr, cfg.optim.weight_decay) == (5, 5e-4, 0.1)
    assert cfg.optim.lr * cfg.optim.final_fraction == pytest.approx(5e-5)
    term = cfg.loss.dfly
    assert (term.loss, term.eta, term.weight, term.alpha) == ("lk_hybrid", 3.0, "label", 0.5)
