"""Stand-ins for decoder layers whose weights were not read, because their features are computed somewhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from dflash_lightning.errors import SettingError


class AbsentLayer(nn.Module):
    """In the place of a decoder layer: it has no weights, and whoever runs it hears so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise no_layers(self.name)


def are_absent(layers: Iterable[nn.Module]) -> bool:
    """Whether decoder layers were not read."""
    return any(isinstance(layer, AbsentLayer) for layer in layers)


def no_layers(name: str, what: str = "it is to compute something that needs them") -> SettingError:
    """The one error for a use of decoder layers that are not there."""
    return SettingError(
        "target.layers",
        f"the decoder layers of {name} were not read, only its embedding, final norm and language head, but {what}",
        do="Set target.layers=true, which loads the whole target here, or leave out what needs it",
    )
