"""One training step: what is trained, what is not, and what is logged."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from dflash_lightning import module as module_file
from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data.features import make as features_file
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.loss import CrossEntropy, Divergence, WeightedLoss
from dflash_lightning.model import save_draft
from dflash_lightning.module import OptimSettings
from dflash_lightning.schedule import decay_weights
from dflash_lightning.training.log import StepLog
from dflash_lightning.types import FeatureSpec, StepContext

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8]


class Recorder(Callback):
    """Keeps what is logged, the learning rate of each optimizer step, and the batches."""

    def __init__(self) -> None:
        self.losses, self.rates, self.batches, self.outputs = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs["loss"].item())
        if "train/loss" in trainer.callback_metrics:
            self.losses.append(trainer.callback_metrics["train/loss"].item())


def test_loss_of_a_step_equals_a_slow_loop_over_slots(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    module, recorder = make_module(tiny_target), Recorder()
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[recorder])
    start = {}

    class KeepStart(Callback):
        def on_train_start(self, trainer, pl_module):
            start.update({k: v.clone() for k, v in module.draft_model.state_dict().items()})

    trainer.callbacks.insert(0, KeepStart())
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), row_tokens=64))
    batch = recorder.batches[0]
    module.draft_model.load_state_dict(start)
    layout = batch.layout
    features = tiny_target.features(batch.input_ids, batch.position_ids, FeatureSpec((0, 2)))
    embeddings = tiny_target.embed(layout.input_ids)
    hidden = module.draft_model.block_hidden(embeddings, layout, features, batch.position_ids, tiny_target.lm)
    logits = tiny_target.model.lm_head(hidden)  # the plain head, [B, N, K, V]
    losses, total = 0.0, 0.0
    shares = decay_weights(3, 4.0)
    for b, n, k in layout.valid.nonzero().tolist():
        row = nn.functional.cross_entropy(logits[b, n, k], layout.labels[b, n, k])
        losses += float(shares[k - 1] * row)
        total += float(shares[k - 1])
        position = int(layout.label_index[b, n, k])
        assert layout.labels[b, n, k] == batch.input_ids[b, position]
        assert layout.prev_ids[b, n, k] == batch.input_ids[b, position - 1]
        assert batch.loss_mask[b, position]
    assert total > 10
    assert recorder.outputs[0] == pytest.approx(losses / total, rel=1e-5)


def test_only_the_drafter_is_trained_saved_and_optimised(parts, write_rows, make_target, tmp_path):
    make_module, make_data, make_trainer = parts
    target = make_target("qwen3")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    module, trainer = make_module(target), make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, datamodule=make_data(target, write_rows(LENGTHS)))
    assert module.changed_parameters() == len(list(module.draft_model.parameters()))
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert not target.model.training
    assert all(name.startswith("model.") for name in module.state_dict())
    optimised = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimised == {id(p) for p in module.draft_model.parameters()}
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)  # plain types only
    numbers = sum(p.numel() for p in module.draft_model.parameters())
    assert (tmp_path / "run.ckpt").stat().st_size < 1.1 * 3 * 4 * numbers + 40_000
    assert checkpoint["draft_config"]["block_size"] == 4


@pytest.mark.parametrize("accumulate", [1, 4])
def test_warm_up_and_cosine_count_optimizer_steps(parts, write_rows, tiny_target, tmp_path, accumulate):
    make_module, make_data, make_trainer = parts
    recorder = Recorder()
    module = make_module(tiny_target, optim=OptimSettings(lr=1.0e-3, warmup_steps=2))
    trainer = make_trainer(
        tmp_path, max_epochs=2 * accumulate, accumulate_grad_batches=accumulate, callbacks=[recorder]
    )
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert len(recorder.rates) == 16  # 8 rows in 2 epochs, or in 8 epochs four at a time
    assert recorder.rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert recorder.rates[9] == pytest.approx(5e-4, rel=1e-6)  # half-way down: 7 of 14 steps
    assert 0 < recorder.rates[-1] < 2e-5


def test_bf16_training_moves_fp32_norms(parts, write_rows, tiny_target, tmp_path):
    # half a bf16 step below 1.0 is 2e-3, so pure bf16 weights would stay at 1.0 with these small steps.
    make_module, make_data, make_trainer = parts
    module = make_module(tiny_target, optim=OptimSettings(lr=6e-4, warmup_steps=0))
    trainer = make_trainer(tmp_path, max_steps=100, max_epochs=-1, precision="bf16-mixed")
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), row_tokens=64))
    norms = [p for name, p in module.draft_model.named_parameters() if "norm" in name]
    assert all(p.dtype == torch.float32 for p in module.draft_model.parameters())
    entries = torch.cat([p.detach().flatten() for p in norms])
    assert len(norms) >= 5
    assert (entries == 1.0).float().mean() < 0.1
    moments = [value for state in trainer.optimizers[0].state.values() for key, value in state.items() if key != "step"]
    assert moments and all(value.dtype == torch.float32 for value in moments)


def test_a_constant_gradient_moves_a_weight_from_1_to_094_in_bf16_mixed(parts, write_rows, tiny_target, tmp_path):
    # weight 1.0, constant gradient 0.01, Adam, lr 6e-4, 100 steps.
    make_module, make_data, make_trainer = parts
    module = make_module(tiny_target, optim=OptimSettings(lr=6e-4, warmup_steps=0, final_fraction=1.0))

    class ConstantGradient(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)

    trainer = make_trainer(
        tmp_path, max_steps=100, max_epochs=-1, precision="bf16-mixed", callbacks=[ConstantGradient()]
    )
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), row_tokens=64))
    norm = module.draft_model.get_parameter("drafter.norm.weight")
    assert norm.detach().tolist() == pytest.approx([0.94] * len(norm), abs=2e-3)


def test_a_term_with_coefficient_0_is_evaluated_and_changes_nothing(
    parts, write_rows, tiny_target, tmp_path, weights_of
):
    make_module, make_data, make_trainer = parts
    results = []
    for terms in (
        {"cross_entropy": CrossEntropy(decay=4.0)},
        {"cross_entropy": CrossEntropy(decay=4.0), "flat": CrossEntropy(decay=None, coefficient=0.0)},
    ):
        module, trainer = make_module(tiny_target, loss=terms), make_trainer(tmp_path, max_steps=3)
        trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS)))
        results.append((weights_of(module), set(trainer.callback_metrics)))
    assert "train/loss/flat" in results[1][1] and "train/loss/flat" not in results[0][1]
    assert all(torch.equal(value, results[1][0][name]) for name, value in results[0][0].items())


def test_what_weights_that_follow_the_drafter_leave_is_logged(parts, write_rows, tiny_target, tmp_path):
    """A new drafter fails at the first or second slot, so little of a block is trained, and the log says how little."""
    make_module, make_data, make_trainer = parts
    terms = {"plain": CrossEntropy(decay=4.0), "cut": WeightedLoss(weight="auf")}
    module, trainer = make_module(tiny_target, loss=terms), make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS)))
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if "/weight/" in name}
    assert list(found) == ["train/weight/cut"]
    least = 1 / module.draft_model.alignment.num_drafts  # every block keeps a slot
    assert least <= found["train/weight/cut"] < 1


def test_accuracy_by_slot_is_logged_for_predicting_slots(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS)))
    logged = {name for name in trainer.callback_metrics if name.startswith("train/accuracy")}
    assert logged == {"train/accuracy", *(f"train/accuracy/slot_{k}" for k in (1, 2, 3))}


def test_reduced_vocabulary_holds_the_ids_of_the_training_rows(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    data = make_data(tiny_target, write_rows([9, 12]))
    module = make_module(tiny_target, draft_vocabulary="data")
    make_trainer(tmp_path, max_steps=1).fit(module, datamodule=data)
    assert module.draft_model.draft_vocab.tolist() == sorted(data.used_ids())
    assert module.draft_model.config.draft_vocab_size < 22


def test_initial_weights_depend_on_the_seed_alone(parts, write_rows, tiny_target, tmp_path, weights_of):
    make_module, _, _ = parts
    states = []
    for noise, seed in ((1, 0), (2, 0), (1, 7)):
        torch.manual_seed(noise)
        module = make_module(tiny_target, seed=seed)
        module.configure_model()
        states.append(weights_of(module)["conditioning.fc.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_a_learning_rate_of_0_is_refused():
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.0 does not move the weights"):
        OptimSettings(lr=0.0)


def test_no_loss_term_is_refused(parts, tiny_target):
    with pytest.raises(ValueError, match=r"Add one, e\.g\. loss=cross_entropy"):
        parts[0](tiny_target, loss={})


def test_unbounded_training_is_refused(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    trainer = make_trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ValueError, match=r"Set trainer\.max_epochs or trainer\.max_steps"):
        trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS)))


def test_a_checkpoint_of_another_drafter_is_refused(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, path))
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    other = make_module(tiny_target, block=Anchored(block_size=5, num_anchors=4))
    with pytest.raises(ValueError, match=r"block_size: checkpoint 4, now 5.*--fresh"):
        make_trainer(tmp_path, max_steps=2).fit(
            other, datamodule=make_data(tiny_target, path), ckpt_path=str(tmp_path / "four.ckpt")
        )


def test_schedule_settings_are_plain_and_replaceable():
    settings = replace(OptimSettings(lr=1e-3), warmup_fraction=0.5)
    assert settings.factor(0, 10) == pytest.approx(1 / 6) and settings.factor(5, 10) == 1.0
    with pytest.raises(ValueError, match=r"warmup_fraction: 1\.5 is not a share"):
        OptimSettings(lr=1e-3, warmup_fraction=1.5)


def test_init_from_starts_with_the_saved_weights_and_refuses_conflicts(
    parts, tiny_target, make_target, tmp_path: Path, make_draft
):
    make_module, folder = parts[0], tmp_path / "draft"
    saved = make_draft(tiny_target)  # 2 layers
    save_draft(saved, folder)
    two, layers_left_open = BlockTransformer(num_layers=2), KVInjection()
    module = make_module(tiny_target, init_from=str(folder), drafter=two, conditioning=layers_left_open)
    module.configure_model()
    assert layers_left_open.target_layer_ids is None, "the settings of the recipe were changed"
    assert module.draft_model.config.target_layer_ids == [0, 2]  # left open, so the drafter's
    assert module.draft_model.training
    state = saved.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in module.draft_model.state_dict().items())
    conflicts = {
        r"num_hidden_layers is 1 in the recipe, 2 there": {},
        r"block_size is 5 in the recipe, 4 there": {"drafter": two, "block": Anchored(block_size=5)},
        r"target_layer_ids is \[0, 1\] in the recipe": {
            "drafter": two,
            "conditioning": KVInjection(target_layer_ids=[0, 1]),
        },
    }
    for message, settings in conflicts.items():
        with pytest.raises(ValueError, match=message):
            make_module(tiny_target, init_from=str(folder), **settings).configure_model()
    with pytest.raises(ValueError, match="made for tiny-llama with digest of the weights"):
        make_module(make_target("qwen3"), init_from=str(folder), drafter=two).configure_model()


@pytest.mark.parametrize("vocabulary", ["most", "data"])
def test_a_draft_vocabulary_that_cannot_be_made_is_refused(parts, tiny_target, vocabulary):
    message = {"most": "'most' is unknown", "data": "needs a DraftData data module"}[vocabulary]
    with pytest.raises(ValueError, match=f"draft_vocabulary: .*{message}|draft_vocabulary: {message}"):
        parts[0](tiny_target, draft_vocabulary=vocabulary).configure_model()


def test_a_mask_id_that_the_data_contains_is_refused_in_fit(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    data = make_data(tiny_target, write_rows(LENGTHS))
    used = max(data.used_ids())
    module = make_module(tiny_target, block=Anchored(block_size=4, num_anchors=4, mask_token_id=used))
    with pytest.raises(ValueError, match=rf"mask_token_id: {used}"):
        make_trainer(tmp_path).fit(module, datamodule=data)


def test_half_precision_weights_are_refused(parts, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    trainer = make_trainer(tmp_path, precision="bf16-true")
    with pytest.raises(ValueError, match=r"trainer\.precision: bf16-true .* Use bf16-mixed or 32-true"):
        trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS)))


def test_accuracy_is_written_in_the_step_it_is_of(parts, write_rows, tiny_target, tmp_path, monkeypatch):
    make_module, make_data, make_trainer = parts
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(tmp_path, max_epochs=2, log_every_n_steps=3, logger=logger)
    module = make_module(tiny_target)
    counted = []
    original = StepLog.count_correct
    monkeypatch.setattr(StepLog, "count_correct", lambda *args: counted.append(module.global_step) or original(*args))
    trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert counted == [2, 5, 8, 11, 14]
    with open(tmp_path / "metrics.csv") as file:
        written = [int(row["step"]) for row in csv.DictReader(file) if row["train/accuracy"]]
    assert written == counted


def test_broken_parameters_are_named(parts, tiny_target):
    module = parts[0](tiny_target)
    module.configure_model()
    assert module.broken_parameters() == []
    with torch.no_grad():
        module.draft_model.get_parameter("drafter.norm.weight")[3] = float("nan")
    assert module.broken_parameters() == ["drafter.norm.weight"]


TAUGHT = {"divergence": Divergence(), "second": CrossEntropy(labels="target", coefficient=0.5)}


def test_a_teacher_is_made_where_a_loss_asks_and_speaks_from_the_last_hidden_state(
    parts, write_rows, tiny_target, tmp_path, monkeypatch
):
    """The features' spec is the union of what drafter and losses read; one teacher serves all terms of a step."""
    make_module, make_data, make_trainer = parts
    made, original = [], module_file.Teacher
    monkeypatch.setattr(module_file, "Teacher", lambda *args: made.append(args) or original(*args))
    for loss, spec in ((TAUGHT, FeatureSpec((0, 2), last_hidden=True)), ({"ce": CrossEntropy()}, FeatureSpec((0, 2)))):
        module, made[:] = make_module(tiny_target, loss=loss), []
        trainer = make_trainer(tmp_path, max_steps=2)
        trainer.fit(module, datamodule=make_data(tiny_target, write_rows(LENGTHS)))
        assert module.required() == spec and len(made) == (2 if spec.last_hidden else 0)
        assert all(temperatures == (1.0,) for *_, temperatures in made)  # the divergence's; labels need no law
        assert {"train/loss", "train/accuracy"} <= trainer.callback_metrics.keys()
    assert module.changed_parameters()


