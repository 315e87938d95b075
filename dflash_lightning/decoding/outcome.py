"""What a round gave every row, brought to the host in one piece."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_lightning.decoding.types import Draft, Verdict


class RowOutcome(NamedTuple):
    """``tokens`` are the accepted drafts and the token after them.

    ``nodes`` drafts were judged, and ``offered`` is the deepest depth that was at risk.
    """

    tokens: list[int]
    nodes: int
    offered: int

    @property
    def rejected(self) -> int:
        """Live drafts that do not stand."""
        return self.nodes + 1 - len(self.tokens)


def read_outcomes(draft: Draft, verdict: Verdict) -> list[RowOutcome]:
    """The outcome of every row; waits for the device, once."""
    columns = [verdict.accepted[:, None], verdict.following[:, None]]
    if draft.live is None and verdict.path is None:
        width = draft.tokens.shape[1] - 1
        rows = torch.cat([*columns, draft.tokens[:, 1:]], dim=1).tolist()
        return [RowOutcome([*row[2 : 2 + row[0]], row[1]], width, min(row[0] + 1, width)) for row in rows]
    live = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.live is None else draft.live
    nodes = live[:, 1:].sum(1)
    offered, tokens = verdict.offered, draft.tokens
    if offered is None:
        assert verdict.path is None, "the verdict on a tree says what was at risk"
        offered = torch.minimum(verdict.accepted + 1, nodes)
    if verdict.path is not None:
        tokens = tokens.gather(1, verdict.path)
    rows = torch.cat([*columns, nodes[:, None], offered[:, None], tokens[:, 1:]], dim=1).tolist()
    return [RowOutcome([*row[4 : 4 + row[0]], row[1]], row[2], row[3]) for row in rows]
