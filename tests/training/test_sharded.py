"""A sharded drafter in one process: its gradients are those of a whole one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import Carryover, SeededTargetKV, TokenFusion
from dflash_lightning.drafter import CausalTransformer, FeedbackTransformer, HybridDrafter
from dflash_lightning.head import LatticeHead, MarkovHead, RefinerHead, SelectorHead
from dflash_lightning.loss import CandidateCrossEntropy, CrossEntropy, LatticeLoss, RefinedLoss, total_loss
from dflash_lightning.model import DraftModel
from dflash_lightning.module import DraftModule
from dflash_lightning.testing.toys import toy_batch, toy_module
from dflash_lightning.training.rounds import play_round
from dflash_lightning.training.sharded import clip, local, shard, total_norm, whole
from dflash_lightning.types import StepContext

TOKENS = Anchored(block_size=4, num_anchors=24, inputs="tokens", label_layout="anchor_first")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of one process."""
    if torch.distributed.is_initialized():  # by a run of an earlier test in this process
        torch.distributed.destroy_process_group()
    store = tmp_path_factory.mktemp("mesh") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def gradients(module: DraftModule) -> dict[str, torch.Tensor]:
    batch = toy_batch(module)
    if module.draft_model.conditioning.carries:
        batch = play_round(module.draft_model, module.target, batch, module.required(), module._lm)
    out, features = module.outputs(batch)
    shares = module.loss_shares(batch, out, features, StepContext(0, 10, 0), batch.window_totals)
    total_loss(shares).backward()
    return {name: whole(p.grad) for name, p in module.draft_model.named_parameters() if p.grad is not None}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "layer by layer": lambda: {"head": MarkovHead(rank=5)},
    "slots in turn": lambda: {
        "drafter": FeedbackTransformer(num_layers=2),
        "conditioning": TokenFusion(target_layer_ids=[1, 3]),
        "block": TOKENS,
    },
    "tokens": lambda: {"drafter": CausalTransformer(num_layers=2), "block": TOKENS},
    "lattice": lambda: {
        "head": LatticeHead(candidates=4, hidden_size=8, num_layers=1, num_heads=2, factor_dim=8),
        "loss": {"base": CrossEntropy(view="base"), "lattice": LatticeLoss()},
    },
    "refiner": lambda: {"head": RefinerHead(rank=3), "loss": {"refined": RefinedLoss()}},
    "candidates": lambda: {"head": SelectorHead(candidates=16, rank=4), "loss": {"own": CandidateCrossEntropy()}},
    "rounds": lambda: {"conditioning": Carryover(target_layer_ids=[1, 3], fresh=0.0)},
    "hybrid": lambda: {
        "drafter": HybridDrafter(num_layers=2, state_heads=4, state_head_dim=3, state_states=2, state_groups=2),
        "conditioning": SeededTargetKV(target_layer_ids=[1, 3]),
    },
}


@pytest.mark.parametrize("parts", PARTS)
def test_gradients_are_those_of_a_whole_drafter(parts: str, mesh: Any) -> None:
    expected = gradients(toy_module(**PARTS[parts]()))
    module = toy_module(**PARTS[parts]())
    plain = {name: p.detach().clone() for name, p in module.draft_model.named_parameters()}
    shard(module.draft_model, mesh)
    assert all(isinstance(p, DTensor) for p in module.draft_model.parameters())
    found = gradients(module)
    assert found.keys() == expected.keys() and len(found) > 10
    for name, gradient in expected.items():
        rounding = 1e-6 * float(gradient.abs().max())
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=rounding), name
    # Afterwards weights are sharded again, and the copy to decode with has all of them.
    draft = module.whole_draft()
    assert draft is module.whole_draft() and type(draft) is DraftModel
    assert {name: torch.equal(p, plain[name]) for name, p in draft.named_parameters()} == dict.fromkeys(plain, True)


def test_norm_clip_and_finite_weights_are_those_of_plain_tensors(mesh: Any) -> None:
    module, plain = toy_module(), toy_module()
    shard(module.draft_model, mesh)
    gradients(module), gradients(plain)
    ours, theirs = list(module.draft_model.parameters()), list(plain.draft_model.parameters())
    norm = total_norm([p.grad for p in ours])
    expected = nn.utils.clip_grad_norm_(theirs, 0.01)
    assert type(norm) is torch.Tensor and norm == pytest.approx(float(expected)) and norm > 0.01
    optimizer = torch.optim.SGD(ours, lr=1.0)
    clip(optimizer, 0.01, torch.full((), float("nan")))
    assert total_norm([p.grad for p in ours]) == norm
    clip(optimizer, 0.01, norm)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(whole(mine.grad), other.grad, rtol=1e-6)
    clip(optimizer, 1e-5, None)
    nn.utils.clip_grad_value_(theirs, 1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(whole(mine.grad), other.grad, rtol=1e-6)
    assert module.broken_parameters() == []
    local(ours[3].detach())[0] = float("nan")
    names = [name for name, _ in module.draft_model.named_parameters()]
    assert module.broken_parameters() == [names[3]]


def test_a_single_number_cannot_be_sharded(mesh: Any) -> None:
    draft = toy_module().draft_model
    draft.head.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(
        ValueError, match=r"trainer\.strategy: head\.scale is a single number.*Use trainer\.strategy=ddp"
    ):
        shard(draft, mesh)


def test_lightnings_own_sharding_is_refused(
    parts: Any, tiny_target: Any, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    """It would restore a checkpoint after the schedule is made, and write one that only it can read."""
    make_module, make_data, make_trainer = parts
    trainer = make_trainer(tmp_path, strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"ModelParallelStrategy is not supported.*or trainer=fsdp"):
        trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows([20])))
