"""Expected rounds of a drafter on texts that the target wrote: one forward per text, and no decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.acceptance.figures import ExpectedRounds
from dflash_lightning.acceptance.recursion import round_chances, smooth_rounds
from dflash_lightning.acceptance.requests import Rejection, Standing
from dflash_lightning.acceptance.responses import Response, anchors_of, find_responses, mask_of
from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.block import lay_out, merge_layouts
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.draft_proposer import decode_copy
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.chunks import chunk_bytes, cut
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import BlockLayout, Document, FeatureSpec, TargetFeatures

_SLOTS = 4096  # drafted at once: what bounds the memory


@dataclass
class _Text:
    """A document with what the target computed on it, on the CPU: it never changes while the drafter trains."""

    domain: str
    document: Document
    responses: list[Response]
    features: TargetFeatures
    target_probs: Float[Tensor, " S"]  # of every token, by the served law; 0 where it is not asked for
    hidden: Float[Tensor, "S H"] | None  # the last one; only for the smooth estimate

    @property
    def judged(self) -> Bool[Tensor, " S"]:
        """The tokens that rounds commit."""
        mask = mask_of(self.responses, len(self.target_probs))
        mask[[response.first for response in self.responses]] = False
        return mask


@dataclass
class _Piece:
    """Rounds of a text that are drafted with others: those at its anchors ``span``."""

    text: int
    span: slice


class AcceptanceEvaluator:
    """Says how many rounds decoding the ``documents`` would take with the drafter as it is at each call.

    Blocks stand at *every* token of every response, as if a round began there, with the true text before them. Heads
    and drafters with a memory are given the true tokens of their own block. From the chances that these drafts stand,
    a recursion gives the expected rounds (``acceptance.recursion``). This is exact, not an approximation:

    - greedy, on texts that the target wrote greedily: the rounds of real decoding, response by response;
    - sampling, on texts drawn by the decoding's own law: their mean over draws is the mean of real decoding.

    The target's features are computed at the first call and kept on the CPU. The drafter runs in the target's dtype as
    it does in decoding, on a copy; neither its modes and gradients nor any random state are touched.

    Args:
        documents: what the target wrote, by domain; their supervised tokens are the responses (``find_responses``).
        settings: decoding; refuses what does not follow from the text (``AcceptanceRule.of``).
        smooth: also estimate from whole laws, at the price of one more row of the vocabulary per slot.
        slots_at_once: slots that are drafted together.

    Raises:
        ValueError: expected rounds do not follow from the text under these settings.
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftModel,
        documents: Mapping[str, Sequence[Document]],
        settings: DecodingSettings,
        *,
        smooth: bool = False,
        slots_at_once: int = _SLOTS,
    ) -> None:
        self.rule = AcceptanceRule.of(settings, draft)
        self.target, self.draft, self.settings, self.smooth = target, draft, settings, smooth
        self.num_drafts = settings.num_drafts(draft)
        self.alignment = replace(draft.alignment, block_size=settings.block_size or draft.config.block_size)
        self._blocks = max(1, slots_at_once // self.alignment.block_size)
        self._documents = documents
        self._texts: list[_Text] | None = None
        self._model: DraftModel | None = None
        self._layouts: list[tuple[list[_Piece], BlockLayout]] = []

    def __call__(self) -> ExpectedRounds:
        """The figures of all domains together, for the drafter's weights as they are now."""
        return sum(self.by_domain().values(), ExpectedRounds(self.num_drafts))

    def by_domain(self) -> dict[str, ExpectedRounds]:
        """The figures of every domain, for the drafter's weights as they are now."""
        with plain_mode(self.target.device):
            if self._texts is None:
                named = [(name, document) for name, some in self._documents.items() for document in some]
                self._texts = [text for name, document in named for text in self._read(name, document)]
                self._layouts = [(pieces, self._lay_out(pieces)) for pieces in self._pieces()]
            model = self._refreshed()
            tables = [torch.zeros(self._num_anchors(text), self.num_drafts, 2) for text in self._texts]
            for pieces, layout in self._layouts:
                found = self._ask(model, pieces, layout)
                sizes = [piece.span.stop - piece.span.start for piece in pieces]
                for piece, rows in zip(pieces, found.split(sizes), strict=True):
                    tables[piece.text][piece.span] = rows
            return {domain: self._figures(domain, tables) for domain in self._documents}

    # -- the target's part, once --------------------------------------------------------------------------------------

    def _read(self, domain: str, document: Document) -> Iterator[_Text]:
        """The text with the target's features; none where no round commits anything."""
        responses = find_responses(document, self.target.stop_ids, self.settings.max_new_tokens)
        responses = [response for response in responses if response.committed]
        if not responses:
            return
        end = responses[-1].end
        ids, spec = document.input_ids[:end], self.draft.required()
        places = torch.arange(end)[None]
        seen = self.target.features(ids[None], places, spec | FeatureSpec(last_hidden=True), packed=False)
        assert seen.last_hidden is not None
        hidden = seen.last_hidden[0]
        probs = torch.zeros(end)
        wanted = mask_of(responses, end)[1:].nonzero()[:, 0] + 1
        for rows in self._rows_at_once(len(wanted)):
            tokens = wanted[rows].to(hidden.device)
            law = self.rule.sampler.law(self.target.lm.logits(hidden[tokens - 1]))
            probs[wanted[rows]] = law.of(ids.to(hidden.device)[tokens]).cpu()
        kept = seen if spec.last_hidden else replace(seen, last_hidden=None)
        yield _Text(
            domain,
            replace(document, input_ids=ids, loss_mask=mask_of(responses, end)),
            responses,
            kept.map(_kept),
            probs,
            _kept(hidden) if self.smooth else None,
        )

    def _rows_at_once(self, count: int) -> list[slice]:
        return cut(count, max(1, chunk_bytes(self.target.device) // (4 * self.target.facts.vocab_size)))

    def _num_anchors(self, text: _Text) -> int:
        return sum(response.committed for response in text.responses)

    def _pieces(self) -> Iterator[list[_Piece]]:
        """Runs of rounds, of as many texts as fit, that are drafted together."""
        assert self._texts is not None
        pieces, room = [], self._blocks
        for number, text in enumerate(self._texts):
            start, count = 0, self._num_anchors(text)
            while start < count:
                stop = min(count, start + room)
                pieces.append(_Piece(number, slice(start, stop)))
                start, room = stop, room - (stop - start)
                if not room:
                    yield pieces
                    pieces, room = [], self._blocks
        if pieces:
            yield pieces

    def _lay_out(self, pieces: list[_Piece]) -> BlockLayout:
        """The blocks of some texts, which stand in one row, one after the other."""
        assert self._texts is not None
        placed, offset = [], 0
        for piece in pieces:
            text = self._texts[piece.text]
            anchors = anchors_of(text.responses)[piece.span]
            layout = lay_out(text.document, anchors, self.alignment, inputs=self.draft.drafter.inputs)
            placed.append((offset, layout))
            offset += len(text.target_probs)
        count = sum(layout.anchors.shape[1] for _, layout in placed)
        return merge_layouts([placed], num_blocks=count, alignment=self.alignment)

    # -- the drafter's part, every time -------------------------------------------------------------------------------

    def _refreshed(self) -> DraftModel:
        if self._model is None:
            self._model = decode_copy(self.draft, self.target)
            self._model.bind(self.target)
            self._lm = self._model.head_of(self.target.lm)
        theirs = self.draft.state_dict()
        for name, mine in self._model.state_dict().items():
            mine.copy_(theirs[name])
        return self._model

    def _ask(self, model: DraftModel, pieces: list[_Piece], layout: BlockLayout) -> Float[Tensor, "n K 2"]:
        """The chances that the drafts of these blocks stand, and that they do not."""
        assert self._texts is not None
        texts, device = [self._texts[piece.text] for piece in pieces], self.target.device
        layout = _on(layout, device)
        features = TargetFeatures.joined([text.features for text in texts]).map(lambda x: x.to(device))
        places = torch.cat([torch.arange(len(text.target_probs)) for text in texts])[None].to(device)
        probs = torch.cat([text.target_probs for text in texts]).to(device)[layout.label_index]
        hidden = model.block_hidden(self.target.embed(layout.input_ids), layout, features, places, self._lm)
        view = model.outputs(hidden, layout, self._lm).views["main"]
        asked: list[Any] = [Standing(self.rule, layout.labels, probs)]
        if self.smooth:
            states = torch.cat([text.hidden for text in texts if text.hidden is not None]).to(device)
            stops = torch.tensor(sorted(self.target.stop_ids), dtype=torch.long, device=device)
            before = (layout.label_index - 1).clamp(min=0)
            asked.append(Rejection(self.rule, states, before, self.target.lm, stops))
        answers = view.ask(*asked)
        found = torch.stack([*answers, *[torch.zeros_like(answers[0])] * (2 - len(answers))], dim=-1)
        return found[0, :, self.alignment.first_slot :].cpu()

    def _figures(self, domain: str, tables: list[Tensor]) -> ExpectedRounds:
        """The figures of one domain, from what is said of all texts [n, K, 2]."""
        assert self._texts is not None
        texts = [(text, table) for text, table in zip(self._texts, tables, strict=True) if text.domain == domain]
        if not texts:
            return ExpectedRounds(self.num_drafts)
        runs, documents, cut_count = [], [], 0
        for text, table in texts:
            runs += table.split([response.committed for response in text.responses])
            documents += [text.document.sample_id] * len(text.responses)
            cut_count += sum(not response.stopped for response in text.responses)
        lengths = torch.tensor([len(run) for run in runs])
        padded = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True)
        accept, reject = padded.unbind(-1)
        own = sum(int((text.target_probs[text.judged] > 0.0).sum()) for text, _ in texts)
        smooth = float("nan")
        if self.smooth:
            smooth = float(smooth_rounds(round_chances(accept, lengths), reject, lengths).sum())
        return ExpectedRounds.of(accept, lengths, documents, own=own, cut=cut_count, smooth=smooth)


def _kept(x: Tensor) -> Tensor:
    return x.detach().cpu().clone()


def _on(layout: BlockLayout, device: torch.device) -> BlockLayout:
    moved: dict[str, Any] = {
        f.name: v.to(device) for f in fields(layout) if isinstance(v := getattr(layout, f.name), Tensor)
    }
    return replace(layout, **moved)
