"""SpecForge's own training model (specforge 0.2.0) and ours: the same loss and gradients from the same weights."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.block import Anchored, anchored, count_slots
from dflash_lightning.export import export
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.model import load_draft
from dflash_lightning.model.files import file_names
from dflash_lightning.types import Document, FeatureSpec, StepContext

pytestmark = pytest.mark.parity
LENGTH = 30
SUPERVISED = (torch.arange(LENGTH) >= 8) & (torch.arange(LENGTH) != 20)  # a hole, and blocks that end behind the text
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
CASES = {  # family, block size, decay, number of anchors, settings
    "full": ("qwen3", 4, 4.0, 99, {}),
    "no_decay": ("llama", 8, None, 99, {"num_layers": 3}),
    "few_anchors": ("llama", 16, 7.0, 5, {"num_layers": 1}),
    "mixed": ("qwen3", 4, 4.0, 99, MIXED),  # is_causal null: SpecForge's sliding layers are causal in a block
}


@pytest.fixture(scope="module")
def ours(make_target, make_draft):
    made = {}
    for name, (family, block_size, _, _, settings) in CASES.items():
        target = make_target(family)
        made[name] = target, make_draft(target, block_size=block_size, **settings)
    return made


def text_of(name):
    return torch.randint(250, (LENGTH,), generator=torch.Generator().manual_seed(len(name)))


@pytest.fixture(scope="module")
def theirs(ours, consumer, tmp_path_factory):
    root, requests, tensors = tmp_path_factory.mktemp("specforge"), [], {}
    for name, (target, draft) in ours.items():
        export(draft, target, root / name, format="zlab", dtype="float32", prompts=[[3, 7, 5]], max_new_tokens=4)
        ids = text_of(name)[None]
        tensors |= {
            f"{name}/ids": ids,
            f"{name}/loss_mask": SUPERVISED[None].float(),
            f"{name}/features": target.features(ids, torch.arange(LENGTH)[None], FeatureSpec((0, 2))).hidden.flatten(2),
            f"{name}/embedding": target.embedding_weight,
            f"{name}/head": target.lm.weight,
        }
        _, _, decay, num_anchors, _ = CASES[name]
        request = {"name": name, "draft": str(root / name), "save_to": str(root / f"{name}-saved")}
        requests.append({**request, "decay": decay, "num_anchors": num_anchors})
    return (*consumer("specforge", {"cases": requests}, tensors), root)


@pytest.mark.parametrize("name", CASES)
def test_same_weights_and_anchors_give_specforges_loss_and_gradients(name, ours, theirs, monkeypatch):
    (target, draft), (answers, gradients, _) = ours[name], theirs
    _, block_size, decay, num_anchors, _ = CASES[name]
    answer = answers[name]
    assert answer["missing"] == answer["unexpected"] == [] and answer["target_layer_ids"] == [0, 2]
    document, block = Document(0, text_of(name), SUPERVISED), Anchored(block_size=block_size, num_anchors=num_anchors)
    eligible = block.eligible_anchors(SUPERVISED).tolist()
    assert {*answer["anchors"]} <= {*eligible} and len(answer["anchors"]) == min(num_anchors, len(eligible))
    monkeypatch.setattr(anchored, "draw_sorted", lambda *_, **__: torch.tensor(sorted(answer["anchors"])))
    layout = block.blocks(document, draft.alignment, seed=0, epoch=0)
    positions = torch.arange(LENGTH)[None]
    features = target.features(document.input_ids[None], positions, draft.required())
    draft.train().zero_grad()
    hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)
    out, term = draft.outputs(hidden, layout, target.lm), CrossEntropy(decay=decay)
    loss = term.numerator(out, layout, None, StepContext(0, 1, 0)) / term.denominator(count_slots(layout))
    assert loss.item() == pytest.approx(answer["loss"], rel=1e-5)
    loss.backward()
    names = file_names(draft)
    for key, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[f"{name}/{names[key]}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_drafter_saved_by_specforge_is_ours_again(name, ours, theirs):
    draft = load_draft(theirs[2] / f"{name}-saved")
    assert draft.config.layer_types == ours[name][1].config.layer_types
    assert draft.config.sliding_window == ours[name][1].config.sliding_window
    for key, value in ours[name][1].state_dict().items():
        assert torch.equal(draft.state_dict()[key], value), key
