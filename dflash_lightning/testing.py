"""Checks for the test of a method of one's own: what every part of a kind must hold, on small tensors in milliseconds.

Each raises ``AssertionError`` with what does not hold. They say nothing of whether a method is any good, nor of the law
of what is sampled: ``dflash smoke`` trains a recipe and counts tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.block import Anchored, BlockConstructor, check_layout, count_slots
from dflash_lightning.conditioning import Conditioning, KVInjection
from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.law import greedy_law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores, Verdict
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.drafter import BlockTransformer, Drafter
from dflash_lightning.head import DraftHead, MarginalHead, SelectorHead
from dflash_lightning.loss import CrossEntropy, LossTerm
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.ops.candidates import NO_CANDIDATE
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb, LanguageHead
from dflash_lightning.target import FrozenTarget, load_target
from dflash_lightning.target.tiny import save_tiny_target
from dflash_lightning.types import Alignment, BlockLayout, Document, StepContext, TrainBatch

_PROMPT, _LENGTH, _LETTERS, _SLOTS = 6, 24, 16, 3  # of what everything is tried on; drafts where there is no model
_STEP = StepContext(0, 10, 0)


@lru_cache(maxsize=1)
def toy_target() -> FrozenTarget:
    """A frozen random model of twelve layers and 32 tokens; nobody may change it."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_target(Path(folder), num_layers=12)
        return load_target(folder, dtype="float32")


