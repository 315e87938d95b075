"""A target that is cut over all ranks of a run (tensor parallelism), because it is too large for one device.

Its layers are cut as transformers' plan for the family says. Embedding and language head, whose rows drafters and
losses need, stay whole on every rank. A forward of such a target is one of all ranks together: in training they take
turns, each with a batch of its own. So every rank still trains on its own data, and sums over ranks are what they are
without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig

from dflash_lightning.device import has_gpu, use_gpu
from dflash_lightning.errors import SettingError
from dflash_lightning.target.families import causal_lm_class, setting
from dflash_lightning.types import TargetFeatures

_SETTING = "target.tensor_parallel"
_PATIENCE = timedelta(minutes=30)  # that ranks wait for one another
_STARTED_BY = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def check_ranks(config: PretrainedConfig, name: str) -> int:
    """How many ranks the target is cut over: all that were started. Reads environment and configuration only.

    Raises:
        ValueError: this is the only process, or the family or its number of heads cannot be cut.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or any(variable not in os.environ for variable in _STARTED_BY):
        raise SettingError(
            _SETTING,
            f"{name} is to be cut over the ranks of this run, but no others are there while it is loaded",
            do="Start them first: torchrun --nproc-per-node=N -m dflash_lightning fit RECIPE trainer=ddp "
            "trainer.devices=N. Or set it to false",
        )
    if not (setting(config, "base_model_tp_plan") and causal_lm_class(config)):
        raise SettingError(
            _SETTING,
            f"transformers has no plan for cutting family {config.model_type!r} ({name})",
            do="Set it to false, or use a smaller dtype or a quantised checkpoint",
        )
    heads = {key: setting(config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    if uneven := {key: count for key, count in heads.items() if count is not None and count % world}:
        stated = " and ".join(f"{key} {count}" for key, count in uneven.items())
        raise SettingError(
            _SETTING, f"{stated} of {name} cannot be cut over {world} ranks evenly", do="Use fewer ranks"
        )
    return world


def cutting(config: PretrainedConfig, name: str) -> dict[str, Any]:
    """Start ``torch.distributed`` if it is not, and say to ``from_pretrained`` how to cut the target.

    Raises:
        ValueError: see ``check_ranks``.
    """
    world = check_ranks(config, name)
    if not torch.distributed.is_initialized():
        on_gpu = has_gpu()
        if on_gpu:
            use_gpu(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    whole_parts = {part: "replicate" for part in _rows_of_tokens(config)}
    return {"distributed_config": DistributedConfig(tp_size=world, tp_plan=whole_parts)}


def _rows_of_tokens(config: PretrainedConfig) -> list[str]:
    """Names of the embedding and the language head in the family's model."""
    model_class = causal_lm_class(config)
    assert model_class is not None
    with torch.device("meta"):
        model = model_class(config)
    wanted = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is part for part in wanted)]


def is_cut(model: nn.Module) -> bool:
    """Whether some weights of ``model`` are cut over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of the shape it states; every rank must call this for one that is cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_values(tensor: Tensor) -> Tensor:
    """A weight as a plain tensor of the shape it states: gathered if it is cut, as numbers if it is quantised.

    Every rank must call this for a weight that is cut.
    """
    tensor = whole(tensor)
    return tensor.dequantize() if is_traceable_wrapper_subclass(tensor) else tensor  # type: ignore[no-untyped-call]


def in_turns(
    run: Callable[[Int[Tensor, "b s"], Int[Tensor, "b s"], bool], TargetFeatures],
    input_ids: Int[Tensor, "B S"],
    position_ids: Int[Tensor, "B S"],
    packed: bool,
) -> TargetFeatures:
    """``run`` on the batch of every rank, by all ranks together; the result of this rank's own.

    Every rank must call this, each with a batch of any shape. It waits for the device.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = torch.tensor([*input_ids.shape, packed], device=input_ids.device)
    all_shapes = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(all_shapes, own)
    found: TargetFeatures | None = None
    for turn, (rows, width, is_packed) in enumerate(torch.stack(all_shapes).tolist()):
        batch = torch.stack([input_ids, position_ids]) if turn == rank else input_ids.new_empty(2, rows, width)
        torch.distributed.broadcast(batch, turn)
        result = run(batch[0], batch[1], bool(is_packed))
        found = result if turn == rank else found
    assert found is not None
    return found


def check_whole(cut: bool, where: str, what: str, do: str = f"Use another, or set {_SETTING}=false") -> None:
    """Refuse what cannot be done with a target that is ``cut`` over ranks.

    Raises:
        ValueError: names the setting ``where``.
    """
    if cut:
        raise SettingError(where, f"{what}, but the target is cut over ranks ({_SETTING})", do=do)
