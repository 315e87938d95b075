"""The drafter's configuration: everything from which its weights' shapes, its inputs and its alignment follow."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from dflash_lightning.geometry import GEOMETRY, LayerGeometry
from dflash_lightning.types import Alignment, LabelLayout

NESTED = "dflash_config"  # where z-lab's files keep what transformers' configs have no name for
# What names and settings in a drafter's files mean. A change that an earlier version would misread adds 1. Files state
# the version from 2 on: a file without one has version 1, as every file of another program.
CONTRACT_VERSION = 1
_VERSION_FIELD = "contract_version"


class DraftConfig(PretrainedConfig):
    """Plain settings only, spelled as z-lab's checkpoints and transformers' DFlash generator spell them.

    The fields of ``LayerGeometry`` are settings too, and ``geometry`` gives them together.
    ``target_layer_ids`` are 0-based decoder layers of the target (id ``i`` is the output of layer ``i``).
    ``draft_vocab_size`` ``None`` means the whole target vocabulary; otherwise the model holds the ids in a buffer.
    ``components`` names the conditioning, drafter and head: ``{"head": {"name": "marginal", "settings": {}}}``.
    ``chat_template_kwargs`` are what prompts are rendered with, as training rows were.
    ``target`` identifies the model the drafter was made for: name, revision, digest, vocab_size. ``num_target_layers``
    and ``vocab_size`` are the target's; ``None`` where a file of another program has no field for it.
    """

    model_type = "dflash_lightning"
    default_theta = None  # type: ignore[assignment]  # transformers would fill in 10000 where a file states no base

    def __init__(
        self,
        *,
        block_size: int = 0,
        mask_token_id: int = -1,
        label_layout: LabelLayout = "same_position",
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = 0,
        target_hidden_size: int = 0,
        vocab_size: int | None = 0,
        draft_vocab_size: int | None = None,
        components: dict[str, dict[str, Any]] | None = None,
        target: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        layers = {name: kwargs.pop(name, default) for name, default in vars(LayerGeometry()).items()}
        if layers["layer_types"] is None:
            layers["layer_types"] = ["full_attention"] * layers["num_hidden_layers"]
        for name, value in layers.items():
            setattr(self, name, value)
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.label_layout = label_layout
        self.target_layer_ids = target_layer_ids if target_layer_ids is not None else []
        self.num_target_layers = num_target_layers
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.components = components if components is not None else {}
        self.target = target if target is not None else {}
        self.chat_template_kwargs = chat_template_kwargs if chat_template_kwargs is not None else {}
        super().__init__(**kwargs)

    @property
    def geometry(self) -> LayerGeometry:
        """The draft layers' sizes and attention."""
        return LayerGeometry(**{name: getattr(self, name) for name in GEOMETRY})

    @property
    def alignment(self) -> Alignment:
        """The one statement of how slots and labels line up."""
        return Alignment(self.block_size, self.mask_token_id, self.label_layout)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Settings of a file, flat or nested, old or new spelling of RoPE; see ``lift_settings``.

        Raises:
            ValueError: the file has a contract version that is not known here.
        """
        settings = lift_settings(config_dict)
        check_contract(settings)
        settings.pop(_VERSION_FIELD, None)
        return super().from_dict(settings, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for ``config.json`` and checkpoints."""
        stated: dict[str, Any] = super().to_dict()
        return stated if CONTRACT_VERSION == 1 else {**stated, _VERSION_FIELD: CONTRACT_VERSION}


# Everything that a drafter's files may state.
FIELDS = {*GEOMETRY, *inspect.signature(DraftConfig.__init__).parameters} - {"self", "kwargs"}


def check_contract(settings: Mapping[str, Any], where: str = "The drafter") -> None:
    """Refuse the settings of a file that a later version of this package wrote.

    Raises:
        ValueError: ``contract_version`` is higher than the version known here, or no version at all.
    """
    version = settings.get(_VERSION_FIELD, 1)
    if type(version) is not int or not 1 <= version <= CONTRACT_VERSION:
        raise ValueError(
            f"{where}: the config states {_VERSION_FIELD}={version!r}, and this dflash_lightning reads versions 1 to "
            f"{CONTRACT_VERSION}. Upgrade dflash_lightning to the version that wrote the file. Nothing was loaded."
        )


def lift_settings(raw: Mapping[str, Any], where: str = "The drafter") -> dict[str, Any]:
    """The settings of a drafter's ``config.json`` in one flat layout, whichever way the file spells them.

    z-lab's and SpecForge's files keep some settings flat and some in ``dflash_config``, and both spellings of RoPE are
    about. The nested value wins, as in all programs that read such files; where the flat one disagrees, a warning names
    both. RoPE is resolved as transformers does.

    Raises:
        ValueError: ``rope_parameters`` and ``rope_scaling`` say different things, of which programs read one each.
    """
    settings = {key: value for key, value in raw.items() if key != NESTED}
    for key, value in (raw.get(NESTED) or {}).items():
        if settings.get(key) is not None and settings[key] != value:
            _warn_conflict(key, settings[key], f"{NESTED}.{key}", value)
        settings[key] = value
    rope = _lift_rope(settings, where)
    if rope["rope_theta"] is not None:
        settings["rope_parameters"] = rope
    return settings


def _lift_rope(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """What is said of RoPE, taken out of ``settings``; a value of the block wins over a flat one."""
    blocks = {key: settings.pop(key, None) or {} for key in ("rope_parameters", "rope_scaling")}
    flat = {key: settings.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    read = {name: _one_rope(block, flat) for name, block in blocks.items()}
    if all(blocks.values()) and read["rope_parameters"] != read["rope_scaling"]:
        raise ValueError(
            f"{where}: config.json states rope_parameters={blocks['rope_parameters']} and "
            f"rope_scaling={blocks['rope_scaling']}. transformers reads the latter, other programs the former, so it "
            "is open how the drafter rotates. Remove the one that it was not trained with. Nothing was loaded."
        )
    name = "rope_scaling" if blocks["rope_scaling"] else "rope_parameters"
    for key, value in flat.items():
        stated = blocks[name].get(key)
        if value is not None and stated is not None and stated != value:
            _warn_conflict(key, value, f"{name}.{key}", stated)
    return read[name]


def _one_rope(block: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """A RoPE block with one name for its kind, completed by what stands flat beside it."""
    kind = block.get("rope_type", block.get("type", "default"))
    rope = {"rope_type": kind, **{key: value for key, value in block.items() if key not in ("rope_type", "type")}}
    for key, value in flat.items():
        if rope.get(key) is None and (value is not None or key == "rope_theta"):
            rope[key] = value
    return rope


def _warn_conflict(flat_name: str, flat: Any, nested_name: str, nested: Any) -> None:
    warnings.warn(
        f"The drafter's config states {flat_name}={flat} and {nested_name}={nested}; {nested} is used. "
        "Remove one of them from config.json.",
        stacklevel=5,
    )
