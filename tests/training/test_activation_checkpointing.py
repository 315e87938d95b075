"""Layers whose activations are made again: the same gradients and the same run, with less kept in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.autograd.graph import saved_tensors_hooks

from dflash_lightning.block import Anchored
from dflash_lightning.callbacks import ActivationCheckpointing
from dflash_lightning.callbacks.activation_checkpointing import checkpoint_layers, checkpointed_layers
from dflash_lightning.conditioning import (
    Conditioning,
    InputFusion,
    KVInjection,
    LayerMix,
    NullConditioning,
    ResidualMix,
    TokenContext,
    TokenFusion,
)
from dflash_lightning.drafter import BlockTransformer, ConvTransformer, Drafter, FeedbackTransformer
from dflash_lightning.module import DraftModule
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.testing.toys import toy_batch, toy_module

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "block_transformer": lambda: BlockTransformer(num_layers=2, init_std=0.2),
    "windows": lambda: BlockTransformer(
        num_layers=2, init_std=0.2, layer_types=["sliding_attention", "full_attention"], sliding_window=5
    ),
    "conv_transformer": lambda: ConvTransformer(num_layers=2, group_size=8),
}
CONDITIONINGS: dict[str, Callable[[], Conditioning]] = {
    "kv_injection": lambda: KVInjection(target_layer_ids=[1, 3]),
    "no_features": NullConditioning,
    "layer_mix": lambda: LayerMix(target_layer_ids=[3, 0, 2]),
    "residual_mix": lambda: ResidualMix(target_layer_ids=[3, 0, 2]),
    "token_context": lambda: TokenContext(num_layers=2),
    "input_fusion": lambda: InputFusion(target_layer_ids=[0, 2]),
}
CASES = [(drafter, "kv_injection") for drafter in DRAFTERS]
CASES += [("block_transformer", name) for name in CONDITIONINGS if name != "kv_injection"]


def gradients(module: DraftModule) -> tuple[int, dict[str, torch.Tensor]]:
    """How many numbers the forward pass keeps, and the gradient of every weight."""
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = toy_batch(module)
    with saved_tensors_hooks(see, lambda tensor: tensor):
        out, _ = module.outputs(batch)
        (log_prob,) = out.views["main"].ask(LabelLogProb(batch.layout.labels))
    named = dict(module.draft_model.named_parameters())
    found = torch.autograd.grad(log_prob.sum(), list(named.values()), allow_unused=True)
    return sum(kept.values()), {n: g for n, g in zip(named, found, strict=True) if g is not None}


@pytest.mark.parametrize(("drafter", "conditioning"), CASES)
def test_gradients_are_the_same_and_less_is_kept(drafter: str, conditioning: str) -> None:
    module = toy_module(drafter=DRAFTERS[drafter](), conditioning=CONDITIONINGS[conditioning]())
    much, expected = gradients(module)
    with checkpointed_layers(module.draft_model.drafter):
        little, found = gradients(module)
    again, _ = gradients(module)
    assert little < 0.7 * much and again == much
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def test_a_drafter_that_runs_slot_by_slot_is_refused() -> None:
    module = toy_module(
        drafter=FeedbackTransformer(num_layers=1),
        block=Anchored(block_size=4, num_anchors=24, label_layout="anchor_first", inputs="tokens"),
        conditioning=TokenFusion(target_layer_ids=[0, 2, 3]),
    )
    with pytest.raises(ValueError, match=r"callbacks\.activation_checkpointing: FeedbackTransformer has no layers"):
        checkpoint_layers(module.draft_model.drafter)


def test_a_run_learns_the_same_and_is_left_as_it_was(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any, weights_of: Any
) -> None:
    make_module, make_data, make_trainer = parts
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append("forward" in vars(pl_module.draft_model.drafter.layers[0]))

    weights = []
    for callbacks in ([], [ActivationCheckpointing(), Watch()]):
        torch.manual_seed(0)
        module = make_module(tiny_target)
        trainer = make_trainer(tmp_path, max_epochs=1, callbacks=callbacks)
        trainer.fit(module, datamodule=make_data(tiny_target, write_rows([20, 9])))
        weights.append(weights_of(module))
        assert "forward" not in vars(module.draft_model.drafter.layers[0])
    assert seen and all(seen)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
