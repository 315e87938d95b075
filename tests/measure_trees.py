"""Every builder of trees on two trained drafters, at equal numbers of nodes. Run by hand:

    OMP_NUM_THREADS=1 python tests/measure_trees.py OUT.jsonl DFLASH DSPARK [BUILDER ...]

DFLASH and DSPARK are run folders (or checkpoints): one drafter whose slots do not know each other, one whose slots know
the token before them. ``PROMPTS`` held-out prompts of the bench's domains, one at a time: greedily with every builder
of ``GREEDY`` (all, unless some are named) at ``BUDGETS`` nodes, with those of ``PRICED`` at the sizes that their costs
choose, and at temperature 1 with those of ``SAMPLED``. A line of JSON per way goes to OUT: tau, nodes per round, wall
milliseconds per stage, drafted and plain tokens per second (wall and CPU), the speed-up, and how many outputs are the
plain ones (of those compared; rejection gives others). The speed-up is of two prompts that are decoded plainly and with
drafts in turns, a ratio of times of the same minute; the other figures are of all prompts. ``--table OUT.jsonl`` prints
the rows as Markdown.

``--quick`` decodes two prompts of 16 tokens at one budget: whether all of it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import find_draft, open_target_of
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder import (
    BestFirstTree,
    CostTree,
    DraftBuilder,
    FanTree,
    LayerTree,
    RooflineTree,
    SampledTree,
    TableTree,
)
from dflash_lightning.decoding.decoder import DecodeResult
from dflash_lightning.decoding.evaluation import Evaluator

PROMPTS, NEW_TOKENS, COMPARED = 9, 48, 6
BUDGETS = (8, 16, 32)
DATA = "package://dflash_lightning/data/bench"
DOMAINS = ("arithmetic", "chat", "code")
GREEDY: dict[str, Any] = {
    "best first": lambda n: BestFirstTree(budget=n),
    "layers, k = 4": lambda n: LayerTree(budget=n, width=4, branch=4, pool_all=True),
    "layers, pruned": lambda n: LayerTree(budget=n, width=12, branch=64, depth_bonus=-0.2, candidates=64),
    "layers, equal shares": lambda n: LayerTree(budget=n, candidates=64),
    "fans of 7": lambda n: FanTree(budget=n),
    "table, 16 x 16": lambda n: TableTree(budget=n),
}
PRICED: dict[str, Any] = {
    "cost table": lambda: CostTree(max_budget=64),
    "cost table, best of all": lambda: CostTree(max_budget=64, stop="best"),
    "cost line, mean": lambda: CostTree(
        max_budget=63, branch=8, cost="line", plan="mean", rounds=32, grid=[3, 7, 15, 31, 47, 63]
    ),
    "roofline": lambda: RooflineTree(max_budget=64),
}
SAMPLED: dict[str, Any] = {
    "best first, matched": lambda n: BestFirstTree(budget=n),
    "sampled": lambda n: SampledTree(budget=n),
    "sampled, planned by paths": lambda n: SampledTree(budget=n, plan="paths"),
}


@dataclass
class Way:
    """A builder with its number of nodes, at a temperature; null builders are chains."""

    name: str
    nodes: int | str
    builder: DraftBuilder | None
    temperature: float = 0.0


@dataclass
class Bed:
    """A drafter, its target and the prompts; plain answers are decoded once per temperature."""

    name: str
    folder: str
    new_tokens: int
    plain: dict[float, DecodeResult] = field(default_factory=dict)

    def open(self, prompts: int) -> Bed:
        """Load the weights and render the prompts, domains in turns."""
        found = find_draft(self.folder)
        self.draft = found.model.eval()
        self.target = open_target_of(found, None, device=None, dtype=None)
        rows = [load_prompts(f"{DATA}/test_{domain}.jsonl") for domain in DOMAINS]
        turns = [row for some in zip(*rows, strict=False) for row in some][:prompts]
        self.prompts = [render_prompt(self.target.tokenizer, row, **found.chat_template_kwargs) for row in turns]
        return self

    def measure(self, way: Way) -> dict[str, Any]:
        """Decode all prompts in this way."""
        settings = DecodingSettings(
            max_new_tokens=self.new_tokens,
            batch_size=1,
            temperature=way.temperature,
            builder=way.builder,
            compile=False,
        )
        compared = min(COMPARED, len(self.prompts))
        known = self.plain.get(way.temperature)
        evaluator = Evaluator(
            self.target, self.draft, self.prompts, settings, num_checked=compared, plain=known, shown=False
        )
        found = evaluator()
        if evaluator.plain is not None:
            self.plain[way.temperature] = evaluator.plain
        stats, plain = found.stats, found.plain
        return {
            "drafter": self.name,
            "builder": way.name,
            "nodes": way.nodes,
            "temperature": way.temperature,
            "tau": stats.tau,
            "nodes_per_round": stats.drafted / stats.rounds,
            **{f"{stage}_ms": stats.stage_ms(stage) for stage in ("draft", "verify", "commit")},
            "tokens_per_s": 1 / stats.s_per_token(),
            "plain_tokens_per_s": 1 / plain.s_per_token(),
            "tokens_per_cpu_s": 1 / stats.s_per_token(cpu=True),
            "plain_tokens_per_cpu_s": 1 / plain.s_per_token(cpu=True),
            "speedup": found.speedup,
            "identical": f"{stats.identical}/{stats.compared}",
            "verdict": found.verdict,
        }


def ways(named: list[str], budgets: tuple[int, ...]) -> Iterator[Way]:
    """Everything that is measured on each drafter."""
    yield Way("chain", "slots", None)
    for name, make in GREEDY.items():
        for nodes in budgets if not named or name in named else ():
            yield Way(name, nodes, make(nodes))
    for name, make in PRICED.items():
        if not named or name in named:
            yield Way(name, "by cost", make())
    yield Way("chain", "slots", None, 1.0)
    for name, make in SAMPLED.items():
        for nodes in budgets if not named or name in named else ():
            yield Way(name, nodes, make(nodes), 1.0)


def table(path: Path) -> str:
    """The rows of a file as Markdown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    head = "| drafter | builder | nodes | T | tau | nodes per round | draft, verify ms | tokens/s | plain | identical |"
    lines = [head, "|" + "---|" * 10]
    for row in rows:
        lines.append(
            f"| {row['drafter']} | {row['builder']} | {row['nodes']} | {row['temperature']:g} | {row['tau']:.2f} | "
            f"{row['nodes_per_round']:.1f} | {row['draft_ms']:.1f}, {row['verify_ms']:.1f} | "
            f"{row['tokens_per_s']:.1f} ({row['speedup']:.2f}x) | {row['plain_tokens_per_s']:.1f} | "
            f"{row['identical']} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--table":
        print(table(Path(arguments[1])))
        return
    quick = "--quick" in arguments
    out, *folders = [word for word in arguments if word != "--quick"]
    named, folders = folders[2:], folders[:2]
    for name, folder in zip(("dflash", "dspark"), folders, strict=True):
        bed = Bed(name, folder, 16 if quick else NEW_TOKENS).open(2 if quick else PROMPTS)
        for way in ways(named, BUDGETS[1:2] if quick else BUDGETS):
            row = bed.measure(way)
            print(json.dumps(row), flush=True)
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
