"""Tokens per CPU-second against z-lab's own ``dflash_generate``, with the same drafter and prompts. Run by hand:

    OMP_NUM_THREADS=1 python tests/parity/measure_decode.py RUN PARITY_PYTHON [--prompts FILE] [--turns 3]

RUN is a run folder of a DFlash drafter, PARITY_PYTHON the interpreter of ``make parity``'s environment. Both programs
decode the same prompts greedily in float32, one at a time, in turns; each keeps its process and its weights. ``plain``
is transformers' ``generate`` on the same prompts, ours is eager (nothing is compiled). A reduced draft
vocabulary, which z-lab's layout cannot hold, is left out on both sides. Prints JSON: tokens per
CPU-second of each (median over the turns), the ratios, and whether all three gave the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

THEIRS = """
import json, sys, time, os
out = os.dup(1); os.dup2(2, 1)
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM
torch.cuda.synchronize = lambda: None
task = json.loads(sys.stdin.readline())
target = AutoModelForCausalLM.from_pretrained(task["target"], dtype=torch.float32).eval()
draft = DFlashDraftModel.from_pretrained(task["draft"], dtype=torch.float32).eval()
def run(kind):
    texts, begin = [], time.process_time()
    for prompt in task["prompts"]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            if kind == "zlab":
                found = dflash_generate(draft, target, ids, task["max_new_tokens"], task["stop_ids"])
            else:
                found = target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=task["max_new_tokens"], do_sample=False,
                    eos_token_id=task["stop_ids"], pad_token_id=task["stop_ids"][0])
        texts.append(found[0, len(prompt):].tolist())
    return {"seconds": time.process_time() - begin, "texts": texts}
for line in sys.stdin:
    os.write(out, (json.dumps(run(line.strip())) + "\\n").encode())
"""


def over_all_tokens(draft: Any) -> Any:
    """The same weights without a reduced vocabulary, which z-lab's layout cannot hold."""
    config = copy.deepcopy(draft.config)
    config.draft_vocab_size = None
    whole = type(draft)(config).eval()
    whole.load_state_dict({name: value for name, value in draft.state_dict().items() if name != "draft_vocab"})
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("parity_python")
    parser.add_argument("--prompts", default="package://dflash_lightning/data/quickstart/test.jsonl")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    from dflash_lightning.commands.drafts import find_draft, open_target_of
    from dflash_lightning.data import load_prompts, render_prompt
    from dflash_lightning.decoding import DecodingSettings
    from dflash_lightning.model import save_draft

    source = find_draft(args.run)
    target = open_target_of(source, None, device="cpu", dtype="float32")
    draft = over_all_tokens(source.model)
    prompts = [render_prompt(target.tokenizer, prompt) for prompt in load_prompts(args.prompts, limit=args.limit)]
    settings = DecodingSettings(max_new_tokens=args.max_new_tokens, batch_size=1, compile=False)
    longest = max(map(len, prompts))
    drafted = settings.make_decoder(target, draft, longest_prompt=longest)
    stop_ids = sorted(target.stop_ids)

    def ours() -> dict[str, Any]:
        begin = time.process_time()
        found = drafted.decode(prompts, max_new_tokens=args.max_new_tokens, stop_ids=stop_ids)
        return {"seconds": time.process_time() - begin, "texts": [g.output_ids for g in found.generations]}

    with tempfile.TemporaryDirectory() as folder:
        save_draft(draft, folder + "/ours")
        export = [sys.executable, "-m", "dflash_lightning", "export", "--draft", folder + "/ours", "--out"]
        form = ["--format", "zlab", "--weights", "float32", "--target", str(source.model.config.target["name"])]
        subprocess.run([*export, folder + "/draft", *form], check=True, stdout=subprocess.DEVNULL)
        target.model.save_pretrained(Path(folder) / "target")
        task = {
            "target": str(Path(folder) / "target"),
            "draft": folder + "/draft",
            "prompts": prompts,
            "stop_ids": stop_ids,
        }
        worker = subprocess.Popen(
            [args.parity_python, "-c", THEIRS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps({**task, "max_new_tokens": args.max_new_tokens}) + "\n")

        def ask(kind: str) -> dict[str, Any]:
            if kind == "ours":
                return ours()
            worker.stdin.write(kind + "\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
            return json.loads(worker.stdout.readline())  # type: ignore[union-attr]

        kinds = ("ours", "zlab", "plain")
        found = {kind: [ask(kind) for _ in range(1)][1:] for kind in kinds}  # the first turn warms up
        for _ in range(args.turns):
            for kind in kinds:
                found[kind].append(ask(kind))
        worker.stdin.close()
        worker.wait(timeout=60)

    texts = {kind: turns[0]["texts"] for kind, turns in found.items()}
    tokens = sum(map(len, texts["ours"]))
    rate = {
        kind: statistics.median(sum(map(len, t["texts"])) / t["seconds"] for t in turns)
        for kind, turns in found.items()
    }
    print(json.dumps({
        "tokens": tokens,
        "block_size": source.model.config.block_size,
        "tokens_per_cpu_second": {kind: round(value, 2) for kind, value in rate.items()},
        "ours_to_zlab": round(rate["ours"] / rate["zlab"], 3),
        "ours_to_plain": round(rate["ours"] / rate["plain"], 3),
        "same_tokens": texts["ours"] == texts["plain"],
        "same_as_zlab": texts["ours"] == texts["zlab"],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
