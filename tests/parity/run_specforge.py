"""Loads exports of ours as SpecForge's drafter and computes its training loss and gradients."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel


def frozen(weight: torch.Tensor, kind: type) -> torch.nn.Module:
    """An embedding or head with this weight, as the trainer holds the target's."""
    rows, width = weight.shape
    module = kind(rows, width) if kind is torch.nn.Embedding else kind(width, rows, bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def run(case: dict, inputs: dict) -> tuple[dict, dict]:
    """Loss, anchors and gradients of one batch; anchors are drawn by SpecForge and told."""
    name = case["name"]
    draft, info = DFlashDraftModel.from_pretrained(case["draft"], dtype=torch.float32, output_loading_info=True)
    model = OnlineDFlashModel(
        draft,
        frozen(inputs[f"{name}/head"], torch.nn.Linear),
        frozen(inputs[f"{name}/embedding"], torch.nn.Embedding),
        mask_token_id=draft.mask_token_id,
        block_size=draft.block_size,
        attention_backend="sdpa",
        num_anchors=case["num_anchors"],
        loss_decay_gamma=case["decay"],
    )
    drawn, draw = [], model._sample_anchor_positions

    def drawing(*arguments, **settings):
        drawn.append(draw(*arguments, **settings))
        return drawn[-1]

    model._sample_anchor_positions = drawing
    torch.manual_seed(0)
    loss = model(inputs[f"{name}/ids"], inputs[f"{name}/features"], inputs[f"{name}/loss_mask"])[0]
    loss.backward()
    ((anchors, keep),) = drawn
    answer = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "loss": loss.item(),
        "anchors": anchors[keep].tolist(),
        "target_layer_ids": list(draft.target_layer_ids),
    }
    draft.save_pretrained(case["save_to"])
    return answer, {f"{name}/{key}": value.grad for key, value in draft.named_parameters()}


folder = Path(sys.argv[1])
request, inputs = json.loads((folder / "request.json").read_text()), load_file(folder / "request.safetensors")
answers, tensors = {}, {}
for case in request["cases"]:
    answers[case["name"]], found = run(case, inputs)
    tensors |= found
(folder / "answer.json").write_text(json.dumps(answers))
save_file(tensors, folder / "answer.safetensors")
