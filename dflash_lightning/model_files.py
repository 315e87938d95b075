"""A drafter on disk: z-lab's tensor names, strict loading, and writes that leave no half folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file, logging

from dflash_lightning.draft_config import NESTED, DraftConfig, lift_settings

PARTS = ("conditioning.", "drafter.", "head.")
COMPILED = "_orig_mod."


def file_names(model: torch.nn.Module) -> dict[str, str]:
    """The name under which each entry of ``model.state_dict()`` is saved: z-lab's, without the part's name in front.

    ``conditioning.fc.weight`` is saved as ``fc.weight``. What ``torch.compile`` puts in front of a module is left out.
    """
    names = {}
    for key in model.state_dict():
        name = key.replace(COMPILED, "")
        part = next((part for part in PARTS if name.startswith(part)), "")
        names[key] = name.removeprefix(part)
    assert len(set(names.values())) == len(names), "two parts save a tensor under one name"
    return names


def read_draft_config(folder: str | Path, **hub: Any) -> DraftConfig:
    """The configuration in ``folder`` (or in a hub repository); files of z-lab's layout get the parts they imply.

    Raises:
        ValueError: there is no config.json, or it is not a drafter's.
    """
    path = Path(folder) / "config.json"
    if Path(folder).exists() and not path.is_file():
        raise ValueError(
            f"{folder}: there is no config.json, so it holds no drafter. Give the folder of a saved drafter."
        )
    raw = json.loads(Path(str(cached_file(str(folder), "config.json", **hub))).read_text())
    settings = lift_settings(raw)
    if raw.get("model_type") != DraftConfig.model_type:
        settings = _adopt(settings, folder)
    return DraftConfig.from_dict(settings)


def _adopt(settings: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Settings of a z-lab style file as ours: the same fields, plus the parts that its weights belong to."""
    if "target_layer_ids" not in settings:
        raise ValueError(
            f"{folder}: config.json states no target_layer_ids, at the top level or in {NESTED!r}, so it is no drafter "
            f"known here (model_type {settings.get('model_type')!r}). Give a saved drafter's folder."
        )
    dropped = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")
    kept = {key: value for key, value in settings.items() if key not in dropped}
    kept.setdefault("target_hidden_size", kept.get("hidden_size", 0))
    if kept.get("head_dim") is None and kept.get("num_attention_heads"):
        kept["head_dim"] = kept.get("hidden_size", 0) // kept["num_attention_heads"]
    types = kept.get("layer_types") or []
    if "sliding_attention" not in types:
        kept["sliding_window"] = None
    ids = kept["target_layer_ids"]
    kept["components"] = {
        "conditioning": {"name": "kv_injection", "settings": {"target_layer_ids": ids, "num_features": len(ids)}},
        "drafter": {"name": "block_transformer", "settings": {"num_layers": kept.get("num_hidden_layers", 0)}},
        "head": {"name": "marginal", "settings": {}},
    }
    return kept


def load_draft_weights(
    cls: type[Any], load: Callable[..., Any], path: str | Path, *args: Any, config: Any = None, **kwargs: Any
) -> Any:
    """What ``load`` (transformers' ``from_pretrained``) makes of ``path``, with our names and without tolerance.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; all of them are listed.
    """
    if config is None:
        hub = {key: kwargs[key] for key in ("revision", "cache_dir", "token", "local_files_only") if key in kwargs}
        config = read_draft_config(path, **hub)
    with torch.device("meta"):
        names = file_names(cls(config))
    want_info = kwargs.pop("output_loading_info", False)
    # One pattern per first name ("fc", "layers", ..): `^fc\.` becomes `conditioning.fc.`.
    renamed = {(own[: len(own) - len(name)], name.split(".")[0]) for own, name in names.items() if own != name}
    mapping = {rf"^{first}\.": f"{part}{first}." for part, first in sorted(renamed)}
    kwargs |= {"key_mapping": mapping, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = load(str(path), *args, config=config, **kwargs)
    faults = {
        "missing": sorted(names.get(key, key) for key in info["missing_keys"]),
        "unexpected": sorted(names.get(key, key) for key in info["unexpected_keys"]),
        "of another shape": sorted(f"{names.get(key, key)} {a} != {b}" for key, a, b in info["mismatched_keys"]),
    }
    if any(faults.values()):
        stated = "; ".join(f"{kind}: {found}" for kind, found in faults.items() if found)
        raise ValueError(
            f"{path}: the weights are not those of the drafter that config.json describes ({stated}). "
            "The file belongs to another kind or version of drafter; nothing was loaded."
        )
    model._weight_conversions = []  # saving renames by ``file_names``, not by transformers' record of this load
    return (model, info) if want_info else model


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' bars off: a drafter is small, and training shows a bar of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_folder(folder: str | Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` on an empty folder next to ``folder``, then put it in its place by renaming.

    What stands there is never half of something. A folder cannot be exchanged in one step, though: between two renames
    there is none, and a kill in that instant leaves the former one under the name ``.<folder>.old-<process>``.

    Raises:
        OSError: it could not be written (no space, no permission); what was there before is untouched.
    """
    final = Path(folder)
    new, old = (final.parent / f".{final.name}.{kind}-{os.getpid()}" for kind in ("new", "old"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        write(new)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(
            f"The drafter could not be written to {final} ({error}). What was there before is unchanged. "
            "Free some disk space or choose another folder."
        ) from error
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