def test_a_term_on_the_whole_law_equals_the_intact_model_s_own_logits(parts, write_rows, tiny_target, tmp_path):
    """Row label - 1 of a plain forward of the target, packed rows and holes included."""
    make_module, make_data, _ = parts
    module = make_module(tiny_target, loss={"divergence": Divergence(decay=3.0)})
    data = make_data(tiny_target, write_rows(LENGTHS), row_tokens=64)
    module.prepare(data)
    batch = data.first_batches(1)[0]
    out, features = module.outputs(batch)
    shares = module.loss_shares(batch, out, features, StepContext(0, 1, 0), batch.window_totals)
    layout, want, weights = batch.layout, 0.0, 0.0
    starts = [0, *((batch.position_ids[0] == 0).nonzero().flatten().tolist()[1:]), batch.input_ids.shape[1]]
    log_p = torch.cat(
        [tiny_target.model(batch.input_ids[:, a:b]).logits[0].log_softmax(-1) for a, b in pairwise(starts)]
    )
    embeddings = tiny_target.embed(layout.input_ids)
    hidden = module.draft_model.block_hidden(embeddings, layout, features, batch.position_ids, tiny_target.lm)
    log_q = tiny_target.lm.logits(hidden).log_softmax(-1)
    for b, n, k in layout.valid.nonzero().tolist():
        p, weight = log_p[layout.label_index[b, n, k] - 1], float(torch.tensor(-(k - 1) / 3.0).exp())
        want += weight * (p.exp() * (p - log_q[b, n, k])).sum().item()
        weights += weight
    assert weights > 10 and len(starts) > 3
    assert float(shares["divergence"].value) == pytest.approx(want / weights, rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_l14_a_cache_that_rounds_hidden_states_leaves_the_teacher_exact(parts, write_rows, tiny_target, dtype):
    """What the drafter reads is rounded; the law that it learns is the target's own to the last bits."""
    module = parts[0](tiny_target, loss=TAUGHT)
    data = parts[1](tiny_target, write_rows([20, 9, 14]), cache_features="ram", cache_dtype=dtype, row_tokens=64)
    module.prepare(data)
    batch = next(iter(data.train_dataloader()))
    kept = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0).features
    exact = tiny_target.features(batch.input_ids, batch.position_ids, module.required(), packed=batch.packed)
    real = batch.doc_ids >= 0
    assert (kept.hidden - exact.hidden)[real].abs().max() > 1e-3, "nothing is rounded: nothing is shown"
    laws = [module._teacher(found, batch.layout).logits(batch.layout.rows) for found in (kept, exact)]
    assert (laws[0] - laws[1]).abs().max() < 1e-4 and laws[1].abs().max() > 1


def test_features_that_teach_are_never_computed_with_rounded_products(
    parts, write_rows, tiny_target, tmp_path, monkeypatch
):
    """Asked for they are refused; what auto chooses on a fast CPU is exact where a loss reads the teacher."""
    make_module, make_data, make_trainer = parts
    monkeypatch.setattr("dflash_lightning.data.features.products.bfloat16_is_fast", lambda: True)
    made = {"cache_features": "ram", "feature_products": "bfloat16"}
    with pytest.raises(
        ValueError, match=r"data\.feature_products: bfloat16 rounds .*loss\.divergence .*Set it to auto"
    ):
        make_module(tiny_target, loss=TAUGHT).prepare(make_data(tiny_target, write_rows([9, 12]), **made))
    used, original = [], features_file.with_products
    monkeypatch.setattr(features_file, "with_products", lambda *a, **k: used.append(original(*a, **k)) or used[-1])
    for loss in (TAUGHT, {"ce": CrossEntropy()}):
        data = make_data(tiny_target, write_rows([9, 12]), cache_features="ram", feature_products="auto")
        make_trainer(tmp_path, max_steps=1).fit(make_module(tiny_target, loss=loss), datamodule=data)
    assert [target.products for target in used] == [torch.float32, torch.bfloat16]
