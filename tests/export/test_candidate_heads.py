"""Drafters that choose among candidates: in the layouts of the programs that run them, and read back from there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer, ConvTransformer
from dflash_lightning.export import FORMATS, Exported, check, export
from dflash_lightning.head import LatticeHead, SelectorHead
from dflash_lightning.model import DraftModel, load_draft, make_draft_config
from dflash_lightning.target import FrozenTarget

LATTICE = {"candidates": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "factor_dim": 6, "init_std": 0.3}
TRIOS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "DFlash 2": lambda: (convolved(), SelectorHead(candidates=4, rank=5)),
    "LiLiCorr": lambda: (BlockTransformer(num_layers=2, init_std=0.2), LatticeHead(**LATTICE)),
    "LiLiCorr with convolutions": lambda: (convolved(), LatticeHead(**{**LATTICE, "hidden_size": None})),
}
HELD = [(trio, name) for trio in TRIOS for name, exporter in FORMATS.items() if trio in exporter.holds]
PROMPTS = [[(37 * i + 11 * n) % 250 for i in range(12)] for n in (1, 2)]


def convolved() -> ConvTransformer:
    return ConvTransformer(num_layers=2, init_std=0.2, kernel_size=2, group_size=8)


def make(target: FrozenTarget, trio: str) -> DraftModel:
    """A drafter of the tiny target with all weights at random."""
    drafter, head = TRIOS[trio]()
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=drafter,
        head=head,
        mask_token_id=262,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = DraftModel(config).eval()
        for weight in draft.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
    return draft


@pytest.fixture(scope="module")
def folders(make_target: Callable[..., FrozenTarget], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Every drafter in every format that holds it."""
    target, root = make_target("qwen3"), tmp_path_factory.mktemp("exports")
    found: dict[Any, Path] = {"target": target}  # type: ignore[dict-item]
    for trio, name in HELD:
        folder = root / trio.replace(" ", "_") / name
        settings: Any = {"dtype": "float32", "prompts": PROMPTS, "max_new_tokens": 8}
        export(make(target, trio), target, folder, format=name, **settings)
        found[trio, name] = folder
    return found


def test_the_table_says_who_holds_what() -> None:
    assert {name: exporter.holds[1:] for name, exporter in FORMATS.items()} == {
        "hf": (),
        "zlab": ("DFlash 2",),
        "sglang": ("LiLiCorr", "LiLiCorr with convolutions"),
        "vllm": ("DFlash 2", "LiLiCorr", "LiLiCorr with convolutions"),
        "speculators": ("DSpark", "xPress"),
        "specforge": ("Domino", "DSpark"),
    }


@pytest.mark.parametrize("trio", TRIOS)
def test_other_formats_refuse_it_by_name(tiny_target: Any, tmp_path: Path, trio: str) -> None:
    draft = make(tiny_target, trio)
    head = draft.head.name
    for name, exporter in FORMATS.items():
        if trio not in exporter.holds:
            with pytest.raises(ValueError, match=rf"--format {name} cannot hold this drafter: .*'head': '{head}'"):
                export(draft, tiny_target, tmp_path / name, format=name, prompts=PROMPTS)


@pytest.mark.parametrize(("trio", "name"), HELD)
def test_its_replay_comes_out_of_the_tensors_alone(folders: Any, trio: str, name: str) -> None:
    """Drafts and logits of the first blocks by the slow reading, which shares no code with the drafter's."""
    exported = Exported.open(folders[trio, name])
    outcome = check(exported, folders["target"])
    assert outcome.passed, outcome.faults
    plain = {i for prompt in exported.replay.prompts for i in prompt.draft_ids}
    assert len(plain) > 2, "all drafts are the same token: nothing is tested"


@pytest.mark.parametrize(("trio", "name"), HELD)
def test_what_is_written_is_read_back_as_the_same_drafter(folders: Any, trio: str, name: str) -> None:
    loaded, draft = load_draft(folders[trio, name]), make(folders["target"], trio)
    assert [type(part) for part in loaded.children()] == [type(part) for part in draft.children()]
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in draft.state_dict().items())
    for axis in ("drafter", "head"):
        theirs, ours = (getattr(model, axis).settings() for model in (loaded, draft))
        shown = {"kernel_size", "group_size", "rank", *LATTICE} - {"init_std"}
        assert {k: v for k, v in theirs.items() if k in shown} == {k: v for k, v in ours.items() if k in shown}


