"""Features computed once: what they equal, where they lie, and what happens to files that cannot be trusted."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from dflash_lightning.block import Anchored
from dflash_lightning.data import DraftData
from dflash_lightning.data.features import shards as shards_module
from dflash_lightning.data.features.cache import RamFeatures, fixed_rows
from dflash_lightning.data.features.ranks import Ranks, make_on_disk
from dflash_lightning.data.features.shards import FeatureShards, feature_key
from dflash_lightning.data.read.store import DocumentStore, MaskedIds
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, FeatureSpec

SPEC = FeatureSpec((0, 2), last_hidden=True)
ALIGNMENT = Alignment(block_size=4, mask_token_id=260)
WIDTH = 32
ROW_TOKENS = 24
SHARD = 30 * 3 * WIDTH * 4  # bytes of 30 positions in float32: two or three fixed rows


def make_store(lengths: tuple[int, ...] = (11, 9, 20, 5, 16, 13, 24, 7, 3, 18, 12, 22), seed: int = 0) -> DocumentStore:
    rng = np.random.default_rng(seed)
    return DocumentStore.join(
        [MaskedIds.of(rng.integers(0, 256, size=length).tolist(), [1] * length) for length in lengths]
    )


@pytest.fixture(scope="module")
def store() -> DocumentStore:
    return make_store()


def make_shards(store: DocumentStore, target: FrozenTarget, root: Path, **settings: Any) -> FeatureShards:
    settings = {"row_tokens": ROW_TOKENS, "dtype": torch.float32, "shard_bytes": SHARD, **settings}
    return FeatureShards(store, target, settings.pop("spec", SPEC), root=root, **settings)


@pytest.fixture
def built(store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path) -> FeatureShards:
    """A whole cache, as another run would find it: nothing in it has been checked yet."""
    make_shards(store, tiny_target, tmp_path).build()
    shards = make_shards(store, tiny_target, tmp_path)
    assert len(shards.shards) > 3 and all(shard.path.exists() for shard in shards.shards)
    return shards


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, tiny_target: FrozenTarget) -> Iterator[list[int]]:
    """Positions of every row that goes through the target while the test runs."""
    seen: list[int] = []
    features = tiny_target.features

    def counted(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        return features(ids, *args, **kwargs)

    monkeypatch.setattr(tiny_target, "features", counted)
    yield seen


def equal(store: DocumentStore, one: Any, other: Any) -> bool:
    """Whether two caches hold the same bits for every document."""
    pairs = [(one.document(d), other.document(d)) for d in range(len(store))]
    return all(torch.equal(a.hidden, b.hidden) and torch.equal(a.last_hidden, b.last_hidden) for a, b in pairs)


# -- what they equal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_tokens", [ROW_TOKENS, None])
def test_features_on_disk_are_those_in_memory_and_exactly_the_targets(
    store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path, row_tokens: int | None
) -> None:
    shards = make_shards(store, tiny_target, tmp_path, row_tokens=row_tokens)
    shards.build()
    disk = shards.open()
    assert equal(store, disk, RamFeatures(store, tiny_target, SPEC, row_tokens=row_tokens, dtype=torch.float32))
    for first, last in fixed_rows(store, row_tokens):
        documents = [store[d] for d in range(first, last)]
        ids = torch.cat([document.input_ids for document in documents])[None]
        positions = torch.cat([torch.arange(len(document.input_ids)) for document in documents])[None]
        expected = tiny_target.features(ids, positions, SPEC)
        found = [disk.document(d) for d in range(first, last)]
        assert torch.equal(torch.cat([f.hidden for f in found], dim=1), expected.hidden)
        assert torch.equal(torch.cat([f.last_hidden for f in found], dim=1), expected.last_hidden)


def draft_data(target: FrozenTarget, rows: Path, **settings: Any) -> DraftData:
    data = DraftData(
        target, train=str(rows), max_length=64, token_bucket=16, block_bucket=8, rows_per_batch=2, **settings
    )
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=6), ALIGNMENT, SPEC)
    return data


@pytest.fixture
def rows(store: DocumentStore, tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            f'{{"input_ids": {store[d].input_ids.tolist()}, "loss_mask": {[1] * int(store.lengths[d])}}}\n'
            for d in range(len(store))
        )
    )
    return path


@pytest.mark.parametrize("packing", [True, False])
def test_batches_get_from_the_disk_what_they_get_on_the_fly(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path, packing: bool
) -> None:
    """To the rounding of another batch; padding holds zeros; memory and disk give the same bits."""
    places = {"disk": {"features_folder": str(tmp_path / "features")}, "ram": {}}
    disk, ram = (draft_data(tiny_target, rows, packing=packing, cache_features=k, **v) for k, v in places.items())
    plain = draft_data(tiny_target, rows, packing=packing)
    loaders = [data.train_dataloader() for data in (disk, ram, plain)]
    padded = 0
    for batches in zip(*loaders, strict=True):
        found = [
            data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
            for data, batch in zip((disk, ram, plain), batches, strict=True)
        ]
        one, two, expected = (batch.features for batch in found)
        real = found[0].doc_ids >= 0
        assert torch.equal(one.hidden, two.hidden) and torch.equal(one.last_hidden, two.last_hidden)
        torch.testing.assert_close(one.hidden[real], expected.hidden[real], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(one.last_hidden[real], expected.last_hidden[real], atol=2e-4, rtol=1e-4)
        assert not one.hidden[~real].any() and not one.last_hidden[~real].any()
        padded += int((~real).sum())
    assert padded > 0


def test_recipes_that_read_different_features_share_one_cache(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path
) -> None:
    """``cache_also`` keeps more than is read; a batch holds what was asked for, equal to a cache of that alone."""
    also, folder = {"layer_ids": [1, *SPEC.layer_ids], "last_hidden": True}, tmp_path / "features"
    found, expected = [], []
    for spec in (SPEC, FeatureSpec((1,)), FeatureSpec()):
        shared = draft_data(tiny_target, rows, cache_features="disk", features_folder=str(folder), cache_also=also)
        alone = draft_data(tiny_target, rows, cache_features="ram")
        for data, batches in ((shared, found), (alone, expected)):
            data.bind(Anchored(block_size=4, num_anchors=6), ALIGNMENT, spec)
            batches.append(data.on_before_batch_transfer(next(iter(data.train_dataloader())), 0).features)
    assert len(list(folder.iterdir())) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.layer_ids == other.layer_ids and one.tensors().keys() == other.tensors().keys()
        assert all(torch.equal(value, other.tensors()[name]) for name, value in one.tensors().items())


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_a_half_precision_cache_rounds_what_is_read_and_not_the_teacher(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path, place: Any
) -> None:
    """Every field of features made on the fly comes out of the cache; the teacher's states are the target's own."""
    extra = {"features_folder": str(tmp_path / "features")} if place == "disk" else {}
    cached = draft_data(tiny_target, rows, cache_features=place, cache_dtype="bfloat16", **extra)
    exact = draft_data(tiny_target, rows, cache_features="ram")
    plain = draft_data(tiny_target, rows)
    found, whole, expected = (
        data.on_after_batch_transfer(data.on_before_batch_transfer(next(iter(data.train_dataloader())), 0), 0).features
        for data in (cached, exact, plain)
    )
    assert found.tensors().keys() == expected.tensors().keys() == {"hidden", "last_hidden", "ids", "next_ids"}
    assert torch.equal(found.last_hidden, whole.last_hidden)
    assert torch.equal(found.hidden, whole.hidden.bfloat16().float()) and not torch.equal(found.hidden, whole.hidden)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.next_ids, expected.next_ids)


def test_files_of_the_format_that_rounded_the_teacher_are_under_another_key(
    store: DocumentStore, tiny_target: FrozenTarget
) -> None:
    """And those without it are as they were, so that they are used again."""
    keys = [
        feature_key(store, tiny_target, FeatureSpec((0, 2), last), row_tokens=None, dtype=torch.bfloat16)
        for last in (True, False)
    ]
    assert [key.get("last_hidden_in") for key in keys] == ["torch.float32", None]
    assert "last_hidden_in" not in keys[1] and keys[1]["format"] == 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_features_stored_in_half_precision_are_within_its_rounding(
    store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path, dtype: torch.dtype, bound: float
) -> None:
    shards = make_shards(store, tiny_target, tmp_path, dtype=dtype)
    shards.build()
    disk = shards.open()
    exact = RamFeatures(store, tiny_target, SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    worst = 0.0
    for d in range(len(store)):
        found, expected = disk.document(d).hidden, exact.document(d).hidden
        assert found.dtype == dtype
        normal = expected.abs() > 1e-4  # float16 has fewer digits below its normal range
        worst = max(worst, float(((found.float() - expected).abs() / expected.abs())[normal].max()))
    assert bound / 4 < worst <= bound


def test_features_too_large_for_float16_are_refused_not_stored_as_infinities(
    store: DocumentStore, make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    target = make_target("llama")
    target.model.get_input_embeddings().weight.data *= 1e6
    with pytest.raises(ValueError, match=r"'float16' cannot hold .*Use 'bfloat16'"):
        make_shards(store, target, tmp_path, dtype=torch.float16).build()


def test_spec_without_last_hidden_or_without_layers_is_kept(
    store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    layers = make_shards(store, tiny_target, tmp_path, spec=FeatureSpec((1,)))
    layers.build()
    assert layers.open().document(3).last_hidden is None
    last = make_shards(store, tiny_target, tmp_path, spec=FeatureSpec((), last_hidden=True))
    last.build()
    found = last.open().document(3)
    assert found.hidden.shape == (1, 5, 0, WIDTH) and found.last_hidden.shape == (1, 5, WIDTH)


# -- whose they are ---------------------------------------------------------------------------------------------------


def test_a_second_run_computes_nothing(built: FeatureShards, computed: list[int]) -> None:
    built.build()
    built.open()
    assert computed == []


def test_everything_that_features_depend_on_is_part_of_the_key(
    store: DocumentStore, tiny_target: FrozenTarget, make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    other_ids, other_bounds = make_store(), make_store((20, *store.lengths.tolist()[2:]))
    other_ids.ids[17] ^= 1
    half = FrozenTarget(make_target("llama").model.to(torch.bfloat16), tiny_target.tokenizer, name="tiny-llama")
    rotated = make_target("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert rotated.facts.digest == half.facts.digest == tiny_target.facts.digest  # it speaks of weights only
    eager = make_target("llama")
    eager.model.set_attn_implementation("eager")
    folders = {
        "itself": make_shards(store, tiny_target, tmp_path),
        "weights": make_shards(store, make_target("llama", seed=1), tmp_path),
        "config": make_shards(store, rotated, tmp_path),
        "attention": make_shards(store, eager, tmp_path),
        "computed in": make_shards(store, half, tmp_path),
        "stored in": make_shards(store, tiny_target, tmp_path, dtype=torch.bfloat16),
        "layers": make_shards(store, tiny_target, tmp_path, spec=FeatureSpec((0, 1), last_hidden=True)),
        "order of layers": make_shards(store, tiny_target, tmp_path, spec=FeatureSpec((2, 0), last_hidden=True)),
        "last hidden": make_shards(store, tiny_target, tmp_path, spec=FeatureSpec((0, 2))),
        "an id": make_shards(other_ids, tiny_target, tmp_path),
        "bounds of documents": make_shards(other_bounds, tiny_target, tmp_path),
        "rows": make_shards(store, tiny_target, tmp_path, row_tokens=ROW_TOKENS + 8),
    }
    assert len({shards.folder for shards in folders.values()}) == len(folders)
    assert make_shards(make_store(), make_target("llama"), tmp_path).folder == folders["itself"].folder


def test_another_version_of_transformers_computes_anew(
    store: DocumentStore, tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> dict[str, Any]:
        return feature_key(store, tiny_target, SPEC, row_tokens=None, dtype=torch.float32)

    before = key()
    monkeypatch.setattr(shards_module.transformers, "__version__", "5.99.0")
    assert {name for name, value in key().items() if value != before[name]} == {"transformers"}


def test_shards_of_another_key_are_never_read(
    store: DocumentStore, make_target: Callable[..., FrozenTarget], built: FeatureShards, tmp_path: Path
) -> None:
    """Whole files with a right checksum, of another target, copied into the folder."""
    other = make_shards(store, make_target("llama", seed=1), tmp_path)
    other.build()
    for mine, theirs in zip(built.shards, other.shards, strict=True):
        shutil.copy(theirs.path, mine.path)
    with pytest.warns(UserWarning, match="was made for other data or settings; it is computed again"):
        built.build()
    memory = RamFeatures(store, built.target, SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    assert equal(store, built.open(), memory)


# -- files that cannot be trusted -------------------------------------------------------------------------------------


def cut(size: float) -> Callable[[Path], None]:
    """Leaves that share of the file, as a full disk or an interrupted copy does."""
    return lambda path: os.truncate(path, int(size * path.stat().st_size))


def flip(place: float) -> Callable[[Path], None]:
    """Changes one bit at that share of the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(bytes(content))

    return damage


