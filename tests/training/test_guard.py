"""A run stops at the first number that is none, with its weights and its checkpoints as they were before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.training.guard import Diverged, ScaleGuard, StepGuard, StepRecord

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8]


class Spoil(Callback):
    """Puts a value into a gradient of one parameter at an optimizer step (from 1), or into the loss."""

    def __init__(self, step: int, value: float, name: str = "drafter.norm.weight") -> None:
        self.step, self.value, self.name = step, value, name
        self.before: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.before = {n: p.detach().clone() for n, p in pl_module.draft_model.named_parameters()}
            pl_module.draft_model.get_parameter(self.name).grad.view(-1)[0] = self.value


def spoil_loss(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss of one optimizer step NaN, without a NaN in any gradient."""
    shares = DraftModule.loss_shares

    def spoiled(self: Any, *arguments: Any) -> Any:
        made = shares(self, *arguments)
        if self._trainer is not None and self.trainer.training and self.global_step + 1 == step:
            share = made["cross_entropy"]
            made["cross_entropy"] = replace(share, value=share.value + float("nan"))
        return made

    monkeypatch.setattr(DraftModule, "loss_shares", spoiled)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_reaches_no_weight(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any, weights_of: Any, late: bool, value: float
) -> None:
    """``late`` is the way of a GPU: the optimizer is told on the device, and the number is read a step later."""
    make_module, make_data, make_trainer = parts
    module, spoil = make_module(tiny_target), Spoil(3, value)
    make_guard = module._make_guard
    module._make_guard = lambda: StepGuard(make_guard().names, make_guard().parameters, late=late)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[spoil], gradient_clip_val=1.0)
    data = make_data(tiny_target, write_rows(LENGTHS), packing=False)
    with pytest.raises(Diverged) as caught:
        trainer.fit(module, datamodule=data)
    text = str(caught.value)
    assert "training stopped at optimizer step 3 (epoch 0)" in text and f"gradients {value}" in text
    assert f"largest gradient   drafter.norm.weight (norm {value}); NaN or infinite in 1 of" in text
    (document,) = data.plan().epoch(0)[2][0]
    assert f"documents {document} (numbered" in text
    assert all(torch.equal(kept, spoil.before[name]) for name, kept in weights_of(module).items())
    state = trainer.optimizers[0].state[module.draft_model.get_parameter("drafter.norm.weight")]
    assert float(state["step"]) == 2 and torch.isfinite(state["exp_avg_sq"]).all()


