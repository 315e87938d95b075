"""What builders, policies and verifiers must hold."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.law import greedy_law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores, Verdict
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.testing.toys import (
    LETTERS,
    SLOTS,
)


def check_builder(builder: DraftBuilder) -> None:
    """A draft is what ``decoding.types.Draft`` says it is: the root first, parents before children, no twins."""
    scores = Scores(torch.randn(2, SLOTS, LETTERS, generator=torch.Generator().manual_seed(0)))
    roots = torch.tensor([3, 5])
    draft = builder.build(roots, scores, _where(), _sampler(0.0 if builder.drawn == "delta" else 1.0))
    assert draft.drawn == builder.drawn, f"the draft is {draft.drawn!r}, the class says {builder.drawn!r}"
    assert torch.equal(draft.tokens[:, 0], roots), "node 0 is not the root"
    nodes = 1 + builder.num_nodes(SLOTS)
    shape = tuple(draft.tokens.shape)
    assert shape[0] == 2 and shape[1] <= nodes, f"{shape} nodes, but num_nodes says {nodes} of 2 rows at most"
    nodes = shape[1]
    assert draft.drawn != "sampled" or draft.law is not None, "a sampled draft without the law it was drawn from"
    if draft.parents is None:
        return
    assert builder.trees, "the draft is a tree, but the class says that it makes none (trees = True)"
    before = torch.arange(nodes)[1:]
    assert bool((draft.parents[:, 1:] < before).all()) and not bool(draft.parents[:, 0].any()), "parents come first"
    assert int(draft.depth.max()) <= SLOTS, f"nodes deeper than the {SLOTS} slots"
    live = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.live is None else draft.live
    for row in range(2):
        edges = [(int(p), int(t)) for p, t, alive in zip(*_row(draft, live, row), strict=True) if alive]
        assert len(edges) == len(set(edges)), "two children of a node hold the same token"


def _row(draft: Draft, live: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    assert draft.parents is not None
    return draft.parents[row, 1:], draft.tokens[row, 1:], live[row, 1:]


def check_policy(policy: WidthPolicy) -> None:
    """A width is a whole number for each row, from 0; and the policy bears to be told what came of it."""
    signals = {name: torch.full((2,) if policy.by_block else (2, SLOTS), 0.5) for name in policy.reads}
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
        law = greedy_law(torch.nn.functional.one_hot(tokens[:, 1:], LETTERS).float()) if drawn == "sampled" else None
        draft = Draft(tokens, drawn, law=law)  # type: ignore[arg-type]  # sorted forgets the names
        verdict = verifier.verify(draft, _logits(draft), _where(3), _sampler(0.0))
        assert verdict.accepted.tolist() == [3, 1, 0], f"{drawn} drafts: {verdict.accepted.tolist()} stand, not 3, 1, 0"
        assert verdict.following.tolist() == [7, 2, 1], f"{drawn} drafts: {verdict.following.tolist()} follow"


def _logits(draft: Draft) -> Float[Tensor, "B N V"]:
    """A target that says 1, 2, 4, 7 after the nodes of any chain."""
    own = torch.tensor([1, 2, 4, 7]).expand(draft.tokens.shape[0], -1)
    return 5.0 * torch.nn.functional.one_hot(own, LETTERS)


def _where(rows: int = 2) -> Round:
    return Round(torch.arange(rows), torch.full((rows,), 9), 0)


def _sampler(temperature: float) -> Sampler:
    return Sampler(SamplingSpec(temperature=temperature), Noise(0))
