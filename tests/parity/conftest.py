"""What the parity tests share: fitted drafters, and the environment that other programs' packages live in.

Tests talk to that environment by files: they write a request, run one of the ``run_*.py`` here with its python, and
read what it wrote. One run answers for all cases, because importing those packages takes longer than anything else.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.types import Generation
from dflash_lightning.export import export
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import BlockLayout, FeatureSpec

HERE = Path(__file__).parent
ENVIRONMENT, DEFAULT = "DFLASH_PARITY_PYTHON", HERE.parents[1] / ".parity" / "bin" / "python"
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
NEW_TOKENS = 40  # decoded; what stands after TAUGHT of them is new to the drafter
TAUGHT = 28
WINDOW = 6
PATTERNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda layers: {},
    "causal": lambda layers: {"is_causal": True},
    "sliding": lambda layers: {"layer_types": _sliding(layers), "sliding_window": WINDOW},
    "two_sided": lambda layers: {"layer_types": _sliding(layers), "sliding_window": WINDOW, "is_causal": False},
}
FEATURES = {1: [1], 2: [2, 0], 3: [0, 1, 2]}  # tapped layers of a drafter of so many layers, in this order


def _sliding(layers: int) -> list[str]:
    """All sliding; with three layers the first one sees everything."""
    return ["full_attention" if layers == 3 and i == 0 else "sliding_attention" for i in range(layers)]


@dataclass(frozen=True)
class Case:
    """One target and drafter; every pair of family, depth, block size and attention pattern occurs somewhere."""

    family: str
    layers: int
    block_size: int
    pattern: str

    def __str__(self) -> str:
        return f"{self.family}-{self.layers}-{self.block_size}-{self.pattern}"

    @property
    def settings(self) -> dict[str, Any]:
        return PATTERNS[self.pattern](self.layers)


CASES = [
    Case(("qwen3", "llama")[(i + j) % 2], layers, (4, 8, 16)[(i + j) % 3], pattern)
    for i, layers in enumerate((1, 2, 3))
    for j, pattern in enumerate(PATTERNS)
]
OTHER_FAMILIES = [
    Case("gemma3", 1, 4, "full"),
    Case("gemma3", 2, 8, "two_sided"),
    Case("mixtral", 2, 4, "sliding"),
    Case("gpt_oss", 2, 4, "full"),
]


@dataclass
class Fitted:
    """A case's drafter, fitted to the beginning of what its target says, and what both say together."""

    case: Case
    target: FrozenTarget
    draft: DraftModel
    text: torch.Tensor  # [1, prompt and NEW_TOKENS]: the target alone, without a stop token
    stop_ids: tuple[int, ...]
    decoded: Generation
    layout: Callable[[tuple[int, ...]], BlockLayout]  # blocks of the text at these anchors
    folders: dict[str, Path] = field(default_factory=dict)
    prompt: tuple[int, ...] = tuple(PROMPT)
    max_new_tokens: int = NEW_TOKENS

    def probe(self, anchors: tuple[int, ...] = (12, 25, 40)) -> tuple[BlockLayout, Any, torch.Tensor]:
        """Blocks at ``anchors`` of the text, and features of the tapped layers: what to compare logits on."""
        ids = tuple(self.draft.config.target_layer_ids)
        positions = torch.arange(self.text.shape[1])[None]
        return self.layout(anchors), self.target.features(self.text, positions, FeatureSpec(ids)), positions


def lay_out(make_layout: Callable[..., BlockLayout], anchors: tuple[int, ...], **settings: Any) -> BlockLayout:
    return make_layout([[*anchors]], **settings)


def run_our_loop(target: FrozenTarget, draft: DraftModel, stop_ids: tuple[int, ...]) -> Generation:
    """Our own loop, greedy, with plain weights: packed ones differ in the fifth decimal."""
    settings = DecodingSettings(max_new_tokens=NEW_TOKENS, compile=False, prepacked=False)
    decoder = settings.make_decoder(target, draft, longest_prompt=len(PROMPT))
    return decoder.decode([PROMPT], max_new_tokens=NEW_TOKENS, stop_ids=stop_ids).generations[0]


