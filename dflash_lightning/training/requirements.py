"""What loss terms ask of the training data and of the head, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning.pytorch.utilities import rank_zero_warn

from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.errors import SettingError
from dflash_lightning.head import DraftHead
from dflash_lightning.loss import LossTerm
from dflash_lightning.types import Alignment


def check_labels(
    terms: Mapping[str, LossTerm], why_not_samples: Callable[[float], str | None], *, unknown: bool
) -> None:
    """Hold the data to what the terms say of their labels.

    Args:
        terms: the loss terms by name.
        why_not_samples: says of a temperature why the responses are no draws from the target's whole law at it; null
            where nothing speaks against it.
        unknown: whether nobody knows how some of the responses were made; then there is a warning.

    Raises:
        ValueError: a term estimates an expectation over draws that the data does not hold.
    """
    for name, term in terms.items():
        if term.labels != "samples":
            continue
        if (reason := why_not_samples(term.temperature)) is not None:
            raise SettingError(
                f"loss.{name}",
                f"needs responses drawn from the target's whole law at temperature {term.temperature:g}, but "
                f"data.train holds {reason} (its .meta.json says so)",
                do=f"Regenerate them at temperature {term.temperature:g} without top_k and top_p, or use another loss",
            )
        if unknown:
            rank_zero_warn(
                f"loss.{name} needs responses drawn from the target at temperature {term.temperature:g}; nothing says "
                "how those in data.train were made."
            )


def check_teacher(terms: Mapping[str, LossTerm], products: str | None) -> None:
    """Refuse kept features that are computed with rounded products where a loss takes the target's law from them.

    Its probabilities would be off by a percent, which the drafter would learn. ``products`` is
    ``data.feature_products``; what ``auto`` chooses there never rounds a teacher.

    Raises:
        ValueError: a term reads the teacher and the products are bfloat16.
    """
    asking = [name for name, term in terms.items() if term.required().last_hidden]
    if asking and products == "bfloat16":
        raise SettingError(
            "data.feature_products",
            f"bfloat16 rounds the hidden states from which loss.{asking[0]} takes the target's law",
            do="Set it to auto, float32 or null",
        )


def check_signals(terms: Mapping[str, LossTerm], head: DraftHead) -> None:
    """Refuse a term that reads what the head does not offer, and a signal that no term trains but a policy would read.

    Raises:
        ValueError: names the distribution or the signal, or the heads that have candidates.
    """
    for name, term in terms.items():
        if missing := [signal for signal in term.reads if signal not in head.signals]:
            raise SettingError(
                f"loss.{name}",
                f"reads the signal {missing[0]!r}, but head {head.name!r} offers {list(head.signals)}",
                do="Choose a head that has it (head=markov head.confidence=true), or take the term out",
            )
    for name, term in terms.items():
        if term.chooses and not head.chooses:
            able = sorted(known for known, part in DraftHead.registry.items() if getattr(part, "chooses", False))
            raise SettingError(
                f"loss.{name}",
                f"reads the candidates of every slot, but head {head.name!r} chooses among all tokens",
                f"Use a head of {able}, or take the term out",
            )
    for name, term in terms.items():
        if strange := [view for view in term.viewed() if view not in head.distributions]:
            raise SettingError(
                f"loss.{name}",
                f"scores the distribution {strange[0]!r}, but head {head.name!r} offers {list(head.distributions)}",
                do="Choose a head that has it, or another view",
            )
    if head.chooses and not any(term.chooses for term in terms.values()):
        raise SettingError(
            "loss",
            f"no term trains what head {head.name!r} chooses among its candidates",
            do="Add one that reads them, as the recipes of this head do",
        )
    trained = {signal for term in terms.values() for signal in term.reads}
    if idle := [signal for signal in head.signals if signal not in trained]:
        raise SettingError(
            f"head.{idle[0]}",
            "no loss term trains this signal, so it would stay random",
            do=f"Add one that reads it (loss=[..,{idle[0]}]), or switch it off",
        )


def check_slots(terms: Mapping[str, LossTerm], block: BlockConstructor) -> None:
    """Refuse settings of a term that mean nothing in blocks of this size.

    Raises:
        ValueError: names the setting of the term.
    """
    most = block.num_predicting(Alignment(block.largest_size, 0, block.label_layout))
    for name, term in terms.items():
        try:
            term.check_drafts(most)
        except SettingError as error:
            where = error.where.replace("loss.", f"loss.{name}.", 1)
            raise SettingError(where, error.what, error.allowed, error.do) from None


def check_accumulation(conditioning: Conditioning, accumulated: int) -> None:
    """Refuse a step of several micro-batches where a round is played on each: their slots are not counted before.

    ``accumulated`` is the number of micro-batches of an optimizer step.

    Raises:
        ValueError: there are several, and the conditioning ``carries``.
    """
    if conditioning.carries and accumulated > 1:
        raise SettingError(
            "trainer.accumulate_grad_batches",
            f"{accumulated}, but conditioning {conditioning.name!r} moves the blocks of every micro-batch to "
            "where a round has ended, so that the losses' counts are not known before the last of them",
            "Use 1, and more data.rows_per_batch or data.row_tokens",
        )


def check_tallies(terms: Mapping[str, LossTerm], accumulated: int) -> None:
    """Refuse a step of several micro-batches where a term's denominator is only known after each forward pass.

    Raises:
        ValueError: ``accumulated``, the micro-batches of an optimizer step, is above 1 and a term ``tallies``.
    """
    late = [name for name, term in terms.items() if term.tallies]
    if late and accumulated > 1:
        raise SettingError(
            "trainer.accumulate_grad_batches",
            f"{accumulated}, but what loss.{late[0]} is divided by is only known after the forward pass of every "
            "micro-batch, so that the first of them cannot be weighted",
            "Use 1, and more data.rows_per_batch, data.row_tokens or trainer.devices",
        )
