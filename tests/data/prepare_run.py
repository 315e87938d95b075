"""One rank of a small fit with a cache of processed rows; notes who processed rows and what was trained on."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_lightning.data.read.process import Processing
from dflash_lightning.target import FrozenTarget


def tools() -> ModuleType:
    """Helpers of the training tests."""
    path = Path(__file__).parents[1] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("training_tools", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path, devices: int) -> None:
    rank, make = os.environ.get("LOCAL_RANK", "0"), Processing.make

    def noted(self: Processing, *args: Any, **settings: Any) -> Any:
        with (folder / "made.txt").open("a") as file:
            file.write(f"{rank}\n")
        time.sleep(1.0)  # long enough for a rank that does not wait to be seen
        return make(self, *args, **settings)

    Processing.make = noted  # type: ignore[method-assign]
    helpers = tools()
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    target = FrozenTarget(model, AutoTokenizer.from_pretrained(folder / "target"), name="tiny-llama")
    trainer = helpers.make_trainer(folder, devices=devices, strategy="ddp", max_epochs=1)
    data = helpers.make_data(target, str(folder / "rows.jsonl"), cache=str(folder / "cache"))
    trainer.fit(helpers.make_module(target), datamodule=data)
    facts = {"steps": trainer.global_step, "ids": data.documents.ids.tolist(), "kept": data.summary.kept}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