def late_token(text: list[int]) -> int:
    """A token that is first said late in the answer: to stop at, in the middle of a block where it goes well."""
    answer = text[len(PROMPT) :]
    return next(token for i, token in enumerate(answer) if i >= 20 and token not in answer[:i])


@pytest.fixture(scope="session")
def fitted(
    make_target: Callable[..., FrozenTarget],
    make_draft: Callable[..., DraftModel],
    make_layout: Callable[..., BlockLayout],
    fit: Callable[..., DraftModel],
) -> Callable[[Case], Fitted]:
    """``fitted(case)``, made once per session."""
    targets: dict[str, tuple[FrozenTarget, torch.Tensor]] = {}
    made: dict[Case, Fitted] = {}

    def make(case: Case) -> Fitted:
        if case.family not in targets:
            target = make_target(case.family)
            ids = torch.tensor([PROMPT])
            settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
            text = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            targets[case.family] = target, text
        if case not in made:
            target, text = targets[case.family]
            draft = make_draft(
                target,
                block_size=case.block_size,
                num_layers=case.layers,
                target_layer_ids=FEATURES[case.layers],
                init_std=0.05,
                **case.settings,
            )
            fit(draft, target, text[:, : len(PROMPT) + TAUGHT], prompt_length=len(PROMPT))
            stop_ids = (late_token(text[0].tolist()),) if case.layers == 2 else ()
            layout = partial(lay_out, make_layout, block_size=case.block_size, ids=text)
            made[case] = Fitted(case, target, draft, text, stop_ids, run_our_loop(target, draft, stop_ids), layout)
        return made[case]

    return make


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fitted, str], Path]:
    """``exported(fitted, format)``: the folder of an export in float32."""
    root = tmp_path_factory.mktemp("exports")

    def make(it: Fitted, format: str) -> Path:
        if format not in it.folders:
            it.folders[format] = root / f"{it.case}-{format}"
            settings: dict[str, Any] = {"dtype": "float32", "prompts": [PROMPT], "max_new_tokens": 8}
            export(it.draft, it.target, it.folders[format], format=format, **settings)
        return it.folders[format]

    return make


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fitted], Path]:
    """``saved_target(fitted)``: the folder of its target."""
    root, saved = tmp_path_factory.mktemp("targets"), {}

    def make(it: Fitted) -> Path:
        family = it.case.family
        if family not in saved:
            saved[family] = root / family
            it.target.model.save_pretrained(saved[family])
        return saved[family]

    return make


@pytest.fixture(scope="session")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, dict[str, torch.Tensor]]]:
    """``consumer(script, request, tensors)``: what ``script`` answers in the other environment, as JSON and tensors."""
    python = Path(os.environ.get(ENVIRONMENT, DEFAULT))
    if not python.exists():
        assert ENVIRONMENT not in os.environ, f"{ENVIRONMENT}={python} does not exist"  # asked for: not to be skipped
        pytest.skip(f"no environment of other programs at {python}: run tests/parity/make_environment.sh")

    def run(script: str, request: Any, tensors: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        folder = tmp_path_factory.mktemp(script)
        (folder / "request.json").write_text(json.dumps(request))
        save_file({name: value.detach().clone() for name, value in tensors.items()}, folder / "request.safetensors")
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [str(python), "-W", "ignore", str(HERE / f"run_{script}.py"), str(folder)],
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **quiet},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "answer.json").read_text()), load_file(folder / "answer.safetensors")

    return run


@pytest.fixture(scope="session")
def decode() -> Callable[..., Generation]:
    """``decode(target, draft, stop_ids)``: our own loop on the prompt of all cases."""
    return run_our_loop


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return CASES


@pytest.fixture(scope="session")
def other_families() -> list[Case]:
    return OTHER_FAMILIES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = CASES + OTHER_FAMILIES if metafunc.definition.get_closest_marker("all_families") else CASES
        metafunc.parametrize("case", cases, ids=str)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "parity: compares with other programs' own code")
    config.addinivalue_line("markers", "all_families: on targets of further families too")
