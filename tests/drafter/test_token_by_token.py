"""Drafters that are run token by token: training computes what decoding does, and nothing that decoding cannot know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3Model

from dflash_lightning.block import Anchored, Masked
from dflash_lightning.conditioning import Carryover, InputFusion, KVInjection, TokenFusion
from dflash_lightning.drafter import BlockTransformer, CausalTransformer, Drafter, FeedbackTransformer
from dflash_lightning.drafter.feedback_transformer import NormedRows
from dflash_lightning.head import DraftHead, MarginalHead, MarkovHead
from dflash_lightning.model import DraftModel
from dflash_lightning.model.config import check_parts
from dflash_lightning.module import DraftModule
from dflash_lightning.ops import chains
from dflash_lightning.ops.context import ContextState, KVSource
from dflash_lightning.testing import check_drafter, toy_batch, toy_module
from dflash_lightning.types import TargetFeatures, gather_lanes

SLOTS = 4
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
MEMBERS: dict[str, Callable[[], tuple[Drafter, Any]]] = {
    "causal": lambda: (CausalTransformer(num_layers=2, init_std=0.2), KVInjection(target_layer_ids=[1, 3])),
    "causal, sliding": lambda: (
        CausalTransformer(num_layers=2, init_std=0.2, **SLIDING),
        KVInjection(target_layer_ids=[1, 3]),
    ),
    "causal, input fusion": lambda: (
        CausalTransformer(num_layers=1, init_std=0.2),
        InputFusion(target_layer_ids=[1, 3]),
    ),
    "feedback": lambda: (FeedbackTransformer(num_layers=1, init_std=0.2), TokenFusion(target_layer_ids=[1, 3])),
    "feedback, sliding": lambda: (
        FeedbackTransformer(num_layers=2, init_std=0.2, **SLIDING),
        TokenFusion(target_layer_ids=[1, 3]),
    ),
}


def make(name: str) -> DraftModule:
    drafter, conditioning = MEMBERS[name]()
    block = Anchored(block_size=SLOTS, num_anchors=24, label_layout="anchor_first", inputs="tokens")
    return toy_module(drafter=drafter, conditioning=conditioning, block=block)


def features_of(module: DraftModule) -> TargetFeatures:
    batch = toy_batch(module)
    return module.target.features(batch.input_ids, batch.position_ids, module.required())


@torch.no_grad()
def trained(module: DraftModule, features: TargetFeatures) -> Tensor:
    """Hidden states of all blocks of the toy document, from one call as training makes it: [N, K, H]."""
    batch, model = toy_batch(module), module.draft_model
    slots = module.target.embed(batch.layout.input_ids)
    return model.block_hidden(slots, batch.layout, features, batch.position_ids, module.target.lm)[0]


@torch.no_grad()
def stepped(module: DraftModule, features: TargetFeatures, anchor: int) -> Tensor:
    """Hidden states of the block at ``anchor``, run slot by slot as decoding does: [K, H]."""
    model, lm = module.draft_model, module.target.lm
    cache = model.make_cache(batch_size=1, max_length=24, chunk_rows=24)
    context = model.conditioning.extend(features, torch.tensor([0]), torch.tensor([anchor]), cache.tensors, lm)
    state, advance = model.drafter.begin(torch.tensor([[anchor]]), context)
    found = []
    for depth in range(SLOTS):
        slots = context.slot_inputs(lm.embed(features.ids[:, None, anchor + depth, None]))[:, 0]
        hidden, state = advance(state, slots, depth)
        found.append(hidden[0, 0])
    return torch.stack(found)


def gap(module: DraftModule) -> float:
    """The largest difference between what training and decoding compute for blocks with all their tokens."""
    features, anchors = features_of(module), toy_batch(module).layout.anchors[0].tolist()
    at_once = trained(module, features)
    whole = [block for block, anchor in enumerate(anchors) if anchor + SLOTS <= features.ids.shape[1]]
    assert len(whole) > 10
    return max(float((at_once[n] - stepped(module, features, anchors[n])).abs().max()) for n in whole)


@pytest.mark.parametrize("name", MEMBERS)
def test_training_computes_what_steps_compute_on_the_same_tokens(name: str) -> None:
    """In fp32, up to the order of sums. ``check_drafter`` adds the first block after a prompt, and a second round."""
    assert gap(make(name)) < 1e-5
    check_drafter(*MEMBERS[name]())


OWN_SOURCE, AT_SLOT = chains.own_source, chains._at_slot


def _sees_every_chain(k: Tensor, v: Tensor) -> KVSource:
    source = OWN_SOURCE(k, v)
    return replace(source, start=torch.zeros_like(source.start), end=source.end.amax().expand_as(source.end))


def _sees_only_the_last_slot(k: Tensor, v: Tensor) -> KVSource:
    source = OWN_SOURCE(k, v)
    return replace(source, start=source.end - 1)


def _sees_later_features(source: KVSource, slot: int, num_chains: int) -> KVSource:
    """The commonest fault: as teacher forcing over a whole text would have it, slot k sees the context up to itself."""
    found = AT_SLOT(source, slot, num_chains)
    return replace(found, end=(found.end + slot).clamp(max=source.k.shape[1]))


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("own_source", _sees_every_chain),
        ("own_source", _sees_only_the_last_slot),
        ("_at_slot", _sees_later_features),
    ],
)
def test_a_wrong_mask_in_training_is_found(monkeypatch: pytest.MonkeyPatch, place: str, fault: Any) -> None:
    """Each of them trains to a fine loss and drafts badly. Training has many chains per row here, decoding one."""
    module, right = make("feedback"), getattr(chains, place)

    def wrong_in_training(*args: Any) -> KVSource:
        many = args[0].shape[1] > 1 if place == "own_source" else args[2] > 1
        return (fault if many else right)(*args)

    monkeypatch.setattr(chains, place, wrong_in_training)
    assert gap(module) > 1e-3


@pytest.mark.parametrize("name", MEMBERS)
def test_no_slot_sees_a_feature_of_its_anchor_or_of_a_later_position(name: str) -> None:
    module = make(name)
    features, anchors = features_of(module), toy_batch(module).layout.anchors[0].tolist()
    before = trained(module, features)
    block = 5
    anchor = anchors[block]
    hidden = features.hidden.clone()
    hidden[:, anchor:] += 3.0
    assert torch.equal(trained(module, replace(features, hidden=hidden))[block], before[block])
    hidden[:, anchor - 1] += 3.0
    changed = trained(module, replace(features, hidden=hidden))[block] - before[block]
    assert float(changed.abs().amax(-1).min()) > 1e-3, "some slot does not know the feature before the anchor"


@pytest.mark.parametrize("name", MEMBERS)
def test_a_slot_sees_the_tokens_before_it_and_no_later_one(name: str) -> None:
    module = make(name)
    batch, model = toy_batch(module), module.draft_model
    features, slots = features_of(module), module.target.embed(batch.layout.input_ids)

    def hidden(slots: Tensor) -> Tensor:
        with torch.no_grad():
            return model.block_hidden(slots, batch.layout, features, batch.position_ids, module.target.lm)[0]

    before, moved = hidden(slots), slots.clone()
    moved[0, 3, 2] += 1.0
    change = (hidden(moved) - before).abs().amax(-1)
    assert torch.equal(change[3, :2], torch.zeros(2)) and bool((change[3, 2:] > 1e-4).all())
    assert not bool(change[torch.arange(len(change)) != 3].any()), "another block sees the slot"


class NoContext(ContextState):
    """Nothing but the block; a drafter that joins gets the sum."""

    def sources(self, layer: int, attention: object) -> list[KVSource]:
        return []

    def boundary(self) -> Tensor:
        return torch.full((1, 3, 32), 0.3)

    def join(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return embeddings + states


@pytest.mark.parametrize("name", ["causal", "feedback"])
@torch.no_grad()
def test_a_block_without_context_is_a_causal_qwen3_forward(name: str) -> None:
    """An independent implementation of the layers; the fed back inputs are worked out with it, slot after slot."""
    model = make(name).draft_model
    layers = model.config.num_hidden_layers
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=dict(model.config.rope_parameters),
        rms_norm_eps=model.config.rms_norm_eps,
        attn_implementation="eager",
    )
    theirs = Qwen3Model(config).eval()
    theirs.load_state_dict({**theirs.state_dict(), **model.drafter.state_dict()}, strict=True)
    slots, context = torch.randn(1, 3, SLOTS, 32), NoContext()
    positions = torch.tensor([5, 9, 20])[:, None] + torch.arange(SLOTS)
    inputs = slots[0].clone()
    if name == "feedback":
        inputs[:, 0] += context.boundary()[0]
    for slot in range(SLOTS):
        expected = theirs(inputs_embeds=inputs, position_ids=positions).last_hidden_state
        if name == "feedback" and slot + 1 < SLOTS:
            inputs[:, slot + 1] = slots[0, :, slot + 1] + expected[:, slot]
    ours = model.drafter(slots, positions[None], context)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-6)


@torch.no_grad()
def test_slot_0_is_the_last_row_of_the_context() -> None:
    """Its keys and values are those that the row before the anchor has for later blocks, at the same position."""
    module = make("feedback")
    features, model, anchor = features_of(module), module.draft_model, 9
    lm, drafter = module.target.lm, model.drafter
    (layer,) = drafter.layers
    cache = model.make_cache(batch_size=1, max_length=24, chunk_rows=24)
    all_rows = model.conditioning.extend(features, torch.tensor([0]), torch.tensor([24]), cache.tensors, lm)
    (row,) = all_rows.sources(0, NormedRows(layer))
    context = model.conditioning.extend(features, torch.tensor([0]), torch.tensor([anchor]), cache.tensors, lm)
    state, advance = drafter.begin(torch.tensor([[anchor]]), context)
    _, (_, chain) = advance(state, lm.embed(features.ids[:, anchor, None]), 0)
    for kept, found in zip((row.k, row.v), chain[0], strict=True):
        torch.testing.assert_close(found[0, 0, 0], kept[0, anchor - 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["causal, sliding", "feedback, sliding"])
@torch.no_grad()
def test_lanes_know_nothing_of_one_another_and_are_copied_by_gathering(name: str) -> None:
    """Three lanes part at the first draft and their copies at the second; each is what it is when it is alone."""
    module = make(name)
    features, model, lm, anchor = features_of(module), module.draft_model, module.target.lm, 8

    def scores() -> Any:
        cache = model.make_cache(batch_size=1, max_length=24, chunk_rows=24)
        return model.open_in_turn(features.ids[:, anchor], SLOTS, features, torch.tensor([anchor]), cache, lm)

    lanes = scores()
    _, state = lanes.step(lanes.state, features.ids[:, None, anchor], 0)
    _, state = lanes.step(gather_lanes(state, torch.tensor([[0, 0, 0]])), torch.tensor([[3, 7, 11]]), 1)
    state = gather_lanes(state, torch.tensor([[2, 0, 2, 1]]))
    together, _ = lanes.step(state, torch.tensor([[1, 2, 5, 1]]), 2)
    for lane, path in enumerate([(11, 1), (3, 2), (11, 5), (7, 1)]):
        alone = scores()
        _, state = alone.step(alone.state, features.ids[:, None, anchor], 0)
        for depth, token in enumerate(path, start=1):
            found, state = alone.step(state, torch.tensor([[token]]), depth)
        torch.testing.assert_close(together.logits[:, lane], found.logits[:, 0], rtol=0, atol=1e-5)


def test_parts_that_would_draft_badly_together_are_refused() -> None:
    tokens = Anchored(label_layout="anchor_first", inputs="tokens")
    masks = Anchored(label_layout="anchor_first")
    kv, marginal = KVInjection(), MarginalHead()
    check_parts(tokens, kv, CausalTransformer(), marginal)
    for block in (masks, Masked()):
        with pytest.raises(ValueError, match=r"block.inputs: slots hold masks in training, but .*'causal_transformer'"):
            check_parts(block, kv, CausalTransformer(), marginal)
    with pytest.raises(ValueError, match=r"block.inputs: slots hold tokens in training.*Set block.inputs=masks"):
        check_parts(tokens, kv, BlockTransformer(), marginal)
    with pytest.raises(ValueError, match=r"head: drafter 'causal_transformer' .* 'markov' .* Use one of .*'marginal'"):
        check_parts(tokens, kv, CausalTransformer(), MarkovHead())
    for conditioning in (kv, InputFusion()):
        with pytest.raises(ValueError, match=r"'feedback_transformer' reads .* Use one of \['token_fusion'\]"):
            check_parts(tokens, conditioning, FeedbackTransformer(), marginal)
    with pytest.raises(ValueError, match=r"drafter.is_causal: false, but .* Leave it null"):
        CausalTransformer(is_causal=False)
    assert not DraftHead.per_slot, "a head of one's own must say so"


def test_what_a_round_left_is_not_handed_to_a_drafter_that_takes_nothing_of_it() -> None:
    """It would be trained on rounds that decoding never gives it."""
    tokens = Anchored(block_size=SLOTS, label_layout="anchor_first", inputs="tokens")
    with pytest.raises(ValueError, match=r"conditioning: 'carryover' hands .* 'causal_transformer' drafts token"):
        check_parts(tokens, Carryover(), CausalTransformer(), MarginalHead())
    check_parts(Anchored(block_size=SLOTS), Carryover(), BlockTransformer(), MarginalHead())


def test_such_a_drafter_is_not_run_as_one_that_fills_a_block_at_once() -> None:
    module = make("causal")
    model: DraftModel = module.draft_model
    cache = model.make_cache(batch_size=1, max_length=24, chunk_rows=24)
    with pytest.raises(AssertionError, match="use open_in_turn"):
        model.draft_hidden(torch.zeros(1, 4, 32), features_of(module), torch.tensor([24]), cache, module.target.lm)
