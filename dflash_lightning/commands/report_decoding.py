"""The one decoding of a report: some prompts one at a time and timed, the others in batches, each answer held once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.benchmark import Timing, time_decoders
from dflash_lightning.decoding.difference import Difference, first_difference
from dflash_lightning.decoding.evaluation import Evaluation, Evaluator, compared
from dflash_lightning.decoding.watch import watching
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.reference import reference_outputs


@dataclass
class ReportDecoding:
    """``evaluation`` is of all prompts; its times are those of the timed ones, decoded one at a time.

    The timed ones are compared with plain decoding. ``same`` of all outputs are ``transformers.generate``'s token for
    token; ``differences`` are the others.
    """

    evaluation: Evaluation
    timings: dict[str, Timing]
    timed: int
    timed_same: int
    same: int
    differences: list[Difference]

    @property
    def verdict(self) -> str:
        """Whether outputs are the target's own, by both references: yes, up to rounding of a dtype, or NO."""
        evaluation = self.evaluation
        if evaluation.lossless and not self.differences:
            return "yes"
        broken = evaluation.broken or not all(difference.rounding for difference in self.differences)
        return "NO" if broken else f"up to rounding of {evaluation.dtype}"


def decode_for_report(
    target: FrozenTarget, draft: DraftModel, prompts: list[list[int]], settings: DecodingSettings, *, timed: int
) -> ReportDecoding:
    """Decode every prompt once with drafts and once by ``transformers.generate``, which all outputs are held against.

    The first ``timed`` one at a time, and without drafts too, the three decoders taking turns: what they give is timed
    and compared. The others in batches, without compilation, because no time is taken.
    """
    timings = time_decoders(target, draft, prompts[:timed], settings)
    plain, drafted = timings["autoregressive"], timings["speculative"]
    assert drafted.stats is not None and plain.stats is not None
    rest = prompts[timed:]
    batched = dataclasses.replace(settings, compile=False)
    numbers = list(range(timed, len(prompts)))
    others = Evaluator(target, draft, rest, batched, num_checked=0, request_ids=numbers)("decoding the other prompts")
    found = [
        _difference(target, settings, i, prompts[i], output, expected)
        for i, (output, expected) in enumerate(zip(drafted.outputs, plain.outputs, strict=True))
    ]
    differences = [difference for difference in found if difference is not None]
    stats = dataclasses.replace(
        drafted.stats + others.stats,
        **{name: getattr(drafted.stats, name) for name in ("seconds", "cpu_seconds", "cycles", "compiled_cycles")},
    )
    evaluation = Evaluation(
        compared(stats, len(found), differences),
        checked=drafted.stats,
        plain=plain.stats,
        dtype=others.dtype,
        differences=differences,
        generations=drafted.generations + others.generations,
    )
    references = timings["transformers_generate"].outputs + _references(target, rest, others.outputs, settings)
    against = [
        _difference(target, settings, i, prompts[i], output, expected)
        for i, (output, expected) in enumerate(zip(evaluation.outputs, references, strict=True))
    ]
    return ReportDecoding(
        evaluation,
        timings,
        timed=len(drafted.outputs),
        timed_same=sum(difference is None for difference in against[: len(drafted.outputs)]),
        same=sum(difference is None for difference in against),
        differences=[difference for difference in against if difference is not None],
    )


def _difference(
    target: FrozenTarget,
    settings: DecodingSettings,
    number: int,
    prompt: list[int],
    output: list[int],
    expected: list[int],
) -> Difference | None:
    return first_difference(target, settings.sampling, request=number, prompt=prompt, output=output, expected=expected)


def _references(
    target: FrozenTarget, prompts: list[list[int]], outputs: list[list[int]], settings: DecodingSettings
) -> list[list[int]]:
    """What ``transformers.generate`` answers, in batches."""
    most, what = settings.max_new_tokens, "transformers.generate on them"
    with watching(what, len(prompts), max_new_tokens=most, stop_ids=target.stop_ids) as watch:
        return reference_outputs(
            target,
            prompts,
            outputs,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            on_token=lambda row, token: watch(row, [token], [False]),
        )
