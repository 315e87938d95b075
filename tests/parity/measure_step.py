"""One training step of the drafter beside SpecForge's and speculators' own, on one shape. Run by hand:

    OMP_NUM_THREADS=1 python tests/parity/measure_step.py PARITY_PYTHON [--turns 5] [--vocab N] [--bfloat16] ..

PARITY_PYTHON is the interpreter of ``make parity``'s environment. Every program holds a drafter of the shape (the
options of ``dflash bench``, whose defaults are SmolLM2-135M with five draft layers) with random weights, and makes
steps of forward, loss, backward and AdamW on given random features: the target's pass is not part of it. They take
turns, a step each. Prints JSON: CPU-seconds of a step (median), growth of memory over the state before the first step,
and both as shares of the best other program's. Ours also says how close it comes to its own matrix products, measured
in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

HEAD = """
import json, os, sys, time
out = os.dup(1); os.dup2(2, 1)
shape = json.loads(sys.stdin.readline())
bfloat16 = shape.pop("bfloat16")
def autocast():
    import torch
    return torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
def say(x): os.write(out, (json.dumps(x) + "\\n").encode())
def mib(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"): return int(line.split()[1]) / 1024
"""
TAIL = """
before = mib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
say("ready")
for line in sys.stdin:
    begin = time.process_time(); step(); spent = time.process_time() - begin
    say({"seconds": spent, "growth": mib("VmHWM") - before})
"""
OURS = """
import torch
from dflash_lightning.loss import total_loss
from dflash_lightning.profiling.build import Place, build_batch, build_module, build_target
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.types import StepContext
shape = Shape(**shape); target = build_target(shape, Place())
module = build_module(shape, target); batch = build_batch(shape, module)
batch.features = target.features(batch.input_ids, batch.position_ids, module.required(), packed=False)
optimizer = module.optim.make_optimizer(list(module.draft_model.parameters()), scaled=False)
def step():
    with autocast():
        found, features = module.outputs(batch)
        shares = module.loss_shares(batch, found, features, StepContext(0, 10, 0), batch.window_totals)
    total_loss(shares).backward()
    optimizer.step(); optimizer.zero_grad(set_to_none=True)
"""
INPUTS = """
import torch
from transformers import Qwen3Config
torch.manual_seed(0)
s = shape; layer_ids = list(range(s["features"]))
geometry = dict(vocab_size=s["vocab"], hidden_size=s["hidden"], intermediate_size=s["ffn"],
    num_hidden_layers=s["layers"], num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"],
    head_dim=s["head_dim"], rms_norm_eps=1e-5,
    max_position_embeddings=2048, tie_word_embeddings=False)
ids = torch.randint(0, s["vocab"] - 1, (s["batch"], s["sequence"]))
features = torch.randn(s["batch"], s["sequence"], s["features"] * s["hidden"])
mask = torch.ones_like(ids)
"""
SPECFORGE = (
    INPUTS
    + """
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
config = Qwen3Config(**geometry)
config.block_size, config.num_target_layers, config.attention_bias = s["block"], s["target_layers"], False
config.dflash_config = {"mask_token_id": s["vocab"] - 1, "target_layer_ids": layer_ids}
config._attn_implementation = "sdpa"
draft = DFlashDraftModel(config)
head = torch.nn.Linear(s["hidden"], s["vocab"], bias=False).requires_grad_(False)
embedding = torch.nn.Embedding(s["vocab"], s["hidden"]).requires_grad_(False)
model = OnlineDFlashModel(draft, head, embedding, mask_token_id=s["vocab"] - 1, block_size=s["block"],
    attention_backend="sdpa", num_anchors=s["anchors"], loss_decay_gamma=7.0)
optimizer = torch.optim.AdamW(draft.parameters(), lr=6e-4)
def step():
    with autocast():
        loss = model(ids, features, mask)[0]
    loss.backward()
    optimizer.step(); optimizer.zero_grad(set_to_none=True)
"""
)
SPECULATORS = (
    """
import importlib.machinery
from unittest.mock import MagicMock
os.environ["TORCHDYNAMO_DISABLE"] = "1"
for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets"):
    stand_in = MagicMock(name=name)
    stand_in.__path__, stand_in.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = stand_in
"""
    + INPUTS
    + """
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
method = {"proposal_type": "greedy", "speculative_tokens": s["block"] - 1}
method |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
config = DFlashSpeculatorConfig.from_dict({
    "speculators_model_type": "dflash", "speculators_version": "0.9.0", "architectures": ["DFlashSpeculator"],
    "speculators_config": {"algorithm": "dflash", "proposal_methods": [method], "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "none", "architectures": ["LlamaForCausalLM"]}},
    "draft_vocab_size": s["vocab"], "block_size": s["block"], "aux_hidden_state_layer_ids": layer_ids,
    "mask_token_id": s["vocab"] - 1, "sliding_window_non_causal": True, "sample_from_anchor": False,
    "target_hidden_size": s["hidden"], "num_target_layers": s["target_layers"],
    "transformer_layer_config": {"model_type": "qwen3", **geometry}})
config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention has no backward pass on a CPU
model = DFlashDraftModel(config)
for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
    module = getattr(model, name, None)
    if module is not None:
        module.requires_grad_(False)
        torch.nn.init.normal_(module.weight, std=0.02)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-4)
last, positions = torch.randn(s["batch"], s["sequence"], s["hidden"]), torch.arange(s["sequence"])[None]
def step():
    with autocast():
        found = model(hidden_states=features, input_ids=ids, loss_mask=mask, verifier_last_hidden_states=last,
            document_ids=torch.zeros_like(ids), position_ids=positions, loss_config=resolve_loss_config("ce", "eager"),
            max_anchors=s["anchors"])
    loss = next(x for x in found if torch.is_tensor(x) and x.ndim == 0) if isinstance(found, tuple) else found.loss
    loss.backward()
    optimizer.step(); optimizer.zero_grad(set_to_none=True)
"""
)


class Worker:
    """A program in a process of its own, which makes a step when it is asked to."""

    def __init__(self, python: str, code: str, shape: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-c", HEAD + code + TAIL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(json.dumps(shape))
        assert self._read() == "ready"

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def step(self) -> dict[str, float]:
        self._write("step")
        return self._read()  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.communicate(timeout=60)


def main() -> None:
    from dflash_lightning.profiling.shape import SIZES, Shape, option

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parity_python")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bfloat16", action="store_true", help="products under autocast, weights in float32")
    defaults = asdict(Shape())
    for name in SIZES:
        parser.add_argument(option(name), type=int, default=defaults[name])
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in SIZES} | {"bfloat16": args.bfloat16}
    programs = {"ours": (sys.executable, OURS), "specforge": (args.parity_python, SPECFORGE)}
    programs["speculators"] = (args.parity_python, SPECULATORS)
    workers = {name: Worker(python, code, shape) for name, (python, code) in programs.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for turn in range(args.turns + 1):
        for name, worker in workers.items():
            measured = worker.step()
            if turn:  # the first step warms up; its memory is in the highest of all
                found[name].append(measured)
    for worker in workers.values():
        worker.end()
    seconds = {name: statistics.median(step["seconds"] for step in steps) for name, steps in found.items()}
    growth = {name: max(step["growth"] for step in steps) for name, steps in found.items()}
    best = {
        kind: min(v for n, v in figures.items() if n != "ours") for kind, figures in (("s", seconds), ("m", growth))
    }
    print(
        json.dumps(
            {
                "shape": shape,
                "cpu_seconds": {name: round(value, 3) for name, value in seconds.items()},
                "growth_mib": {name: round(value) for name, value in growth.items()},
                "seconds_to_best_other": round(seconds["ours"] / best["s"], 3),
                "growth_to_best_other": round(growth["ours"] / best["m"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
