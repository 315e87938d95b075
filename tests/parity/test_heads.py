"""Heads that other programs have too, on the same weights and blocks: hidden states, loss and gradients, both ways.

SpecForge 0.2.0 has those of Domino and DSpark, speculators 0.9.0 those of DSpark and xPress. Their
own classes load what is exported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_lightning.block import Anchored, count_slots
from dflash_lightning.block.anchored import lay_out
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export import export
from dflash_lightning.head import MarkovHead, PrefixHead, RefinerHead
from dflash_lightning.loss import ConfidenceLoss, CrossEntropy, RefinedLoss, TotalVariation
from dflash_lightning.model import DraftModel, load_draft, make_draft_config
from dflash_lightning.model.foreign_parts import names_elsewhere
from dflash_lightning.ops.lm_head import Teacher
from dflash_lightning.types import Document, FeatureSpec, StepContext

pytestmark = pytest.mark.parity
IDS = torch.randperm(250, generator=torch.Generator().manual_seed(5))[:30]  # no token twice: a token is a place
FIRST = 8  # the first supervised token
WHOLE = torch.arange(30) >= FIRST
HOLED = WHOLE & (torch.arange(30) != 20)
SIZE, CONTEXT = 4, StepContext(0, 1, 0)
MIXED = '{"ce": 0.1, "tv": 0.9}'
CASES = {
    "domino": ("anchor_first", {"share": 0.4, "decay": 3.0, "shift_label": True}),
    "domino, drafts where slots stand": ("same_position", {"share": 0.0, "decay": None, "shift_label": False}),
    "xpress": ("anchor_first", {"loss": MIXED, "decay": 4.0, "ce_from_data": False}),
    "dspark": ("anchor_first", {"loss": '{"tv": 0.9}', "decay": 4.0}),
    "dspark, drafts where slots stand": ("same_position", {"loss": '{"tv": 0.9}', "decay": 4.0}),
    "dspark, SpecForge": ("anchor_first", {"decay": 4.0}),
    "xpress, labels of the data": ("anchor_first", {"loss": MIXED, "decay": 7.0, "ce_from_data": True}),
}


def head_of(name):
    if name.startswith("dspark"):  # one whose confidence is as the other program's, and one as ours is by default
        own = name != "dspark, drafts where slots stand"
        return MarkovHead(rank=6, confidence=True, confidence_bias=own, confidence_token=own)
    return PrefixHead(state_size=10, rank=6) if is_domino(name) else RefinerHead(rank=6)


def program_of(name):
    return "specforge" if is_domino(name) or "SpecForge" in name else "speculators"


def is_domino(name):
    return name.startswith("domino")


def supervised(name):
    """With a hole for SpecForge. speculators reads the mask where a slot stands, not where its label does."""
    return HOLED if program_of(name) == "specforge" else WHOLE


def their_name(key, head):
    """Of an entry of our state dict."""
    rest = key.partition(".")[2]
    return names_elsewhere(head, [rest])[rest]


@pytest.fixture(scope="module")
def ours(make_target, make_draft):
    made = {}
    for name, (layout, _) in CASES.items():
        target = make_target("qwen3")
        head = head_of(name)
        draft = DraftModel(
            make_draft_config(
                target.facts,
                block=Anchored(block_size=SIZE, label_layout=layout),
                conditioning=KVInjection(target_layer_ids=[0, 2]),
                drafter=BlockTransformer(num_layers=2),
                head=head,
                mask_token_id=262,
            )
        )
        plain = make_draft(target, block_size=SIZE, target_layer_ids=[0, 2])
        draft.load_state_dict({**draft.state_dict(), **plain.state_dict()})
        for weight in draft.head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        made[name] = target, draft
    return made


@pytest.fixture(scope="module")
def theirs(ours, consumer, tmp_path_factory):
    root, requests, tensors = tmp_path_factory.mktemp("heads"), [], {}
    positions = torch.arange(len(IDS))[None]
    for number, (name, (target, draft)) in enumerate(ours.items()):
        folder = root / str(number)
        target.model.save_pretrained(root / f"{number}-target")
        target.facts = replace(target.facts, name=str(root / f"{number}-target"))
        settings = CASES[name][1]
        export(draft, target, folder, format=program_of(name), dtype="float32", prompts=[[3, 7, 5]], max_new_tokens=4)
        features = target.features(IDS[None], positions, FeatureSpec((0, 2), last_hidden=True))
        tensors |= {
            f"{name}/ids": IDS[None],
            f"{name}/loss_mask": supervised(name)[None].float(),
            f"{name}/features": features.hidden.flatten(2),
            f"{name}/last_hidden": last_hidden_for(name, target),
            f"{name}/embedding": target.embedding_weight,
            f"{name}/head": target.lm.weight,
        }
        request = {
            "name": name,
            "program": program_of(name),
            "draft": str(folder),
            "save_to": str(root / f"{number}-saved"),
        }
        requests.append({**request, **settings, "head": draft.head.name})
    return (*consumer("heads", {"cases": requests}, tensors), root)


def last_hidden_for(name, target):
    """The target's last hidden states as the program wants them: speculators applies the final norm itself."""
    if program_of(name) == "specforge":
        positions = torch.arange(len(IDS))[None]
        return target.features(IDS[None], positions, FeatureSpec(last_hidden=True)).last_hidden
    seen = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    target.features(IDS[None], torch.arange(len(IDS))[None], FeatureSpec(last_hidden=True))
    hook.remove()
    return seen[0]


