"""Contract of the conditioning axis: how target features enter the drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextState, DraftCache
from dflash_lightning.types import BlockLayout, FeatureSpec, TargetFeatures


class Conditioning(Component, nn.Module, ABC, axis=True):
    """Turns target features into what the draft layers read.

    Settings only in the constructor; ``build`` makes the weights. ``prepare`` serves training (all context of a batch
    at once, gradients enabled), ``extend`` serves decoding (a chunk of new rows per round, in place, compiled with
    static shapes: no Python branch on tensor values). Both must give a block the same context: a test holds them
    together.
    """

    target_layer_ids: list[int] | None

    @abstractmethod
    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        """Target layers to tap when the recipe names none."""

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights."""

    @abstractmethod
    def required(self) -> FeatureSpec:
        """Target features that ``prepare`` and ``extend`` read; known after ``build``."""

    @abstractmethod
    def prepare(self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout) -> ContextState:
        """Context of a training batch."""

    @abstractmethod
    def extend(
        self,
        hidden: Float[Tensor, "B R T H"],
        keep: Int[Tensor, " B"],
        cache: DraftCache,
    ) -> ContextState:
        """Append the first ``keep[b]`` of ``R`` new rows (positions ``cursor[b] ..``) and return the context so far.

        ``cache.cursor`` is moved by ``keep`` before the state is used: the state's visible rows are those ``< cursor``.
        """

    def states(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        """One context state per position, which every draft layer projects; for generators that keep their own cache.

        Raises:
            ValueError: this conditioning has no such form.
        """
        raise ValueError(
            f"assistant_model: conditioning {self.name!r} cannot be driven by transformers' generate(). "
            "Decode with `dflash generate`."
        )

    def warm_start_layers(self, num_target_layers: int, *, with_drafter: bool) -> list[int]:
        """Target decoder layers whose weights ``warm_start`` wants to see; none of them means a start at random.

        Known after ``build``. ``with_drafter`` says whether the drafter starts from the target: a conditioning may wish
        the same, or its own.
        """
        return []

    def warm_start(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Start from the target: ``layers`` holds the state dict of every layer of ``warm_start_layers``."""