DAMAGES = {
    "removed": Path.unlink,
    "empty": cut(0.0),
    "cut in its header": cut(0.01),
    "cut": cut(0.6),
    "a bit of its header": flip(0.004),
    "a bit of its length": flip(0.0),
    "a bit of its content": flip(0.7),
    "its last bit": flip(1.0),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_shard_is_found_and_made_again_and_no_other(
    store: DocumentStore, built: FeatureShards, computed: list[int], kind: str
) -> None:
    victim, others = built.shards[1], [*built.shards[:1], *built.shards[2:]]
    before = {shard.path: shard.path.stat().st_ino for shard in others}
    DAMAGES[kind](victim.path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        built.build()
    told = [str(warning.message) for warning in said if str(victim.path) in str(warning.message)]
    assert len(told) == (kind != "removed") and all("it is computed again" in text for text in told)
    assert sum(computed) == victim.tokens
    assert {path: path.stat().st_ino for path in before} == before
    memory = RamFeatures(store, built.target, SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    assert equal(store, built.open(), memory)


def test_a_shard_that_vanishes_after_it_was_made_is_reported(built: FeatureShards) -> None:
    built.build()
    built.shards[2].path.unlink()
    with pytest.raises(ValueError, match=r"it is missing.*Start the run again"):
        built.open()


def test_a_run_that_fails_half_way_goes_on_from_the_shards_that_stand(
    store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, calls = tiny_target.features, []

    def interrupted(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(ids.shape[1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return features(ids, *args, **kwargs)

    monkeypatch.setattr(tiny_target, "features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_shards(store, tiny_target, tmp_path).build()
    again = make_shards(store, tiny_target, tmp_path)
    standing = sum(shard.tokens for shard in again.shards if shard.path.exists())
    assert 0 < standing < len(store.ids)
    calls[:] = [0] * 4
    again.build()
    assert sum(calls) == len(store.ids) - standing
    memory = RamFeatures(store, tiny_target, SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    assert equal(store, again.open(), memory)


# -- several processes ------------------------------------------------------------------------------------------------


def test_processes_that_make_one_cache_together_and_are_killed_leave_nothing_wrong(
    make_target: Callable[..., FrozenTarget],
    fork: Any,
    tmp_path: Path,
    computed: list[int],
    tiny_target: FrozenTarget,
) -> None:
    store = make_store(tuple([11, 9, 20] * 20))
    target, compute = make_target("llama"), FrozenTarget.features

    def build_slowly() -> None:
        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.03)
            return compute(target, *args, **kwargs)

        target.features = slowly  # type: ignore[method-assign]
        make_shards(store, target, tmp_path / "features").build()

    shards = make_shards(store, tiny_target, tmp_path / "features")
    workers = [fork(build_slowly, tmp_path / f"{number}.txt") for number in range(2)]
    try:
        for worker, count in zip(workers, (3, 6), strict=True):
            while sum(shard.path.exists() for shard in shards.shards) < count:
                assert any(w.poll() is None for w in workers), "both ended before they were killed"
                time.sleep(0.01)
            worker.kill()
    finally:
        for worker in workers:
            worker.kill()
    standing = {shard.path: shard.path.stat().st_ino for shard in shards.shards if shard.path.exists()}
    assert 6 <= len(standing) < len(shards.shards)
    (shards.folder / ".features-00000000.safetensors.node-1.tmp").write_bytes(b"half a sh")  # a kill while writing
    shards.build()
    assert {path: path.stat().st_ino for path in standing} == standing
    assert sum(computed) == sum(shard.tokens for shard in shards.shards if shard.path not in standing)
    memory = RamFeatures(store, tiny_target, SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    assert equal(store, shards.open(), memory)
    assert sorted(path.name for path in shards.folder.iterdir()) == sorted(
        ["key.json", *(shard.path.name for shard in shards.shards)]
    )


@pytest.mark.parametrize("disks", ["shared", "one per machine"])
def test_ranks_divide_the_work_and_every_machine_ends_up_with_all(
    store: DocumentStore, make_target: Callable[..., FrozenTarget], tmp_path: Path, disks: str
) -> None:
    """Two machines of two ranks each. On a shared disk nothing is computed twice, else once per machine."""
    barrier, positions = threading.Barrier(4), [0] * 4
    targets = [make_target("llama") for _ in range(4)]  # not in the threads, which share a random generator
    roots = [tmp_path / ("all" if disks == "shared" else f"machine{rank // 2}") for rank in range(4)]
    for root in roots:  # threads also share a process number, which temporary files are named by
        make_shards(store, targets[0], root).build(rank=99, world=100)

    def run(rank: int) -> Any:
        root, target = roots[rank], targets[rank]
        features = target.features

        def counted(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            positions[rank] += ids.shape[1]
            return features(ids, *args, **kwargs)

        target.features = counted  # type: ignore[method-assign]
        ranks = Ranks(rank, 4, rank % 2, 2, barrier=lambda name: barrier.wait(60) and None)
        return make_on_disk(make_shards(store, target, root), ranks, say=lambda line: None)

    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(run, range(4)))
    assert sum(positions) == len(store.ids) * (1 if disks == "shared" else 2) and all(positions)
    memory = RamFeatures(store, make_target("llama"), SPEC, row_tokens=ROW_TOKENS, dtype=torch.float32)
    assert all(equal(store, cache, memory) for cache in caches)


def test_ranks_are_those_of_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=str(tmp_path))
    ranks = Ranks.of(trainer)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (0, 1, 0, 1)
    assert ranks.barrier == trainer.strategy.barrier


# -- room, and what is said -------------------------------------------------------------------------------------------


def test_size_and_place_are_said_before_anything_is_computed(
    tiny_target: FrozenTarget, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], computed: list[int]
) -> None:
    data = draft_data(tiny_target, rows, cache_features="disk", features_folder=str(tmp_path), cache_dtype="bfloat16")
    capsys.readouterr()
    said: list[str] = []
    data._say = lambda *lines: said.append(f"{len(computed)} rows: {lines}")  # type: ignore[method-assign]
    data.train_dataloader()
    tokens = int(data.documents.offsets[-1])
    size = tokens * WIDTH * (2 * 2 + 4) / 2**20  # two layers in bfloat16, the teacher in the target's float32
    assert len(said) == 1 and said[0].startswith("0 rows: ") and len(computed) > 0
    assert f"features of {tokens} tokens take {size:.1f} MiB of disk as bfloat16 in {tmp_path}/" in said[0]
    assert "(0.0 MiB are there)" in said[0]


def test_a_disk_without_room_is_refused_before_a_feature_is_computed(
    store: DocumentStore,
    tiny_target: FrozenTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed: list[int],
) -> None:
    """What stands already needs no room; the message names caches of other settings, which may be deleted."""
    half = make_shards(store, tiny_target, tmp_path)
    half.build(rank=0, world=2)
    make_shards(store, tiny_target, tmp_path, row_tokens=None).build()
    computed.clear()
    missing = sum(shard.tokens for shard in half.shards[1::2]) * 3 * WIDTH * 4
    asked = []

    def usage(free: int) -> Callable[[Path], Any]:
        return lambda place: asked.append(Path(place)) or SimpleNamespace(free=free)

    monkeypatch.setattr(shards_module.shutil, "disk_usage", usage(missing - 1))
    with pytest.raises(ValueError, match=r"'disk' needs .* more in .*but .* are free there") as refused:
        make_on_disk(make_shards(store, tiny_target, tmp_path), Ranks(), say=lambda line: None)
    other = make_shards(store, tiny_target, tmp_path, row_tokens=None).folder.name
    assert f"{tmp_path}: ['{other}']" in str(refused.value) and "data.features_folder" in str(refused.value)
    assert computed == [] and asked == [half.folder]
    monkeypatch.setattr(shards_module.shutil, "disk_usage", usage(missing))
    make_on_disk(make_shards(store, tiny_target, tmp_path), Ranks(), say=lambda line: None)
    assert len(computed) > 0
    make_shards(store, tiny_target, tmp_path / "not" / "there" / "yet").estimate()
    with pytest.raises(ValueError, match=r"other data or settings in .*none"):
        make_shards(store, tiny_target, tmp_path / "not" / "there" / "yet").check_room()
    assert asked[-1] == tmp_path


def test_the_cache_folder_is_the_users_unless_named(
    store: DocumentStore, tiny_target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shards = FeatureShards(store, tiny_target, SPEC, row_tokens=None, dtype=torch.float32)
    assert shards.folder.parent == tmp_path / "dflash_lightning" / "features" and not shards.folder.exists()


def test_a_folder_says_in_words_what_it_is_of(built: FeatureShards) -> None:
    key = json.loads((built.folder / "key.json").read_text())
    assert key["target_name"] == "tiny-llama" and key["layer_ids"] == [0, 2] and key["stored_in"] == "torch.float32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_features": "ram", "features_folder": "x"}, "applies to features on disk only. Remove it"),
        ({"features_folder": "x"}, "applies to features on disk only. Remove it"),
        ({"cache_also": {"layer_ids": [1]}}, "data.cache_also: applies to features that are kept only. Remove it"),
        ({"cache_features": "ram", "cache_also": {"layers": [1]}}, r"\['layers'\] is unknown. Name layer_ids"),
        ({"cache_features": "ram", "cache_also": {"layer_ids": [-1]}}, "is not understood. Name layer_ids"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    tiny_target: FrozenTarget, rows: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DraftData(tiny_target, train=str(rows), max_length=64, **settings)  # type: ignore[arg-type]
