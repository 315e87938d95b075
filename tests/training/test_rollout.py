"""Rounds of the real decoder as training data: what is recorded, which blocks it gives, and that a run resumes."""

import json

import pytest
import torch
from lightning.pytorch import Callback

from dflash_lightning.block import Anchored, Recorded
from dflash_lightning.block.recorded import UNKNOWN
from dflash_lightning.callbacks import Rollout
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.rollout import Rollout as Listener
from dflash_lightning.loss import OnPolicyLoss
from dflash_lightning.testing import check_block
from dflash_lightning.types import Alignment, DecodedRound, Document, label_log_probs, segments


def one(anchor, accepted, drafts=3):
    chances = tuple(-0.1 * (anchor + i) - 0.1 for i in range(drafts))
    return DecodedRound(anchor, tuple(range(100 + anchor, 100 + anchor + drafts)), accepted, chances, -1.0)


def test_blocks_begin_where_a_draft_was_rejected():
    """MH 3.6: blocks of 4, boundaries 3 and 7 of a 10-token answer; labels (0,1,2), (4,5,6), (8,9)."""
    rounds = [one(-1, 3), one(3, 3)]
    rejecting = [DecodedRound(-1, (0,) * 4, 3, (0.0,) * 4, 0.0), DecodedRound(3, (0,) * 4, 3, (0.0,) * 4, 0.0)]
    found = segments([*rejecting, one(7, 2)], 10, 3)
    assert [(s.anchor, tuple(range(s.anchor + 1, s.last + 1))) for s in found] == [
        (-1, (0, 1, 2)), (3, (4, 5, 6)), (7, (8, 9)),
    ]  # fmt: skip
    assert segments(rounds, 10, 3) == (), "nothing was rejected"


def test_a_run_of_accepted_blocks_is_one_segment_and_rejected_drafts_belong_to_their_own_block():
    rounds = [one(0, 1), one(2, 3), one(6, 0), one(7, 3)]
    found = segments(rounds, 12, 3)
    assert [(s.anchor, s.last) for s in found] == [(0, 2), (2, 5), (7, 10)]
    assert found[0].rejected == ((2, 101, -0.2), (3, 102, pytest.approx(-0.3))) and found[1].rejected == ()
    assert segments(rounds, 12, 3, suffix=False)[0].rejected == ((2, 101, -0.2),)
    chances = label_log_probs(rounds)
    assert chances[1] == -0.1 and chances[2] == -1.0 and chances[3] == pytest.approx(-0.3) and 12 not in chances


@pytest.mark.parametrize("layout", ["same_position", "anchor_first"])
def test_slots_hold_what_was_committed_and_what_was_rejected(layout):
    ids = torch.arange(30)
    document = Document(4, ids, (ids >= 6) & (ids < 18))  # an answer of 12 tokens, then something else
    block = Recorded(block_size=4, num_anchors=8, label_layout=layout)
    alignment = Alignment(4, 31, layout)
    block.records = {4: [one(0, 1, alignment.num_drafts), one(2, 0, alignment.num_drafts)]}
    made = block.blocks(document, alignment, seed=0, epoch=0)
    assert made.anchors[0].tolist() == [6, 8, 9]
    first = alignment.first_slot
    assert made.labels[0, 0][made.valid[0, 0]].tolist() == [7, 8], "the drafts that stand and the target's token"
    assert made.valid[0, 0, first:].tolist() == [True, True, *[False] * (alignment.num_drafts - 2)]
    streams = {name: value[0, 0, first:] for name, value in made.streams.items()}
    assert streams["rejected"].tolist() == [-1, *range(101, 100 + alignment.num_drafts)]
    assert streams["teacher"][:2].tolist() == pytest.approx([-0.1, -1.0])
    assert float(streams["teacher"][2]) == UNKNOWN == float(streams["rejected_teacher"][0])
    other = block.blocks(Document(5, ids, document.loss_mask), alignment, seed=0, epoch=0)
    assert other.anchors.shape == (1, 0) and other.streams.keys() == made.streams.keys()
    check_block(Recorded(block_size=4, label_layout=layout))


