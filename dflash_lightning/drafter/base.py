"""Contract of the drafter axis: the network between slot inputs and slot hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.context import ContextState
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import SlotInputs, TargetFacts


class Drafter(Component, nn.Module, ABC, axis=True):
    """The trainable backbone. Block-local: slots see their own block and the context, never another block.

    The same ``forward`` serves training (many blocks per row) and decoding (one block per row, context from a cache).
    ``needs`` names what it reads of a context beyond ``sources`` and ``slot_inputs`` (see ``Conditioning.provides``).
    ``inputs`` names what its slots hold in training (see ``BlockConstructor.inputs``).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    inputs: ClassVar[SlotInputs] = "masks"
    former: ClassVar[Mapping[str, str]] = {"forward.layout": "positions say where the slots stand"}
    num_layers: int

    @abstractmethod
    def geometry(self, facts: TargetFacts) -> LayerGeometry:
        """Its layers: its settings, with null resolved against the target (``LayerGeometry.of``)."""

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights."""

    def check_slots(self, num_slots: int) -> None:
        """Refuse settings that mean nothing in blocks of at most so many slots; by default there are none.

        Raises:
            ValueError: names the setting.
        """

    def bind(self, target: FrozenTarget) -> None:
        """Take what this backbone runs of the target itself; called wherever a drafter meets its target.

        Keep it in a plain object and never as a module or parameter, so that it is in no ``state_dict``, gets no
        optimizer, and is neither moved nor cast with the drafter. A copy of the drafter shares it. It belongs to the
        target: nothing may change it.

        Raises:
            ValueError: this is not the target that the drafter was made for, or of a kind that cannot serve.
        """

    @abstractmethod
    def forward(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        """Hidden states after the output norm, ready for the language head; slots stand at ``positions``."""

    def units(self) -> list[nn.Module]:
        """Parts whose weights nobody but their own ``forward`` uses in training: each may be gathered for itself.

        By default there are none, and a drafter that is spread over ranks is gathered as a whole. Nor can what it keeps
        for the backward pass be made again part by part (``callbacks.ActivationCheckpointing``).
        """
        return []

    @abstractmethod
    def absorb(self, context: ContextState) -> None:
        """Let every layer project the new rows of a decoding ``context`` into its cache, without drafting a block."""

    def warm_start_layers(self, num_target_layers: int) -> list[int]:
        """Target decoder layers that ``warm_start`` copies, one per draft layer; empty where none is asked for."""
        return []

    def warm_start(self, layers: list[Mapping[str, Tensor]]) -> None:
        """Copy weights from the target's decoder layers ``layers`` (state dicts, one per draft layer)."""


def check_kernel(setting: str, kernel: int, num_slots: int) -> None:
    """Refuse a convolution over more slots than a block has: its weights behind would never be used.

    Raises:
        ValueError: it reads more.
    """
    if kernel > num_slots:
        raise SettingError(
            setting,
            f"{kernel} slots are read at once, but a block has {num_slots}",
            f"Use a number from 1 to {num_slots}",
        )
