"""Expected tau while training: the figure of real decoding, without any, and nothing else is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from dflash_lightning.acceptance import expected_tau, read_texts
from dflash_lightning.callbacks import ExpectedTau, SpeculativeEval
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.target import FrozenTarget

LENGTHS = [20, 9, 14, 30]
GREEDY = DecodingSettings(max_new_tokens=12, batch_size=4, compile=False)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, tiny_target: FrozenTarget) -> dict[str, str]:
    """Prompts, and what the tiny target answers to them, as ``regenerate`` writes it; the first two, and the others."""
    folder = tmp_path_factory.mktemp("held-out")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in ("red", "a longer green", "blue", "grey")))
    ids = [
        render_prompt(tiny_target.tokenizer, row, vocab_size=tiny_target.facts.vocab_size)
        for row in load_prompts(str(prompts))
    ]
    decoder = GREEDY.make_decoder(tiny_target, None, longest_prompt=max(map(len, ids)))
    found = decoder.decode(ids, max_new_tokens=12, stop_ids=tiny_target.stop_ids).generations
    rows = [
        json.dumps({"input_ids": [*p, *g.output_ids], "loss_mask": [0] * len(p) + [1] * len(g.output_ids)}) + "\n"
        for p, g in zip(ids, found, strict=True)
    ]
    files = {"prompts": prompts, "code": folder / "code.jsonl", "chat": folder / "chat.jsonl"}
    files["code"].write_text("".join(rows[:2]))
    files["chat"].write_text("".join(rows[2:]))
    for name in ("code", "chat"):
        write_meta(files[name], tiny_target)
    return {name: str(path) for name, path in files.items()}


def write_meta(file: Path, target: FrozenTarget, **sampling: Any) -> None:
    """The sidecar of rows that ``target`` wrote, greedily unless told otherwise."""
    law = {"labels": "greedy", "temperature": 0.0, "top_k": None, "top_p": None, **sampling}
    made = {"sampling": law, "target": {"digest": target.facts.digest}, "chat_template": {"kwargs": {}}}
    file.with_name(file.name + ".meta.json").write_text(json.dumps({"made_with": made}))


@pytest.fixture
def fit(parts: Any, write_rows: Callable[..., str], tiny_target: FrozenTarget, tmp_path: Path) -> Callable[..., Any]:
    """``fit(callbacks, resume=None, rows=None, **trainer)``: module and trainer, always from the same start."""
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)

    def run(callbacks: list[Any], resume: str | None = None, rows: list[str] | None = None, **settings: Any) -> Any:
        torch.manual_seed(0)
        module = make_module(tiny_target)
        trainer = make_trainer(tmp_path, callbacks=callbacks, **settings)
        trainer.fit(
            module, datamodule=make_data(tiny_target, rows or path, packing=False, max_length=96), ckpt_path=resume
        )
        return module, trainer

    return run


def domains(held_out: dict[str, str]) -> dict[str, str]:
    return {name: held_out[name] for name in ("code", "chat")}


def test_it_is_the_tau_of_decoding_the_same_prompts_and_changes_no_weight(
    fit, held_out, tiny_target, weights_of, tmp_path, capsys
) -> None:
    """Trained on the very texts, so that tau moves."""
    real = SpeculativeEval(held_out["prompts"], decoding=GREEDY, every_n_steps=20)
    expected = ExpectedTau(domains(held_out), decoding=GREEDY, every_n_steps=20)
    logger = CSVLogger(tmp_path, name=None, version="logs")
    rows = [held_out["code"], held_out["chat"]]
    module, trainer = fit([expected, real], rows=rows, max_epochs=12, logger=logger)
    plain, _ = fit([], rows=rows, max_epochs=12)
    assert all(torch.equal(value, weights_of(plain)[name]) for name, value in weights_of(module).items())
    assert [entry["step"] for entry in expected.history] == [0, 20, 40, 48]  # the last weights too
    for ours, theirs in zip(expected.history, real.history, strict=True):
        assert ours["decode/expected_tau"] == pytest.approx(theirs["decode/tau"], abs=1e-6)
    last = expected.history[-1]
    assert last["decode/expected_tau"] > 1.05 > expected.history[0]["decode/expected_tau"]
    assert {"decode/expected_tau/code", "decode/expected_tau/chat", "decode/expected_acceptance/slot_3"} < last.keys()
    again = expected_tau(tiny_target, module.draft_model, domains(held_out), GREEDY)
    assert list(again) == ["code", "chat", "all"]
    assert again["all"].tau == last["decode/expected_tau"] and again["code"].tau == last["decode/expected_tau/code"]
    assert float(trainer.callback_metrics["decode/expected_tau"]) == pytest.approx(last["decode/expected_tau"])
    assert "decode/expected_tau/chat" in (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[0]
    printed = capsys.readouterr().out
    assert "expected tau, step 0: 1." in printed and "44 tokens of 4 responses" in printed
    assert "of the tokens are none" not in printed and "nothing says" not in printed


def test_a_resumed_run_goes_on_with_its_figures(fit, held_out, tmp_path) -> None:
    def callbacks() -> list[Any]:
        saved = ModelCheckpoint(tmp_path, "at-{step}", every_n_train_steps=2, save_top_k=-1)
        return [ExpectedTau(held_out["code"], decoding=GREEDY, every_n_steps=2), saved]

    whole = callbacks()
    rows = [held_out["code"], held_out["chat"]]
    fit(whole, rows=rows, max_epochs=2, enable_checkpointing=True)
    resumed = callbacks()
    fit(resumed, resume=str(tmp_path / "at-step=4.ckpt"), rows=rows, max_epochs=2, enable_checkpointing=True)
    assert [entry["step"] for entry in resumed[0].history] == [0, 2, 4, 6, 8]
    taus = [[entry["decode/expected_tau"] for entry in one[0].history] for one in (resumed, whole)]
    assert taus[0] == pytest.approx(taus[1])


def test_checkpoints_and_early_stops_that_follow_it_are_told_at_every_measurement(
    fit, held_out, tmp_path, monkeypatch
) -> None:
    scores = {0: 1.0, 1: 2.0, 2: 5.0, 3: 4.0, 4: 3.0, 5: 2.0}
    figures = ExpectedTau._figures
    step = lambda self: self.history[-1]["step"] + 1 if self.history else 0  # noqa: E731
    monkeypatch.setattr(
        ExpectedTau, "_figures", lambda self, found: {**figures(self, found), "decode/expected_tau": scores[step(self)]}
    )
    name = "decode/expected_tau"
    best = ModelCheckpoint(tmp_path, "best", name, mode="max", save_on_train_epoch_end=False)
    stop = EarlyStopping(name, mode="max", patience=3, check_on_train_epoch_end=False)
    expected = ExpectedTau(held_out["code"], decoding=GREEDY, every_n_steps=1)
    _, trainer = fit([expected, best, stop], max_epochs=2, enable_checkpointing=True)
    assert trainer.global_step == 5 and float(best.best_model_score) == 5.0
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 2


def test_two_of_a_kind_keep_apart_and_epochs_are_a_period_too(fit, held_out) -> None:
    both = [
        ExpectedTau(held_out["code"], decoding=GREEDY, every_n_steps=None),
        ExpectedTau(held_out["chat"], decoding=GREEDY, every_n_steps=None, prefix="decode/chat_", limit=1),
    ]
    _, trainer = fit(both, max_epochs=2)
    assert [[entry["step"] for entry in one.history] for one in both] == [[0, 4, 8]] * 2
    assert {
        "decode/expected_tau",
        "decode/chat_tau",
        "decode/chat_acceptance/slot_1",
    } <= trainer.callback_metrics.keys()
    assert both[0].state_key != both[1].state_key


def test_texts_of_another_law_are_refused_and_doubtful_ones_named(held_out, tiny_target, tmp_path, fit, capsys) -> None:
    drawn = tmp_path / "drawn.jsonl"
    drawn.write_text(Path(held_out["code"]).read_text())
    write_meta(drawn, tiny_target, labels="sampled", temperature=1.0, top_p=1.0)
    with pytest.raises(ValueError, match=r"rows: .*drawn\.jsonl holds ones drawn at temperature 1.* from greedy ones"):
        read_texts(str(drawn), tiny_target, GREEDY)
    sampling = DecodingSettings(temperature=1.0)
    assert read_texts(str(drawn), tiny_target, sampling).warnings == []  # top_p 1 cuts nothing
    with pytest.raises(ValueError, match=r"rows\.chat: .* from ones drawn at temperature 1, top_k 5"):
        read_texts({"chat": str(drawn)}, tiny_target, DecodingSettings(temperature=1.0, top_k=5))
    with pytest.raises(ValueError, match=r"'all' names all domains together"):
        read_texts({"all": str(drawn), "code": str(drawn)}, tiny_target, sampling)
    assert list(read_texts({"all": str(drawn)}, tiny_target, sampling).documents) == ["all"]
    with pytest.raises(ValueError, match=r"callbacks\.expected_tau\.rows: .*no-such"):
        read_texts("no-such.jsonl", tiny_target, GREEDY, setting="callbacks.expected_tau.rows")
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(json.dumps({"input_ids": [7] * 12, "loss_mask": [0] * 3 + [1] * 9}) + "\n")
    fit([ExpectedTau(str(foreign), decoding=GREEDY, every_n_steps=4)])
    printed = capsys.readouterr().out
    assert f"callbacks.expected_tau.rows: nothing says how the responses in {foreign} were made" in printed
    assert "of the tokens are none that the target writes with these settings" in printed


def test_settings_that_cannot_be_used_are_refused(held_out, parts, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps: 0 is no period"):
        ExpectedTau(held_out["code"], decoding=GREEDY, every_n_steps=0)
    with pytest.raises(ValueError, match=r"rows: no file is given"):
        ExpectedTau({}, decoding=GREEDY)
    with pytest.raises(ValueError, match="measures a DraftModule, but the trainer was given LightningModule"):
        ExpectedTau(held_out["code"], decoding=GREEDY).setup(parts[2](tmp_path), LightningModule(), "fit")
