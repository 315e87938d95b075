"""What the intact model computes for a few tokens: the truth that features, head and packing are held against."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dflash_lightning.errors import SettingError
from dflash_lightning.target.families import attention_spans
from dflash_lightning.target.parallel import plain_values

SHORT = 8  # tokens of a probe where no window asks for more
TAIL = 3  # tokens of a second document
LONGEST = 160  # a probe past a larger window would cost more than it shows
_NAMED = 4  # tensors that an error names


@dataclass(frozen=True)
class Intact:
    """One forward of the model as it was loaded: ``outputs[i]`` is what decoder layer ``i`` returned."""

    ids: Int[Tensor, "1 S"]
    outputs: list[Float[Tensor, "1 S H"]]
    logits: Float[Tensor, "1 S V"]


def probe_length(config: PretrainedConfig, max_positions: int) -> int:
    """Tokens of a probe: some past the largest window or chunk that is small enough, and no more than the model has."""
    spans = [span for span in attention_spans(config) if span + SHORT <= LONGEST]
    return max(1, min(SHORT + max(spans, default=0), max_positions))


@torch.no_grad()
def run_intact(model: PreTrainedModel, layers: Iterable[nn.Module], ids: Int[Tensor, "1 S"]) -> Intact:
    """The model's own forward over ``ids``, with hooks on its decoder layers."""
    outputs: list[Tensor] = []
    with _listening(layers, outputs):
        logits = model(input_ids=ids, use_cache=False).logits
    return Intact(ids, outputs, logits)


@contextmanager
def _listening(layers: Iterable[nn.Module], outputs: list[Tensor]) -> Iterator[None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def token_errors(found: Float[Tensor, "S D"], expected: Float[Tensor, "S D"]) -> Float[Tensor, " S"]:
    """Largest difference of each token, relative to its largest value: one token's size says nothing of another's."""
    difference = (found.float() - expected.float()).abs().amax(-1)
    return difference / expected.float().abs().amax(-1).clamp_min(1e-6)


def typical_error(errors: Float[Tensor, " S"], groups: Sequence[slice]) -> float:
    """The largest median of a group of tokens.

    What goes wrong in principle (a leak, a window that is not kept) shows in every token of a group. A single token may
    differ by rounding alone: where two experts are nearly tied, the other one is chosen.
    """
    return max(float(errors[group].median()) for group in groups if len(errors[group]))


def check_finite(model: PreTrainedModel, intact: Intact, name: str) -> None:
    """Refuse weights and results that are NaN or infinite: greedy decoding would answer with token 0 for ever.

    Weights that a download left blank are warned of.

    Raises:
        ValueError: names the tensors, or the first layer whose output is not finite.
    """
    broken, blank = _flawed(model)
    if broken:
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        raise SettingError(
            "target",
            f"weights of {name} are NaN or infinite: {', '.join(broken[:_NAMED])}{more}",
            do=f"{_remedy(model.dtype)}",
        )
    places = [f"decoder layer {i} gives" for i in range(len(intact.outputs))] + ["its language head gives"]
    for place, tensor in zip(places, [*intact.outputs, intact.logits], strict=True):
        if not bool(torch.isfinite(tensor).all()):
            raise SettingError(
                "target",
                f"{name} computes NaN or infinity in {_plain(model.dtype)}: {place} it for a few test tokens",
                do=f"{_remedy(model.dtype)}",
            )
    if blank:  # no error, for a model may have been made so
        more = f" and {len(blank) - _NAMED} more" if len(blank) > _NAMED else ""
        warnings.warn(
            f"target: weights of {name} are zero, wholly or at the end: {', '.join(blank[:_NAMED])}{more}. A download "
            "that did not finish leaves such files: compare their size or sha256 with the original's.",
            stacklevel=2,
        )


def _flawed(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names of tensors that are not finite, and of weights that are blank; each is gathered or dequantised once."""
    vocabulary = {
        id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module
    }
    weights = {id(parameter) for parameter in model.parameters()}
    broken, blank = [], []
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or tensor.element_size() < 2:  # codes of a quantised weight
            continue
        values = plain_values(tensor.detach())
        if not _is_finite(values):
            broken.append(key)
        if id(tensor) in weights and _is_blank(values, padded=id(tensor) in vocabulary):
            blank.append(key)
    return broken, blank


def _is_blank(tensor: Tensor, *, padded: bool) -> bool:
    """Whether a matrix is zero, wholly or in its last eighth: what a download leaves that did not finish.

    The rows of a vocabulary may end in zeros: they are padding.
    """
    if tensor.dim() < 2 or not len(tensor):
        return False
    tail = tensor[-(-7 * len(tensor) // 8) :] if len(tensor) >= 8 and not padded else tensor
    return not bool(tail[-1].any()) and not bool(tail.any())


def _is_finite(tensor: Tensor) -> bool:
    # A sum needs no room for a copy; it may overflow by itself.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())


def _remedy(dtype: torch.dtype) -> str:
    again = "copy or download it again, or use the checkpoint that it was made from."
    if dtype == torch.float16:
        return (
            "Most likely values overflow float16, whose largest number is 65504: use target.dtype=float32 or bfloat16 "
            f"(--dtype). Otherwise the checkpoint is damaged: {again}"
        )
    return f"The checkpoint is damaged, or its training diverged: {again}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
