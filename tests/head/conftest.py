"""What tests of heads with a memory share: every text of three tokens, and the law that is stepped along each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, MarginalHead
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead
from dflash_lightning.types import BlockLayout, Scores, gather_lanes


def lay_out_texts(
    make_layout: Callable[..., BlockLayout], paths: torch.Tensor, root: int, first_slot: int
) -> BlockLayout:
    """A block per text of ``paths`` [N, D] behind ``root``, all its slots labelled; ``first_slot`` predicts first."""
    count, size = len(paths), paths.shape[1] + first_slot
    layout = make_layout([[5] * count], block_size=size)
    predicts = (torch.arange(size) >= first_slot).expand(1, count, size)
    text = torch.cat([torch.full((count, 1 + first_slot), root), paths], dim=1)[None]
    return replace(
        layout,
        labels=text[..., 1:].contiguous(),
        prev_ids=text[..., :-1].contiguous(),
        predicts=predicts,
        scored=predicts,
        valid=predicts,
        rows=predicts.flatten().nonzero().squeeze(1),
    )


@dataclass(frozen=True)
class World:
    """Three tokens, hidden states of four numbers, texts of three tokens behind the root; all of it in float64."""

    make_layout: Callable[..., BlockLayout]
    vocabulary: int = 3
    width: int = 4
    depth: int = 3
    root: int = 2

    @property
    def paths(self) -> torch.Tensor:
        return torch.tensor(list(itertools.product(range(self.vocabulary), repeat=self.depth)))

    def build(self, head: DraftHead, *, first_slot: int = 0, **config: Any) -> Any:
        layout = "same_position" if first_slot else "anchor_first"
        sizes = {"hidden_size": self.width, "vocab_size": self.vocabulary, "block_size": self.depth + first_slot}
        head.build(DraftConfig(mask_token_id=0, label_layout=layout, **{**sizes, **config}))
        return head.double()

    def randomise(self, head: Any, scale: float = 0.8) -> Any:
        with torch.no_grad():
            for weight in head.parameters():
                weight.normal_(0, scale)
        return head

    def lm(self, **settings: Any) -> LanguageHead:
        rows, embedding = (torch.randn(self.vocabulary, self.width, dtype=torch.float64) for _ in range(2))
        return LanguageHead(rows, embedding=embedding, **settings)

    def hidden(self, blocks: int, slots: int) -> torch.Tensor:
        return torch.randn(1, blocks, slots, self.width, dtype=torch.float64)

    def layout(self, first_slot: int = 0) -> BlockLayout:
        """One block per text of ``paths``, all of its slots labelled; ``first_slot`` predicts first."""
        return lay_out_texts(self.make_layout, self.paths, self.root, first_slot)

    def stepped(self, scores: Scores, path: list[int], root: int | None = None) -> list[torch.Tensor]:
        """The logits at every depth along ``path``."""
        assert scores.step is not None
        state, last, found = scores.state, self.root if root is None else root, []
        for depth, token in enumerate(path):
            at, state = scores.step(state, torch.tensor([[last]]), depth)
            found.append(at.logits[0, 0])
            last = token
        return found

    def check_law(self, head: DraftHead, first_slot: int, view: str = "main") -> torch.Tensor:
        """By enumeration: the law in training is that of the steps after the same tokens; it sums to 1."""
        lm, layout, paths = self.lm(softcap=2.0), self.layout(first_slot), self.paths
        hidden = self.hidden(1, self.depth + first_slot)
        out = head.outputs(hidden.expand(-1, len(paths), -1, -1), layout, lm)
        (trained,) = out.views[view].ask(LabelLogProb(layout.labels))
        scores = head.open(hidden[0, :, first_slot:], torch.tensor([self.root]), lm)
        said = torch.stack(
            [
                torch.stack([x.log_softmax(-1)[t] for x, t in zip(self.stepped(scores, path), path, strict=True)])
                for path in paths.tolist()
            ]
        )
        torch.testing.assert_close(trained[0, :, first_slot:], said)
        assert float(said.sum(1).exp().sum().detach()) == pytest.approx(1.0), "the laws of all texts are no law"
        spread = said[:, -1].view(-1, self.vocabulary)
        assert float((spread - spread[:1]).abs().max().detach()) > 0.1, "no law depends on the token before"
        return said.detach()

    def check_lanes(self, head: DraftHead) -> None:
        """Two rows, lanes copied and crossed between the steps: each steps as if it were alone."""
        lm, hidden = self.lm(), self.hidden(2, self.depth)[0]
        roots = torch.tensor([self.root, 0])
        scores = head.open(hidden, roots, lm)
        assert scores.step is not None
        _, state = scores.step(scores.state, roots[:, None], 0)
        tokens = torch.tensor([[1, 0, 1], [2, 2, 0]])
        _, state = scores.step(gather_lanes(state, torch.zeros(2, 3, dtype=torch.long)), tokens, 1)
        crossed, after = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[0, 1], [2, 1]])
        together, _ = scores.step(gather_lanes(state, crossed), after, 2)
        for b, w in itertools.product(range(2), range(2)):
            path = [int(tokens[b, crossed[b, w]]), int(after[b, w]), 0]
            alone = self.stepped(head.open(hidden[b : b + 1], roots[b : b + 1], lm), path, int(roots[b]))
            torch.testing.assert_close(together.logits[b, w], alone[-1])

    def check_start(self, head: DraftHead) -> None:
        """An untrained head says what the marginals say, bit for bit, in training and in decoding."""
        lm, layout = self.lm(), self.layout()
        hidden = self.hidden(len(self.paths), self.depth)
        outs = [h.outputs(hidden, layout, lm).views["main"] for h in (head, MarginalHead())]
        assert torch.equal(*(view.ask(LabelLogProb(layout.labels))[0] for view in outs))
        scores = head.open(hidden[:, 0], torch.tensor([self.root]), lm)
        assert torch.equal(torch.stack(self.stepped(scores, [0, 1, 2])), lm.logits(hidden[0, 0]))


@pytest.fixture
def world(make_layout: Callable[..., BlockLayout]) -> World:
    return World(make_layout)


@pytest.fixture
def every_text(make_layout: Callable[..., BlockLayout]) -> Callable[..., BlockLayout]:
    """A block per text of three tokens behind root 2; called with the slot that predicts first."""

    def lay_out(first_slot: int = 1) -> BlockLayout:
        return World(make_layout).layout(first_slot)

    return lay_out
