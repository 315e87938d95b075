"""What a training step holds, by the formula and as the process grows, over shapes that differ in one size each.

    OMP_NUM_THREADS=1 python tests/measure_memory.py [SHAPE ...]

Every shape is a process of its own (``dflash bench step``): growth of its resident memory over the state before the
first step, which is at the highest after a few steps. SHAPE are options of ``dflash bench``, in quotes; all of
``SHAPES`` unless given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

# The target is short: its pass holds little. The first is the default, with that.
SHAPES = [
    "",
    "--sequence 1024",
    "--block 8",
    "--vocab 151936 --anchors 32",
    "--layers 2",
    "--batch 2",
    "--anchors 16",
    "--draft-vocab 4096",
]


def measure(shape: str) -> dict[str, int]:
    """The record's memory, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        words = ["bench", "step", "--target-layers", "9", *shape.split(), "--json", str(file)]
        subprocess.run([sys.executable, "-m", "dflash_lightning", *words], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))["memory"]
    return found


def main() -> None:
    print(f"{'shape':<32}{'formula':>9}{'measured':>10}{'ratio':>8}   MiB")
    for shape in sys.argv[1:] or SHAPES:
        memory = measure(shape)
        expected, grown = memory["predicted_bytes"], memory["growth_bytes"]
        line = f"{shape or 'default':<32}{expected / 2**20:9.0f}{grown / 2**20:10.0f}{expected / grown:8.2f}"
        print(line, {name: round(count / 2**20) for name, count in memory["parts"].items()}, flush=True)


if __name__ == "__main__":
    main()