@pytest.mark.parametrize(
    ("trio", "name", "key", "value"),
    [
        ("LiLiCorr", "sglang", "lilicorr_candidate_topk", "4"),
        ("LiLiCorr", "vllm", "lilicorr_num_layers", 1.0),
        ("LiLiCorr", "sglang", "lilicorr_mlp_ratio", "2"),
        ("DFlash 2", "zlab", "selector_rank", True),
        ("DFlash 2", "vllm", "conv_kernel_size", [2]),
    ],
)
def test_a_setting_that_is_no_number_is_refused_by_name(
    folders: Any, tmp_path: Path, trio: str, name: str, key: str, value: Any
) -> None:
    config = json.loads((folders[trio, name] / "config.json").read_text())
    held = config["dflash_config"] if key in config.get("dflash_config", {}) else config
    assert key in held
    held[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{key} {re.escape(repr(value))}, which is no (whole )?number"):
        load_draft(tmp_path)


def test_names_and_shapes_of_the_lattice_are_those_of_the_serving_engines(folders: Any) -> None:
    """MH 1.6, both ways: no name is missing and none is there that the loader would not know."""
    h, width, f, slots, k, heads = 8, 32, 6, 3, 4, 2
    linear = {
        **{name: (h, width) for name in ("token_proj", "pass_hidden_proj", "context_proj")},
        **{"feature_mlp.1": (h, 5), "feature_mlp.3": (h, h), "layers.0.attn.out_proj": (h, h)},
        **{"layers.0.mlp.0": (2 * h, h), "layers.0.mlp.2": (h, 2 * h), "factor_input_proj": (h, 3 * h)},
        **{name: (f, h) for name in ("out_head", "in_head", "anchor_out_head")},
    }
    expected: dict[str, tuple[int, ...]] = {f"lilicorr.{name}.weight": shape for name, shape in linear.items()}
    expected |= {f"lilicorr.{name}.bias": shape[:1] for name, shape in linear.items()}
    expected |= {f"lilicorr.feature_mlp.0.{name}": (5,) for name in ("weight", "bias")}
    expected |= {
        f"lilicorr.{name}.weight": (h,)
        for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm")
    }
    expected |= {
        "lilicorr.slot_embedding": (1, 1, slots, 1, h),
        "lilicorr.rank_embedding": (1, 1, 1, k, h),
        "lilicorr.relative_slot_bias": (heads, 2 * (slots + 1) - 1),
        "lilicorr.same_slot_bias": (heads,),
        "lilicorr.layers.0.attn.in_proj_weight": (3 * h, h),
        "lilicorr.layers.0.attn.in_proj_bias": (3 * h,),
    }
    for name in ("vllm", "sglang"):
        tensors = load_file(folders["LiLiCorr", name] / "model.safetensors")
        own = {key: tuple(value.shape) for key, value in tensors.items() if key.startswith("lilicorr.")}
        assert own == expected
        rest = {key.split(".")[0] for key in tensors.keys() - own.keys()}
        assert rest == {"fc", "hidden_norm", "norm", "layers"} and not any("_conv" in key for key in tensors)
        raw = json.loads((folders["LiLiCorr", name] / "config.json").read_text())
        assert raw["architectures"] == ["LiLiCorrDraftModel"] and raw["model_type"] == "qwen3"
        assert raw["block_size"] == 4 and raw["num_target_layers"] == 4
        assert (
            raw["dflash_config"] | {"block_size": 4, "num_target_layers": 4}
            == raw["dflash_config"]
            == {
                **{"block_size": 4, "num_target_layers": 4, "mask_token_id": 262, "target_layer_ids": [0, 2]},
                **{
                    "causal": None,
                    "is_causal": None,
                    "projector_type": "lilicorr",
                    "lilicorr_enabled": True,
                    "lilicorr_candidate_topk": 4,
                },
                **{
                    "lilicorr_hidden_size": 8,
                    "lilicorr_num_layers": 1,
                    "lilicorr_num_heads": 2,
                    "lilicorr_mlp_ratio": 2.0,
                },
                **{"lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0},
            }
        )
    both = json.loads((folders["LiLiCorr with convolutions", "vllm"] / "config.json").read_text())["dflash_config"]
    assert (both["conv_kernel_size"], both["conv_group_size"], both["lilicorr_hidden_size"]) == (2, 8, 0)


def test_names_of_dflash_2_are_those_of_the_released_checkpoints(folders: Any) -> None:
    """MH 2.1: bare names of the codebooks, two convolutions per layer, the architecture, the settings."""
    for name in ("zlab", "vllm"):
        tensors = load_file(folders["DFlash 2", name] / "model.safetensors")
        own = {key: tuple(value.shape) for key, value in tensors.items() if "_conv." in key or "selector" in key}
        convolution = {"base_kernel": (2, 2, 32), "kernel_projection.weight": (2 * 2 * 4, 32)}
        assert own == {
            **{f"candidate_selector.{side}_codebook": (272, 5) for side in ("predecessor", "successor")},
            "candidate_selector.hidden_projection.weight": (5, 32),
            **{
                f"layers.{i}.{place}_conv.{key}": shape
                for i in range(2)
                for place in ("attention", "mlp")
                for key, shape in convolution.items()
            },
        }
        raw = json.loads((folders["DFlash 2", name] / "config.json").read_text())
        assert raw["architectures"] == ["DFlash2DraftModel"]
        stated = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4}
        assert raw["dflash_config"] | stated == raw["dflash_config"]


def test_codebooks_named_with_weight_are_read_too(folders: Any, tmp_path: Path) -> None:
    folder = folders["DFlash 2", "zlab"]
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"{key}.weight" if key.endswith("_codebook") else key: value for key, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    one, other = (load_draft(place).state_dict() for place in (folder, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (["selector_rank"], r"states \['selector_top_k'\], but no \['selector_rank'\]"),
        (["selector_rank", "selector_top_k"], r"states the architecture DFlash2DraftModel and none of"),
        (["conv_group_size"], r"but no \['conv_group_size'\]"),
        (["conv_kernel_size", "conv_group_size"], r"They belong to a drafter of DFlash 2, of which the settings say"),
    ],
)
def test_settings_that_leave_open_what_is_computed_are_refused(
    folders: Any, tmp_path: Path, gone: list[str], message: str
) -> None:
    folder = folders["DFlash 2", "zlab"]
    raw = json.loads((folder / "config.json").read_text())
    for key in gone:
        del raw["dflash_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path)


def test_vllm_takes_a_power_of_two_of_candidates(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = LatticeHead(**{**LATTICE, "candidates": 3})
    monkeypatch.setitem(TRIOS, "LiLiCorr", lambda: (BlockTransformer(num_layers=1), head))
    config = make(tiny_target, "LiLiCorr").config
    assert any("3 candidates, and vLLM takes a power of two" in reason for reason in FORMATS["vllm"].limits(config))
