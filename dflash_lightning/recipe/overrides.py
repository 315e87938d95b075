"""What stands behind a recipe on the command line, in Hydra's words."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from dflash_lightning.recipe.faults import Fault, hint_for
from dflash_lightning.recipe.folders import folder_words, folders_of, group_options, misplaced, recipes_folder
from dflash_lightning.recipe.renamed import renamed_option

# Any value of this group that is no option is a model's path, hub id or GGUF file: "target=Qwen/Qwen3-4B".
TARGET, _CUSTOM = "target", "custom"
# What one may write for an option because its effect is named so.
_SAME = {"data.features=served": "data=served"}


class Overrides:
    """Overrides of one recipe file, translated one by one; those that cannot be followed become faults.

    ``words`` are for Hydra, ``chosen`` the groups for which an option was chosen, ``refused`` those whose option does
    not exist, ``set_keys`` the dotted keys that are given a value.
    """

    def __init__(self, file: Path, overrides: list[str]) -> None:
        self.file = file
        self.options = group_options(*folders_of(file))
        self.words: list[str] = []
        self.faults: list[Fault] = []
        self.chosen: set[str] = set()
        self.refused: set[str] = set()
        self.set_keys: set[str] = set()
        for text in overrides:
            self._add(_SAME.get(text, text))

    def _add(self, text: str) -> None:
        group, _, value = text.partition("=")
        if group == TARGET and not value.startswith("[") and value not in (*self.options[TARGET], "null", ""):
            self._add_target(text, value)
            return
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            do = "Write key=value, quoting odd characters"
            self.faults.append(Fault(text, f"cannot be read as an override ({reason})", do))
            return
        if override.is_sweep_override():
            do = "Write key=[a,b] for a list, and one run per value otherwise"
            self.faults.append(Fault(text, "names several values, but a run has one", do))
        elif not override.key_or_group:
            self.faults.append(Fault(text, "names no key", "Write key=value"))
        elif override.key_or_group in self.options:
            self._add_option(text, override)
        else:
            # A key that the recipe does not have is added (++), so that it is reported with all other faults.
            self.words.append(f"++{text}" if override.type is OverrideType.CHANGE else text)
            self.set_keys.add(override.key_or_group)

    def _add_target(self, text: str, value: str) -> None:
        near = get_close_matches(value, self.options[TARGET], n=1, cutoff=0.75)
        if near and "/" not in value and not Path(value).exists():
            self._refuse(
                TARGET, [Fault(text, "no such option, and no such path", hint_for(value, self.options[TARGET]))]
            )
            return
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        self.words += [f"{TARGET}={_CUSTOM}", f'{TARGET}.source="{quoted}"']

    def _add_option(self, text: str, override: Override) -> None:
        if faults := list(self._option_faults(override)):
            self._refuse(override.key_or_group, faults)
            return
        if override.type is not OverrideType.DEL:
            self.chosen.add(override.key_or_group)
        self.words.append(text)

    def _refuse(self, group: str, faults: list[Fault]) -> None:
        self.refused.add(group)
        self.faults += faults

    def _option_faults(self, override: Override) -> Iterator[Fault]:
        group, value = override.key_or_group, override.value()
        known = self.options[group]
        if value is None and override.type is not OverrideType.DEL:
            yield Fault(override.input_line or "", "a group takes an option, not null", hint_for("", known))
        if override.type is OverrideType.ADD:
            do = f"Write {group}=[OPTION,OPTION] for several, or {group}={value} for this one alone"
            yield Fault(override.input_line or "", "a group that has its option cannot be added to", do)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and override.type is not OverrideType.DEL and name not in known:
                place = folder_words(self.file, f"{group}/")
                do = renamed_option(group, name) or misplaced(self.file, group, name)
                do = do or f"{hint_for(name, known)}{self._own()}"
                yield Fault(f"{group}={name}", f"no such option in {place}", do)

    def _own(self) -> str:
        """Where options of one's own are put, for a recipe that has no place for them."""
        if folders_of(self.file)[0] != recipes_folder().resolve():
            return ""
        return ". Options of your own lie in GROUP/NAME.yaml beside a recipe of your own (dflash fit mine.yaml)"
