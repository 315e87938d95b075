"""A hidden category per block: the worked example, one law in training and decoding, and how it is declared."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import LatentHead, MarginalHead
from dflash_lightning.head.latent import mixture
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead
from dflash_lightning.types import BlockLayout, Scores

V, H, DEPTH = 3, 4, 3
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))


def make_head(seed: int = 0, **settings: Any) -> LatentHead:
    head = LatentHead(**{"categories": 3, "rank": 2, **settings})
    head.build(DraftConfig(hidden_size=H, vocab_size=V))
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return head.double()


def make_lm(size: int = V, **settings: Any) -> LanguageHead:
    weight = torch.randn(size, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return LanguageHead(weight, **settings)


def joint(head: LatentHead, hidden: Tensor, lm: LanguageHead) -> Tensor:
    """The probability of every text from the formula: sum over categories of the prior and a product of laws."""
    change = head.up.weight.unflatten(0, (head.categories, H)) @ head.down.weight  # [Z, H, H]
    laws = lm.logits(hidden[:, None] + torch.einsum("zij,kj->kzi", change, hidden)).softmax(-1)  # [D, Z, V]
    prior = head.prior(hidden[0]).softmax(-1)
    return torch.stack([(prior * laws[torch.arange(DEPTH), :, text].prod(0)).sum() for text in TEXTS]).detach()


def walked(scores: Scores, text: list[int]) -> list[Tensor]:
    """The laws that decoding finds along a text."""
    state, last, found = scores.state, 2, []
    assert scores.step is not None
    for depth, token in enumerate(text):
        at, state = scores.step(state, torch.tensor([[last]]), depth)
        found.append(at.logits[0, 0].log_softmax(-1).detach())
        last = token
    return found


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_training_decoding_and_the_formula_have_one_law(
    first_slot: int, softcap: float | None, every_text: Any
) -> None:
    """All 27 texts: the product of the predictive laws is the probability of the text under the mixture."""
    head, lm, layout = make_head(), make_lm(softcap=softcap), every_text(first_slot)
    hidden = torch.randn(1, 1, DEPTH + first_slot, H, dtype=torch.float64)
    out = head.outputs(hidden.expand(-1, len(TEXTS), -1, -1), layout, lm)
    (trained,) = out.views["main"].ask(LabelLogProb(layout.labels))
    scores = head.open(hidden[0, :, first_slot:], torch.tensor([2]), lm)
    expected = joint(head, hidden[0, 0, first_slot:], lm)
    torch.testing.assert_close(trained[0, :, first_slot:].sum(-1).exp().detach(), expected)
    assert float(expected.sum()) == pytest.approx(1.0)
    for n, text in enumerate(TEXTS.tolist()):
        said = torch.stack([law[token] for law, token in zip(walked(scores, text), text, strict=True)])
        torch.testing.assert_close(trained[0, n, first_slot:].detach(), said)
    spread = trained[0, :, -1].view(-1, V).detach()
    assert float((spread - spread[:1]).abs().max()) > 0.05, "no law depends on the tokens before: nothing is tested"


def test_the_worked_example_of_two_categories() -> None:
    """MT 3.6 f."""
    prior = torch.tensor([[0.3, 0.7]]).double()
    laws = torch.tensor([[[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.1, 0.9]]]]).double()  # [1, slot, category, token]
    scores = mixture(prior.log(), laws.log(), LanguageHead(torch.zeros(2, 1)))
    first = walked(scores, [0])[0].exp()
    assert first.tolist() == pytest.approx([0.41, 0.59])
    second = [walked(scores, [token, 0])[1].exp() for token in range(2)]
    assert second[0].tolist() == pytest.approx([0.495122, 0.504878], abs=1e-6)
    assert second[1].tolist() == pytest.approx([0.130508, 0.869492], abs=1e-6)
    together = torch.stack([first[token] * second[token] for token in range(2)])
    torch.testing.assert_close(together, torch.tensor([[0.203, 0.207], [0.077, 0.513]]).double())
    assert scores.logits[0, 1].exp().tolist() == pytest.approx([0.28, 0.72]), "the first look knows no token"


def test_one_category_and_an_untrained_head_are_the_marginals(every_text: Any) -> None:
    layout, lm = every_text(), make_lm()
    hidden = torch.randn(1, len(TEXTS), DEPTH + 1, H, dtype=torch.float64)
    (plain,) = MarginalHead().outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    fresh = LatentHead()
    fresh.build(DraftConfig(hidden_size=H, vocab_size=V))
    (found,) = fresh.double().outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    torch.testing.assert_close(found.detach(), plain)
    one = make_head(categories=1)
    moved = hidden + one.up(one.down(hidden))
    (found,) = one.outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    (plain,) = MarginalHead().outputs(moved, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    torch.testing.assert_close(found.detach(), plain.detach())
    assert float(fresh.up.weight.detach().abs().min()) > 0.0, "categories that begin alike would stay alike"


def test_gradients_reach_all_and_are_those_of_the_formula(every_text: Any) -> None:
    """Of the probability of a text, against autograd through the dense formula."""
    head, lm, layout = make_head(), make_lm(), every_text()
    hidden = torch.randn(1, 1, DEPTH + 1, H, dtype=torch.float64, requires_grad=True)
    wanted = [hidden, *head.parameters()]
    weight = torch.randn(len(TEXTS), dtype=torch.float64)

    out = head.outputs(hidden.expand(-1, len(TEXTS), -1, -1), layout, lm)
    (said,) = out.views["main"].ask(LabelLogProb(layout.labels))
    found = torch.autograd.grad((weight * said[0, :, 1:].sum(-1)).sum(), wanted)

    rows = hidden[0, 0, 1:]
    change = head.up.weight.unflatten(0, (3, H)) @ head.down.weight
    laws = lm.logits(rows[:, None] + torch.einsum("zij,kj->kzi", change, rows)).log_softmax(-1)
    prior = head.prior(rows[0]).log_softmax(-1)
    dense = torch.stack([(prior + laws[torch.arange(DEPTH), :, text].sum(0)).logsumexp(0) for text in TEXTS])
    expected = torch.autograd.grad((weight * dense).sum(), wanted)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert bool((ours != 0).any())


def test_a_token_changes_the_laws_behind_it_and_no_other(every_text: Any) -> None:
    """A slot must not know its own label, nor a later one; an unlabelled slot tells nothing."""
    head, lm, layout = make_head(), make_lm(), every_text()
    hidden = torch.randn(1, 1, DEPTH + 1, H, dtype=torch.float64).expand(-1, len(TEXTS), -1, -1)

    def weights(layout: BlockLayout) -> Tensor:
        return head.outputs(hidden, layout, lm).views["main"].per_row[1].detach()

    before, labels = weights(layout).view(len(TEXTS), DEPTH, -1), layout.labels.clone()
    labels[..., 2] = (labels[..., 2] + 1) % V
    change = (weights(replace(layout, labels=labels)).view_as(before) - before).abs().amax(-1)
    assert float(change[:, :2].max()) == 0.0 and float(change[:, 2].min()) > 1e-6
    hole = layout.scored.clone()
    hole[..., 2] = False
    kept = replace(layout, scored=hole, valid=hole, rows=hole.flatten().nonzero().squeeze(1))
    torch.testing.assert_close(weights(kept).view(len(TEXTS), 2, -1)[:, 1], before[:, 1])


def test_a_label_outside_the_drafts_vocabulary_tells_nothing(every_text: Any) -> None:
    head, layout = make_head(), every_text()
    lm = make_lm().restrict(torch.tensor([0, 2]))
    hidden = torch.randn(1, 1, DEPTH + 1, H, dtype=torch.float64)
    (said,) = (
        head.outputs(hidden.expand(-1, len(TEXTS), -1, -1), layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    )
    scores = head.open(hidden[0, :, 1:], torch.tensor([1]), lm)
    for n, text in enumerate(TEXTS.tolist()):
        for depth, law in enumerate(walked(scores, text)):
            expected = 0.0 if text[depth] == 1 else float(law[text[depth] // 2])
            assert float(said[0, n, 1 + depth].detach()) == pytest.approx(expected)
    assert scores.ids is lm.ids


# -- a whole drafter --------------------------------------------------------------------------------------------------


def test_it_decodes_losslessly_and_no_format_holds_it(tiny_target: Any) -> None:
    config = make_draft_config(
        tiny_target.facts,
        block=Anchored(block_size=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=1, init_std=0.2),
        head=LatentHead(init_std=0.3),
        mask_token_id=262,
    )
    draft = DraftModel(config).eval()
    torch.nn.init.normal_(draft.head.down.weight, std=0.3)
    settings = DecodingSettings(max_new_tokens=8, compile=False)
    texts = [
        [g.output_ids for g in decoder.decode([[72, 101], [10, 11, 12]], max_new_tokens=8, stop_ids=()).generations]
        for decoder in (settings.make_decoder(tiny_target, model, longest_prompt=3) for model in (draft, None))
    ]
    assert texts[0] == texts[1]
    for exporter in FORMATS.values():
        assert any("'head': 'latent'" in reason for reason in exporter.limits(config))


@pytest.mark.parametrize("settings", [{"categories": 0}, {"rank": 0}])
def test_settings_that_make_no_mixture_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"head\.{next(iter(settings))}: 0 leaves no mixture"):
        LatentHead(**settings)