def toy_module(**parts: Any) -> DraftModule:
    """A drafter for the toy target with the given parts (see ``DraftModule``) and DFlash's for the rest.

    All weights are moved a little, so that none that starts at 0 or 1 is forgotten unseen.
    """
    usual = {
        "block": Anchored(block_size=4, num_anchors=_LENGTH),
        "conditioning": KVInjection(target_layer_ids=[1, 3]),
        "drafter": BlockTransformer(num_layers=2, init_std=0.2),
        "head": MarginalHead(),
        "loss": {"cross_entropy": CrossEntropy()},
        "optim": OptimSettings(lr=1e-3),
    }
    module = DraftModule(toy_target(), **{**usual, **parts})
    module.prepare(None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in module.draft_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def toy_document() -> Document:
    """24 tokens of which the first 6 are a prompt."""
    ids = torch.randint(0, _LETTERS, (_LENGTH,), generator=torch.Generator().manual_seed(0))
    return Document(0, ids, torch.arange(_LENGTH) >= _PROMPT)


def toy_batch(module: DraftModule) -> TrainBatch:
    """The toy document as a micro-batch, with all its blocks."""
    document = toy_document()
    layout = module.block.blocks(document, module.draft_model.alignment, seed=0, epoch=0)
    none = torch.zeros(1, _LENGTH, dtype=torch.long)
    return TrainBatch(
        input_ids=document.input_ids[None],
        loss_mask=document.loss_mask[None],
        doc_ids=none,
        position_ids=torch.arange(_LENGTH)[None],
        sample_ids=none[:, :1],
        layout=layout,
        window_totals=count_slots(layout),
        window=0,
        packed=False,
    )


class _SpeakingHead(MarginalHead):
    """DFlash's head, with a signal and a distribution for every name that a loss term wants to read."""

    name = "marginal_with_signals"

    def __init__(
        self, *, signals: Sequence[str] = (), by_block: bool = False, distributions: Sequence[str] = ("main",)
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        self.by_block = by_block
        self.distributions = tuple(distributions)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        views = super().outputs(hidden, layout, lm).views
        return HeadOutput(dict.fromkeys(self.distributions, views["main"]), self._speak(hidden))

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        return replace(super().open(hidden, roots, lm), signals=self._speak(hidden))

    def _speak(self, hidden: Float[Tensor, "*blocks D H"]) -> dict[str, Tensor]:
        said = hidden[..., 0, :] if self.by_block else hidden  # of the first slot, whose states no check changes
        return dict.fromkeys(self.signals, said.mean(-1).sigmoid())


# -- training ---------------------------------------------------------------------------------------------------------


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
    speaking = _SpeakingHead(signals=list(term.reads), by_block=term.by_block, distributions=list(term.viewed()))
    module = toy_module(loss={"own": term}, head=speaking if head is None else head)
    batch = toy_batch(module)
    out, features = module.outputs(batch)
    ((_, share),) = module.loss_shares(batch, out, features, _STEP, count_slots(batch.layout)).values()
    assert share.shape == () and bool(torch.isfinite(share)), f"numerator / denominator is {share}, no finite number"
    share.backward()
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
        found.append(float(shares["own"][1]))
    same = abs(found[0] - found[1]) <= 1e-5 * max(1.0, abs(found[0]))
    assert same, f"slots that are not valid change the term: {found[0]:.6g} becomes {found[1]:.6g}"


def check_head(head: DraftHead) -> None:
    """A block that is decoded with the tokens of a training row has the law it was trained with, slot by slot."""
    for label_layout in head.label_layouts:
        _check_parts(head=head, block=Anchored(block_size=4, num_anchors=_LENGTH, label_layout=label_layout))


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
        parts["block"] = Anchored(block_size=4, num_anchors=_LENGTH, label_layout="anchor_first", inputs="tokens")
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
    """Log-probabilities of the document's own tokens as they are drafted, by anchor: in a first and a second round."""
    ids, target, draft = toy_document().input_ids, module.target, module.draft_model
    decoder = SpeculativeDecoder(target, draft, max_length=64, compile=False, shown=False)
    decoder.refresh()
    decoder.warm_up()
    cached, proposer = decoder.parts.target, decoder.parts.proposer
    anchors = [_PROMPT, _PROMPT + 2]
    _, features, lengths = cached.prefill([ids[:_PROMPT].tolist()])
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
        known = {int(a): labels for a, labels in zip(layout.anchors[0], layout.labels[0], strict=True)}
        found[anchor] = _label_log_probs(scores, ids[anchor], known[anchor], draft.alignment.first_slot)
        if number == 0:
            cached.verify(ids[None, anchor : anchor + 3])
            keep, following = torch.tensor([2]), ids[anchor + 2, None]
            lengths = lengths + keep
            features = cached.commit(None, keep).with_next(keep, following)
            proposer.ingest(features, keep, Verdict(torch.tensor([1]), following))
    return found


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


# -- decoding ---------------------------------------------------------------------------------------------------------


def check_builder(builder: DraftBuilder) -> None:
    """A draft is what ``decoding.types.Draft`` says it is: the root first, parents before children, no twins."""
    scores = Scores(torch.randn(2, _SLOTS, _LETTERS, generator=torch.Generator().manual_seed(0)))
    roots = torch.tensor([3, 5])
    draft = builder.build(roots, scores, _where(), _sampler(0.0 if builder.drawn == "delta" else 1.0))
    assert draft.drawn == builder.drawn, f"the draft is {draft.drawn!r}, the class says {builder.drawn!r}"
    assert torch.equal(draft.tokens[:, 0], roots), "node 0 is not the root"
    nodes = 1 + builder.num_nodes(_SLOTS)
    assert draft.tokens.shape == (2, nodes), f"{tuple(draft.tokens.shape)} nodes, but num_nodes says {nodes} of 2 rows"
    assert draft.drawn != "sampled" or draft.law is not None, "a sampled draft without the law it was drawn from"
    if draft.parents is None:
        return
    assert builder.trees, "the draft is a tree, but the class says that it makes none (trees = True)"
    before = torch.arange(nodes)[1:]
    assert bool((draft.parents[:, 1:] < before).all()) and not bool(draft.parents[:, 0].any()), "parents come first"
    assert int(draft.depth.max()) <= _SLOTS, f"nodes deeper than the {_SLOTS} slots"
    live = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.live is None else draft.live
    for row in range(2):
        edges = [(int(p), int(t)) for p, t, alive in zip(*_row(draft, live, row), strict=True) if alive]
        assert len(edges) == len(set(edges)), "two children of a node hold the same token"


def _row(draft: Draft, live: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    assert draft.parents is not None
    return draft.parents[row, 1:], draft.tokens[row, 1:], live[row, 1:]


def check_policy(policy: WidthPolicy) -> None:
    """A width is a whole number for each row, from 0; and the policy bears to be told what came of it."""
    signals = {name: torch.full((2,) if policy.by_block else (2, _SLOTS), 0.5) for name in policy.reads}
    draft = Draft(torch.tensor([[3, 1, 2, 4], [5, 1, 2, 4]]), "delta", signals=signals)
    policy.start(_where())
    for _ in range(3):
        width = policy.width(draft, _where())
        assert width.shape == (2,) and not width.is_floating_point(), f"{width} is not one whole number for each row"
        assert bool((width >= 0).all()), f"{width} is below 0, the root alone"
        policy.observe(draft.cut(width), Verdict(torch.tensor([1, 0]), torch.tensor([7, 8])), _logits(draft))


def check_verifier(verifier: Verifier) -> None:
    """At temperature 0 the longest run of the target's own likeliest tokens stands, and its next one follows."""
    for drawn in sorted(verifier.judges):
        tokens = torch.tensor([[3, 1, 2, 4], [5, 1, 9, 4], [6, 9, 2, 4]])
        law = greedy_law(torch.nn.functional.one_hot(tokens[:, 1:], _LETTERS).float()) if drawn == "sampled" else None
        draft = Draft(tokens, drawn, law=law)  # type: ignore[arg-type]  # sorted forgets the names
        verdict = verifier.verify(draft, _logits(draft), _where(3), _sampler(0.0))
        assert verdict.accepted.tolist() == [3, 1, 0], f"{drawn} drafts: {verdict.accepted.tolist()} stand, not 3, 1, 0"
        assert verdict.following.tolist() == [7, 2, 1], f"{drawn} drafts: {verdict.following.tolist()} follow"


def _logits(draft: Draft) -> Float[Tensor, "B N V"]:
    """A target that says 1, 2, 4, 7 after the nodes of any chain."""
    own = torch.tensor([1, 2, 4, 7]).expand(draft.tokens.shape[0], -1)
    return 5.0 * torch.nn.functional.one_hot(own, _LETTERS)


def _where(rows: int = 2) -> Round:
    return Round(torch.arange(rows), torch.full((rows,), 9), 0)


def _sampler(temperature: float) -> Sampler:
    return Sampler(SamplingSpec(temperature=temperature), Noise(0))
