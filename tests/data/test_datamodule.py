"""From files to micro-batches: what is trained on, how it is laid out, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.data import DraftData
from dflash_lightning.data.batch.collate import WindowItem
from dflash_lightning.data.batch.loader import PlanSampler
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.masks import is_packed
from dflash_lightning.types import Alignment, FeatureSpec, SlotTotals, TrainBatch

ALIGNMENT = Alignment(block_size=4, mask_token_id=260)
SPEC = FeatureSpec((0, 2), last_hidden=True)


def write_chats(path: Path, count: int = 13, seed: int = 0) -> Path:
    """Conversations of one or two turns whose responses have between 1 and 60 letters."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        turns = []
        for _ in range(int(rng.integers(1, 3))):
            reply = "".join(rng.choice(list("abc de"), size=int(rng.integers(1, 60)))).strip() or "x"
            turns += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": reply}]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows))
    return path


def write_tokens(path: Path, *rows: tuple[list[int], list[int]]) -> Path:
    path.write_text("\n".join(json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> str:
    return str(write_chats(tmp_path / "train.jsonl"))


def make_data(target: FrozenTarget, train: str, **settings: object) -> DraftData:
    settings = {"max_length": 128, "token_bucket": 16, "block_bucket": 8, **settings}
    data = DraftData(target, train=train, **settings)  # type: ignore[arg-type]
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=6), ALIGNMENT, SPEC)
    return data


def epoch_of(data: DraftData, epoch: int = 0) -> list[TrainBatch]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def documents_in(batches: Iterable[TrainBatch]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Per sample id its ids, mask and positions as the batches hold them."""
    found = {}
    for batch in batches:
        for b in range(len(batch.input_ids)):
            for number, sample in enumerate(batch.sample_ids[b].tolist()):
                where = batch.doc_ids[b] == number
                if sample >= 0:
                    assert sample not in found
                    found[sample] = (batch.input_ids[b, where], batch.loss_mask[b, where], batch.position_ids[b, where])
                else:
                    assert not where.any()
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_whole_documents_with_their_own_positions(
    tiny_target: FrozenTarget, chats: str, packing: bool
) -> None:
    data = make_data(tiny_target, chats, packing=packing, rows_per_batch=2)
    found = documents_in(epoch_of(data))
    assert sorted(found) == list(range(len(data.documents)))
    for sample, (ids, mask, positions) in found.items():
        document = data.documents[sample]
        assert torch.equal(ids, document.input_ids) and torch.equal(mask, document.loss_mask)
        assert torch.equal(positions, torch.arange(len(ids)))


def test_shapes_are_few_and_padding_is_a_document_of_its_own(tiny_target: FrozenTarget, chats: str) -> None:
    for batch in epoch_of(make_data(tiny_target, chats, rows_per_batch=2, row_tokens=200)):
        assert batch.input_ids.shape[0] == 2 and batch.input_ids.shape[1] % 16 == 0
        assert batch.layout.anchors.shape[1] % 8 == 0
        padding = batch.doc_ids < 0
        assert not batch.loss_mask[padding].any() and (batch.position_ids[padding] < 128).all()
        for b in range(2):
            assert batch.position_ids[b, padding[b]].tolist()[:1] in ([], [0])


@pytest.mark.parametrize("row_tokens", [128, 200])
def test_batches_know_whether_they_are_packed_before_they_reach_a_device(
    tiny_target: FrozenTarget, chats: str, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(tiny_target, chats, row_tokens=row_tokens)
    batches = epoch_of(data)
    assert [batch.packed for batch in batches] == [is_packed(batch.position_ids) for batch in batches]
    assert any(batch.packed for batch in batches)
    monkeypatch.setattr("dflash_lightning.target.frozen.is_packed", lambda positions: pytest.fail("asked"))
    for batch in batches:
        assert data.on_after_batch_transfer(batch, 0).features is not None


def test_the_feature_cache_is_filled_on_the_trainers_device(
    make_target: Callable[..., FrozenTarget], chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader is made before the module's fit starts, which is what moves the target otherwise."""
    data = make_data(make_target("llama"), chats, cache_features="ram")
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=str(tmp_path))
    order: list[object] = []
    features = data.target.features
    monkeypatch.setattr(data.target, "to", lambda device: order.append(device) or data.target)
    monkeypatch.setattr(data.target, "features", lambda *args, **kw: order.append("features") or features(*args, **kw))
    data.train_dataloader()
    assert order[:2] == [torch.device("cpu"), "features"]


