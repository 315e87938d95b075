"""Another drafter to start from: which of its parts are taken over, and what of it may differ from the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError, hint_for
from dflash_lightning.files import DraftOrigin
from dflash_lightning.geometry import FIELD_OF, GEOMETRY, OF_TARGET
from dflash_lightning.model.trio import AXES

# Fields of ``DraftConfig`` that weights depend on, by the part that decides them; null: the drafter as a whole.
FIELDS: dict[str | None, tuple[str, ...]] = {
    None: ("block_size", "label_layout", "mask_token_id", "draft_vocab_size"),
    "conditioning": ("target_layer_ids",),
    "drafter": tuple(name for name in GEOMETRY if name not in OF_TARGET),
}
_UNSTATED = ("hidden_act",)  # fields that no setting of a recipe decides


@dataclass(frozen=True)
class Origin:
    """A drafter to start from, beside the parts of a recipe (``init_from``)."""

    stated: DraftOrigin
    parts: Mapping[str, Component]  # the recipe's, by axis

    @property
    def _change(self) -> set[str]:
        return {FIELD_OF.get(name, name) for name in self.stated.change}

    def check_names(self) -> None:
        """Refuse a name in ``change`` that means nothing for these parts.

        Raises:
            ValueError: says which, and what could have been meant.
        """
        known = {"target", *AXES, *(field for fields in FIELDS.values() for field in fields)}
        known |= {f"{axis}.{name}" for axis, part in self.parts.items() for name in part.settings()}
        if unknown := sorted(self._change - known):
            what = f"{', '.join(map(repr, unknown))} is no setting of a drafter"
            raise SettingError("init_from.change", what, hint_for(unknown[0], known))

    @property
    def _fields(self) -> tuple[str, ...]:
        """Fields of the configuration on which the taken parts depend."""
        return tuple(field for part in (None, *self.stated.parts) for field in FIELDS.get(part, ()))

    def fill_in(self, ours: DraftConfig, theirs: DraftConfig) -> None:
        """Take over from the origin what the recipe leaves open (null), in place."""
        if "drafter" not in self.stated.parts:
            return
        stated = self.parts["drafter"].settings()
        left_open = {FIELD_OF.get(name, name) for name, value in stated.items() if value is None} | {*_UNSTATED}
        for field in left_open & {*FIELDS["drafter"]}:
            if field == "layer_types":  # layers that the origin does not have are what the recipe makes them
                ours.layer_types = (
                    theirs.layer_types[: ours.num_hidden_layers] + ours.layer_types[len(theirs.layer_types) :]
                )
            else:
                setattr(ours, field, getattr(theirs, field))

    def _differences(self, ours: DraftConfig, theirs: DraftConfig) -> Iterator[tuple[str, Any, Any]]:
        """Everything that differs and may not: its name, what the recipe says, and what the origin says."""
        for field in self._fields:
            a, b = getattr(ours, field), getattr(theirs, field)
            if field == "layer_types":  # another number of layers is a difference of its own
                a, b = a[: len(b)], b[: len(a)]
            yield from self._pair(field, a, b)
        for axis in self.stated.parts:
            name, stated = self.parts[axis].name, theirs.components.get(axis, {})
            if name != stated.get("name"):
                yield from self._pair(axis, name, stated.get("name"))
                continue
            there = AXES[axis].from_settings(name, stated.get("settings", {})).settings()
            for setting, value in self.parts[axis].settings().items():
                field = FIELD_OF.get(setting, setting)
                if field not in FIELDS.get(axis, ()) and setting not in self.parts[axis].initial:
                    yield from self._pair(f"{axis}.{setting}", value, there[setting])

    def check(self, ours: DraftConfig, theirs: DraftConfig, *, draft_vocabulary: str | None) -> None:
        """Refuse a drafter that is not the one the recipe describes, but for what may change; both values are named.

        Raises:
            ValueError: lists everything that differs.
        """
        path, settings = self.stated.path, self.parts["drafter"].settings()
        if "drafter" in self.stated.parts and settings.get("init_from_target"):
            raise SettingError(
                "init_from",
                f"the drafter starts from {path}, but drafter.init_from_target=true starts it from the target's layers",
                do="Set drafter.init_from_target=false, or init_from=null",
            )
        found = self._differences(ours, theirs)
        differing = [f"{name} is {a!r} in the recipe, {b!r} there" for name, a, b in found]
        if draft_vocabulary == "data" and theirs.draft_vocab_size is None and "draft_vocab_size" not in self._change:
            differing.append("draft_vocabulary is 'data' in the recipe, the whole vocabulary there")
        if differing:
            raise SettingError(
                "init_from",
                f"the drafter in {path} is not the one the recipe describes ({'; '.join(differing)})",
                do="Set these in the recipe to what the drafter has (or to null, where that is allowed), list what "
                "is meant to differ in init_from.change and leave parts that start fresh out of "
                "init_from.parts, or train from scratch. A drafter of a part of the vocabulary is continued "
                "with draft_vocabulary=data, and keeps the tokens that it has",
            )

    def _pair(self, name: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
        if ours != theirs and not {name, name.partition(".")[0]} & self._change:
            yield name, ours, theirs

    @torch.no_grad()
    def copy(self, source: nn.Module, model: nn.Module) -> str:
        """Copy the parts' tensors of equal name and shape into ``model``; what was copied and is fresh, in words.

        Raises:
            ValueError: no tensor of these parts is the same.
        """
        theirs, own = source.state_dict(), model.state_dict()
        copied: dict[str, int] = {}
        fresh: dict[str, list[str]] = {}
        for name, value in own.items():
            part, _, rest = name.partition(".")
            if part not in AXES:
                continue
            if part in self.stated.parts and name in theirs and theirs[name].shape == value.shape:
                value.copy_(theirs[name])
                copied[part] = copied.get(part, 0) + 1
            else:
                fresh.setdefault(part, []).append(rest)
        if not copied:
            raise SettingError(
                "init_from",
                f"{self.stated.path} has no tensor of {' or '.join(self.stated.parts)} with the name and shape "
                "of the recipe's",
                do="Choose a drafter of these parts, or set init_from=null",
            )
        words = [f"{count} of {part}" for part, count in copied.items()]
        words += [f"fresh: {part} ({_listed(names)})" for part, names in fresh.items()]
        return f"init_from: tensors copied from {self.stated.path}: {'; '.join(words)}"


def _listed(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