def test_a_late_verdict_comes_before_a_save(parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any) -> None:
    make_module, make_data, make_trainer = parts

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    module = make_module(tiny_target)
    make_guard = module._make_guard
    module._make_guard = lambda: StepGuard(make_guard().names, make_guard().parameters, late=True)
    trainer = make_trainer(tmp_path, callbacks=[Spoil(3, float("nan")), Save()])
    with pytest.raises(Diverged):
        trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_a_run_that_diverges_keeps_its_checkpoint_and_goes_on_from_it(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["trainer.max_epochs=2", "data.packing=false", "callbacks.recent.every_n_train_steps=1"]
    with monkeypatch.context() as patch:
        spoil_loss(patch, 8)
        assert place.fit("smoke", *settings, name="nan") == 1
    error = capsys.readouterr().err
    assert "training stopped at optimizer step 8 (epoch 0): the loss is nan" in error
    assert "optim.lr" in error and "target in float16" in error
    assert "last.ckpt holds step 7 with finite weights: the same command goes on from there" in error
    assert place.checkpoint("nan")["global_step"] == 7 and not place.state("nan")["finished"]
    assert place.fit("smoke", *settings, name="nan") == 0
    assert "last.ckpt (step 7)" in capsys.readouterr().out
    assert place.fit("smoke", *settings, name="whole") == 0
    ours, theirs = place.checkpoint("nan"), place.checkpoint("whole")
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


@pytest.mark.parametrize("rate", ["1e30", "1e38"])
def test_weights_that_are_none_are_not_saved(place: Any, rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The step itself was of finite numbers, and still broke the weights (or the next loss)."""
    settings = ["optim.warmup_steps=0", "callbacks.recent.every_n_train_steps=1"]
    assert place.fit("smoke", f"optim.lr={rate}", *settings, name=f"high-{rate}") == 1
    assert "optim.lr" in capsys.readouterr().err
    last = place.run(f"high-{rate}") / "checkpoints" / "last.ckpt"
    if last.exists():
        assert all(torch.isfinite(v).all() for v in place.checkpoint(f"high-{rate}")["state_dict"].values())


def test_a_checkpoint_that_is_broken_already_is_refused(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version wrote it: the same command would diverge for ever."""

    def cut(self: Any, *rest: Any) -> None:
        if self.global_step == 3:
            raise KeyboardInterrupt

    arguments = ["data.packing=false", "callbacks.recent.every_n_train_steps=1"]
    with monkeypatch.context() as patch:
        patch.setattr(DraftModule, "on_train_batch_start", cut)
        assert place.fit("smoke", *arguments, name="broken") == 130
    path = place.run("broken") / "checkpoints" / "last.ckpt"
    whole = path.read_bytes()
    for where in ("weights model.drafter.norm.weight", "optimizer exp_avg of parameter 1"):
        checkpoint = torch.load(path, weights_only=False)
        moments = checkpoint["optimizer_states"][0]["state"][1]
        (checkpoint["state_dict"] if "weights" in where else moments)[where.split()[1]].view(-1)[0] = float("nan")
        torch.save(checkpoint, path)
        capsys.readouterr()
        assert place.fit("smoke", *arguments, name="broken") == 2
        error = capsys.readouterr().err
        assert f"tensors hold NaN or infinity ({where} is the first)" in error and "--fresh" in error
        path.write_bytes(whole)
    assert place.fit("smoke", *arguments, name="broken") == 0


def record(loss: float, norm: float) -> StepRecord:
    return StepRecord(5, 0, 1e-3, torch.tensor(loss), torch.tensor(norm), [torch.tensor([[3, -1], [4, 3]])])


def test_scaled_gradients_may_overflow_a_while_but_losses_may_not() -> None:
    parameter = nn.Parameter(torch.ones(2))
    guard, optimizer = ScaleGuard(["weight"], [parameter]), torch.optim.SGD([parameter], lr=1.0)
    for norm in [float("inf")] * (ScaleGuard.PATIENCE - 1) + [1.0] + [float("inf")] * (ScaleGuard.PATIENCE - 1):
        guard.judge(record(2.0, norm), optimizer)
    with pytest.raises(Diverged, match=r"documents 3, 4 \(numbered"):
        guard.judge(record(2.0, float("inf")), optimizer)
    with pytest.raises(Diverged, match="the loss is nan"):
        ScaleGuard(["weight"], [parameter]).judge(record(float("nan"), 1.0), optimizer)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_by_hand_is_lightnings(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every precision, and never of gradients that are scaled."""
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)
    clip = DraftModule.configure_gradient_clipping
    found: dict[str, list[list[torch.Tensor]]] = {"ours": [], "theirs": []}

    def both(self: Any, optimizer: Any, **settings: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept = [p.grad.clone() for p in parameters]
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(parameters, settings["gradient_clip_val"])
        else:
            nn.utils.clip_grad_value_(parameters, settings["gradient_clip_val"])
        found["theirs"].append([p.grad.clone() for p in parameters])
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad.copy_(gradient)
        clip(self, optimizer, **settings)
        found["ours"].append([p.grad.clone() for p in parameters])
        assert any(not torch.equal(a, b) for a, b in zip(kept, found["ours"][-1], strict=True)), "nothing was clipped"

    monkeypatch.setattr(DraftModule, "configure_gradient_clipping", both)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fp16 = MixedPrecision("16-mixed", "cpu", scaler)
    norms = []
    for settings in ({}, {"precision": "bf16-mixed"}, {"plugins": [fp16]}):
        trainer = make_trainer(
            tmp_path, max_steps=2, gradient_clip_val=1e-2, gradient_clip_algorithm=algorithm, **settings
        )
        module = make_module(tiny_target, optim=OptimSettings(lr=1e-3, warmup_steps=0))
        trainer.fit(module, datamodule=make_data(tiny_target, path))
        norms.append(float(trainer.callback_metrics["train/grad_norm"]))
        fused = trainer.optimizers[0].defaults["fused"]
        assert fused is ("plugins" not in settings)
    assert len(found["ours"]) == 6
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=0.1)  # a scaled one would be a thousand times as large


def test_the_guard_of_a_run_is_by_device_and_scaler(parts: Any, tiny_target: Any) -> None:
    module = parts[0](tiny_target)
    module.configure_model()
    module._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=None))
    assert type(module._make_guard()) is StepGuard and not module._make_guard().late
    module._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()))
    assert type(module._make_guard()) is ScaleGuard
