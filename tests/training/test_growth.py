"""Blocks that grow between epochs: sizes, labels, decoding and checkpoints go along, and a resumed run is the same."""

import json

import pytest
import torch
from lightning.pytorch import Callback

from dflash_lightning.block import Anchored, Growing
from dflash_lightning.callbacks import BlockGrowth, SpeculativeEval
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluation
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import SteppedCrossEntropy
from dflash_lightning.testing import check_block
from dflash_lightning.training.growth import check_growth, resize
from dflash_lightning.types import Alignment, Document

LENGTHS = [20, 9, 14, 30]


def growing(**settings):
    return Growing(**{"block_size": 4, "largest": 7, "step": 2, "num_anchors": 4, **settings})


@pytest.fixture
def run(parts, write_rows, tiny_target, tmp_path, monkeypatch):
    """``run(ceilings, epochs, **fit)``: a run whose evaluations find the given ceilings; module, data, callback."""
    make_module, make_data, make_trainer = parts
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["red"]}) + "\n")
    path, figures = write_rows(LENGTHS), Evaluation.figures

    def fit(ceilings, epochs, *, block=None, fed=None, callbacks=(), **fit_settings):
        def found():  # by the epochs that were trained
            return ceilings[trainer.global_step // 4]

        monkeypatch.setattr(Evaluation, "figures", lambda self: {**figures(self), "decode/ceiling": found()})
        torch.manual_seed(0)
        module = make_module(
            tiny_target, block=block or growing(), loss={"stepped": SteppedCrossEntropy(trained=3, labels="data")}
        )
        settings = DecodingSettings(max_new_tokens=8, batch_size=2, compile=False, block_size=fed)
        evaluation, growth = SpeculativeEval(str(prompts), decoding=settings, lossless_prompts=1), BlockGrowth()
        trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[evaluation, growth, *callbacks])
        trainer.fit(module, datamodule=make_data(tiny_target, path, packing=False), **fit_settings)
        return module, trainer, evaluation, growth

    return fit


def test_a_block_grows_before_the_epoch_after_an_evaluation_that_found_it_full(run, capsys):
    module, _, evaluation, growth = run([0.1, 0.2, 0.9, 0.9, 0.9], 4)
    steps = [entry["step"] for entry in evaluation.history]
    assert growth.grown == [{"step": steps[1], "block_size": 6.0}, {"step": steps[2], "block_size": 7.0}]
    assert module.draft_model.config.block_size == module.block.block_size == 7
    assert module.draft_model.alignment.num_drafts == 6
    drafts = [sum(name.startswith("decode/survival/slot_") for name in entry) for entry in evaluation.history]
    assert drafts == [3, 3, 5, 6, 6], "decoding goes along"
    said = capsys.readouterr()
    assert "blocks grow from 4 to 6 slots: the drafts of 20% of rounds all stood" in said.out + said.err


def test_a_run_resumed_in_an_epoch_or_at_its_end_grows_where_it_would_have(run, tmp_path, weights_of):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"at-{trainer.global_step}.ckpt", weights_only=False)

    module, trainer, _, _ = run([0.1, 0.2, 0.9, 0.0], 3, callbacks=[Save()])
    steps = trainer.global_step
    assert steps == 12, "four steps an epoch"
    whole = weights_of(module)
    per_epoch = steps // 3
    for step in (per_epoch + 1, per_epoch):
        again, trainer, _, growth = run([0.1, 0.2, 0.9, 0.0], 3, ckpt_path=tmp_path / f"at-{step}.ckpt")
        assert trainer.global_step == steps and again.block.block_size == 7, (step, growth.grown)
        assert all(torch.equal(value, whole[name]) for name, value in weights_of(again).items()), step


def test_blocks_are_those_of_anchored_of_the_size_of_now():
    document = Document(0, torch.arange(24), torch.arange(24) >= 6)
    block = growing()
    check_block(growing(block_size=4))
    assert block.largest_size == 7 and block.next_size() == 6 and not block.resize(8) and not block.resize(3)
    for size in (4, 6, 7):
        assert block.resize(size)
        ours = block.blocks(document, Alignment(4, 31), seed=0, epoch=1)
        theirs = Anchored(block_size=size, num_anchors=4).blocks(document, Alignment(size, 31), seed=0, epoch=1)
        assert torch.equal(ours.labels, theirs.labels) and torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.valid, theirs.valid) and ours.labels.shape[2] == size
    assert block.next_size() == 7


class SlotHead(MarginalHead):
    """A head with a weight for every slot."""

    name = "slot_head_for_growth"

    def build(self, config):
        self.slots = torch.nn.Parameter(torch.zeros(config.block_size))


def test_a_drafter_with_weights_of_its_slots_does_not_grow(parts, tiny_target):
    make_module, _, _ = parts
    module = make_module(tiny_target, block=growing(), head=SlotHead())
    module.prepare(None)
    with pytest.raises(ValueError, match=r"block: blocks grow to 7 slots, but .* head\.slots"):
        check_growth(module.block, module.draft_model)
    plain = make_module(tiny_target, block=growing(), drafter=BlockTransformer(num_layers=1))
    plain.prepare(None)
    check_growth(plain.block, plain.draft_model)
    assert resize(plain.block, plain.draft_model, 6) and not resize(plain.block, plain.draft_model, 9)
    assert plain.draft_model.config.block_size == 6


def test_blocks_that_cannot_grow_and_a_run_that_decodes_nothing_are_refused(
    run, parts, tiny_target, write_rows, tmp_path
):
    with pytest.raises(ValueError, match=r"callbacks\.block_growth: 'anchored' blocks do not grow beyond 4 slots"):
        run([0.0], 1, block=Anchored(block_size=4, num_anchors=4))
    with pytest.raises(ValueError, match=r"decoding\.block_size: 3 slots are fed whatever blocks have grown to"):
        run([0.9], 1, fed=3)
    make_module, make_data, make_trainer = parts
    module, data = make_module(tiny_target, block=growing()), make_data(tiny_target, write_rows(LENGTHS))
    with pytest.raises(ValueError, match=r"callbacks\.block_growth: nothing is decoded while it trains"):
        make_trainer(tmp_path, max_epochs=1, callbacks=[BlockGrowth()]).fit(module, datamodule=data)
    for settings in ({"largest": 3}, {"step": 0}):
        with pytest.raises(ValueError, match=r"block\.(largest|step): "):
            growing(**settings)
    with pytest.raises(ValueError, match=r"callbacks\.block_growth\.ceiling: 2"):
        BlockGrowth(ceiling=2.0)
