"""Blocks that are causal inside (JetSpec): who sees whom, what a shorter block drafts, and both kinds of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer, CausalTransformer
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.module import DraftModule
from dflash_lightning.ops.context import ContextState, KVSource
from dflash_lightning.ops.rotary import make_rotation
from dflash_lightning.recipe import load_recipe
from dflash_lightning.testing import toy_batch, toy_document, toy_module
from dflash_lightning.types import BlockLayout, TargetFeatures

SLOTS = 5


def causal(is_causal: bool | None = True, size: int = SLOTS, **drafter: Any) -> DraftModule:
    """Blocks of one token and masks."""
    return toy_module(
        drafter=BlockTransformer(num_layers=2, init_std=0.2, is_causal=is_causal, **drafter),
        block=Anchored(block_size=size, num_anchors=24),
    )


def sequential() -> DraftModule:
    """Blocks of true tokens."""
    return toy_module(
        drafter=CausalTransformer(num_layers=2, init_std=0.2),
        block=Anchored(block_size=SLOTS, num_anchors=24, label_layout="anchor_first", inputs="tokens"),
    )


@torch.no_grad()
def hidden_of(module: DraftModule, features: TargetFeatures, slots: Tensor | None = None) -> Tensor:
    """Hidden states of the toy document's blocks [N, K, H], with other slot inputs [1, N, K, H] where given."""
    batch, model = toy_batch(module), module.draft_model
    slots = module.target.embed(batch.layout.input_ids) if slots is None else slots
    return model.block_hidden(slots, batch.layout, features, batch.position_ids, module.target.lm)[0]


def features_of(module: DraftModule) -> TargetFeatures:
    batch = toy_batch(module)
    return module.target.features(batch.input_ids, batch.position_ids, module.required())


@dataclass
class Context(ContextState):
    """Eight rows, of which blocks see those that ``layout`` says."""

    states: Tensor
    layout: BlockLayout

    def sources(self, layer: int, attention: Any) -> list[KVSource]:
        k, v = attention.project(self.states, torch.arange(8)[None])
        return [KVSource(k, v, self.layout.context_start, self.layout.context_end, self.layout.anchors)]


@pytest.mark.parametrize(("is_causal", "counts"), [(True, [3, 4, 5, 6, 7, 8]), (False, [5, 5, 5, 8, 8, 8])])
def test_what_slots_see_is_counted_right(make_layout: Any, is_causal: bool, counts: list[int]) -> None:
    """MT 0.2: eight rows, anchors 2 and 5, three slots. A slot passes a gradient to every row and slot that it sees."""
    layer = causal(is_causal).draft_model.drafter.layers[0]
    layout, attention = make_layout([[2, 5]], block_size=3), layer.self_attn
    states, slots = torch.randn(1, 8, 32, requires_grad=True), torch.randn(1, 2, 3, 32, requires_grad=True)
    rotation = make_rotation(
        layout.position_ids, theta=attention.theta, head_dim=attention.head_dim, dtype=torch.float32
    )
    out = layer(slots, rotation, Context(states, layout))
    found = []
    for slot in out[0].flatten(0, 1):
        seen = torch.autograd.grad(slot.sum(), (states, slots), retain_graph=True)
        found.append(sum(int((gradient.abs().sum(-1) > 0).sum()) for gradient in seen))
    assert found == counts


def test_a_slot_does_not_depend_on_what_later_slots_hold() -> None:
    """Nor on another block; a block that is not causal does, which is what makes it tell."""
    for is_causal in (True, False):
        module = causal(is_causal)
        features, slots = features_of(module), module.target.embed(toy_batch(module).layout.input_ids)
        before, moved = hidden_of(module, features), slots.clone()
        moved[0, 3, 2] += 1.0
        change = (hidden_of(module, features, moved) - before).abs().amax(-1)
        assert bool((change[3, 2:] > 1e-4).all())
        assert torch.equal(change[3, :2], torch.zeros(2)) == is_causal
        assert not bool(change[torch.arange(len(change)) != 3].any())


@pytest.mark.parametrize("build", [causal, sequential])
def test_no_slot_knows_the_targets_state_at_its_anchor_or_later(build: Any) -> None:
    """Bit for bit, where everything from the anchor on is other; the state before the anchor is known to all slots."""
    module = build()
    features, block = features_of(module), 5
    before, anchor = hidden_of(module, features)[block], int(toy_batch(module).layout.anchors[0, block])
    hidden = features.hidden.clone()
    hidden[:, anchor:] += 3.0
    assert torch.equal(hidden_of(module, replace(features, hidden=hidden))[block], before)
    hidden[:, anchor - 1] += 3.0
    change = (hidden_of(module, replace(features, hidden=hidden))[block] - before).abs().amax(-1)
    assert bool((change > 1e-4).all())


