"""Runs z-lab's own package on exports of ours, and saves each drafter again the way that package does."""

import json
import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

torch.cuda.synchronize = lambda: None  # the package times itself on CUDA only

folder = Path(sys.argv[1])
request, inputs = json.loads((folder / "request.json").read_text()), load_file(folder / "request.safetensors")
targets, answer, tensors = {}, {}, {}
for case in request["cases"]:
    name = case["name"]
    if case["target"] not in targets:
        targets[case["target"]] = AutoModelForCausalLM.from_pretrained(case["target"], dtype=torch.float32).eval()
    target = targets[case["target"]]
    draft, info = DFlashDraftModel.from_pretrained(case["draft"], dtype=torch.float32, output_loading_info=True)
    draft.eval()
    for anchor in case["anchors"]:
        block = inputs[f"{name}/{anchor}/block"]
        with torch.no_grad():
            hidden = draft(
                position_ids=torch.arange(anchor + block.shape[1])[None],
                noise_embedding=target.get_input_embeddings()(block),
                target_hidden=inputs[f"{name}/{anchor}/context"],
            )
            tensors[f"{name}/{anchor}"] = draft.compute_logits(hidden, target.lm_head)
    out = dflash_generate(
        draft,
        target,
        torch.tensor([case["prompt"]]),
        case["max_new_tokens"],
        case["stop_ids"] or None,
        return_stats=True,
    )
    draft.save_pretrained(case["save_to"])
    answer[name] = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "output_ids": out.output_ids[0, out.num_input_tokens :].tolist(),
        "committed": out.acceptance_lengths,
        "target_layer_ids": list(draft.target_layer_ids),
    }
(folder / "answer.json").write_text(json.dumps(answer))
save_file(tensors, folder / "answer.safetensors")
