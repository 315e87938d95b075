"""Heads that know the tokens drafted before a slot: in the layouts of the programs that have them, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export import FORMATS, Exported, check, export
from dflash_lightning.head import MarkovHead, PrefixHead, RefinerHead
from dflash_lightning.model import DraftModel, load_draft, make_draft_config
from dflash_lightning.target import FrozenTarget

PROMPTS = [[(37 * i + 11 * n) % 250 for i in range(12)] for n in (1, 2)]
MARKOV = {"rank": 5, "confidence": True}
# Trio, head, label layout, tokens that it knows (null: all).
CASES: dict[str, tuple[str, Callable[[], Any], str, int | None]] = {
    "dspark": ("DSpark", lambda: MarkovHead(**MARKOV, detach_confidence=True), "anchor_first", None),
    "dspark, no confidence": ("DSpark", lambda: MarkovHead(rank=6), "anchor_first", None),
    "dspark, its own confidence": (
        "DSpark",
        lambda: MarkovHead(**MARKOV, confidence_token=False, confidence_bias=True),
        "anchor_first",
        None,
    ),
    "dspark, few tokens": ("DSpark", lambda: MarkovHead(**MARKOV), "same_position", 60),
    "xpress": ("xPress", lambda: RefinerHead(rank=6, passes=2), "anchor_first", None),
    "xpress, in turn, few tokens": ("xPress", lambda: RefinerHead(rank=6, passes=None), "anchor_first", 60),
    "domino": ("Domino", lambda: PrefixHead(state_size=10, rank=6), "anchor_first", None),
    "domino, drafts where slots stand": (
        "Domino",
        lambda: PrefixHead(state_size=10, rank=6, pure_slots=0),
        "same_position",
        None,
    ),
}


def why(case: str, name: str) -> list[str]:
    """Why the format does not hold it."""
    return FORMATS[name].limits(make_case(case).config)


def make_case(case: str, target: FrozenTarget | None = None) -> DraftModel:
    """A drafter of the tiny target with all weights at random."""
    _, head, layout, vocabulary = CASES[case]
    config = make_draft_config(
        (target or TARGETS[0]).facts,
        block=Anchored(block_size=4, label_layout=layout),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=2, init_std=0.2),
        head=head(),
        mask_token_id=262,
        draft_vocab_size=vocabulary,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = DraftModel(config).eval()
        for key, weight in draft.named_parameters():
            weight.data += (0.9 if key.startswith("head.") else 0.2) * torch.randn_like(weight)
    if vocabulary is not None:
        draft.draft_vocab.copy_(torch.arange(vocabulary) * 4 + 3)
    return draft


TARGETS: list[FrozenTarget] = []
HELD = [
    *((case, "speculators") for case in CASES if not case.startswith("domino")),
    *((case, "specforge") for case in CASES if not case.startswith("xpress") and "few tokens" not in case),
]


@pytest.fixture(scope="module", autouse=True)
def target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    TARGETS[:] = [make_target("qwen3")]
    return TARGETS[0]


@pytest.fixture(scope="module")
def folders(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    root, found = tmp_path_factory.mktemp("exports"), {}
    for case, name in HELD:
        found[case, name] = root / f"{len(found)}"
        settings: Any = {"dtype": "float32", "prompts": PROMPTS, "max_new_tokens": 8}
        export(make_case(case), target, found[case, name], format=name, **settings)
    return found


def test_these_are_all_that_are_held() -> None:
    held = {(case, name) for case in CASES for name in FORMATS if not why(case, name)}
    assert held == {*HELD}
    for case, (trio, *_) in CASES.items():
        for name, exporter in FORMATS.items():
            if trio not in exporter.holds:
                assert any(f"'head': '{make_case(case).head.name}" in reason for reason in why(case, name))


@pytest.mark.parametrize(("case", "name"), HELD)
def test_its_replay_comes_out_of_the_tensors_alone(folders: Any, target: FrozenTarget, case: str, name: str) -> None:
    """Drafts by the slow reading, which shares no code with the head's; the head makes a difference to them."""
    exported = Exported.open(folders[case, name])
    outcome = check(exported, target)
    assert outcome.passed, outcome.faults
    alike = []
    for prompt in exported.replay.prompts:
        columns = [max(range(16), key=row.__getitem__) for row in prompt.logits]
        alike.append(prompt.draft_ids == [prompt.logit_ids[slot][column] for slot, column in enumerate(columns)])
        assert len(prompt.draft_ids) == make_case(case).alignment.num_drafts
    assert not all(alike), "the marginals alone would draft the same: nothing is tested"


