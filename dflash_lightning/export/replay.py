"""The replay: what a drafter does on a few prompts, written down so that any engine can be held to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder.chain import best_tokens
from dflash_lightning.export.conventions import Conventions, Drafting
from dflash_lightning.files import REPLAY_FILE
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, best_chain

NUM_LARGEST, NUM_SPREAD = 16, 32  # logits kept per slot: the largest, and token ids evenly spaced over the vocabulary
HOW_TO_READ = (
    "Decode each prompt_ids greedily with the target alone or drafted: output_ids must come out. The first block's "
    "anchor is output_ids[0], its context the target's hidden states of prompt_ids. draft_ids are what the drafter "
    "proposes for it, logits[slot][j] the drafter's logit of token logit_ids[slot][j]. committed counts the tokens "
    "that each round adds (drafts accepted plus one, cut at the end)."
)


@dataclass(frozen=True)
class RecordedPrompt:
    """One prompt: the target's greedy answer, the rounds it took, and the first block that was drafted."""

    prompt_ids: list[int]
    output_ids: list[int]
    committed: list[int]
    draft_ids: list[int]
    logit_ids: list[list[int]]
    logits: list[list[float]]


@dataclass(frozen=True)
class Replay:
    """Content of ``replay.json``; ``tensors`` has two digests of every tensor: as written, and rounded to bfloat16."""

    format: str
    target: dict[str, Any]
    dtype: str
    prompts: list[RecordedPrompt]
    tensors: dict[str, list[str]]
    how_to_read: str = HOW_TO_READ

    def as_json(self) -> dict[str, Any]:
        """Plain values, for the file beside the weights."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Replay:
        """The replay in a parsed file.

        Raises:
            ValueError: it is no replay.
        """
        try:
            prompts = [RecordedPrompt(**prompt) for prompt in raw["prompts"]]
            replay = cls(**{**raw, "prompts": prompts})
            if wrong := [*_faults(replay)]:
                raise TypeError(f"{', '.join(wrong)} is of another kind")
            return replay
        except (KeyError, TypeError) as error:
            raise ValueError(f"{REPLAY_FILE}: it is no replay of `dflash export` ({error}). Export again.") from error


def _faults(replay: Replay) -> Iterator[str]:
    """Fields of a replay whose values are of another kind than ``dflash export`` writes."""
    yield from (name for name in ("format", "dtype") if not isinstance(getattr(replay, name), str))
    yield from (name for name in ("target", "tensors") if not isinstance(getattr(replay, name), dict))
    for number, prompt in enumerate(replay.prompts, start=1):
        lists = {name: getattr(prompt, name) for name in ("prompt_ids", "output_ids", "committed", "draft_ids")}
        for name, value in lists.items():
            if not _is_ids(value) or not (value or name == "committed"):  # a single token takes no round
                yield f"{name} of prompt {number}"
        rows = prompt.logit_ids
        if not isinstance(rows, list) or not all(map(_is_ids, rows)) or not _alike(prompt.logits, rows):
            yield f"logit_ids or logits of prompt {number}"


def _alike(logits: Any, rows: list[list[int]]) -> bool:
    """Whether there is a number for every id."""
    if not isinstance(logits, list) or not all(isinstance(row, list) for row in logits):
        return False
    numbers = all(type(value) in (int, float) for row in logits for value in row)
    return numbers and [len(row) for row in logits] == [len(row) for row in rows]


def merge_observed(replay: Replay, raw: Mapping[str, Any]) -> list[RecordedPrompt]:
    """The replay's prompts with what an engine made of them: ``{"prompts": [{"prompt_ids": .., "draft_ids": ..}]}``.

    Every entry needs ``prompt_ids`` and ``draft_ids`` (of the first block); ``logits`` (at the replay's ``logit_ids``)
    and ``committed`` where the engine gives them.

    Raises:
        ValueError: an entry lacks something, or is none of the replay's prompts.
    """
    known, merged = {tuple(prompt.prompt_ids): prompt for prompt in replay.prompts}, []
    entries = raw.get("prompts") or []
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], start=1):
        if not isinstance(entry, dict) or not all(_is_ids(entry.get(name)) for name in ("prompt_ids", "draft_ids")):
            raise ValueError(
                f"--observed: prompt {number} is no {{'prompt_ids': [..], 'draft_ids': [..]}} with lists of token ids "
                f"({str(entry)[:60]}). Correct the file."
            )
        prompt = known.get(tuple(entry["prompt_ids"]))
        if prompt is None or not entry["draft_ids"]:
            raise ValueError(
                f"--observed: prompt {number} has no draft_ids, or prompt_ids that are none of {REPLAY_FILE}'s. Record "
                "what the engine drafts behind output_ids[0] of those prompts."
            )
        seen = {name: entry.get(name) or [] for name in ("draft_ids", "logits", "committed")}
        merged.append(replace(prompt, **seen))
    if not merged:
        raise ValueError(
            "--observed: the file has no prompts. Write {'prompts': [{'prompt_ids': .., 'draft_ids': ..}]}."
        )
    return merged


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """sha256 of every tensor's bytes, and of those it has once rounded to bfloat16."""
    return {name: [_sha256(value), _sha256(value.to(torch.bfloat16))] for name, value in sorted(tensors.items())}


def _sha256(value: Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def record(
    target: FrozenTarget, model: DraftModel, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[RecordedPrompt]:
    """What ``model`` does on ``prompts``, by the loop that every other command decodes with."""
    settings = DecodingSettings(max_new_tokens=max_new_tokens, compile=False, prepacked=False)
    decoder = settings.make_decoder(target, model, longest_prompt=max(map(len, prompts)))
    result = decoder.decode(list(prompts), max_new_tokens=max_new_tokens, stop_ids=target.stop_ids)
    recorded = []
    for prompt, generation in zip(prompts, result.generations, strict=True):
        logits, ids, drafts = _first_block(target, model, prompt, generation.output_ids[0])
        picked = _columns(logits)
        recorded.append(
            RecordedPrompt(
                prompt_ids=list(prompt),
                output_ids=generation.output_ids,
                committed=generation.committed,
                draft_ids=drafts,
                logit_ids=ids[picked].tolist(),
                logits=logits.gather(-1, picked).tolist(),
            )
        )
    return recorded


def _first_block(
    target: FrozenTarget, model: DraftModel, prompt: list[int], anchor: int
) -> tuple[Float[Tensor, "D v"], Int[Tensor, " v"], list[int]]:
    """Of the first block: the language head's logits, the token id of every column, and the tokens that are drafted.

    Through the path that decoding takes.
    """
    alignment, lm = model.alignment, model.head_of(target.lm)
    length = len(prompt)
    features = target.features(torch.tensor([prompt]), torch.arange(length)[None], model.required())
    slots = torch.full((1, alignment.block_size), alignment.mask_token_id)
    slots[0, 0] = anchor
    with plain_mode(target.device):
        cache = model.make_cache(batch_size=1, max_length=length, chunk_rows=length)
        keep = torch.tensor([length], device=target.device)
        hidden = model.draft_hidden(target.embed(slots), features, keep, cache, lm)
        roots = torch.tensor([anchor], device=target.device)
        scores = model.open(hidden[:, alignment.first_slot :], roots, lm)
        drafts = best_chain(scores, roots) if scores.draw is None else scores.draw(best_tokens)[0]
        logits = lm.logits(hidden[0, alignment.first_slot : alignment.block_size]).float().cpu()
    ids = torch.arange(logits.shape[-1]) if lm.ids is None else lm.ids.cpu()
    return logits, ids, drafts[0].tolist()


def _columns(logits: Float[Tensor, "D v"]) -> Int[Tensor, "D n"]:
    """Which columns to keep of every slot."""
    size = logits.shape[-1]
    largest = logits.topk(min(NUM_LARGEST, size)).indices
    spread = torch.linspace(0, size - 1, min(NUM_SPREAD, size)).long().expand(len(logits), -1)
    return torch.cat([largest, spread], dim=-1)


@dataclass(eq=False)
class Replayer:
    """Replays recorded prompts with drafters given as tensors and conventions.

    The target runs once over every prompt and its answer; ``layer_ids`` must cover whatever conventions will ask for.
    """

    target: FrozenTarget
    prompts: list[RecordedPrompt]
    layer_ids: tuple[int, ...]
    lm: LanguageHead

    def __post_init__(self) -> None:
        spec = FeatureSpec(self.layer_ids)
        texts = [torch.tensor([p.prompt_ids + p.output_ids]) for p in self.prompts]
        self._features = [self.target.features(t, torch.arange(t.shape[1])[None], spec) for t in texts]

    def first_block(self, drafting: Drafting, number: int) -> Float[Tensor, "D v"]:
        """Logits of the first block of prompt ``number``."""
        return self._logits(drafting, number, 0)

    def recorded_columns(self, drafting: Drafting, number: int) -> Float[Tensor, "D n"]:
        """Logits of the first block where the replay has some."""
        columns, known = self.lm.columns(torch.tensor(self.prompts[number].logit_ids).flatten())
        assert bool(known.all()), "the replay has logits of tokens that the drafter does not know"
        logits = self.first_block(drafting, number)
        return logits.gather(-1, columns.view(len(logits), -1))

    def draft_ids(self, drafting: Drafting, number: int, position: int = 0) -> list[int]:
        """Tokens drafted behind ``output_ids[position]``."""
        hidden, context = self._hidden(drafting, number, position)
        with plain_mode(self.target.device):
            logits, embedding = self.lm.logits(hidden).float(), self.target.lm.embedding
            assert embedding is not None
            root = self.prompts[number].output_ids[position]
            best = torch.tensor(drafting.draft(hidden, logits, root, context, embedding, self.lm.ids))
        return (best if self.lm.ids is None else self.lm.ids.cpu()[best]).tolist()

    def committed(self, drafting: Drafting, number: int) -> list[int]:
        """Tokens added by every round: drafts are judged by the recorded answer, which is the target's own."""
        output, counts, at = self.prompts[number].output_ids, [], 0
        while at + 1 < len(output):
            drafts, left = self.draft_ids(drafting, number, at), output[at + 1 :]
            agreed = [a == b for a, b in zip(drafts, left, strict=False)]
            accepted = agreed.index(False) if False in agreed else len(agreed)
            counts.append(min(accepted + 1, len(left)))
            at += counts[-1]
        return counts

    def _logits(self, drafting: Drafting, number: int, position: int) -> Float[Tensor, "D v"]:
        hidden, _ = self._hidden(drafting, number, position)
        with plain_mode(self.target.device):
            return self.lm.logits(hidden).float().cpu()

    def _hidden(
        self, drafting: Drafting, number: int, position: int
    ) -> tuple[Float[Tensor, "D H"], Float[Tensor, "S T H"]]:
        """Hidden states of the slots that predict behind ``output_ids[position]``, and the context they see."""
        c: Conventions = drafting.conventions
        prompt = self.prompts[number]
        anchor = len(prompt.prompt_ids) + position
        slots = torch.full((c.block_size,), c.mask_token_id)
        slots[0] = prompt.output_ids[position]
        context = self._features[number].select(c.layer_ids)[0, :anchor]
        with plain_mode(self.target.device):
            return drafting.hidden(self.target.embed(slots), context, anchor)[c.first_slot :], context
