"""``dflash compare``: measured runs side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_lightning.bench.comparison import compare_runs
from dflash_lightning.bench.runs import Run
from dflash_lightning.bench.tables import render
from dflash_lightning.files import write_atomic
from dflash_lightning.run import json_text


def compare(args: argparse.Namespace, runs: Sequence[Run], page: Callable[[dict[str, Any]], str]) -> int:
    """Print the comparison of ``runs``, and write it where asked; ``page`` makes the one for a browser.

    Raises:
        ValueError: runs that cannot be compared, see ``compare_runs``.
    """
    found = compare_runs(runs, baseline=args.baseline, mixed=args.mixed)
    if args.json:
        write_atomic(Path(args.json), comparison_text(found))
    if args.html:
        write_atomic(Path(args.html), page(json.loads(comparison_text(found))))
    print(render(found, markdown=args.markdown), end="")  # last: a reader may go away
    return 0


def comparison_text(found: dict[str, Any]) -> str:
    """A comparison as JSON: the figures to be read, then a line for every run that they come from."""
    head = json_text({key: value for key, value in found.items() if key != "runs"})
    runs = [json_text(run, indent=None).strip() for run in found["runs"]]
    listed = ",\n".join(f"    {run}" for run in runs)
    return f'{head.rstrip().removesuffix("}").rstrip()},\n  "runs": [\n{listed}\n  ]\n}}\n'
