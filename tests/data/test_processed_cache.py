"""Processed rows are kept under everything they depend on: a change of any of it misses, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import dflash_lightning
from dflash_lightning.data import DataSummary, DraftData
from dflash_lightning.data.read import process
from dflash_lightning.data.read.process import Processing, code_digest, tokenizer_digest
from dflash_lightning.data.read.processed_cache import Processed, ProcessedCache
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.data.read.store import DocumentStore, MaskedIds
from dflash_lightning.target import FrozenTarget

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you."}]}
SETTINGS = Processing(64, "right", "all_turns", {}, 0)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [CHAT, CHAT, {"turns": ["no answer"]}, CHAT]))
    return path


@pytest.fixture
def own_target(tiny_target: FrozenTarget, byte_tokenizer: PreTrainedTokenizerFast) -> FrozenTarget:
    """A target whose tokenizer may be changed."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = byte_tokenizer.chat_template
    return FrozenTarget(tiny_target.model, tokenizer, name="tiny")


def make_data(target: FrozenTarget, path: Path, folder: Path, **settings: Any) -> DraftData:
    data = DraftData(target, train=str(path), cache=str(folder), **{"max_length": 64, **settings})
    data.setup()
    return data


# -- hits -------------------------------------------------------------------------------------------------------------


def test_second_run_reads_what_the_first_one_made(
    tiny_target: FrozenTarget,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Settings that do not change documents, and a seed that draws no rows, find them too."""
    side = tmp_path / "rejected.jsonl"
    first = make_data(tiny_target, rows, tmp_path / "cache", rejected=str(side))
    assert f"processed rows kept in {tmp_path / 'cache'}" in capsys.readouterr().out
    listed = side.read_text()
    side.unlink()
    monkeypatch.setattr(Processing, "make", lambda *args, **settings: pytest.fail("rows were processed again"))
    again = make_data(
        tiny_target, rows, tmp_path / "cache", rejected=str(side), packing=False, rows_per_batch=3, seed=5
    )
    assert f"processed rows read from {tmp_path / 'cache'}" in capsys.readouterr().out
    assert again.summary == first.summary and side.read_text() == listed != ""
    for data in (first, again):
        assert isinstance(data.documents.ids, np.memmap) and isinstance(data.documents.mask, np.memmap)
    assert np.array_equal(again.documents.ids, first.documents.ids)
    assert np.array_equal(again.documents.mask, first.documents.mask)
    assert again.documents.lengths.tolist() == first.documents.lengths.tolist()
    assert again.documents[1].loss_mask.any() and again.used_ids() == first.used_ids()


def test_without_a_cache_nothing_is_kept(
    tiny_target: FrozenTarget, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessedCache, "__init__", lambda *args: pytest.fail("a cache was opened"))
    data = DraftData(tiny_target, train=str(rows), max_length=64)
    data.prepare_data()
    data.setup()
    assert data.summary.kept == 3


def test_users_own_folder_follows_the_platforms_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ProcessedCache("user").folder == tmp_path / "dflash_lightning" / "data"


def test_share_of_bad_rows_is_checked_on_what_is_read_from_the_cache(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path
) -> None:
    rows.write_text(rows.read_text() + "{broken\n")
    make_data(tiny_target, rows, tmp_path / "cache", max_bad_rows=0.5)
    with pytest.raises(ValueError, match=r"1 of 5 rows \(20 %\) cannot be used"):
        make_data(tiny_target, rows, tmp_path / "cache", max_bad_rows=0.1)


# -- misses -----------------------------------------------------------------------------------------------------------


def key_of(target: FrozenTarget, path: Path, processing: Processing = SETTINGS, **source: Any) -> str:
    key = processing.key(make_sources([{"path": str(path), **source}]), target)
    assert key == json.loads(json.dumps(key))
    return ProcessedCache("unused").entry(key).name


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 63},
        {"truncate": "left"},
        {"supervise": "last_turn"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_every_setting_of_the_documents_misses(tiny_target: FrozenTarget, rows: Path, changes: dict[str, Any]) -> None:
    assert key_of(tiny_target, rows, replace(SETTINGS, **changes)) != key_of(tiny_target, rows)


@pytest.mark.parametrize("source", [{"weight": 2}, {"weight": 0.5}, {"limit": 2}, {"kind": "messages"}])
def test_every_setting_of_a_source_misses(tiny_target: FrozenTarget, rows: Path, source: dict[str, Any]) -> None:
    assert key_of(tiny_target, rows, **source) != key_of(tiny_target, rows)


def test_the_seed_counts_where_it_draws_rows_and_only_there(tiny_target: FrozenTarget, rows: Path) -> None:
    other = replace(SETTINGS, seed=1)
    assert key_of(tiny_target, rows, other, weight=2) == key_of(tiny_target, rows, weight=2)
    assert key_of(tiny_target, rows, other, weight=1.5) != key_of(tiny_target, rows, weight=1.5)


def test_changed_content_misses_though_size_and_time_are_the_same(tiny_target: FrozenTarget, rows: Path) -> None:
    before, times = key_of(tiny_target, rows), rows.stat()
    rows.write_text(rows.read_text().replace("Hello", "Jello"))
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert rows.stat().st_size == times.st_size and key_of(tiny_target, rows) != before


def test_a_new_file_behind_a_pattern_misses(tiny_target: FrozenTarget, rows: Path) -> None:
    pattern = rows.parent / "*.jsonl"
    before = key_of(tiny_target, pattern)
    (rows.parent / "more.jsonl").write_text(json.dumps(CHAT))
    assert key_of(tiny_target, pattern) != before


def test_template_text_and_tokens_miss_but_what_a_call_leaves_in_the_tokenizer_does_not(
    own_target: FrozenTarget, rows: Path
) -> None:
    tokenizer, before = own_target.tokenizer, key_of(own_target, rows)
    assert tokenizer is not None
    tokenizer.pad_token = "<|pad|>"
    keys = [before, key_of(own_target, rows)]  # it is a special token now
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert key_of(own_target, rows) == keys[-1]
    tokenizer.chat_template += " "
    keys.append(key_of(own_target, rows))
    tokenizer.add_tokens(["Hello"])
    keys.append(key_of(own_target, rows))
    assert len(set(keys)) == len(keys) - (keys[0] == keys[1])


def test_slow_tokenizer_is_told_apart_by_the_files_it_saves() -> None:
    class Slow(PreTrainedTokenizerBase):
        def __init__(self, content: str) -> None:
            self.__dict__["content"] = content

        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "vocabulary").write_text(self.content)

    assert tokenizer_digest(Slow("a")) == tokenizer_digest(Slow("a")) != tokenizer_digest(Slow("b"))


def test_a_template_that_reads_the_clock_misses_on_another_day(
    own_target: FrozenTarget, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tomorrow(process.date):
        @classmethod
        def today(cls) -> process.date:
            return process.date(2100, 1, 1)

    def both() -> tuple[str, str]:
        today = key_of(own_target, rows)
        with monkeypatch.context() as patch:
            patch.setattr(process, "date", Tomorrow)
            return today, key_of(own_target, rows)

    assert len(set(both())) == 1
    assert own_target.tokenizer is not None
    own_target.tokenizer.chat_template += "{{ strftime_now('%d') }}"
    assert len(set(both())) == 2


def test_changed_code_and_libraries_miss(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key_of(tiny_target, rows)]
    monkeypatch.setattr(process, "_version", lambda name: f"{name} of tomorrow")
    keys.append(key_of(tiny_target, rows))
    monkeypatch.setattr(process, "code_digest", lambda: "other code")
    keys.append(key_of(tiny_target, rows))
    assert len(set(keys)) == 3


def test_code_digest_follows_every_file_that_turns_rows_into_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash_lightning, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for name in ("data/a.py", "data/deep/b.py", "target/c.py"):
        for text in ("x = 1", "x = 2"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            digests.append(code_digest())
    assert len(set(digests)) == 6
    (tmp_path / "drafter.py").write_text("y = 1")
    assert code_digest() == digests[-1]


# -- damage, interruptions, company -----------------------------------------------------------------------------------


def made(value: int = 1) -> Processed:
    document = MaskedIds.of([value, 2, 3], [0, 1, 1])
    return Processed(DocumentStore.join([document, document]), DataSummary(read=1, kept=1), [{"line": value}])


KEY = {"what": "this"}


@pytest.mark.parametrize("name", ["ids.npy", "mask.npy", "offsets.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "empty"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    cache = ProcessedCache(str(tmp_path))
    cache.get(KEY, made)
    file = cache.entry(KEY) / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"short": content[:-1], "flipped": content, "empty": b""}[damage])
    found, was_there = cache.get(KEY, lambda: made(7))
    assert not was_there and found.store.ids.tolist() == [7, 2, 3, 7, 2, 3] and found.rejected == [{"line": 7}]
    assert cache.get(KEY, lambda: pytest.fail("made twice"))[1]


def test_an_entry_of_another_key_is_not_read(tmp_path: Path) -> None:
    cache = ProcessedCache(str(tmp_path))
    cache.get({"what": "that"}, made)
    cache.entry({"what": "that"}).rename(cache.entry(KEY))
    assert not cache.get(KEY, lambda: made(7))[1]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProcessedCache(str(tmp_path))
    entry = cache.entry(KEY)

    def killed(path: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the arrays were written; a kill runs no clean-up
        patch.setattr("dflash_lightning.data.read.processed_cache.shutil.rmtree", lambda *args, **settings: None)
        patch.setattr("dflash_lightning.data.read.processed_cache.file_digest", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.get(KEY, made)
    assert len(list(tmp_path.glob(f"{entry.name}.*.tmp"))) == 1 and not entry.exists()
    assert not cache.get(KEY, made)[1]
    assert {path.name for path in tmp_path.iterdir()} == {entry.name, f"{entry.name}.lock"}


def test_an_entry_is_made_once_though_many_ask_at_the_same_time(tmp_path: Path) -> None:
    cache, start, makers, found = ProcessedCache(str(tmp_path)), threading.Barrier(4), [], []

    def make() -> Processed:
        makers.append(threading.get_ident())
        return made()

    def ask() -> None:
        start.wait()
        found.append(cache.get(KEY, make)[0].store.ids.tolist())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(makers) == 1 and found == [[1, 2, 3, 1, 2, 3]] * 4


def test_an_error_while_making_leaves_nothing_and_lets_the_next_one_in(tmp_path: Path) -> None:
    cache = ProcessedCache(str(tmp_path))

    def fail() -> Processed:
        raise ValueError("no row can be used")

    with pytest.raises(ValueError, match="no row can be used"):
        cache.get(KEY, fail)
    assert not cache.entry(KEY).exists() and not cache.get(KEY, made)[1]


def test_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data.cache: .*file.* cannot be written .*or set data.cache=null"):
        ProcessedCache(str(tmp_path / "file" / "cache")).get(KEY, made)


@pytest.mark.slow
def test_one_of_two_ranks_processes_the_rows_and_both_train_on_them(
    make_target: Callable[..., FrozenTarget],
    byte_tokenizer: PreTrainedTokenizerFast,
    run_group: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """Two gloo processes under Lightning; processing is slowed down, so that a rank that does not wait for it shows."""
    target = make_target("llama")
    target.model.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"input_ids": [5 + i] * 9, "loss_mask": [0, *[1] * 8]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(Path(__file__).parent / "prepare_run.py"), str(tmp_path), "2"]
    done = run_group(command, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "made.txt").read_text().split() == ["0"]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1] and ranks[0]["kept"] == 6 and ranks[0]["steps"] > 0
    assert done.stdout.count("6 read, 6 kept") == 1  # told once


def test_rows_of_lengths_that_sort_otherwise_as_text_are_kept_and_found(
    tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    """Lengths are counted by bucket: 64 stands before 128 as a number, and after it as the text that a file holds."""
    rows = tmp_path / "rows.jsonl"
    ids = [[1] * length for length in (20, 60, 100)]
    rows.write_text("".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) + "\n" for row in ids))
    first, again = (make_data(tiny_target, rows, tmp_path / "cache", max_length=128) for _ in range(2))
    assert first.summary == again.summary and sorted(first.summary.lengths) == [32, 64, 128]
