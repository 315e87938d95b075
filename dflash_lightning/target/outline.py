"""A target without its decoder layers: embedding, final norm and language head are read, and no other tensor is.

A run whose features are computed on servers needs nothing else of the target, so that a target of any size fits beside
its drafter. Only the files that hold these tensors are opened (of a hub repository: fetched).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from dflash_lightning.errors import SettingError
from dflash_lightning.target.absent import AbsentLayer
from dflash_lightning.target.families import VERIFIED_FAMILIES, causal_lm_class, find_anatomy, setting

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Find = Callable[[str], Path | None]  # a file of the checkpoint by its name; null where there is none


def load_outline(
    find: Find, config: PretrainedConfig, name: str, *, dtype: torch.dtype | str, generation: GenerationConfig | None
) -> PreTrainedModel:
    """The model of ``config`` with an ``AbsentLayer`` in the place of every decoder layer.

    ``dtype`` "auto" is that of the tensors. ``generation`` null leaves what the configuration says.

    Raises:
        ValueError: the model's code is its own, or its weights are no safetensors files that hold these tensors.
    """
    model_class = causal_lm_class(config)
    if model_class is None:
        raise _whole(name, "its model code is its own, so nobody knows which tensors are embedding, norm and head")
    with torch.device("meta"):
        model = model_class(config)
    anatomy = find_anatomy(model, name)
    layers = nn.ModuleList(AbsentLayer(name) for _ in anatomy.layers)
    anatomy.decoder._modules[anatomy.layers_name] = layers
    tied = bool(setting(config, "tie_word_embeddings", default=False))
    _fill(model, _Tensors(find, name), dtype, without_head=tied)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if generation is not None:
        model.generation_config = generation
    if config.model_type not in VERIFIED_FAMILIES:
        warnings.warn(
            f"target: {name} is of family {config.model_type!r}, which is not verified, and without its layers it "
            "cannot be checked that its language head gives the model's own logits. Verified families: "
            f"{', '.join(VERIFIED_FAMILIES)}.",
            stacklevel=4,
        )
    return model


def folder_or_hub(location: str, revision: str | None) -> Find:
    """Files of a local folder, or of a repository on the hub, which are fetched when they are asked for."""
    if (folder := Path(location)).is_dir():
        return lambda file: folder / file if (folder / file).is_file() else None

    def fetch(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(location, file, revision=revision))
        except LocalEntryNotFoundError as error:  # one of the other kind too: nothing is known of the file
            what = f"{file} could not be fetched from {location}: {str(error).splitlines()[0]}"
            raise SettingError("target", what, do="Try again where the hub can be reached") from error
        except EntryNotFoundError:
            return None

    return fetch


class _Tensors:
    """Single tensors of a checkpoint's safetensors files, by the model's names for them."""

    def __init__(self, find: Find, name: str) -> None:
        self._find, self._name = find, name
        self._files: dict[str, str] | None = None  # which file holds a tensor; null: there is one file
        index = find(_INDEX) if find(_FILE) is None else None
        try:
            if index is not None:
                self._files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                "target", f"{index} is no index of weight files ({error})", do="Copy it again"
            ) from error

    def read(self, name: str, prefix: str) -> Tensor:
        """The tensor ``name``; a checkpoint of the decoder alone leaves out its ``prefix``."""
        for spelling in (name, name.removeprefix(f"{prefix}.")):
            file = _FILE if self._files is None else self._files.get(spelling)
            path = None if file is None else self._find(file)
            if path is None:
                continue
            try:
                with safe_open(path, "pt") as tensors:
                    if spelling in tensors.keys():  # noqa: SIM118
                        return tensors.get_tensor(spelling)
            except (SafetensorError, OSError) as error:
                raise SettingError(
                    "target", f"{path} is cut short or no safetensors file ({error})", do="Copy or download it again"
                ) from error
        raise _whole(self._name, f"no safetensors file of it holds the tensor {name}")


def _fill(model: PreTrainedModel, tensors: _Tensors, dtype: torch.dtype | str, *, without_head: bool) -> None:
    """Read every parameter that is left; buffers that are made from the configuration hold NaN: nothing uses them."""
    head = model.get_output_embeddings()
    skipped = {id(head.weight)} if without_head else set()
    wanted = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in skipped]
    if without_head:
        embedding = model.get_input_embeddings().weight
        wanted += [(name, p) for name, p in model.named_parameters() if p is embedding and id(p) in skipped]
    read = {name: _checked(name, tensors.read(name, model.base_model_prefix), p) for name, p in wanted}
    model.to_empty(device="cpu")
    for name, value in read.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        module._parameters[own] = nn.Parameter(value if dtype == "auto" else value.to(dtype), requires_grad=False)  # type: ignore[arg-type]
    for buffer in model.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0)


def _checked(name: str, value: Tensor, wanted: Tensor) -> Tensor:
    if value.shape != wanted.shape or not value.is_floating_point() or value.element_size() < 2:
        raise SettingError(
            "target",
            f"tensor {name} is {value.dtype} {list(value.shape)} in the checkpoint, but config.json describes "
            f"{list(wanted.shape)}",
            do="They do not fit together, or the tensor is quantised: use the checkpoint that it was made from",
        )
    if not bool(torch.isfinite(value).all()):
        raise SettingError("target", f"tensor {name} holds NaN or infinity", do="Copy or download the checkpoint again")
    return value


def _whole(name: str, why: str) -> SettingError:
    return SettingError(
        "target.layers",
        f"{name} cannot be loaded without its decoder layers: {why}",
        do="Save it as safetensors with transformers, or set target.layers=true, which loads all of it",
    )