def anchors_of(name, answer, tensors):
    if program_of(name) == "specforge":
        return sorted(answer["anchors"])
    place = {token: i for i, token in enumerate(IDS.tolist())}
    roots = tensors[f"{name}/blocks"].view(-1, SIZE)[:, 0].tolist()
    return [place[root] for root in roots if place.get(root, 0) >= FIRST]  # others are padding


def terms_of(name):
    settings = CASES[name][1]
    if name == "dspark, SpecForge":
        shared = {"decay": settings["decay"], "prefix": True}
        terms = (CrossEntropy(**shared), TotalVariation(**shared), ConfidenceLoss(**shared))
        return list(zip((0.1, 1.8, 1.0), terms, strict=True))  # .9 of the L1 distance
    if name.startswith("dspark"):
        decay = settings["decay"]
        return [(0.9, TotalVariation(decay=decay)), (1.0, ConfidenceLoss(decay=decay, normalize="slots"))]
    if not is_domino(name):
        labels = "data" if settings["ce_from_data"] else "target"
        return [(1.0, RefinedLoss(decay=settings["decay"], labels=labels, normalize="slots"))]
    share = settings["share"]
    terms = (CrossEntropy(view=view, decay=settings["decay"]) for view in ("base", "main"))
    return list(zip((share, 1.0 - share), terms, strict=True))


def assert_same_laws(name, draft, target, layout, hidden, tensors):
    """Logits and confidence of every slot after the text's own tokens, by the path that decoding takes."""
    first, count = draft.alignment.first_slot, hidden.shape[1]
    before = layout.prev_ids[0, :, first:]
    theirs = [tensors[f"{name}/{key}"].flatten() for key in ("head_logits", "confidence")]
    logits, confidence = (x.view(-1, SIZE, x.numel() * 32 // tensors[f"{name}/hidden"].numel())[:count] for x in theirs)
    with torch.no_grad():
        scores = draft.open(hidden[0, :, first:], before[:, 0], target.lm)
        for depth in range(before.shape[1]):
            law, _ = scores.step(scores.state, before[:, depth, None], depth)
            at = first + depth
            known = layout.valid[0, :, at]  # behind the text the tokens before a slot are padding, of whatever kind
            torch.testing.assert_close(logits[known, at], law.logits[known, 0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(confidence[known, at, 0].sigmoid(), law.signals["confidence"][known, 0])


@pytest.mark.parametrize("name", CASES)
def test_same_weights_and_blocks_give_the_same_loss_and_gradients(name, ours, theirs):
    (target, draft), (answers, tensors, _) = ours[name], theirs
    answer = answers[name]
    copies = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert answer["unexpected"] == [] and {*answer["missing"]} <= copies
    anchors = torch.tensor(anchors_of(name, answer, tensors))
    assert len(anchors) > 10
    layout = lay_out(Document(0, IDS, supervised(name)), anchors, draft.alignment)
    positions = torch.arange(len(IDS))[None]
    features = target.features(IDS[None], positions, FeatureSpec((0, 2), last_hidden=True))
    draft.train().zero_grad()
    hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)
    if program_of(name) == "speculators":
        served = tensors[f"{name}/hidden"].view(-1, SIZE, 32)[: len(anchors)]
        torch.testing.assert_close(served, hidden[0].detach(), rtol=1e-5, atol=1e-5)
    if name.startswith("dspark"):
        assert_same_laws(name, draft, target, layout, hidden.detach(), tensors)
    out, totals = draft.outputs(hidden, layout, target.lm), count_slots(layout)
    teacher = Teacher(features.last_hidden, layout, target.lm, None, (1.0,))
    terms = terms_of(name)
    parts = []
    for weight, term in terms:
        divisor = (terms[-1][1] if name.startswith("dspark") else term).denominator(totals)  # DSpark's is one for all
        parts.append(weight * term.numerator(out, layout, teacher, CONTEXT) / divisor)
    loss = torch.stack(parts).sum()
    assert loss.item() == pytest.approx(answer["loss"], rel=1e-5)
    loss.backward()
    trained = draft if program_of(name) == "specforge" else draft.head
    for key, parameter in draft.named_parameters():
        if trained is draft.head and not key.startswith("head."):
            continue
        torch.testing.assert_close(
            parameter.grad, tensors[f"{name}/{their_name(key, draft.head.name)}"], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", CASES)
def test_what_the_other_program_saves_is_our_drafter_again(name, ours, theirs):
    again = load_draft(theirs[2] / f"{[*CASES].index(name)}-saved")
    (_, draft) = ours[name]
    assert (again.config.label_layout, again.head.name) == (draft.config.label_layout, draft.head.name)
    state = again.state_dict()
    for key, value in draft.state_dict().items():
        assert torch.equal(state[key], value), key
