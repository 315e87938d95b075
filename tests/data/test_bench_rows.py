"""The rows that the bench ships: how many, of which domains, and that each file is what its provenance says."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files

from dflash_lightning.data.bench.make_prompts import DOMAINS, make_prompts

FOLDER = files("dflash_lightning.data.bench")


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress((FOLDER / name).read_bytes()).splitlines()]


def test_three_thousand_conversations_are_answers_to_the_training_prompts() -> None:
    asked = [prompt.text for turn in zip(*(make_prompts("train", d) for d in DOMAINS), strict=True) for prompt in turn]
    held_out = {prompt.text for domain in DOMAINS for prompt in make_prompts("test", domain)}
    assert len(held_out) == 120 and not held_out & set(asked)
    wanted = {
        "train.jsonl.gz": ("greedy", asked),
        "train_sampled.jsonl.gz": ("sampled", asked[:600]),
        "train_sampled_more.jsonl.gz": ("sampled", asked[600:]),
    }
    for name, (labels, prompts) in wanted.items():
        rows, made = _rows(name), json.loads((FOLDER / f"{name}.meta.json").read_text())
        assert [row["messages"][0]["content"] for row in rows] == prompts
        assert all(row["messages"][1]["role"] == "assistant" and row["messages"][1]["content"] for row in rows)
        assert (
            made["complete"]
            and made["counts"]["rows"] == len(rows)
            and made["made_with"]["sampling"]["labels"] == labels
        )
    assert sum(len(prompts) for _, prompts in wanted.values()) == 3000
    packed = [(FOLDER / name).read_bytes() for name in wanted]
    assert sum(map(len, packed)) < 8 * 2**20
