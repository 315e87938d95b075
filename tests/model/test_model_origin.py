"""``init_from: {path, parts, change}``: what is copied, what is fresh, what may differ, and what is refused."""

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import HeadOutput, MarginalHead
from dflash_lightning.model import save_draft
from dflash_lightning.model.start import DraftPlan

LAYERS = KVInjection(target_layer_ids=[0, 2])


class Scaled(MarginalHead):
    """Marginals with weights and a setting of its own."""

    name = "scaled_in_tests"

    def __init__(self, *, rank: int = 2) -> None:
        super().__init__()
        self.rank = rank

    def build(self, config):
        self.scale = torch.nn.Linear(config.hidden_size, self.rank)

    def outputs(self, hidden, layout, lm):
        return HeadOutput({})

    def open(self, hidden, roots, lm):
        return super().open(hidden, roots, lm)


@pytest.fixture
def start(tmp_path, tiny_target):
    """``start(draft, settings of init_from, **plan)``: a drafter as a recipe of these parts starts from ``draft``."""

    def make(draft, stated=None, *, target=tiny_target, **parts):
        save_draft(draft, tmp_path / "draft")
        path = str(tmp_path / "draft")
        plan = {
            "block": Anchored(block_size=4),
            "conditioning": KVInjection(),
            "drafter": BlockTransformer(num_layers=2),
            "head": MarginalHead(),
            "init_from": path if stated is None else {"path": path, **stated},
        }
        plan = DraftPlan(**{**plan, **parts})
        for check in plan.checks(target.facts, target.decoder_layer_state):
            check()
        return plan.make(target, {})

    return make


def same(model, draft, part):
    own, theirs = model.state_dict(), draft.state_dict()
    names = [name for name in own if name.startswith(f"{part}.")]
    return [torch.equal(own[name], theirs[name]) for name in names if name in theirs]


def test_a_trained_backbone_gets_a_fresh_head_of_another_kind(tiny_target, make_draft, start, capsys):
    draft = make_draft(tiny_target)
    model = start(draft, {"parts": ["conditioning", "drafter"]}, head=Scaled(rank=3))
    assert all(same(model, draft, "conditioning")) and all(same(model, draft, "drafter"))
    assert model.head.scale.weight.shape == (3, 32)
    assert model.config.components["head"] == {"name": Scaled.name, "settings": {"rank": 3}}
    said = capsys.readouterr().err
    assert "2 of conditioning; 23 of drafter; fresh: head (scale.weight, scale.bias)" in said


def test_a_fresh_part_starts_as_the_seed_says(tiny_target, make_draft, start):
    """The same weights as without a start, whatever was drawn or copied before."""
    draft = make_draft(tiny_target)
    stated = {"parts": ["conditioning"]}
    first, second = start(draft, stated), start(draft, stated, seed=1)
    alone = DraftPlan(
        Anchored(block_size=4, mask_token_id=262), LAYERS, BlockTransformer(num_layers=2), MarginalHead()
    ).make(tiny_target, {})
    assert all(same(first, alone, "drafter")) and not all(same(second, alone, "drafter"))
    assert all(same(first, draft, "conditioning"))


def test_a_block_may_grow(tiny_target, make_draft, start):
    draft = make_draft(tiny_target, block_size=8)
    model = start(draft, {"change": ["block_size"]}, block=Anchored(block_size=16))
    assert model.config.block_size == 16 and model.alignment.num_drafts == 15
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in model.state_dict().items())


def test_layers_may_be_added_and_are_fresh(tiny_target, make_draft, start, capsys):
    """By the recipe's name of the setting, too; the file's list of layer types is too short and is not taken."""
    draft = make_draft(tiny_target)
    model = start(draft, {"change": ["num_layers"]}, drafter=BlockTransformer(num_layers=3))
    assert model.config.layer_types == ["full_attention"] * 3 and all(same(model, draft, "drafter"))
    assert "23 of drafter; fresh: drafter (layers.2." in capsys.readouterr().err


