"""What was measured at one shape: seconds, shares, rates and memory, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dflash_lightning.machine import machine
from dflash_lightning.ops.clock import Spent
from dflash_lightning.profiling.build import Place
from dflash_lightning.profiling.shape import Shape

VERSION = 1  # of the JSON


@dataclass(frozen=True)
class Figures:
    """Costs of one ``unit`` of what was measured: a step, a pass, a round, a run.

    ``spent`` is the median over all that were timed as a whole. ``stages`` are seconds of what was watched; their
    shares are those of the unit. ``flop`` counts operations by stage, ``product_seconds`` what their products alone
    would take. ``rates`` are further figures by name, and what they are counted in.
    """

    what: str
    unit: str
    shape: Shape
    place: Place
    spent: Spent
    stages: Mapping[str, Spent]
    flop: Mapping[str, int]
    product_seconds: Mapping[str, float]
    memory: Mapping[str, Any]
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a unit: CPU-seconds on a CPU, else those of the clock."""
        return self._clock(self.spent)

    def _clock(self, spent: Spent) -> float:
        return spent.cpu if self.place.clock else spent.wall

    def shares(self) -> dict[str, float]:
        """Of every stage; they sum to 1."""
        found = {stage: self._clock(spent) for stage, spent in self.stages.items()}
        total = sum(found.values())
        return {stage: seconds / total if total else 0.0 for stage, seconds in found.items()}

    def record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        stages = {stage: self._stage(stage, share) for stage, share in self.shares().items()}
        return {
            "version": VERSION,
            "what": self.what,
            "unit": self.unit,
            "shape": asdict(self.shape),
            "device": self.place.device,
            "dtype": str(self.place.dtype).removeprefix("torch."),
            "machine": machine(),
            "torch": torch.__version__,
            "cpu_seconds": self.spent.cpu,
            "wall_seconds": self.spent.wall,
            "stages": stages,
            **_rated(self.seconds, sum(self.flop.values()), sum(self.product_seconds.values())),
            "without_target": _sum(other for stage, other in stages.items() if stage != "target"),
            "memory": dict(self.memory),
            "rates": dict(self.rates),
        }

    def _stage(self, stage: str, share: float) -> dict[str, Any]:
        seconds = share * self.seconds
        work = _rated(seconds, self.flop.get(stage, 0), self.product_seconds.get(stage, 0.0))
        return {"share": share, "seconds": seconds, **work}


def _sum(stages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several stages: what a step takes where the target's features are kept."""
    kept = list(stages)
    seconds, flop, alone = (sum(stage[name] for stage in kept) for name in ("seconds", "flop", "product_seconds"))
    return {"seconds": seconds, **_rated(seconds, flop, alone)}


def _rated(seconds: float, flop: int, product_seconds: float) -> dict[str, Any]:
    """Operations, their rate, and the share of that which the products alone would reach."""
    return {
        "flop": flop,
        "flop_per_second": flop / seconds if seconds else 0.0,
        "product_seconds": product_seconds,
        "share_of_product_rate": product_seconds / seconds if seconds else 0.0,
    }


def timed(run: Callable[[], object]) -> Spent:
    """What a call takes."""
    spent = Spent()
    with spent.timed():
        run()
    return spent


def median(whole: Sequence[Spent]) -> Spent:
    """Of both clocks, each by itself."""
    return Spent(statistics.median(s.wall for s in whole), statistics.median(s.cpu for s in whole))


def table(record: Mapping[str, Any]) -> str:
    """What the command prints of a ``Figures.record``."""
    cpu, unit = record["device"] == "cpu", record["unit"]
    lines = [
        f"{record['what']} at {_words(record['shape'])}",
        f"on {record['machine']['gpu'] or record['machine']['cpu']}, {record['machine']['threads']} threads, "
        f"{record['dtype']}",
        "",
        f"{'one ' + unit:<18}{record['cpu_seconds']:9.3f} CPU-s {record['wall_seconds']:9.3f} s on the clock",
        f"{'work':<18}{record['flop'] / 1e9:9.2f} GFLOP at {record['flop_per_second'] / 1e9:.1f} GFLOP/s, "
        f"{record['share_of_product_rate']:.0%} of what its products reach alone",
    ]
    if "target" in record["stages"]:
        other = record["without_target"]
        lines.append(
            f"{'without the target':<18}{other['seconds']:9.3f} {'CPU-s' if cpu else 's'}, {other['flop'] / 1e9:.2f} "
            f"GFLOP at {other['flop_per_second'] / 1e9:.1f} GFLOP/s, {other['share_of_product_rate']:.0%}"
        )
    lines.append(f"{'memory':<18} {_memory_line(record['memory'])}")
    lines += [f"{name.replace('_', ' '):<34}{value:10.2f}" for name, value in record["rates"].items()]
    header = f"{'stage':<14}{'share':>7}{'CPU-s' if cpu else 's':>10}{'GFLOP':>10}{'GFLOP/s':>10}{'of products':>13}"
    lines += ["", header]
    for stage, found in record["stages"].items():
        line = f"{stage:<14}{found['share']:7.1%}{found['seconds']:10.4f}"
        if found["flop"]:
            line += f"{found['flop'] / 1e9:10.2f}{found['flop_per_second'] / 1e9:10.1f}"
            line += f"{found['share_of_product_rate']:13.0%}"
        lines.append(line)
    return "\n".join(lines)


def _words(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items() if value)


def _memory_line(memory: Mapping[str, Any]) -> str:
    found = [f"{memory['growth_bytes'] / 2**20:.0f} MiB more than before the first"]
    if memory.get("cuda_growth_bytes") is not None:
        found.append(f"{memory['cuda_growth_bytes'] / 2**20:.0f} MiB on the GPU")
    if "predicted_bytes" in memory:
        found.append(f"{memory['predicted_bytes'] / 2**20:.0f} MiB expected")
    return ", ".join(found)


def over_table(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """One line per value of the size ``name``: counted work, seconds and memory."""
    header = f"{name.replace('_', ' '):>14}{'GFLOP':>10}{'CPU-s':>10}{'GFLOP/s':>10}{'of products':>13}{'MiB':>8}"
    lines = [header]
    for record in records:
        memory = record["memory"]
        grown = memory["growth_bytes"] if memory.get("cuda_growth_bytes") is None else memory["cuda_growth_bytes"]
        lines.append(
            f"{record['shape'][name]:>14}{record['flop'] / 1e9:10.2f}{record['cpu_seconds']:10.3f}"
            f"{record['flop_per_second'] / 1e9:10.1f}{record['share_of_product_rate']:13.0%}{grown / 2**20:8.0f}"
        )
    return "\n".join(lines)
