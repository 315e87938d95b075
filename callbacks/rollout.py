"""Decodes the same prompts at the start of every epoch, so that the drafter is trained on rounds of its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from dflash_lightning.block import Recorded
from dflash_lightning.block.recorded import answer_length
from dflash_lightning.data import DraftData
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.rollout import Rollout as Listener
from dflash_lightning.errors import SettingError
from dflash_lightning.files import write_atomic
from dflash_lightning.model import DraftModel
from dflash_lightning.module import DraftModule
from dflash_lightning.progress import print_line
from dflash_lightning.target.parallel import check_whole
from dflash_lightning.types import DecodedRound

Records = dict[int, tuple[DecodedRound, ...]]


class Rollout(Callback):
    """Lets drafter and target answer the prompts of the first ``documents`` rows, and hands the rounds to the blocks.

    Decoding is the real one, at temperature 0: the answers are the target's own whatever the drafter is worth, so they
    are those of the rows (``dflash regenerate``); where one parts from its row its rounds end. What changes from epoch
    to epoch is where rounds begin and what is rejected. The records of an epoch are written to ``rounds/`` in the run's
    folder before it is trained on. A resumed run reads them, and one that was killed while it decoded decodes again. A
    run that goes on within an epoch needs them: the weights that they were decoded with are gone.

    Only ``block=recorded`` reads them (Draft-OPD, arXiv 2605.29343, which refreshes the drafter at every update;
    here it is stale by at most an epoch).

    Args:
        documents: training rows whose prompts are answered, the first ones; null answers all.
        batch_size: prompts decoded at once.
    """

    def __init__(self, *, documents: int | None = None, batch_size: int = 16) -> None:
        for name, value in (("documents", documents), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise SettingError(f"callbacks.rollout.{name}", f"{value} answers nothing", "Use 1 or more")
        self.documents = documents
        self.batch_size = batch_size

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, DraftModule) or not isinstance(pl_module.block, Recorded):
            raise SettingError(
                "callbacks.rollout", "these blocks read no rounds", do="Use block=recorded, or leave the callback out"
            )
        check_whole(pl_module.target.cut, "callbacks.rollout", "one rank decodes for all", "Leave the callback out")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In the middle of an epoch: what it began with."""
        assert isinstance(pl_module, DraftModule) and isinstance(pl_module.block, Recorded)
        pl_module.block.records = None  # those of an earlier fit
        if trainer.global_step and (known := _read(self._place(trainer))):
            self._hand_over(pl_module, known)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        draft = pl_module.whole_draft()
        place, state = self._place(trainer), _drafter_state(draft)
        known = _read(place)
        if known.get("drafter") != state:
            if trainer.is_global_zero:
                records = self._decode(trainer, pl_module, draft)
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(place, json.dumps({"drafter": state, "rounds": _plain(records)}))
                self._say(trainer, records)
            trainer.strategy.barrier("rollout")
            known = _read(place)
        if not any(known["rounds"].values()):
            raise SettingError(
                "data.train",
                f"none of the {len(known['rounds'])} answers that were decoded begins as its row does, so there are no "
                "rounds to train on",
                do="Give rows that this target wrote at temperature 0 (dflash regenerate)",
            )
        self._hand_over(pl_module, known)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before a run that goes on within an epoch trains on blocks that know no rounds."""
        assert isinstance(pl_module, DraftModule) and isinstance(pl_module.block, Recorded)
        if pl_module.block.records is None:
            raise SettingError(
                "callbacks.rollout",
                f"the run goes on within epoch {trainer.current_epoch}, but the rounds it is trained on are not in "
                f"{self._place(trainer)}, and the drafter that decoded them is gone",
                do="Put that file back, resume from a checkpoint of an epoch's end, or start anew with --fresh",
            )

    def _hand_over(self, module: LightningModule, known: dict[str, Any]) -> None:
        assert isinstance(module, DraftModule) and isinstance(module.block, Recorded)
        module.block.records = {
            int(document): tuple(
                DecodedRound(r["anchor"], tuple(r["drafts"]), r["accepted"], tuple(r["log_probs"]), r["own"])
                for r in rounds
            )
            for document, rounds in known["rounds"].items()
        }

    def _place(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "rounds" / f"epoch-{trainer.current_epoch:04d}.json"

    def _decode(self, trainer: Trainer, module: DraftModule, draft: DraftModel) -> Records:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, DraftData)
        count = len(data.documents) if self.documents is None else min(self.documents, len(data.documents))
        asked = {}
        for number in range(count):
            document, length = data.documents[number], answer_length(data.documents[number])
            if length > 1:
                first = int(document.loss_mask.nonzero()[0])
                ids = document.input_ids.tolist()
                asked[number] = (ids[:first], ids[first : first + length])
        asked = {number: pair for number, pair in asked.items() if pair[0]}
        if not asked:
            return {}
        longest = max(len(prompt) for prompt, _ in asked.values())
        most = max(len(answer) for _, answer in asked.values())
        settings = DecodingSettings(max_new_tokens=most, batch_size=min(self.batch_size, len(asked)), compile=False)
        with isolate_rng(), torch.no_grad():
            decoder = settings.make_decoder(module.target, draft, longest_prompt=longest, shown=False)
            listener = Listener.listen(decoder)
            # Answers of about one length together, so that few rows ride along after their end.
            order = sorted(asked, key=lambda number: len(asked[number][1]))
            found: Records = {}
            for begin in range(0, len(order), settings.batch_size):
                some = order[begin : begin + settings.batch_size]
                decoded = decoder.decode(
                    [asked[n][0] for n in some],
                    max_new_tokens=max(len(asked[n][1]) for n in some),
                    stop_ids=module.target.stop_ids,
                    request_ids=some,
                )
                for number, generation in zip(some, decoded.generations, strict=True):
                    found[number] = listener.rounds(generation, asked[number][1])
        return found

    def _say(self, trainer: Trainer, records: Records) -> None:
        rounds = [one for found in records.values() for one in found]
        committed = sum(one.accepted + 1 for one in rounds) / max(1, len(rounds))
        print_line(f"rollout: {len(rounds)} rounds of {len(records)} answers, {committed:.3f} tokens committed in each")


def _read(place: Path) -> dict[str, Any]:
    """The records of an epoch; empty where there is no such file, or a damaged one."""
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of JSON or of UTF-8
        return {}
    return known if isinstance(known, dict) and isinstance(known.get("rounds"), dict) else {}


def _plain(records: Records) -> dict[str, list[dict[str, Any]]]:
    return {str(document): [asdict(one) for one in rounds] for document, rounds in sorted(records.items())}


def _drafter_state(draft: DraftModel) -> str:
    """Identifies the drafter's weights as they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
