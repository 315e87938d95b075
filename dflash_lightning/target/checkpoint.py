"""Loading weights without tolerance: every tensor of the model is the file's own, or one error says which are not.

transformers fills what a checkpoint lacks at random and goes on. A drafter trained against such a target, or an answer
of it, is worth nothing, and nobody can make the same target again.
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel

from dflash_lightning.errors import SettingError
from dflash_lightning.target.checkpoint_files import IGNORED, list_names
from dflash_lightning.target.families import setting

# What building a model and reading its files may raise, from a wrong setting to a broken archive.
_FAILURES = (
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError),
    *(EOFError, ImportError, SafetensorError, pickle.UnpicklingError),
)
_REPORTER = "transformers.modeling_utils"
_WHOLE_LAYER = 5  # tensors of a decoder layer, at the least
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
# Parts of a checkpoint that are no language model, and are not needed of it.
_OTHER_PARTS = re.compile(
    r"^(model\.)?(visual|vision\w*|image\w*|audio\w*|speech\w*|multi_modal\w*|mm_\w+|v_head|value_head|score"
    r"|classifier|medusa\w*)\."
)
_WRAPPERS = {"state_dict", "model_state_dict", "model", "module", "net"}  # what trainers wrap weights into
_PREFIXES = {
    "_orig_mod.": "torch.compile puts it there: save model._orig_mod",
    "module.": "DistributedDataParallel puts it there: save model.module",
    "base_model.model.": "PEFT puts it there: load the adapter, call merge_and_unload() and save the result",
    "_fsdp_wrapped_module.": "FSDP puts it there: save the full state dict",
    "language_model.": "it is the language model of a multimodal one: save that part by itself",
    "model.language_model.": "it is the language model of a multimodal one: save that part by itself",
}


def load_model(load: Callable[..., Any], config: PretrainedConfig, name: str) -> PreTrainedModel:
    """What ``load`` (transformers' ``from_pretrained`` with all but the loading report) gives, if it is whole.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape (the first few of each are named), a file
            cannot be read, or the model cannot be built from its configuration.
    """
    reports: list[str] = []
    try:
        with _collecting_reports(reports):
            model, info = load(output_loading_info=True, ignore_mismatched_sizes=True)
    except ImportError as error:
        raise SettingError(
            "target", f"{name} needs a package that is not installed here", do=_first_line(error)
        ) from error
    except _FAILURES as error:
        detail = _failed_conversions(reports) or f"{type(error).__name__}: {_first_line(error)}"
        raise SettingError(
            "target",
            f"the model at {name} cannot be loaded ({detail})",
            do="Its config.json and its weights do not fit together, or a file is damaged. Copy or download it again",
        ) from error
    _check_tensors(config, info, name)
    return model


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _collecting_reports(reports: list[str]) -> Iterator[None]:
    """transformers' table of missing and unexpected tensors goes to ``reports``: faults are said here, and once."""

    def collect(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            reports.append(text)
        return "LOAD REPORT" not in text

    logger = logging.getLogger(_REPORTER)
    logger.addFilter(collect)
    try:
        yield
    finally:
        logger.removeFilter(collect)


def _failed_conversions(reports: list[str]) -> str:
    """Tensors that transformers could not join (the experts of a layer, say), and why."""
    names = [line.split("|")[0].strip() for text in reports for line in text.splitlines() if "| CONVERSION" in line]
    reasons = [line for text in reports for line in text.splitlines() if re.match(r"\w*Error: \S", line)]
    if not names:
        return ""
    return f"parts of {list_names(names)} are missing or of another shape: {(reasons or ['unknown reason'])[0]}"


def _check_tensors(config: PretrainedConfig, info: Mapping[str, Any], name: str) -> None:
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not IGNORED.search(key))
    unexpected = _without_draft_layers(config, unexpected)
    others = [key for key in unexpected if _OTHER_PARTS.search(key)]
    unexpected = [key for key in unexpected if key not in others]
    shapes = [f"{key} {list(a)} instead of {list(b)}" for key, a, b in sorted(info["mismatched_keys"])]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if any(faults.values()):
        stated = "; ".join(f"{kind}: {list_names(found)}" for kind, found in faults.items() if found)
        raise SettingError(
            "target",
            f"the weights of {name} are not those of the model that its configuration describes",
            do=f"{stated}. {_explanation(config, missing, unexpected)}Nothing is filled in at random: correct the "
            "checkpoint",
        )
    if others:
        parts = sorted({key.removeprefix("model.").split(".")[0] for key in others})
        warnings.warn(
            f"target: {name} also holds {len(others)} tensors of {', '.join(parts)}, which its language model has no "
            "use for. They are left out.",
            stacklevel=4,
        )


def _without_draft_layers(config: PretrainedConfig, names: Collection[str]) -> list[str]:
    """Without the layers behind the last one that predict several tokens ahead (DeepSeek-V3, GLM): no part of it."""
    count = int(setting(config, "num_hidden_layers", default=0))
    extra = int(setting(config, "num_nextn_predict_layers", "num_mtp_layers", default=0))
    drafting = {_layer(name) for name in names if ".eh_proj." in name} | set(range(count, count + extra))
    return [name for name in names if (layer := _layer(name)) is None or layer < count or layer not in drafting]


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found[3])


def _explanation(config: PretrainedConfig, missing: list[str], unexpected: list[str]) -> str:
    """The likely cause, with a remedy; empty when none is known."""
    needed = set(missing)
    if set(unexpected) & _WRAPPERS:
        return f"The file is a training checkpoint: the weights are inside its {unexpected[0]!r}. Save them alone. "
    for name in unexpected:
        for prefix, remedy in _PREFIXES.items():
            plain = name.removeprefix(prefix)
            if plain != name and (plain in needed or plain.removeprefix("model.") in needed):
                return f"The names in the file begin with {prefix!r}; {remedy}. "
    if any(".base_layer." in name or "lora_" in name for name in unexpected):
        return "The file holds a LoRA adapter: call merge_and_unload() on the model and save the result. "
    count = int(setting(config, "num_hidden_layers", default=0))
    beyond = sorted({layer for name in unexpected if (layer := _layer(name)) is not None and layer >= count})
    if beyond:
        return f"The file holds layers 0..{beyond[-1]}, but config.json says num_hidden_layers {count}. "
    absent = {_layer(name) for name in missing}
    first = min((layer for layer in absent if layer is not None), default=0)
    per_layer = len(missing) / max(1, len(absent))
    if first > 0 and absent == set(range(first, count)) and per_layer >= _WHOLE_LAYER:
        return f"config.json says num_hidden_layers {count}, but layers {first}..{count - 1} are not in the file. "
    if any(name.startswith(("lm_head.", "embed_out.")) for name in missing):
        return "Without a head of its own the model needs tie_word_embeddings: true in config.json, if it was made so. "
    return ""