@pytest.fixture
def world(parts, tiny_target, tmp_path):
    """Rows that the target wrote itself, and a run on them."""
    make_module, make_data, make_trainer = parts
    prompts = [[(11 * i + j) % 250 for j in range(5)] for i in range(4)]
    plain = DecodingSettings(max_new_tokens=14, batch_size=4, compile=False).make_decoder(
        tiny_target, None, longest_prompt=5
    )
    answers = [g.output_ids for g in plain.decode(prompts, max_new_tokens=14, stop_ids=()).generations]
    answers[3] = [
        *answers[3][:6],
        (answers[3][6] + 1) % 250,
        *answers[3][7:],
    ]  # somebody else's, from its seventh token
    rows = [
        {"input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)} for p, a in zip(prompts, answers, strict=True)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fit(folder, epochs=2, callbacks=(), **settings):
        torch.manual_seed(0)
        module = make_module(
            tiny_target, block=Recorded(block_size=4, num_anchors=8), loss={"on_policy": OnPolicyLoss()}
        )
        data = make_data(tiny_target, str(tmp_path / "own.jsonl"), packing=False)
        trainer = make_trainer(folder, max_epochs=epochs, callbacks=[Rollout(batch_size=2), *callbacks])
        trainer.fit(module, datamodule=data, **settings)
        return module, trainer

    return fit, prompts, answers


class Save(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/at-{trainer.global_step}.ckpt", weights_only=False)


def test_a_run_records_rounds_trains_on_them_and_resumes_to_the_same_bits(world, tmp_path, weights_of, capsys):
    fit, _, answers = world
    module, trainer = fit(tmp_path, callbacks=[Save()])
    whole, steps = weights_of(module), trainer.global_step
    assert steps == 8 and module.changed_parameters() > 0
    said = capsys.readouterr()
    assert "rounds of 4 answers" in said.out + said.err
    kept = [json.loads((tmp_path / "rounds" / f"epoch-000{e}.json").read_text()) for e in range(2)]
    assert kept[0]["drafter"] != kept[1]["drafter"] and kept[0]["rounds"].keys() == {"0", "1", "2", "3"}
    strange = kept[0]["rounds"]["3"]
    assert strange[-1]["anchor"] + strange[-1]["accepted"] + 1 < 6, "rounds end where the answer is no longer the row's"
    last = kept[0]["rounds"]["0"][-1]
    assert last["anchor"] + last["accepted"] + 1 == len(answers[0]) - 1
    (tmp_path / "rounds" / "epoch-0001.json").unlink()  # it is decoded again: after step 4 it was not yet there
    for step in (2, 4, 6):
        if step == 6:
            (tmp_path / "rounds" / "epoch-0001.json").write_text(json.dumps(kept[1]))
        again, trainer = fit(tmp_path, ckpt_path=tmp_path / f"at-{step}.ckpt")
        assert trainer.global_step == steps
        assert all(torch.equal(value, whole[name]) for name, value in weights_of(again).items()), step
    place = tmp_path / "rounds" / "epoch-0001.json"
    assert json.loads(place.read_text()) == kept[1]
    for spoil in (lambda: place.write_text('{"drafter":'), place.unlink):
        spoil()
        with pytest.raises(ValueError, match=r"callbacks\.rollout: .* within epoch 1, .* not in .*epoch-0001\.json"):
            fit(tmp_path, ckpt_path=tmp_path / "at-6.ckpt")


@torch.no_grad()
def test_records_are_the_decoder_s_rounds_and_the_target_s_own_numbers(world, tmp_path, tiny_target, parts):
    _, prompts, answers = world
    make_module, _, _ = parts
    module = make_module(tiny_target)
    module.prepare(None)
    settings = DecodingSettings(max_new_tokens=14, batch_size=4, compile=False)
    decoder = settings.make_decoder(tiny_target, module.draft_model, longest_prompt=5)
    listener = Listener.listen(decoder)
    result = decoder.decode(prompts, max_new_tokens=14, stop_ids=())
    counted = 0
    for prompt, answer, generation in zip(prompts, answers, result.generations, strict=True):
        rounds = listener.rounds(generation, answer)
        assert [r.accepted for r in rounds] == generation.accepted[: len(rounds)]
        for r in rounds:
            text = torch.tensor([prompt + answer[: r.anchor + 1] + list(r.drafts)])
            laws = tiny_target.model(input_ids=text).logits[0].float().log_softmax(-1)
            begin = len(prompt) + r.anchor
            expected = [float(laws[begin + i, d]) for i, d in enumerate(r.drafts)]
            assert list(r.log_probs) == pytest.approx(expected, abs=1e-3), (
                "after the drafts before, not after the answer"
            )
            own = float(laws[begin + r.accepted, answer[r.anchor + r.accepted + 1]])
            assert r.own == pytest.approx(own, abs=1e-3)
            counted += 1
    assert counted > 20


def test_blocks_that_read_no_rounds_are_refused(parts, tiny_target, write_rows, tmp_path):
    make_module, make_data, make_trainer = parts
    module = make_module(tiny_target, block=Anchored(block_size=4, num_anchors=4))
    data = make_data(tiny_target, write_rows([20, 9]))
    with pytest.raises(ValueError, match=r"callbacks\.rollout: these blocks read no rounds"):
        make_trainer(tmp_path, max_steps=1, callbacks=[Rollout()]).fit(module, datamodule=data)
    strange = make_module(tiny_target, block=Recorded(block_size=4), loss={"on_policy": OnPolicyLoss()})
    with pytest.raises(ValueError, match=r"data\.train: none of the 2 answers .*dflash regenerate"):
        make_trainer(tmp_path, max_steps=1, callbacks=[Rollout()]).fit(strange, datamodule=data)
    for setting in ("documents", "batch_size"):
        with pytest.raises(ValueError, match=rf"callbacks\.rollout\.{setting}: 0 answers nothing"):
            Rollout(**{setting: 0})