@pytest.mark.parametrize(("case", "name"), HELD)
def test_what_is_written_is_read_back_as_the_same_drafter(folders: Any, case: str, name: str) -> None:
    loaded, draft = load_draft(folders[case, name]), make_case(case)
    state, expected = loaded.state_dict(), draft.state_dict()
    if case.startswith("dspark") and draft.head.confidence and not draft.head.confidence_bias:
        assert state.pop("head.certainty.bias").tolist() == [0.0]
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, state[key]) for key, value in expected.items())
    assert (loaded.config.label_layout, loaded.config.block_size) == (draft.config.label_layout, 4)
    theirs, ours = loaded.head.settings(), draft.head.settings()
    shown = {"rank", "confidence", "confidence_token", "variant", "expansion", "state_size", "pure_slots"}
    assert {k: v for k, v in theirs.items() if k in shown} == {k: v for k, v in ours.items() if k in shown}
    assert (theirs.get("passes") or 4) == (ours.get("passes") or 4)  # in turn is as many passes as drafts


def test_names_of_dspark_are_those_of_speculators(folders: Any) -> None:
    folder = folders["dspark, few tokens", "speculators"]
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = {key: tuple(value.shape) for key, value in tensors.items() if key.split(".")[0].endswith("_head")}
    own.pop("lm_head.weight")
    assert own == {
        "markov_head.markov_w1.weight": (272, 5),
        "markov_head.markov_w2.weight": (60, 5),
        "confidence_head.proj.weight": (1, 37),
        "confidence_head.proj.bias": (1,),
    }
    stated = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "sample_from_anchor": False,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "aux_hidden_state_layer_ids": [1, 3],
    }
    assert raw | stated == raw and raw["speculators_config"]["algorithm"] == "dspark"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert '"method": "dspark"' in (folder / "README.md").read_text()


def test_names_of_xpress_are_those_of_speculators(folders: Any) -> None:
    folder = folders["xpress", "speculators"]
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = {key: tuple(value.shape) for key, value in tensors.items() if key.startswith("refiner_head.")}
    linear = {"down_h": (6, 32), "down_g": (6, 32), "in_proj": (6, 18), "mlp_gate": (12, 6), "mlp_up": (12, 6)}
    linear |= {"mlp_down": (6, 12), "readout": (272, 6), "token_embed": (272, 6)}
    assert own == {f"refiner_head.{k}.weight": v for k, v in linear.items()} | {"refiner_head.mix_l": (6, 4, 4)}
    stated = {"architectures": ["XPressSpeculator"], "speculators_model_type": "xpress", "sample_from_anchor": True}
    stated |= {"xpress_rank": 6, "xpress_mlp_ratio": 2, "num_jacobi_passes": 2}
    assert raw | stated == raw and "projector_type" not in raw


def test_names_of_dspark_and_domino_are_those_of_specforge(folders: Any) -> None:
    tensors = load_file(folders["dspark", "specforge"] / "model.safetensors")
    assert {key: tuple(value.shape) for key, value in tensors.items() if key.split(".")[0].endswith("_head")} == {
        "markov_head.markov_w1.weight": (272, 5),
        "markov_head.markov_w2.weight": (272, 5),
        "confidence_head.proj.weight": (1, 37),
        "confidence_head.proj.bias": (1,),
    }
    raw = json.loads((folders["dspark", "specforge"] / "config.json").read_text())
    stated = {"projector_type": "dspark", "markov_rank": 5, "markov_head_type": "vanilla", "attention_mode": "gqa"}
    stated |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    assert raw["architectures"] == ["DSparkDraftModel"] and raw["dflash_config"] | stated == raw["dflash_config"]
    tensors = load_file(folders["domino", "specforge"] / "model.safetensors")
    assert {k: tuple(v.shape) for k, v in tensors.items() if k.split(".")[0] in ("prefix_gru", "embed_proj")} == {
        "prefix_gru.weight_ih_l0": (30, 32),
        "prefix_gru.weight_hh_l0": (30, 10),
        "embed_proj.0.weight": (6, 42),
        "embed_proj.2.weight": (272, 6),
    }
    raw = json.loads((folders["domino", "specforge"] / "config.json").read_text())
    stated = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1}
    assert raw["dflash_config"] | stated | {"shift_label": True} == raw["dflash_config"]
    assert raw["architectures"] == ["DominoDraftModel"]