def test_packed_blocks_are_those_of_the_documents_alone(tiny_target: FrozenTarget, chats: str) -> None:
    """Anchors come from (seed, epoch, sample id) alone, wherever a document lands, and blocks never cross documents."""
    data = make_data(tiny_target, chats, row_tokens=200, seed=5)
    block = Anchored(block_size=4, num_anchors=6)
    seen = 0
    for batch in epoch_of(data, epoch=3):
        layout = batch.layout
        for number, sample in enumerate(batch.sample_ids[0].tolist()):
            if sample < 0:
                continue
            offset = int((batch.doc_ids[0] == number).nonzero()[0])
            alone = block.blocks(data.documents[sample], ALIGNMENT, seed=5, epoch=3)
            mine = layout.keep[0] & (layout.context_start[0] == offset)
            assert torch.equal(layout.anchors[0, mine] - offset, alone.anchors[0])
            assert torch.equal(layout.labels[0, mine][layout.scored[0, mine]], alone.labels[0][alone.scored[0]])
            seen += int(mine.sum())
        assert (layout.context_end >= layout.context_start).all()
    assert seen == sum(int(batch.layout.keep.sum()) for batch in epoch_of(data, epoch=3)) > 0


def test_anchors_change_with_the_epoch_and_the_seed(tiny_target: FrozenTarget, chats: str) -> None:
    def anchors(seed: int, epoch: int) -> list[list[int]]:
        return [batch.layout.anchors[0].tolist() for batch in epoch_of(make_data(tiny_target, chats, seed=seed), epoch)]

    assert anchors(0, 0) == anchors(0, 0)
    assert anchors(0, 0) != anchors(0, 1) != anchors(1, 1)


def window_sums(batches: list[TrainBatch]) -> dict[int, Tensor]:
    sums: dict[int, Tensor] = {}
    for batch in batches:
        counts = torch.stack([batch.layout.valid.sum(), batch.layout.valid.any(-1).sum()])
        sums[batch.window] = sums.get(batch.window, torch.tensor(0)) + counts
    return sums


