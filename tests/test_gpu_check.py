"""``tests/gpu_check.sh`` on a machine without a GPU: it says so; and what it would run on one is right."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_lightning import device as device_file
from dflash_lightning.cli import _parse
from dflash_lightning.device import Abilities
from dflash_lightning.recipe import check_recipe, load_recipe

SCRIPT = Path(__file__).parent / "gpu_check.sh"
# Says how many GPUs there are, writes down what else it is asked to run, and fails where one of the words is FAILS.
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && {{ echo {gpus}; exit 0; }}
printf '%s\\n' "$(printf '%q ' "$@")" >>{log}
for word in "$@"; do [[ $word == "{fails}" ]] && {{ echo 'something broke'; exit 1; }}; done
exit 0
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, str, list[list[str]]]]:
    """``check(gpus=, fails=, seconds=)``: exit status, all that was said, and what Python was asked to run."""

    def run(*, gpus: int, fails: str = "", seconds: int = 360) -> tuple[int, str, list[list[str]]]:
        python, log = tmp_path / "python", tmp_path / "log"
        python.write_text(PYTHON.format(gpus=gpus, log=log, fails=fails))
        python.chmod(0o755)
        log.write_text("")
        environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "GPU_CHECK_SECONDS": str(seconds)}
        done = subprocess.run(
            ["bash", SCRIPT, python], capture_output=True, text=True, timeout=60, env=environment, check=False
        )
        return done.returncode, done.stdout + done.stderr, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


def test_without_a_gpu_it_says_that_nothing_was_checked(check: Callable[..., tuple[int, str, list[list[str]]]]) -> None:
    assert check(gpus=0) == (2, "no GPU: nothing was checked\n", [])


def test_one_gpu_leaves_out_two_processes_and_all_else_runs_as_written(
    check: Callable[..., tuple[int, str, list[list[str]]]],
) -> None:
    status, said, ran = check(gpus=1)
    assert status == 0 and "left out  two_gpus" in said and "passed in" in said
    tests, fit, step, prefetch, *decodes = ran
    benches = [step, *decodes]
    assert prefetch == ["tests/measure_prefetch.py", "--device", "cuda"]
    assert (SCRIPT.parent.parent / prefetch[0]).exists()
    assert tests == ["-m", "pytest", "-q", "-m", "compiled", "tests/test_cuda.py"]
    assert (SCRIPT.parent.parent / tests[-1]).exists()
    assert [words[:3] for words in benches] == [["-m", "dflash_lightning", "bench"]] * 3
    for words in benches:
        assert _parse(words[2:]).device == "cuda"
    check_fit(fit)


def check_fit(words: list[str]) -> None:
    """The recipe is one that ``dflash fit`` takes, but for the trainer, which needs the GPU."""
    assert words[:4] == ["-m", "dflash_lightning", "fit", "quickstart"]
    cfg = load_recipe("quickstart", words[4:])
    assert cfg.trainer.max_steps == 40 and cfg.trainer.accelerator == "gpu"
    check_recipe(cfg)


def test_two_gpus_train_together(check: Callable[..., tuple[int, str, list[list[str]]]]) -> None:
    status, said, ran = check(gpus=2)
    assert status == 0 and len(ran) == 7 and "left out" not in said
    check_fit(ran[-1])
    assert load_recipe("quickstart", ran[-1][4:]).trainer.strategy == "ddp"


def test_what_fails_or_is_not_reached_is_named(check: Callable[..., tuple[int, str, list[list[str]]]]) -> None:
    status, said, ran = check(gpus=1, fails="--compiled")
    assert status == 1 and len(ran) == 6
    assert "FAILED  decode_compiled" in said and "something broke" in said
    assert "failed or not reached: decode_compiled (" in said
    status, said, ran = check(gpus=1, seconds=0)
    assert status == 1 and ran == [] and "NOT REACHED  tests" in said


def test_steps_with_the_next_batch_beside_them_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU that says it has streams: PyTorch's for it do nothing."""
    monkeypatch.setitem(device_file._KNOWN, "cpu", Abilities(queues=False, own_kernels=True, streams=True))
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self))
    monkeypatch.setattr("sys.path", [*sys.path])
    spec = importlib.util.spec_from_file_location("measure_prefetch", SCRIPT.parent / "measure_prefetch.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sizes = {"steps": 1, "turns": 1, "width": 64, "layers": 4, "length": 32, "anchors": 2, "vocabulary": 264}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert script.main(["--device", "cpu", *words]) == 0 and recorded
    said = capsys.readouterr().out
    assert "turn 1: a step takes" in said and "losses are equal to rounding" in said
