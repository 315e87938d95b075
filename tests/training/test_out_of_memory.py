"""Memory that runs out: one message, with what takes most and the setting that makes it smaller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.commands import fit as fit_module
from dflash_lightning.decoding import SpeculativeDecoder
from dflash_lightning.model import DraftModel
from dflash_lightning.model.memory import ADVICE, StepMemory
from dflash_lightning.target import TargetAdapter
from dflash_lightning.training.out_of_memory import explained, ran_out


def gpu(*args: Any, **settings: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def main_memory(*args: Any, **settings: Any) -> None:
    torch.empty(1 << 55)  # the allocator's own error


def other(*args: Any, **settings: Any) -> None:
    raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("fail", [gpu, main_memory])
@pytest.mark.parametrize("measured_first", [True, False])
def test_a_run_that_needs_too_much_says_what_to_make_smaller(
    place: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fail: Any, measured_first: bool
) -> None:
    if not measured_first:
        monkeypatch.setattr(fit_module, "estimate", lambda parts, done=0: None)
    monkeypatch.setattr(DraftModel, "block_hidden", fail)
    settings = ["callbacks=[checkpoint_last]", "trainer.max_epochs=1"]
    assert place.fit("smoke", *settings, name=f"{fail.__name__}-{measured_first}") == 2
    error = capsys.readouterr().err
    assert error.count("dflash: out of memory: Of about") == 1 and "Traceback" not in error
    assert any(advice in error for advice in ADVICE.values())
    assert ("CUDA out of memory" if fail is gpu else "can't allocate memory") in error


def test_the_largest_part_is_named_with_its_setting() -> None:
    memory = StepMemory({"target": 2**20, "activations": 2**31, "logits": 2**20})
    said = r"activations take most: 2\.0 GiB. Use .*block\.num_anchors"
    with pytest.raises(ValueError, match=said), explained(lambda: memory):
        gpu()
    with pytest.raises(ValueError, match=r"target\.dtype=bfloat16"), explained(lambda: None):
        main_memory()


def test_decoding_is_told_apart(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetAdapter, "prefill", main_memory)
    decoder = SpeculativeDecoder(tiny_target, None, max_length=16)
    memory = StepMemory({"activations": 2**31})
    with pytest.raises(ValueError, match=r"decoding\.batch_size"), explained(lambda: memory):
        decoder.decode([[1, 2]], max_new_tokens=2, stop_ids=())


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"), explained(lambda: None):
        other()
    assert ran_out(MemoryError()) and not ran_out(ValueError("out of memory"))
