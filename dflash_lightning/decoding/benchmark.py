"""Times three decoders against each other on the same prompts, one prompt at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_lightning.decoding.loop import OnRound
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Generation
from dflash_lightning.decoding.watch import watching
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.clock import Spent
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.reference import generate_plainly

_WARM_UP_TOKENS = 4


@dataclass
class Timing(Spent):
    """Seconds and tokens of one decoder over all timed prompts, prefill included.

    ``stats`` and ``generations`` are of decoders that go through our loop; others leave them null and empty.
    """

    tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    stats: DecodeStats | None = None
    generations: list[Generation] = field(default_factory=list)

    @property
    def s_per_token(self) -> float:
        """Wall seconds per generated token."""
        return self.wall / self.tokens

    @property
    def cpu_s_per_token(self) -> float:
        """CPU seconds per generated token, over all threads."""
        return self.cpu / self.tokens


# ``decode(prompt, its number, most new tokens, listener, where the time goes)``: the answer's ids.
_Decode = Callable[[list[int], int, int, OnRound, Timing], list[int]]


def time_decoders(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[list[int]],
    settings: DecodingSettings,
    *,
    shown: bool = True,
) -> dict[str, Timing]:
    """Timings of ``speculative``, ``autoregressive`` (the same loop without drafts) and ``transformers_generate``.

    One prompt at a time, the three taking turns prompt by prompt in this process, so that whatever else the machine
    does falls on all alike. Each decodes a few tokens beforehand, untimed (compilation, packing, allocation). The
    outputs are whole answers: they can be held against each other.

    Raises:
        ValueError: the settings sample: then the three would decode different texts.
    """
    check_greedy(settings)
    decoders = _decoders(target, draft, prompts, settings, shown)
    for decode in decoders.values():
        decode(prompts[0], 0, min(settings.max_new_tokens, _WARM_UP_TOKENS), lambda *heard: None, Timing())
    timings = {name: Timing() for name in decoders}
    most, answers = settings.max_new_tokens, len(prompts) * len(decoders)
    what = "decoding in three ways, timed"
    with watching(what, answers, max_new_tokens=most, stop_ids=target.stop_ids, shown=shown) as watch:
        for number, prompt in enumerate(prompts):
            for name, decode in decoders.items():
                timing = timings[name]
                with timing.timed():
                    output = decode(prompt, number, most, watch, timing)
                timing.tokens += len(output)
                timing.outputs.append(output)
    return timings


def check_greedy(settings: DecodingSettings) -> None:
    """Refuse settings with which three decoders would write three texts.

    Raises:
        ValueError: they sample.
    """
    if settings.temperature != 0.0:
        raise SettingError(
            "decoding.temperature",
            f"{settings.temperature} draws different texts per decoder",
            do="Time at temperature 0",
        )


def _decoders(
    target: FrozenTarget, draft: DraftModel, prompts: list[list[int]], settings: DecodingSettings, shown: bool
) -> dict[str, _Decode]:
    longest = max(len(prompt) for prompt in prompts)
    single = dataclasses.replace(settings, batch_size=1)

    def ours(with_draft: DraftModel | None) -> _Decode:
        decoder = single.make_decoder(target, with_draft, longest_prompt=longest, shown=shown)

        def decode(prompt: list[int], number: int, most: int, listener: OnRound, timing: Timing) -> list[int]:
            result = decoder.decode(
                [prompt], max_new_tokens=most, stop_ids=target.stop_ids, request_ids=[number], on_round=listener
            )
            timing.stats = result.stats if timing.stats is None else timing.stats + result.stats
            timing.generations += result.generations
            return result.generations[0].output_ids

        return decode

    def generate(prompt: list[int], number: int, most: int, listener: OnRound, timing: Timing) -> list[int]:
        return generate_plainly(
            target, prompt, max_new_tokens=most, on_token=lambda row, token: listener(number, [token], [False])
        )

    return {"speculative": ours(draft), "autoregressive": ours(None), "transformers_generate": generate}
