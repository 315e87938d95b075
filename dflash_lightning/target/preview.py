"""What a target's configuration tells before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from dflash_lightning.target.facts import config_facts
from dflash_lightning.target.families import causal_lm_class, check_family, find_anatomy
from dflash_lightning.target.gguf import cached_folder, is_complete
from dflash_lightning.target.hub import reachable
from dflash_lightning.target.place import TargetLocation, locate
from dflash_lightning.target.text import TargetText
from dflash_lightning.types import TargetFacts


@dataclass(frozen=True)
class TargetPreview:
    """A target without its weights: sizes and names (``facts``, whose digest and token ids are empty)."""

    facts: TargetFacts
    config: PretrainedConfig

    @property
    def text(self) -> TargetText:
        """What checks of the data ask for; without tokenizer."""
        return TargetText(self.facts.name, None, (), self.facts.vocab_size, self.facts.max_positions)

    def decoder_layer_state(self, i: int) -> dict[str, Tensor]:
        """Names and shapes of decoder layer ``i``'s weights, on the meta device."""
        model_class = causal_lm_class(self.config)
        assert model_class is not None
        with torch.device("meta"):
            model = model_class(self.config)
        return dict(find_anatomy(model, self.facts.name).layers[i].state_dict())


def preview(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False, local: bool = True
) -> TargetPreview | None:
    """The target at ``source`` as far as its configuration tells; null where that cannot be read yet.

    ``local`` asks the hub for nothing: only what is on this machine is read.

    Raises:
        ValueError: nothing is there, or the family cannot be a target.
    """
    where = locate(source)
    place = _folder_of(where if local else reachable(where, revision))
    if place is None:
        return None
    hub: dict[str, Any] = {} if Path(place).is_dir() else {"revision": revision, "local_files_only": local}
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **hub)
    except (OSError, ValueError):
        return None  # said where the target is loaded
    check_family(config, source)
    if causal_lm_class(config) is None or not isinstance(getattr(config, "vocab_size", None), int):
        return None  # code from the hub: its configuration may mean anything
    facts = config_facts(config, None, name=source, revision=revision, stop_ids=(), vocab_size=config.vocab_size)
    return TargetPreview(facts, config)


def _folder_of(where: TargetLocation) -> str | None:
    """The folder or repository that holds the configuration; of a GGUF file, its dequantised copy if there is one."""
    if not where.gguf_file:
        return where.location
    file = Path(where.location) / where.gguf_file
    folder = cached_folder(file) if file.is_file() else None
    return None if folder is None or not is_complete(folder) else str(folder)