@pytest.mark.parametrize(
    ("trio", "head", "layout", "name", "reason"),
    [
        ("dspark", lambda: MarkovHead(variant="gated"), "anchor_first", "speculators", r"markov\(variant='gated'\)"),
        ("dspark", lambda: MarkovHead(variant="recurrent"), "anchor_first", "speculators", r"variant='recurrent'"),
        ("dspark", lambda: MarkovHead(variant="gated"), "anchor_first", "specforge", r"markov\(variant='gated'\)"),
        ("dspark", lambda: MarkovHead(), "same_position", "specforge", "only for blocks that all predict"),
        ("xpress", lambda: RefinerHead(rank=6), "same_position", "speculators", "only for blocks that all predict"),
    ],
)
def test_a_setting_that_the_format_cannot_hold_is_refused_by_name(
    target: FrozenTarget, tmp_path: Path, monkeypatch: Any, trio: str, head: Any, layout: str, name: str, reason: str
) -> None:
    monkeypatch.setitem(CASES, "case", (CASES[trio][0], head, layout, None))
    with pytest.raises(ValueError, match=rf"--format {name} cannot hold this drafter: .*{reason}"):
        export(make_case("case"), target, tmp_path / "out", format=name, prompts=PROMPTS)
    assert not list(tmp_path.iterdir())


def test_logits_that_the_target_scales_are_refused(make_target: Callable[..., FrozenTarget], tmp_path: Path) -> None:
    granite = make_target("granite", logits_scaling=3.0)
    with pytest.raises(ValueError, match="corrects the target's logits as they are scaled"):
        export(make_case("dspark", granite), granite, tmp_path / "out", format="speculators", prompts=PROMPTS)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type='gated', which is not read"),
        ("dspark", {"markov_rank": 0}, r"without a Markov head \(markov_rank 0\)"),
        ("dspark", {"enable_confidence_head": 1}, "enable_confidence_head 1, which is neither true nor false"),
        ("dspark", {"markov_rank": "5"}, "markov_rank '5', which is no whole number"),
        ("dspark", {"speculators_model_type": "dflash"}, "drafter of DSpark, of which the settings say nothing"),
        ("dspark", {"speculators_model_type": "dspine"}, r"drafter of dspine .*in a layout that is not supported"),
        ("xpress", {"sample_from_anchor": False}, "also counts the anchor's slot"),
    ],
)
def test_what_cannot_be_run_is_not_read(folders: Any, tmp_path: Path, case: str, changes: Any, message: str) -> None:
    folder = folders[case, "speculators"]
    raw = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path)


def test_silent_files_have_the_librarys_defaults(folders: Any, tmp_path: Path) -> None:
    folder = folders["dspark", "speculators"]
    raw = json.loads((folder / "config.json").read_text())
    for key in ("enable_confidence_head", "confidence_head_with_markov", "markov_head_type", "sample_from_anchor"):
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    one, other = (load_draft(place) for place in (folder, tmp_path))
    assert one.head.settings() == other.head.settings() and one.config.label_layout == other.config.label_layout


def test_a_vocabulary_out_of_order_is_refused(folders: Any, tmp_path: Path) -> None:
    """Rows of the head would be those of other tokens; without a head the order says nothing."""
    folder = folders["dspark, few tokens", "speculators"]
    tensors = load_file(folder / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(60)
    tensors["d2t"] = ids[[1, 0, *range(2, 60)]] - torch.arange(60)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="d2t does not name tokens in ascending order"):
        load_draft(tmp_path)
