"""``dflash regenerate`` on a random target, measured: reading, rendering, decoding in one batch, writing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.ops.clock import Spent
from dflash_lightning.profiling.build import Place, build_target
from dflash_lightning.profiling.figures import Figures, median
from dflash_lightning.profiling.peak_memory import MemoryWatch
from dflash_lightning.profiling.product_rate import product_seconds
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.profiling.work import Work, verify_pass
from dflash_lightning.regenerate.regenerate import RegenerateReport, regenerate
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.tiny import LETTERS

_TEMPLATE_TOKENS = 3  # that the toy's chat template adds to a message of the user


def measure_regenerate(shape: Shape, place: Place, *, repeats: int, new_tokens: int) -> Figures:
    """``repeats`` runs over a file of ``batch`` prompts, greedy, without a drafter; an answer may end early."""
    target = build_target(shape, place, positions=shape.sequence + new_tokens + 1)
    with tempfile.TemporaryDirectory() as folder:
        prompts = _write_prompts(Path(folder) / "prompts.jsonl", shape)
        _run(target, prompts, min(2, new_tokens), shape, "warm")
        memory = MemoryWatch(target.device)
        runs = [_run(target, prompts, new_tokens, shape, str(number)) for number in range(repeats)]
        peak = memory.peak()
    whole, (report, _) = median([spent for _, spent in runs]), runs[0]
    decoding = median([Spent(found.seconds, found.cpu_seconds) for found, _ in runs])
    stages = {"decoding": decoding, "rest": Spent(whole.wall - decoding.wall, whole.cpu - decoding.cpu)}
    work = _work(shape, report.new_tokens)
    return Figures(
        what="regenerate",
        unit="run",
        shape=shape,
        place=place,
        spent=whole,
        stages=stages,
        flop=work.by_stage(),
        product_seconds=product_seconds(work, place),
        memory=peak.figures(),
        rates={
            "tokens": float(report.new_tokens),
            "tokens_per_cpu_second": report.new_tokens / whole.cpu,
            "tokens_per_second": report.new_tokens / whole.wall,
        },
    )


def _write_prompts(path: Path, shape: Shape) -> Path:
    """Texts of letters, each a token, so that the rendered prompt has ``sequence`` tokens."""
    length = max(1, shape.sequence - _TEMPLATE_TOKENS)
    drawn = torch.randint(0, 16, (shape.batch, length), generator=torch.Generator().manual_seed(0))
    texts = ["".join(LETTERS[i] for i in row) for row in drawn.tolist()]
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")
    return path


def _run(
    target: FrozenTarget, prompts: Path, new_tokens: int, shape: Shape, name: str
) -> tuple[RegenerateReport, Spent]:
    settings = DecodingSettings(max_new_tokens=new_tokens, batch_size=shape.batch, compile=False)
    spent = Spent()
    with spent.timed():
        report = regenerate(prompts, target, prompts.with_name(f"{name}.jsonl"), decoding=settings, progress=False)
    return report, spent


def _work(shape: Shape, new_tokens: int) -> Work:
    """Prefill, and a pass over one token for each that was decoded but the first of every answer."""
    prompt, steps = shape.batch * shape.sequence, -(-new_tokens // shape.batch) - 1
    prefill = verify_pass(shape, rows=prompt, seen=prompt * shape.sequence, scored=shape.batch, stage="decoding")
    seen = shape.batch * (shape.sequence + steps // 2 + 1)
    return prefill + verify_pass(shape, rows=shape.batch, seen=seen, scored=shape.batch, stage="decoding").times(steps)
