"""A drafter that is spread over the ranks: FSDP2, by way of Lightning's ``ModelParallelStrategy``.

Every rank keeps its share of the weights, of the gradients and of AdamW's moments. Weights are whole only while they
are used. The target is no part of it: each rank has its own. Checkpoints are those of one process, tensor by tensor, so
a run may go on under another strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.parallel import is_cut, whole


class ShardedStrategy(ModelParallelStrategy):
    """All ranks share one drafter, and every rank reads batches of its own.

    Unlike Lightning's, it restores before it makes optimizers, as other strategies do: the schedule of a run depends on
    what it resumes from. A checkpoint is one file with whole tensors.
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,  # of torch.distributed; null: nccl on GPUs, gloo on CPUs
        timeout_minutes: int = 30,  # that ranks wait for one another before they give up
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, with as many shards as there are processes on all machines."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: weights are sharded in ``configure_model``, which comes before."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: by ``load_optimizer_state_dict``."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The file, whole, on every rank."""
        return super(ModelParallelStrategy, self).load_checkpoint(checkpoint_path, weights_only=weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on the CPU for rank 0, which writes them; empty elsewhere. Every rank must call it."""
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Cut the whole tensors of a checkpoint and take this rank's share of each."""
        assert self.lightning_module is not None
        own, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
        shards = {name: _like(value, own[name]) if name in own else value for name, value in saved.items()}
        self.lightning_module.load_state_dict(shards, strict=strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As one process saves it, on rank 0; without state elsewhere. Every rank must call it."""
        found = optimizer.state_dict()
        return {**found, "state": {number: self._gathered(state) for number, state in found["state"].items()}}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The same for AdamW's moments, which are cut as their parameters are."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            like = dict(zip(numbers, parameters, strict=True))
            state = {
                number: {name: _like(value, like[number]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    def _gathered(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in tensors.items():
            full = whole(value).detach().cpu() if isinstance(value, Tensor) else value
            if self.is_global_zero:
                found[name] = full
        return found


def shard(model: DraftModel, mesh: DeviceMesh) -> None:
    """Spread the weights of ``model`` over the ranks of ``mesh``, along their first dimension.

    Every unit of the drafter is gathered when it runs and forgotten after it. What is left (conditioning, output norm,
    head) stays whole from the forward to the end of the backward, because heads are asked after ``block_hidden``.

    Raises:
        ValueError: a weight has no dimension to cut.
    """
    if single := [name for name, p in model.named_parameters() if p.ndim == 0]:
        raise SettingError(
            "trainer.strategy",
            f"{single[0]} is a single number, which cannot be sharded",
            do="Use trainer.strategy=ddp, or give the weight one dimension",
        )
    for unit in model.drafter.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "block_hidden")


def local(tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*part"]:
    """This rank's share of a tensor, in its own memory; of one that is not sharded the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(value: Any, own: Tensor) -> Any:
    """``value`` cut as ``own`` is, if it is a tensor of its shape; every rank holds all of ``value``."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def gathered(model: DraftModel, target: FrozenTarget, earlier: DraftModel | None = None) -> DraftModel:
    """A drafter with all weights of the sharded ``model`` on this rank; ``earlier``, if it is given, made up to date.

    It has the configuration object of ``model``. Every rank must call this.
    """
    if earlier is None:
        earlier = DraftModel(model.config)
        nn.Module.to(earlier, model.device)
        earlier.bind(target)
    # By name: parameters, and buffers whether or not they are saved.
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(earlier, kind)())
        for name, tensor in getattr(model, kind)():
            own[name].copy_(whole(tensor))
    return earlier


def total_norm(gradients: Sequence[Float[Tensor, ...]]) -> Float[Tensor, ""]:
    """The norm of all gradients over all ranks; every rank must call this if they are sharded."""
    norm = nn.utils.get_total_norm([local(gradient) for gradient in gradients])
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return norm
    squares = norm.square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, limit: float, norm: Float[Tensor, ""] | None, by: str | None = None) -> None:
    """Scale gradients of norm ``norm``, a scalar, down to ``limit``; null bounds each number by ``limit`` instead.

    ``by`` is Lightning's ``gradient_clip_algorithm``: "value" has no use for the norm.

    A norm that is no number (its step will not be made) leaves them as they are: it must not spread over all of them.
    """
    some = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = None if norm is None or by == "value" else torch.where(torch.isfinite(norm), norm, 0.0)
    if any(isinstance(p.grad, DTensor) for p in some):
        # What torch does with plain gradients. An empty share of a rank is left as it is.
        for gradient in (local(p.grad) for p in some if p.grad is not None):
            if norm is None:
                gradient.clamp_(-limit, limit)
            else:
                gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    elif norm is None:
        nn.utils.clip_grad_value_(some, limit)
    else:
        nn.utils.clip_grads_with_norm_(some, limit, norm)


def broken(model: nn.Module) -> list[str]:
    """Parameters that hold a NaN or an infinity on some rank; every rank must call this if they are sharded."""
    flags = torch.stack([torch.isfinite(local(p)).all() for p in model.parameters()])
    if is_cut(model):
        numbers = flags.int()
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN)
        flags = numbers.bool()
    return [name for (name, _), good in zip(model.named_parameters(), flags.tolist(), strict=True) if not good]