def test_window_totals_are_the_sums_over_the_window_and_the_last_one_is_partial(
    tiny_target: FrozenTarget, chats: str
) -> None:
    data = make_data(tiny_target, chats)
    planner = data.plan()
    loader = data.train_dataloader()
    loader.sampler.accumulate = 4
    batches = list(loader)
    assert len(batches) == planner.num_micro_batches and len(batches) % 4 != 0
    assert [batch.window for batch in batches] == [i // 4 for i in range(len(batches))]
    sums = window_sums(batches)
    for batch in batches:
        totals = batch.window_totals
        assert [totals.valid.sum(), totals.blocks] == sums[batch.window].tolist()
        inside = [other for other in batches if other.window == batch.window]
        assert totals.documents == sum(int((other.sample_ids >= 0).sum()) for other in inside)


def test_ranks_together_train_on_what_one_process_trains_on(tiny_target: FrozenTarget, chats: str) -> None:
    """Two ranks with accumulation 1 see, step by step, the documents of one rank with accumulation 2."""
    data = make_data(tiny_target, chats)
    loader = data.train_dataloader()
    planner, maker = loader.sampler.planner, loader._loader.dataset.maker

    def steps(world: int, accumulate: int) -> list[tuple[set[int], Tensor]]:
        shares = []
        for rank in range(world):
            sampler = PlanSampler(planner, rank=rank, world=world, accumulate=accumulate)
            assert len(sampler) == -(-planner.num_micro_batches // world)
            shares.append([maker.window(item) for item in sampler])
        result = []
        for windows in zip(*shares, strict=True):
            batches = [batch for window in windows for batch in window]
            totals = sum((window[0].window_totals for window in windows), SlotTotals.zeros(3))
            result.append((set(documents_in(batches)), totals.pack()))
        return result

    one, two, wide = steps(1, 2), steps(2, 1), steps(4, 1)
    assert planner.num_micro_batches % 2 == 1  # so the last rank gets an empty batch
    assert len(one) == len(two) == -(-planner.num_micro_batches // 2)
    for (documents, totals), (other, others) in zip(one, two, strict=True):
        assert documents == other and torch.equal(totals, others)
    assert set().union(*(documents for documents, _ in wide)) == set(range(len(data.documents)))


def test_empty_batch_has_a_layout_that_trains_nothing_and_features(tiny_target: FrozenTarget, chats: str) -> None:
    data = make_data(tiny_target, chats, rows_per_batch=2)
    maker = data.train_dataloader()._loader.dataset.maker
    full, empty = maker.window(WindowItem(0, 0, 0, (((0, 1), (2,)), ())))
    assert torch.equal(full.window_totals.pack(), empty.window_totals.pack()) and full.window_totals.blocks > 0
    assert empty.input_ids.shape == (2, 16) and (empty.doc_ids == -1).all()
    assert not empty.layout.keep.any() and len(empty.layout.rows) == 0
    features = data.on_after_batch_transfer(empty, 0).features
    assert features is not None and features.hidden.shape == (2, 16, 2, 32)


def test_micro_batches_trained_before_a_resume_still_count_in_the_totals(tiny_target: FrozenTarget, chats: str) -> None:
    maker = make_data(tiny_target, chats).train_dataloader()._loader.dataset.maker
    whole = maker.window(WindowItem(0, 0, 0, (((0,),), ((1,),), ((2,),))))
    rest = maker.window(WindowItem(0, 0, 2, (((0,),), ((1,),), ((2,),))))
    assert len(rest) == 1 and torch.equal(rest[0].input_ids, whole[2].input_ids)
    assert torch.equal(rest[0].window_totals.pack(), whole[0].window_totals.pack())


def test_workers_get_ids_and_settings_but_no_target(tiny_target: FrozenTarget, chats: str) -> None:
    data = make_data(tiny_target, chats, cache_features="ram")
    maker = data.train_dataloader()._loader.dataset.maker
    pickled = pickle.dumps(maker)
    assert len(pickled) < 5 * len(data.documents.ids) + 3000
    item = WindowItem(1, 0, 0, (((0, 1),),))
    (again,), (batch,) = pickle.loads(pickled).window(item), maker.window(item)
    assert torch.equal(again.layout.anchors, batch.layout.anchors)


def test_block_budget_limits_the_blocks_of_a_row(tiny_target: FrozenTarget, chats: str) -> None:
    free, tight = (make_data(tiny_target, chats, row_tokens=512, row_blocks=limit) for limit in (None, 13))
    assert max(int(batch.layout.keep.sum()) for batch in epoch_of(free)) > 13
    assert max(int(batch.layout.keep.sum()) for batch in epoch_of(tight)) <= 13


def test_features_are_normal_tensors_of_the_target(tiny_target: FrozenTarget, chats: str) -> None:
    data = make_data(tiny_target, chats, rows_per_batch=2)
    batch = epoch_of(data)[0]
    with torch.inference_mode():
        features = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0).features
    expected = tiny_target.features(batch.input_ids, batch.position_ids, SPEC)
    assert features is not None and torch.equal(features.hidden, expected.hidden)
    assert not features.hidden.is_inference() and not features.hidden.requires_grad


@pytest.mark.parametrize("packing", [True, False])
def test_cached_features_equal_those_on_the_fly_and_ignore_the_batch(
    tiny_target: FrozenTarget, chats: str, packing: bool
) -> None:
    cached = make_data(tiny_target, chats, cache_features="ram", packing=packing, rows_per_batch=2)
    again = make_data(tiny_target, chats, cache_features="ram", packing=packing, rows_per_batch=1, seed=7)
    for batch in epoch_of(cached):
        features = cached.on_after_batch_transfer(cached.on_before_batch_transfer(batch, 0), 0).features
        expected = tiny_target.features(batch.input_ids, batch.position_ids, SPEC)
        real = batch.doc_ids >= 0
        assert features is not None and features.last_hidden is not None and expected.last_hidden is not None
        torch.testing.assert_close(features.hidden[real], expected.hidden[real], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(features.last_hidden[real], expected.last_hidden[real], atol=2e-4, rtol=1e-4)
        assert not features.hidden[~real].any()
    epoch_of(again)
    assert cached._cache is not None and again._cache is not None
    assert torch.equal(cached._cache.features.hidden, again._cache.features.hidden)


def test_cache_may_be_kept_in_bfloat16(
    tiny_target: FrozenTarget, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tiny_target, chats, cache_features="ram", cache_dtype="bfloat16")
    batch = data.on_after_batch_transfer(data.on_before_batch_transfer(epoch_of(data)[0], 0), 0)
    assert data._cache is not None and data._cache.features.hidden.dtype == torch.bfloat16
    assert batch.features is not None and batch.features.hidden.dtype == torch.float32
    assert "MiB of memory" in capsys.readouterr().out


def test_tokenised_rows_pass_verbatim(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    rows = [([5, 6, 7, 8], [0, 1, 1, 1]), ([9, 10, 260], [1, 1, 0])]
    data = make_data(tiny_target, str(write_tokens(tmp_path / "t.jsonl", *rows)))
    for i, (ids, mask) in enumerate(rows):
        assert data.documents[i].input_ids.tolist() == ids
        assert data.documents[i].loss_mask.tolist() == [bool(m) for m in mask]
    assert set(data.used_ids()) == {5, 6, 7, 8, 9, 10, 260}


def test_every_row_is_accounted_for(
    tiny_target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixed.jsonl"
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you."}]}
    rows = [good, {"turns": ["only a prompt"]}, {"messages": good["messages"][:1]}, good]
    rows.insert(0, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    summary = make_data(tiny_target, str(path)).summary
    assert summary.read == 5 and summary.kept == 2 and sum(summary.dropped.values()) == 3
    assert summary.supervised == 2 * len("Hello you.") + 2 and summary.anchors == 2 * len("Hello you.")
    text = capsys.readouterr().out
    assert "5 read, 2 kept as 2 documents, 3 dropped" in text and "mixed.jsonl:4" in text
    assert "1 x no assistant turn" in text and "dflash regenerate" in text and "'Hello you.<|im_end|>'" in text
    assert len(text.splitlines()) <= 9


@pytest.mark.parametrize("length", range(2, 45))
def test_truncation_keeps_masks_honest_at_every_length(tiny_target: FrozenTarget, tmp_path: Path, length: int) -> None:
    """The end-of-turn token is supervised only where it survived, and nothing else changes."""
    path = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text(
        json.dumps({"messages": messages}) + "\n" + json.dumps({"input_ids": [1, 2, 3], "loss_mask": [1] * 3})
    )
    data = make_data(tiny_target, str(path), max_length=length)
    whole = make_data(tiny_target, str(path), max_length=100).documents[0]
    first = int(whole.loss_mask.nonzero()[0])
    kept = length >= first + 2
    assert data.summary.kept == 1 + kept and len(data.documents) == 1 + kept
    if kept:
        assert torch.equal(data.documents[0].input_ids, whole.input_ids[:length])
        assert torch.equal(data.documents[0].loss_mask, whole.loss_mask[:length])
    else:
        assert data.summary.dropped["nothing supervised within max_length"] == (length <= first)


def test_limit_reads_that_many_rows(tiny_target: FrozenTarget, chats: str) -> None:
    assert make_data(tiny_target, chats, limit=3).summary.read == 3


def test_all_zero_masks_are_a_hard_error(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.jsonl", ([1, 2, 3], [0, 0, 0]), ([1, 2, 3], [0, 0, 0]))
    with pytest.raises(
        ValueError, match=r"all 2 rows of .* were dropped: 2 x no two supervised tokens.*Correct the data"
    ):
        make_data(tiny_target, str(path))


def test_rows_that_end_before_the_response_are_a_hard_error(tiny_target: FrozenTarget, chats: str) -> None:
    with pytest.raises(ValueError, match=r"13 x nothing supervised within max_length.*raise data.max_length \(10\)"):
        make_data(tiny_target, chats, max_length=10)


def test_prompts_without_responses_are_a_hard_error(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}')
    with pytest.raises(ValueError, match="make responses with `dflash regenerate`"):
        make_data(tiny_target, str(tmp_path / "p.jsonl"))


def test_empty_file_is_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"e.jsonl holds no rows. Give a file"):
        make_data(tiny_target, str(tmp_path / "e.jsonl"))


def test_ids_of_another_model_are_refused_with_their_line(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.jsonl", ([1, 2], [1, 1]), ([1, 9999], [1, 1]))
    with pytest.raises(ValueError, match=r"t.jsonl:2: input_ids holds 9999.*tokenised for another model"):
        make_data(tiny_target, str(path))


def test_choice_of_turns_does_not_apply_to_tokenised_rows_and_is_refused(
    tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    """A setting that does not apply is refused."""
    path = str(write_tokens(tmp_path / "t.jsonl", ([1, 2], [1, 1])))
    with pytest.raises(ValueError, match=r"data.supervise: 'last_turn' does not apply.*Remove it"):
        make_data(tiny_target, path, supervise="last_turn")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 513}, r"data.max_length: 513 .*has 512 positions. Use 2..512"),
        ({"max_length": 1}, r"data.max_length: 1 "),
        ({"row_tokens": 64}, "data.row_tokens: a row of 64 cannot hold.*Raise row_tokens"),
        ({"rows_per_batch": 0}, "data.rows_per_batch: 0 is not a count. Use 1"),
        ({"train": []}, "data.train: names no file. Give a file"),
    ],
)
def test_bad_setting_is_refused(tiny_target: FrozenTarget, chats: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(tiny_target, **{"train": chats, **settings})


def test_a_cache_larger_than_the_memory_is_refused_before_a_feature_is_computed(
    make_target: Callable[..., FrozenTarget], chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(make_target("llama"), chats, cache_features="ram")
    monkeypatch.setattr(data.target, "features", lambda *args, **kw: pytest.fail("a feature was computed"))
    monkeypatch.setattr("dflash_lightning.data.features.cache.os.sysconf", lambda name: 256)  # 64 KiB of memory
    with pytest.raises(ValueError, match=r"data.cache_features: 'ram' needs .* this machine has 0.0 GiB. Use null"):
        data.train_dataloader()


def test_accumulation_that_changes_during_the_run_is_refused(
    tiny_target: FrozenTarget, chats: str, tmp_path: Path
) -> None:
    data = make_data(tiny_target, chats)
    schedule = GradientAccumulationScheduler({0: 1, 2: 4})
    data.trainer = Trainer(accelerator="cpu", logger=False, callbacks=[schedule], default_root_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler .*Use a constant trainer.accumulate_grad"):
        data.train_dataloader()


def test_data_without_a_place_for_this_kind_of_block_is_refused(
    tiny_target: FrozenTarget, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(tiny_target, chats)
    monkeypatch.setattr(Anchored, "eligible_anchors", lambda self, mask: torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"block 'anchored' finds no place to start a block in any of \d+ documents"):
        data.train_dataloader()


def test_strict_turns_warnings_into_errors(tiny_target: FrozenTarget, chats: str) -> None:
    with pytest.raises(ValueError, match=r"places where a block can start are few.*data.strict=true"):
        make_data(tiny_target, chats, strict=True)


def test_loader_without_a_bound_block_says_what_to_do(tiny_target: FrozenTarget, chats: str) -> None:
    data = DraftData(tiny_target, train=chats, max_length=128)
    data.setup()
    with pytest.raises(ValueError, match=r"call DraftData\.bind"):
        data.train_dataloader()


def test_target_without_positions_for_features_of_missing_layers_is_told(
    make_target: Callable[..., FrozenTarget], chats: str
) -> None:
    """Asking for a layer that the target lacks fails at the first batch with the layer's number."""
    data = make_data(make_target(), chats)
    data.bind(Anchored(block_size=4, num_anchors=6), ALIGNMENT, FeatureSpec((9,)))
    with pytest.raises(ValueError, match="asks for layer 9"):
        data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
