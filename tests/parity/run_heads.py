"""Loads drafters of ours whose heads other programs have too, computes loss and gradients of training, saves them."""

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
from specforge.algorithms.common.dflash_family_model import OnlineDominoModel, OnlineDSparkModel
from specforge.modeling.draft.domino import DominoDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.dspark import core as dspark


def frozen(weight: torch.Tensor, kind: type) -> torch.nn.Module:
    """An embedding or head with this weight, as the trainer holds the target's."""
    rows, width = weight.shape
    module = kind(rows, width) if kind is torch.nn.Embedding else kind(width, rows, bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def record(module: torch.nn.Module, seen: dict, key: str) -> None:
    """Note what the embedding is first asked for, or what another module first answers."""

    def hook(_, given, output):
        seen.setdefault(key, given[0] if key == "blocks" else output)

    module.register_forward_hook(hook)


def noted(method, seen: dict, key: str):
    """``method``, whose first answer is noted, and for logits the hidden states they were made of."""

    def call(*arguments, **settings):
        answer = method(*arguments, **settings)
        seen.setdefault(key, answer.detach().clone())
        if key == "head_logits":
            seen.setdefault("hidden", settings["hidden_states"].detach().clone())
        return answer

    return call


def told(case: dict, info: dict, model: torch.nn.Module) -> tuple[dict, dict]:
    """What was loaded, and the gradients by name; the model is saved as its program saves it."""
    model.save_pretrained(case["save_to"])
    answer = {"missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"])}
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return answer, {f"{case['name']}/{key}": value for key, value in gradients.items()}


def run_specforge(case: dict, inputs: dict) -> tuple[dict, dict]:
    name = case["name"]
    domino = case["head"] == "prefix"
    kind, trainer = (DominoDraftModel, OnlineDominoModel) if domino else (DSparkDraftModel, OnlineDSparkModel)
    draft, info = kind.from_pretrained(case["draft"], dtype=torch.float32, output_loading_info=True)
    model = trainer(
        draft,
        frozen(inputs[f"{name}/head"], torch.nn.Linear),
        frozen(inputs[f"{name}/embedding"], torch.nn.Embedding),
        mask_token_id=draft.mask_token_id,
        block_size=draft.block_size,
        attention_backend="sdpa",
        num_anchors=99,
        loss_decay_gamma=case["decay"],
        **({"shift_label": case["shift_label"]} if domino else {}),
    )
    seen = {}
    if not domino:
        for key, method in {"head_logits": "apply_logits_head", "confidence": "predict_confidence"}.items():
            setattr(draft, method, noted(getattr(draft, method), seen, key))
    drawn, draw = [], model._sample_anchor_positions

    def drawing(*arguments, **settings):
        drawn.append(draw(*arguments, **settings))
        return drawn[-1]

    model._sample_anchor_positions = drawing
    torch.manual_seed(0)
    given = (inputs[f"{name}/ids"], inputs[f"{name}/features"], inputs[f"{name}/loss_mask"])
    more = {"lambda_base": case["share"]} if domino else {"target_last_hidden_states": inputs[f"{name}/last_hidden"]}
    loss = model(*given, **more)[0]
    loss.backward()
    ((anchors, keep),) = drawn
    answer, gradients = told(case, info, draft)
    gradients |= {f"{name}/{key}": value for key, value in seen.items()}
    return {**answer, "loss": loss.item(), "anchors": anchors[keep].tolist()}, gradients


def run_speculators(case: dict, inputs: dict) -> tuple[dict, dict]:
    name, seen = case["name"], {}
    model, info = SpeculatorModel.from_pretrained(case["draft"], output_loading_info=True)
    own = "markov_head" if "markov" in case["head"] else "refiner_head"
    if own == "refiner_head":
        # No file holds this mask, and the library leaves it as memory happens to be when it loads one.
        model.refiner_head.causal_tril = torch.ones_like(model.refiner_head.causal_tril).tril()
    model.load_verifier_weights()  # as the library's trainer does: embedding and head are not part of an export
    for key, value in model.named_parameters():  # on a CPU its attention has no gradient
        value.requires_grad_(own in key or "confidence_head" in key)
    record(model.embed_tokens, seen, "blocks")
    record(model.norm, seen, "hidden")
    score = dspark.compute_metrics

    def scored(logits, targets, confidence_logits, *arguments, **settings):
        seen["head_logits"], seen["confidence"] = logits, confidence_logits
        return score(logits, targets, confidence_logits, *arguments, **settings)

    dspark.compute_metrics = scored
    length = inputs[f"{name}/ids"].shape[1]
    found = model(
        hidden_states=inputs[f"{name}/features"],
        input_ids=inputs[f"{name}/ids"],
        loss_mask=inputs[f"{name}/loss_mask"],
        verifier_last_hidden_states=inputs[f"{name}/last_hidden"],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        loss_config=resolve_loss_config(case["loss"], "eager"),
        gamma=case["decay"],
        max_anchors=length,
        **{key: case[key] for key in ("ce_from_data",) if key in case},
        **({"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if own == "markov_head" else {}),
    )
    dspark.compute_metrics = score
    loss = next(x for x in found if isinstance(x, torch.Tensor) and x.requires_grad and x.ndim == 0)
    loss.backward()
    answer, gradients = told(case, info, model)
    found = {f"{name}/{key}": value.detach().clone() for key, value in seen.items() if value is not None}
    return {**answer, "loss": loss.item()}, {**gradients, **found}


logger.remove()
folder = Path(sys.argv[1])
request, inputs = json.loads((folder / "request.json").read_text()), load_file(folder / "request.safetensors")
answers, tensors = {}, {}
for case in request["cases"]:
    answers[case["name"]], found = globals()[f"run_{case['program']}"](case, inputs)
    tensors |= found
(folder / "answer.json").write_text(json.dumps(answers))
save_file(tensors, folder / "answer.safetensors")
