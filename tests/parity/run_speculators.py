"""Loads exports of ours with the speculators library, runs its training forward, and saves and converts with it."""

# ruff: noqa: E402 - some modules must be stood in for before the library is imported
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library compiles its forward, for which a machine may lack a C++ compiler
for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets"):
    stand_in = MagicMock(name=name)  # imported for downloading and preparing data, of which nothing is done here
    stand_in.__path__, stand_in.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = stand_in

import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.convert.dflash.converter import DFlashConverter
from speculators.losses import resolve_loss_config


def record(module: torch.nn.Module, seen: dict, key: str) -> None:
    """Note what the embedding is first asked for, or what another module first answers."""

    def hook(_, given, output):
        seen.setdefault(key, given[0] if key == "blocks" else output)

    module.register_forward_hook(hook)


def run(case: dict, inputs: dict) -> tuple[dict, dict]:
    """What the library reads, and the first block slots, hidden states and logits of its training forward."""
    name, seen = case["name"], {}
    model, info = SpeculatorModel.from_pretrained(case["draft"], output_loading_info=True)
    model.load_verifier_weights()  # as the library's trainer does: embedding and head are not part of an export
    record(model.embed_tokens, seen, "blocks")
    record(model.norm, seen, "hidden")
    record(model.lm_head, seen, "logits")
    length = inputs[f"{name}/ids"].shape[1]
    with torch.no_grad():
        model(
            hidden_states=inputs[f"{name}/features"],
            input_ids=inputs[f"{name}/ids"],
            loss_mask=inputs[f"{name}/loss_mask"],
            verifier_last_hidden_states=inputs[f"{name}/last_hidden"],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            position_ids=torch.arange(length)[None],
            loss_config=resolve_loss_config("ce", "eager"),
            max_anchors=length,
        )
    state, file = model.state_dict(), load_file(Path(case["draft"]) / "model.safetensors")
    model.save_pretrained(case["save_to"])
    if case["convert"]:
        DFlashConverter().convert(case["convert"], case["convert_to"], base_model=case["target"], validate=True)
    answer = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "differing": sorted(key for key, value in file.items() if not torch.equal(state[key].to(value.dtype), value)),
        "layer_ids": list(model.target_layer_ids),
        "mask_token_id": model.mask_token_id,
        "block_size": model.config.block_size,
    }
    return answer, {f"{name}/{key}": value.clone() for key, value in seen.items()}


logger.remove()
folder = Path(sys.argv[1])
request, inputs = json.loads((folder / "request.json").read_text()), load_file(folder / "request.safetensors")
answers, tensors = {}, {}
for case in request["cases"]:
    answers[case["name"]], found = run(case, inputs)
    tensors |= found
(folder / "answer.json").write_text(json.dumps(answers))
save_file(tensors, folder / "answer.safetensors")