def test_masked_slots_know_no_token_behind_the_root_and_the_others_those_before_them_alone() -> None:
    """The layout's own inputs when a token of the document is changed: only slots that decoding will tell may move."""
    for build, moves in ((causal, [False] * SLOTS), (sequential, [False, False, True, True, True])):
        module = build()
        batch, features, block = toy_batch(module), features_of(module), 4
        anchor = int(batch.layout.anchors[0, block])
        ids = toy_document().input_ids.clone()
        ids[anchor + 2] = (ids[anchor + 2] + 1) % 16
        document = replace(toy_document(), input_ids=ids)
        other = module.block.blocks(document, module.draft_model.alignment, seed=0, epoch=0)
        changed = hidden_of(module, features, module.target.embed(other.input_ids))[block]
        found = (changed - hidden_of(module, features)[block]).abs().amax(-1) > 1e-4
        assert found.tolist() == moves


@torch.no_grad()
def test_a_shorter_block_drafts_what_the_longer_one_began_with() -> None:
    """Training with 16 slots and drafting with 8 is exact where blocks are causal, and is not where they are not."""
    for is_causal in (True, False):
        module = causal(is_causal)
        model, target, features = module.draft_model, module.target, features_of(module)
        found = []
        for size in (SLOTS, 3):
            masks = torch.full((1, size), model.config.mask_token_id)
            masks[:, 0] = features.ids[:, 9]
            cache = model.make_cache(batch_size=1, max_length=24, chunk_rows=24)
            found.append(model.draft_hidden(target.embed(masks), features, torch.tensor([9]), cache, target.lm)[:, :3])
        gap = float((found[0] - found[1]).abs().max())
        assert gap < 1e-5 if is_causal else gap > 1e-2


def counted(function: Any, calls: list[int]) -> Any:
    """``function``, which leaves a mark at every call."""

    def call(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return function(*given, **named)

    return call


def test_masks_cost_one_forward_for_a_block_and_tokens_one_for_each_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as it was trained; the text is the target's own in both cases."""
    texts = []
    for build, runs in ((causal, 1), (sequential, SLOTS)):
        module, calls = build(), list[int]()
        settings = DecodingSettings(max_new_tokens=7, batch_size=2, compile=False, prepacked=False)
        decoder = settings.make_decoder(module.target, module.draft_model.eval(), longest_prompt=3)
        step = decoder.parts.proposer
        decoder.warm_up()
        layer = decoder.parts.proposer.model.drafter.layers[0]  # type: ignore[attr-defined]
        for name in ("forward", "step"):
            monkeypatch.setattr(layer, name, counted(getattr(layer, name), calls))
        found = decoder.decode([[1, 2, 3], [4, 5]], max_new_tokens=7, stop_ids=())
        assert step.num_drafts == (SLOTS - 1 if runs == 1 else SLOTS)
        texts.append([g.output_ids for g in found.generations])
        assert len(calls) == runs * found.stats.cycles
    plain = DecodingSettings(max_new_tokens=7, batch_size=2, compile=False, prepacked=False)
    own = plain.make_decoder(module.target, None, longest_prompt=3)
    expected = own.decode([[1, 2, 3], [4, 5]], max_new_tokens=7, stop_ids=()).generations
    assert texts[0] == texts[1] == [g.output_ids for g in expected]


# -- the recipes ------------------------------------------------------------------------------------------------------


def test_the_recipes_state_the_published_settings() -> None:
    for recipe in ("jetspec", "jetspec_tokens"):
        cfg = load_recipe(recipe)
        assert (cfg.block.block_size, cfg.block.num_anchors, cfg.drafter.num_layers) == (16, 256, 5)
        assert (cfg.optim.lr, cfg.trainer.max_epochs) == (3e-4, 6)
    masks, tokens = load_recipe("jetspec"), load_recipe("jetspec_tokens")
    assert masks.drafter.is_causal and masks.block.get("inputs", "masks") == "masks"
    assert (tokens.block.inputs, tokens.block.label_layout) == ("tokens", "anchor_first")
    assert (masks.decoding.builder.budget, masks.decoding.builder.fan) == (127, 7)


def test_who_can_run_which_of_the_two() -> None:
    """Masks: every format that has causal blocks. Tokens: nobody, since no format knows such a drafter."""
    masks, tokens = (build().draft_model.config for build in (causal, sequential))
    held = {name: not exporter.limits(masks) for name, exporter in FORMATS.items()}
    assert held == {"hf": True, "zlab": True, "sglang": True, "vllm": True, "speculators": False, "specforge": False}
    assert any("never is" in reason for reason in FORMATS["speculators"].limits(masks))
    for exporter in FORMATS.values():
        assert any("'drafter': 'causal_transformer'" in reason for reason in exporter.limits(tokens))
