"""Times three decoders against each other on the same prompts, and holds outputs to ``transformers.generate``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.reference import generate_plainly

Decode = Callable[[list[int]], list[int]]


@dataclass
class Timing:
    """Seconds and tokens of one decoder over all timed prompts, prefill included."""

    wall: float = 0.0
    cpu: float = 0.0
    tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def s_per_token(self) -> float:
        return self.wall / self.tokens

    @property
    def cpu_s_per_token(self) -> float:
        return self.cpu / self.tokens


def time_decoders(
    target: FrozenTarget, draft: DraftModel, prompts: list[list[int]], settings: DecodingSettings
) -> dict[str, Timing]:
    """Timings of ``speculative``, ``autoregressive`` (the same loop without drafts) and ``transformers_generate``.

    One prompt at a time, the three taking turns prompt by prompt in this process, so that whatever else the machine
    does falls on all alike. Each decodes the first prompt once beforehand, untimed (compilation, packing, allocation).

    Raises:
        ValueError: the settings sample: then the three would decode different texts.
    """
    if settings.temperature != 0.0:
        raise ValueError(
            f"temperature: {settings.temperature} draws different texts per decoder. Time at temperature 0."
        )
    decoders = _decoders(target, draft, prompts, settings)
    for decode in decoders.values():
        decode(prompts[0])
    timings = {name: Timing() for name in decoders}
    for prompt in prompts:
        for name, decode in decoders.items():
            timing = timings[name]
            wall, cpu = time.perf_counter(), time.process_time()
            output = decode(prompt)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            timing.wall += time.perf_counter() - wall
            timing.cpu += time.process_time() - cpu
            timing.tokens += len(output)
            timing.outputs.append(output)
    return timings


def _decoders(
    target: FrozenTarget, draft: DraftModel, prompts: list[list[int]], settings: DecodingSettings
) -> dict[str, Decode]:
    longest = max(len(prompt) for prompt in prompts)
    single = dataclasses.replace(settings, batch_size=1)

    def ours(with_draft: DraftModel | None) -> Decode:
        decoder = single.make_decoder(target, with_draft, longest_prompt=longest)

        def decode(prompt: list[int]) -> list[int]:
            result = decoder.decode([prompt], max_new_tokens=settings.max_new_tokens, stop_ids=target.stop_ids)
            return result.generations[0].output_ids

        return decode

    def generate(prompt: list[int]) -> list[int]:
        return generate_plainly(target, prompt, max_new_tokens=settings.max_new_tokens)

    return {"speculative": ours(draft), "autoregressive": ours(None), "transformers_generate": generate}
