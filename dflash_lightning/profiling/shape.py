"""The shape that is measured: sizes of a random target, of its drafter and of a batch. Needs nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from dflash_lightning.errors import SettingError, hint_for
from dflash_lightning.layer_ids import default_layer_ids


def _size(default: int, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class Shape:
    """Sizes that cost depends on; the defaults are SmolLM2-135M with DFlash's drafter (arXiv 2602.06036).

    A row holds one document. Every size is an option of ``dflash bench``, described by its ``help``.

    Raises:
        SettingError: the sizes do not go together; says which option.
    """

    vocab: int = _size(49152, "tokens of the target")
    hidden: int = _size(576, "width of target and drafter")
    ffn: int = _size(1536, "width inside their feed-forward parts")
    heads: int = _size(9, "query heads")
    kv_heads: int = _size(3, "key-value heads")
    head_dim: int = _size(64, "width of a head")
    target_layers: int = _size(30, "decoder layers of the target")
    features: int = _size(5, "layers of the target that the drafter reads")
    layers: int = _size(5, "draft layers")
    draft_vocab: int = _size(0, "tokens that the drafter can propose, 0 for all")
    sequence: int = _size(512, "tokens of a training row, or of a prompt")
    block: int = _size(16, "slots of a block")
    anchors: int = _size(64, "blocks of a training row")
    batch: int = _size(1, "rows, or prompts")

    def __post_init__(self) -> None:
        for name in SIZES:
            value, least = getattr(self, name), 0 if name == "draft_vocab" else 1
            if value < least:
                raise SettingError(option(name), f"{value} is no size", f"Use {least} or more")
        if self.heads % self.kv_heads:
            raise SettingError(
                "--heads", f"{self.heads} heads cannot share {self.kv_heads} key-value heads", "Use a multiple of them"
            )
        if self.head_dim % 2:
            raise SettingError("--head-dim", f"{self.head_dim} is odd, and features rotate in pairs", "Use an even one")
        if self.block < 2:
            raise SettingError("--block", f"{self.block} leaves no slot to draft", "Use 2 or more")
        if self.anchors > self.sequence - 1:
            raise SettingError(
                "--anchors",
                f"a row of {self.sequence} tokens has {self.sequence - 1} places for blocks, not {self.anchors}",
                "Use fewer, or a longer --sequence",
            )
        if self.vocab < 32:
            raise SettingError("--vocab", f"{self.vocab} tokens leave no room for special ones", "Use 32 or more")
        if self.draft_vocab > self.vocab - 2:
            raise SettingError(
                "--draft-vocab",
                f"{self.draft_vocab} of {self.vocab} tokens leave out too few: the mask is none of them",
                f"Use {self.vocab - 2} or fewer, or 0 for all",
            )
        try:
            default_layer_ids(self.target_layers, self.features)
        except SettingError as error:
            raise SettingError("--features", error.what, "Use fewer, or more --target-layers") from None

    @property
    def layer_ids(self) -> list[int]:
        """The target layers that the drafter reads."""
        return default_layer_ids(self.target_layers, self.features)


SIZES = tuple(each.name for each in fields(Shape))


def option(name: str) -> str:
    """A size as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def shapes_over(shape: Shape, over: str) -> tuple[str, list[Shape]]:
    """The size that ``NAME=a,b,c`` names, and ``shape`` with each of its values, in their order.

    Raises:
        SettingError: there is no such size, a value is no whole number, or the sizes do not go together.
    """
    name, equals, values = over.partition("=")
    name = name.replace("-", "_")
    if not equals or name not in SIZES:
        known = hint_for(name, [size.replace("_", "-") for size in SIZES])
        raise SettingError("--over", f"{over!r} names no size with its values, such as anchors=16,32,64", known)
    try:
        found = [int(value) for value in values.split(",")]
    except ValueError:
        raise SettingError("--over", f"{values!r} are no whole numbers", f"Write {name}=16,32,64") from None
    return name, [replace(shape, **{name: value}) for value in found]