def test_the_target_may_be_another_copy_of_the_model(tiny_target, make_target, make_draft, start):
    draft, other = make_draft(tiny_target), make_target("llama", seed=1)
    with pytest.raises(ValueError, match=r"init_from: .*digest of the weights .*list 'target' in init_from\.change"):
        start(draft, target=other)
    model = start(draft, {"change": ["target"]}, target=other)
    assert model.config.target["digest"] == other.facts.digest
    wide = make_target("llama", hidden_size=64, num_attention_heads=4)
    with pytest.raises(ValueError, match="hidden size 32, but the target tiny-llama has 64"):
        start(draft, {"change": ["target"]}, target=wide)


def test_l10_settings_of_a_head_are_compared_and_not_ignored(tiny_target, make_draft, start):
    """Without a word a head of rank 2 would have gone on as it was, whatever the recipe said."""
    draft = start(make_draft(tiny_target), {"parts": ["conditioning", "drafter"]}, head=Scaled(rank=2))
    with pytest.raises(ValueError, match=r"head\.rank is 3 in the recipe, 2 there.*init_from\.change"):
        start(draft, head=Scaled(rank=3))
    model = start(draft, {"change": ["head.rank"]}, head=Scaled(rank=3))
    assert model.head.rank == 3 and model.head.scale.weight.shape == (3, 32)
    assert all(same(model, draft, "drafter"))
    assert torch.equal(start(draft, head=Scaled()).head.scale.weight, draft.head.scale.weight)


def test_a_head_of_another_kind_is_refused_unless_it_is_left_out(tiny_target, make_draft, start):
    with pytest.raises(
        ValueError, match=r"head is 'scaled_in_tests' in the recipe, 'marginal' there.*init_from\.parts"
    ):
        start(make_draft(tiny_target), head=Scaled())


def test_settings_that_only_say_how_a_part_begins_may_differ(tiny_target, make_draft, start):
    draft = make_draft(tiny_target)
    plan = {"drafter": BlockTransformer(num_layers=2, init_std=0.5), "conditioning": KVInjection(num_features=1)}
    assert all(same(start(draft, **plan), draft, "drafter"))


def test_what_the_file_alone_decides_is_taken_from_it(tiny_target, make_draft, start):
    """A drafter that began as a copy of target layers has the target's activation; no recipe can state that."""
    draft = make_draft(tiny_target)
    draft.config.hidden_act = "gelu"
    assert start(draft).config.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"part": ["head"]},
            r"init_from\.part: unknown key\. Did you mean 'parts'\? .*Write init_from as a path",
        ),
        ({"path": None}, r"init_from\.path: None is no path"),
        (
            {"parts": ["heads"]},
            r"init_from\.parts: 'heads' is no part.* mean 'head'\? Allowed: conditioning, dr",
        ),
        ({"parts": "head"}, r"init_from\.parts: 'head' is no list"),
        ({"parts": []}, r"init_from\.parts: nothing is taken over"),
        ({"change": ["block"]}, r"init_from\.change: 'block' is no setting.* mean 'block_size'\? .* target,"),
        ({"change": ["head.rank"]}, r"init_from\.change: 'head\.rank' is no"),
        ({"parts": ["head"]}, r"init_from: .*draft has no tensor of head with the name and shape of the recipe's"),
    ],
)
def test_what_init_from_cannot_mean_is_said(tiny_target, make_draft, start, stated, message):
    with pytest.raises(ValueError, match=message):
        start(make_draft(tiny_target), stated, conditioning=LAYERS)


def test_a_head_refuses_a_label_layout_that_it_cannot_learn(tiny_target, make_draft, start, monkeypatch):
    monkeypatch.setattr(MarginalHead, "label_layouts", ("anchor_first",))
    with pytest.raises(
        ValueError, match=r"block\.label_layout: head 'marginal' cannot.*'same_position'.*'anchor_first'"
    ):
        start(make_draft(tiny_target))
