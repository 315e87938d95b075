"""Every training method and every way of decoding on SmolLM2-135M-Instruct: same rows, steps and seed. Run by hand:

    OMP_NUM_THREADS=1 python tests/measure_family.py OUT.jsonl [METHOD ...]

Each METHOD (all of ``METHODS`` unless named) trains for ``EPOCHS`` epochs on the quickstart's rows with features from
disk, then decodes ``PROMPTS`` held-out prompts one at a time at temperature 0 and 1, ``COMPARED`` of them plainly too.
A line of JSON per way of decoding goes to OUT: tau, CPU-seconds of training (features not counted), drafted and plain
tokens per CPU-second, outputs identical to plain decoding of those compared, parameters. ``--table OUT.jsonl`` prints
what docs/bench.md shows. BV loss is not among the methods: its rows must be drawn at temperature 1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from omegaconf import OmegaConf

from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.recipe import build_recipe, load_recipe
from dflash_lightning.recipe.make import make

EPOCHS, PROMPTS, NEW_TOKENS, COMPARED = 2, 12, 48, 3
DATA = "package://dflash_lightning/data/quickstart"
SAME = [
    *("target=smollm2", "drafter.num_layers=1", "draft_vocabulary=data", "seed=0"),
    *(f"data.train={DATA}/train.jsonl", "data.limit=576", "data.max_length=512", "data.row_blocks=null"),
    *("data.cache_features=disk", "data.cache_dtype=bfloat16", "data.feature_products=auto", "data.block_bucket=8"),
    "conditioning.target_layer_ids=[5,14,20,27]",  # the same for all, so that one pass over the target serves
    *("optim.lr=2e-3", "optim.betas=[0.9,0.95]", "optim.warmup_steps=20"),
    *("trainer=cpu", "trainer.precision=bf16-mixed", f"trainer.max_epochs={EPOCHS}"),
    *("trainer.enable_progress_bar=false", "trainer.accumulate_grad_batches=1", "logger=csv"),
    *("callbacks=[checkpoint_last]", "decoding.compile=false", "decoding.batch_size=1"),
    f"decoding.max_new_tokens={NEW_TOKENS}",
]
ANCHORED = ["block.num_anchors=16"]
SEVEN = ["block.block_size=7"]  # slot 0 is the anchor: six drafts, as six slots that all predict
SIX = ["block.block_size=6"]
WARM = ["drafter=warm_start"]
DFLASH = [*ANCHORED, *SEVEN, *WARM]
# From a recipe and its own settings; whatever is not said is as the recipe says it.
METHODS: dict[str, tuple[str, list[str]]] = {
    "dflash": ("dflash", [*DFLASH, "loss.cross_entropy.decay=3"]),
    "masked": ("masked", [*SEVEN, *WARM]),
    "forward_kl": ("forward_kl", [*DFLASH, "loss.forward_kl.decay=3"]),
    "reverse_kl": ("reverse_kl", [*DFLASH, "loss.reverse_kl.decay=3"]),
    "tv": ("tv", [*DFLASH, "loss.tv.decay=3"]),
    "target_labels": ("target_labels", [*DFLASH, "loss.target_labels.decay=3"]),
    "d_pace": ("d_pace", DFLASH),
    "dspark": ("dspark", [*ANCHORED, *SIX, *WARM]),
    "dflare": ("dflare", [*ANCHORED, *SEVEN, *WARM]),
    "input_fusion": ("input_fusion", DFLASH),
    "dflash_ar": ("dflash_ar", [*ANCHORED, *SIX]),
    "eagle3": ("eagle3", [*ANCHORED, *SIX]),
    "carryover": ("carryover", DFLASH),
    "target_tail": ("target_tail", [*ANCHORED, *SEVEN]),
}
# Ways of decoding, tried on the drafters they can judge: name, option of recipes/decoding, drafter.
DECODINGS = [
    *(("tree", "dflash"), ("sampled_tree", "dflash"), ("block_verification", "dflash"), ("confidence", "dspark")),
    *(("tree", "dspark"), ("sampled_tree", "dspark"), ("block_verification", "dspark")),
]


class _Clock(Callback):
    """CPU-seconds between the first and the last training step."""

    seconds = 0.0

    def on_train_start(self, *args: Any) -> None:
        self.seconds = -time.process_time()

    def on_train_end(self, *args: Any) -> None:
        self.seconds += time.process_time()


def _decoding(recipe: str, overrides: list[str], option: str) -> DecodingSettings:
    cfg = load_recipe(recipe, [*SAME, f"decoding={option}", *overrides])
    settings: DecodingSettings = make(OmegaConf.to_container(cfg.decoding, resolve=True))
    return settings


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Train one method and decode with what it gives; a row per way of decoding."""
    recipe, overrides = METHODS[name]
    settings = [*SAME, *overrides, f"run_dir={folder / name}"]
    parts, clock = build_recipe(load_recipe(recipe, settings)), _Clock()
    parts.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    parts.trainer.fit(parts.module, datamodule=parts.data)
    draft = parts.module.draft_model.eval()
    prompts = [
        render_prompt(parts.target.tokenizer, prompt, **(draft.config.chat_template_kwargs or {}))
        for prompt in load_prompts(f"{DATA}/test.jsonl")[:PROMPTS]
    ]
    rows = []
    for option in ("greedy", "sampling", *(way for way, drafter in DECODINGS if drafter == name)):
        way = dataclasses.replace(_decoding(recipe, overrides, option), max_new_tokens=NEW_TOKENS, batch_size=1)
        found = Evaluator(parts.target, draft, prompts, way, num_checked=COMPARED, shown=False)()
        rows.append(
            {
                "method": name,
                "decoding": option,
                "tau": found.stats.tau,
                "drafted_tokens_per_cpu_s": 1 / found.checked.s_per_token(cpu=True),
                "plain_tokens_per_cpu_s": 1 / found.plain.s_per_token(cpu=True),
                "identical": f"{found.stats.identical}/{found.stats.compared}",
                "train_cpu_s": clock.seconds,
                "steps": parts.trainer.global_step,
                "parameters": sum(p.numel() for p in draft.parameters()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(path: Path) -> str:
    """The rows of a file as Markdown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = ["| method | decoding | tau | tokens per CPU-s | plain | identical | training CPU-s |", "|" + "---|" * 7]
    for row in rows:
        lines.append(
            f"| {row['method']} | {row['decoding']} | {row['tau']:.2f} | {row['drafted_tokens_per_cpu_s']:.1f} | "
            f"{row['plain_tokens_per_cpu_s']:.1f} | {row['identical']} | {row['train_cpu_s']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--table":
        print(table(Path(arguments[1])))
        return
    out = Path(arguments[0])
    for name in arguments[1:] or list(METHODS):
        rows = measure(name, out.with_suffix(""))
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
