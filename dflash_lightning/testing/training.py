"""What blocks, losses, heads, conditionings and drafters must hold: training and decoding are the same law."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.block import Anchored, BlockConstructor, check_layout, count_slots
from dflash_lightning.conditioning import Conditioning, KVInjection
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.parts import CachedTarget
from dflash_lightning.decoding.types import Round, Scores, Verdict
from dflash_lightning.drafter import BlockTransformer, Drafter
from dflash_lightning.head import DraftHead, SelectorHead
from dflash_lightning.loss import CrossEntropy, LossTerm
from dflash_lightning.module import DraftModule
from dflash_lightning.ops.candidates import NO_CANDIDATE
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.testing.toys import (
    LENGTH,
    PROMPT,
    SpeakingHead,
    toy_batch,
    toy_document,
    toy_module,
)
from dflash_lightning.types import Alignment, BlockLayout, StepContext, TargetFeatures, TrainBatch

_STEP = StepContext(0, 10, 0)


def check_block(block: BlockConstructor) -> None:
    """Blocks agree with the rows they index, as many as planned, some with a label, and the same ones every time."""
    document, alignment = toy_document(), Alignment(block.block_size, 31, block.label_layout)
    layout, again = (block.blocks(document, alignment, seed=0, epoch=0) for _ in range(2))
    check_layout(layout, document.input_ids[None], alignment)
    assert layout.anchors.shape[1] == block.num_blocks(document.loss_mask), "num_blocks plans another number of blocks"
    assert bool(layout.valid.any()), "no slot has a label: the block constructor trains nothing"
    assert torch.equal(layout.anchors, again.anchors), "blocks differ from call to call"
    assert torch.equal(layout.input_ids, again.input_ids), "slots differ from call to call"


def check_loss(term: LossTerm, head: DraftHead | None = None) -> None:
    """The term is a finite sum with a gradient, and slots that are not valid have no part in it.

    Null takes DFlash's head with a signal for every name that the term reads, or one that has candidates if it reads
    those.
    """
    if head is None and term.chooses:
        head = SelectorHead(candidates=16, rank=4)
    speaking = SpeakingHead(signals=list(term.reads), by_block=term.by_block, distributions=list(term.viewed()))
    module = toy_module(loss={"own": term}, head=speaking if head is None else head)
    batch = toy_batch(module)
    out, features = module.outputs(batch)
    (share,) = module.loss_shares(batch, out, features, _STEP, count_slots(batch.layout)).values()
    value = share.value
    assert value.shape == () and bool(torch.isfinite(value)), f"numerator / denominator is {value}, no finite number"
    value.backward()
    gradients = [p.grad for p in module.draft_model.parameters() if p.grad is not None]
    assert any(bool(gradient.any()) for gradient in gradients), "the term has no gradient: nothing would be trained"
    assert bool(term.denominator(count_slots(batch.layout)) > 0), "the denominator is not positive"
    _check_invalid_slots(module, batch)


@torch.no_grad()
def _check_invalid_slots(module: DraftModule, batch: TrainBatch) -> None:
    """Every third label is taken for one that the draft vocabulary lacks; what stands there may be anything."""
    model, target = module.draft_model, module.target
    doubtful = torch.arange(batch.layout.valid.numel()).view_as(batch.layout.valid) % 3 == 0
    layout = replace(batch.layout, valid=batch.layout.valid & ~doubtful)
    features = target.features(batch.input_ids, batch.position_ids, module.required())
    slots, lm = target.embed(layout.input_ids), model.head_of(target.lm)
    hidden = model.block_hidden(slots, layout, features, batch.position_ids, lm)
    noise = 3 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    beside = hidden.shape[2] - layout.valid.shape[2]  # rows of the context, which belong to no slot
    sound = torch.nn.functional.pad(layout.valid, (0, beside), value=True)[..., None]
    sound[:, :, 0] |= module.terms["own"].by_block  # see _speak
    found = []
    for states in (hidden, torch.where(sound, hidden, noise)):
        out = model.outputs(states, layout, lm)
        shares = module.loss_shares(replace(batch, layout=layout), out, features, _STEP, count_slots(layout))
        found.append(float(shares["own"].value))
    same = abs(found[0] - found[1]) <= 1e-5 * max(1.0, abs(found[0]))
    assert same, f"slots that are not valid change the term: {found[0]:.6g} becomes {found[1]:.6g}"


def check_head(head: DraftHead) -> None:
    """A block that is decoded with the tokens of a training row has the law it was trained with, slot by slot."""
    for label_layout in head.label_layouts:
        _check_parts(head=head, block=Anchored(block_size=4, num_anchors=LENGTH, label_layout=label_layout))


def check_conditioning(conditioning: Conditioning) -> None:
    """A block has the same context in training and in decoding, before the first round and after one."""
    drafter = BlockTransformer(num_layers=conditioning.draft_layers or 2, init_std=0.2)
    _check_parts(conditioning=conditioning, drafter=drafter)


def check_drafter(drafter: Drafter, conditioning: Conditioning | None = None) -> None:
    """A block has the same hidden states in training and in decoding, before the first round and after one.

    Null takes ``KVInjection``, or the first registered conditioning that provides what the drafter needs.
    """
    able: list[Any] = [KVInjection, *Conditioning.registry.values()]
    kind = next(part for part in able if drafter.needs <= part.provides)
    parts: dict[str, Any] = {"conditioning": kind(target_layer_ids=[1, 3]) if conditioning is None else conditioning}
    if drafter.inputs == "tokens":
        parts["block"] = Anchored(block_size=4, num_anchors=LENGTH, label_layout="anchor_first", inputs="tokens")
    _check_parts(drafter=drafter, **parts)


def _check_parts(**parts: Any) -> None:
    term = CrossEntropy()
    term.chooses = "head" in parts and parts["head"].chooses  # type: ignore[misc]
    term.reads = tuple(parts["head"].signals) if "head" in parts else ()  # as if it trained them
    module = toy_module(loss={"cross_entropy": term}, **parts)
    batch = toy_batch(module)
    out, _ = module.outputs(batch)
    assert "main" in out.views, f"outputs gives the views {sorted(out.views)}; 'main' is the one that is decoded with"
    named = module.draft_model.head.distributions
    assert set(named) <= set(out.views), f"outputs gives the views {sorted(out.views)}, but {named} are named"
    offered = set(module.draft_model.head.signals)
    assert set(out.signals) == offered, f"outputs gives the signals {sorted(out.signals)}, but names {sorted(offered)}"
    (log_prob,) = out.views["main"].ask(LabelLogProb(batch.layout.labels))
    torch.where(batch.layout.valid, log_prob, 0.0).sum().backward()
    decoded = _decoded_log_probs(module, batch.layout)
    for anchor, found in decoded.items():
        block = int((batch.layout.anchors[0] == anchor).nonzero())
        valid = batch.layout.valid[0, block]
        trained = log_prob[0, block].detach()
        impossible = (found == -torch.inf) & (trained < NO_CANDIDATE / 2)  # both say so, each in its own way
        gap = float((found - trained)[valid & ~impossible].abs().max()) if bool((valid & ~impossible).any()) else 0.0
        assert gap < 1e-3, f"the block at {anchor} is decoded with another law than it is trained with (by {gap:.2g})"


@torch.no_grad()
def _decoded_log_probs(module: DraftModule, layout: BlockLayout) -> dict[int, Float[Tensor, " K"]]:
    """Log-probabilities of the document's own tokens as they are drafted, by anchor.

    In a first and a second round, and in one after two rounds that drafted nothing (``decoding.adaptive``).
    """
    ids, target, draft = toy_document().input_ids, module.target, module.draft_model
    decoder = SpeculativeDecoder(target, draft, max_length=64, compile=False, shown=False)
    decoder.refresh()
    decoder.warm_up()
    cached, proposer = decoder.parts.target, decoder.parts.proposer
    anchors, skipped = [PROMPT, PROMPT + 2, PROMPT + 6], 2
    _, features, lengths = cached.prefill([ids[:PROMPT].tolist()])
    root = ids[anchors[0], None]
    proposer.start(features, lengths, root)
    found = {}
    for number, anchor in enumerate(anchors):
        scores = proposer.propose(ids[anchor, None], Round(torch.zeros(1, dtype=torch.long), lengths, number))
        first_look = set() if draft.head.signals_in_turn else set(draft.head.signals)
        assert first_look <= set(scores.signals), (
            f"open gives the signals {sorted(scores.signals)}, but {sorted(first_look)} are named: give them, or set "
            "signals_in_turn = True if only step knows them"
        )
        assert draft.keeps_state == (scores.state is not None), (
            "open gives a state for step to go on with, and keeps_state is false: say so"
            if scores.state is not None
            else "keeps_state is true, but open gives no state"
        )
        known = {int(a): labels for a, labels in zip(layout.anchors[0], layout.labels[0], strict=True)}
        found[anchor] = _label_log_probs(scores, ids[anchor], known[anchor], draft.alignment.first_slot)
        if number < 2:
            features, keep, following = _committed(cached, ids[anchor : anchor + 3], 2)
            proposer.ingest(features, keep, Verdict(torch.tensor([1]), following))
            lengths = lengths + keep
        if number == 1:
            for place in range(anchor + 2, anchor + 2 + skipped):
                features, keep, _ = _committed(cached, ids[place : place + 2], 1)
                proposer.skip(features, keep)
                lengths = lengths + keep
    return found


def _committed(
    cached: CachedTarget, ids: Int[Tensor, " n"], count: int
) -> tuple[TargetFeatures, Int[Tensor, " 1"], Int[Tensor, " 1"]]:
    """The target's features after it has judged ``ids`` and kept ``count``; that number, and the token behind them."""
    cached.verify(ids[None])
    keep, following = torch.tensor([count]), ids[count, None]
    return cached.commit(None, keep).with_next(keep, following), keep, following


def _label_log_probs(
    scores: Scores, root: Int[Tensor, ""], labels: Int[Tensor, " K"], first_slot: int
) -> Float[Tensor, " K"]:
    """Of each label after the ones before it; what does not predict gets 0."""
    found = torch.zeros(labels.shape)
    for depth, (logits, ids) in enumerate(_laws(scores, root, labels[first_slot:])):
        law, label = logits.float().log_softmax(-1), labels[first_slot + depth]
        column = label[None] if ids is None else (ids == label).nonzero()[:, 0]
        found[first_slot + depth] = law[column[0]] if len(column) else -torch.inf
    return found


def _laws(
    scores: Scores, root: Int[Tensor, ""], labels: Int[Tensor, " D"]
) -> Iterator[tuple[Float[Tensor, " c"], Int[Tensor, " c"] | None]]:
    """Logits after the root and after each label but the last, and the tokens they stand for; null: all in order."""
    state, last = scores.state, root
    for depth, label in enumerate(labels):
        law, at = scores, depth
        if scores.step is not None:
            (law, state), at = scores.step(state, last[None, None], depth), 0
        ids = law.ids if law.ids is None or law.ids.ndim == 1 else law.ids[0, at]
        yield law.logits[0, at], ids
        last = label
