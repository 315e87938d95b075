"""What YAML makes of a recipe file before anybody composes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dflash_lightning.recipe.faults import Fault

_TRAPS = re.compile(r"[-+]?(\d+(:[0-5]?\d)+|0\d+)$")


def yaml_traps(file: Path) -> Iterator[Fault]:
    """Plain scalars that YAML silently turns into another number: ``1:00:00`` (base 60) and ``0010`` (octal).

    And what no tree can hold: an alias inside its own anchor.
    """
    with file.open(encoding="utf-8") as stream:
        try:
            events = list(yaml.parse(stream, Loader=yaml.SafeLoader))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            place = str(error).replace("\n", " ")
            yield Fault(str(file), f"is no valid YAML ({place})", "Mend the line it names")
            return
    open_anchors: list[str | None] = []
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
            at = f"{file}:{event.start_mark.line + 1}"
            yield Fault(at, f"*{event.anchor} stands inside what it names, without end", "Write the value meant")
        if isinstance(event, yaml.ScalarEvent) and event.style is None and _TRAPS.match(event.value):
            at = f"{file}:{event.start_mark.line + 1}"
            number = yaml.safe_load(event.value)
            yield Fault(
                at, f"YAML reads {event.value} as {number}", f'Quote it ("{event.value}") or write the number meant'
            )


def read_mapping(file: Path) -> dict[str, Any]:
    """A file's content as it stands; empty where it is no mapping."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
