"""A budget of verified drafts for the whole batch (DFly, arXiv 2607.25852; D-Cut, arXiv 2607.14647)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.policy.base import WidthPolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.device import send_list
from dflash_lightning.errors import SettingError

RATIOS = (0.25, 0.5, 0.75, 1.0)


class SharedBudget(WidthPolicy):
    """Judges the ``K`` drafts of the batch that are likeliest to stand, where ``K`` gives most drafts for its cost.

    ``s_{b,k}`` is the product of the confidences of row ``b`` up to draft ``k``. A share ``ratio`` of all ``n`` drafts
    of the rows that are decoded makes ``K = ceil(ratio * n)``; the value of a share is the sum of the ``K`` largest
    ``s``, divided by its entry of ``costs``. The best share is taken, the smaller one among equals. ``s`` falls along a
    row, so what a row gets of the ``K`` is the beginning of its draft. ``bonus`` adds the token that every row commits
    whatever stands to each value, which then is tokens per unit of cost; the paper leaves it out.

    ``costs`` are what one verification costs with each share of the drafts, in any unit: measure them on your machine,
    at the batch size you decode with. Null takes them to be equal, as they almost are on a CPU at batch 1: then every
    draft is judged.

    A confidence must not depend on drafted tokens where drafts are rejected by chance: the share follows the
    confidences of all drafts, so a token would have a say in whether it is judged itself.

    Raises:
        ValueError: there is not one positive cost for each ratio, or a ratio is not in (0, 1].
    """

    name = "shared_budget"
    sees = "laws"
    reads = ("confidence",)
    reads_ahead = True

    def __init__(
        self,
        *,
        costs: list[float | int]
        | None = None,  # of a verification with each share of the drafts; null: the same with any
        ratios: list[float | int] | None = None,  # shares that are weighed up; null: a quarter, a half, three, all
        bonus: bool = False,  # count the token that a row commits in any case
    ) -> None:
        self.bonus = bonus
        self.ratios = [float(ratio) for ratio in (RATIOS if ratios is None else ratios)]
        self.costs = None if costs is None else [float(cost) for cost in costs]
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise SettingError("decoding.policy.ratios", f"{self.ratios} are no shares", "Use numbers in (0, 1]")
        known = self._costs()
        if len(known) != len(self.ratios) or not all(0 < cost < math.inf for cost in known):
            raise SettingError(
                "decoding.policy.costs",
                f"{known} are not one positive cost for each of the shares {self.ratios}",
                "Give one number per share, for example [10, 10.5, 12, 14]",
            )

    def width(self, draft: Draft, where: Round) -> Int[Tensor, " B"]:
        confidence = draft.signals["confidence"].float()
        stands = confidence.cumprod(1)
        if where.live is not None:
            stands = torch.where(where.live[:, None], stands, -1.0)  # behind all others
        count = (stands >= 0).sum()
        falling, order = stands.flatten().sort(descending=True, stable=True)
        ratios = send_list(self.ratios, stands.device, torch.float64)
        budgets = (ratios * count).ceil().long()
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        certain = count // stands.shape[1] if self.bonus else count * 0
        best = self._values(falling, budgets, certain).argmax()
        return (ranks.view_as(stands) < budgets[best]).sum(1)

    def _values(
        self, falling: Float[Tensor, " n"], budgets: Int[Tensor, " R"], certain: Int[Tensor, ""]
    ) -> Float[Tensor, " R"]:
        """What each share gives for its cost; ``falling`` are the chances of all drafts, best first."""
        sums = torch.nn.functional.pad(falling.double().cumsum(0), (1, 0))
        costs = send_list(self._costs(), falling.device, torch.float64)
        return (sums[budgets] + certain) / costs

    def _costs(self) -> list[float]:
        return [1.0] * len(self.ratios) if self.costs is None else self.costs
