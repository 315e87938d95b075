"""Stand-ins for the two models of the loop: a target that is a table, and a proposer that follows a script."""

import math
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.choice import choose_strategies, named_part
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.parts import DecodeParts
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.proposer import NoDrafts, Proposer
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Round, Scores, Verdict
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Document, TargetFeatures

VOCAB_SIZE = 272  # of the tiny targets


class TableTarget:
    """A target whose next-token logits are a function of the text so far; it holds the committed text itself.

    ``features`` of a position are the token standing there, so that a proposer can check what it is handed.
    """

    trees, max_batch = True, None

    def __init__(self, next_logits: Callable[[list[int]], torch.Tensor]) -> None:
        self.next_logits = next_logits
        self.texts: list[list[int]] = []
        self.commits: list[list[int]] = []
        self.widths: list[int] = []  # nodes per row of every verification

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(text) for text in self.texts])

    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, TargetFeatures, torch.Tensor]:
        self.texts = [list(prompt) for prompt in prompts]
        width = max(map(len, prompts))
        rows = torch.tensor([prompt + [-1] * (width - len(prompt)) for prompt in prompts])
        return torch.stack([self.next_logits(text) for text in self.texts]), _features(rows), self.lengths

    def check_trees(self) -> None:
        """A table judges any text."""

    def verify(
        self, tokens: torch.Tensor, *, parents: torch.Tensor | None = None, live: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits after the path to each node; those of nodes that are not live are NaN, and nobody may read them."""
        self.judged = tokens
        self.widths.append(tokens.shape[1])
        logits = []
        for b, text in enumerate(self.texts):
            paths: list[list[int]] = []
            for node, token in enumerate(tokens[b].tolist()):
                parent = node - 1 if parents is None else int(parents[b, node])
                paths.append([*(paths[parent] if node else []), token])
            logits.append(torch.stack([self.next_logits(text + path) for path in paths]))
        found = torch.stack(logits)
        return found if live is None else found.masked_fill(~live[..., None], torch.nan)

    def commit(self, path: torch.Tensor | None, keep: torch.Tensor) -> TargetFeatures:
        self.commits.append(keep.tolist())
        rows = self.judged if path is None else self.judged.gather(1, path)
        for text, row, count in zip(self.texts, rows.tolist(), keep.tolist(), strict=True):
            text += row[:count]
        return _features(rows)


def _features(tokens: torch.Tensor) -> TargetFeatures:
    return TargetFeatures((0,), tokens[..., None, None].float(), ids=tokens)


class ScriptedProposer(Proposer):
    """Asks ``script(row, text, round)`` for the drafts (or, as a tensor [D, V], for the logits) after ``text``."""

    def __init__(self, num_drafts: int, script: Callable[[int, list[int], int], list[int] | torch.Tensor]) -> None:
        self.num_drafts = num_drafts
        self.script = script

    def start(self, features: TargetFeatures, lengths: torch.Tensor, roots: torch.Tensor) -> None:
        rows = features.hidden[:, :, 0, 0].long().tolist()
        self.texts = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
        self.round = 0

    def propose(self, roots: torch.Tensor, where: Round) -> Scores:
        answers = [
            self.script(b, [*text, root], self.round)
            for b, (text, root) in enumerate(zip(self.texts, roots.tolist(), strict=True))
        ]
        self.round += 1
        if isinstance(answers[0], torch.Tensor):
            return Scores(torch.stack(answers))
        return Scores(torch.nn.functional.one_hot(torch.tensor(answers), VOCAB_SIZE).float())

    def ingest(self, features: TargetFeatures, keep: torch.Tensor, verdict: Verdict) -> None:
        rows = features.hidden[:, :, 0, 0].long().tolist()
        for text, row, count in zip(self.texts, rows, keep.tolist(), strict=True):
            text += row[:count]


@pytest.fixture
def table_target() -> type[TableTarget]:
    return TableTarget


@pytest.fixture
def scripted_proposer() -> type[ScriptedProposer]:
    return ScriptedProposer


@pytest.fixture
def make_parts() -> Callable[..., DecodeParts]:
    """``make_parts(target, proposer=None, verifier="match", builder=None, policy=None, **sampling)``."""

    def make(
        target: object,
        proposer: Proposer | None = None,
        verifier: Verifier | str = "match",
        builder: DraftBuilder | None = None,
        policy: WidthPolicy | None = None,
        **sampling: object,
    ) -> DecodeParts:
        spec = SamplingSpec(**sampling)
        sampler = Sampler(spec, Noise(spec.seed))
        builder, judge = choose_strategies(builder, policy, named_part("verifier", verifier), spec)
        return DecodeParts(target, proposer if proposer is not None else NoDrafts(), builder, judge, sampler, policy)

    return make


def build_draft(target: FrozenTarget, **settings: object) -> DraftModel:
    """An untrained drafter of two layers for ``target``; blocks of 4 that read two target layers."""
    block_settings = {"block_size": settings.pop("block_size", 4)}
    if "label_layout" in settings:
        block_settings["label_layout"] = settings.pop("label_layout")
    vocabulary = settings.pop("draft_vocab", None)
    config = make_draft_config(
        target.facts,
        block=Anchored(**block_settings),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=2, **settings),
        head=MarginalHead(),
        mask_token_id=VOCAB_SIZE - 1,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
    )
    draft = DraftModel(config)
    if vocabulary is not None:
        draft.draft_vocab.copy_(torch.tensor(vocabulary))
    return draft


def overfit(
    target: FrozenTarget,
    draft: DraftModel,
    pairs: list[tuple[list[int], list[int]]],
    *,
    steps: int,
    lr: float = 5e-3,
) -> None:
    """Teach ``draft`` the responses of (prompt, response) pairs, all anchors at once, by plain cross-entropy.

    It stops before ``steps`` when every label is known by heart: likelier than all others together.
    """
    optimizer, lm = torch.optim.AdamW(draft.parameters(), lr=lr), draft.head_of(target.lm)
    vocabulary = None if lm.ids is None else torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, lm.ids, True)
    batches = []
    for i, (prompt, response) in enumerate(pairs):
        text = prompt + response
        document = Document(i, torch.tensor(text), torch.arange(len(text)) >= len(prompt))
        block = Anchored(block_size=draft.config.block_size, num_anchors=1000, label_layout=draft.config.label_layout)
        layout = block.blocks(document, draft.alignment, seed=0, epoch=0, vocabulary=vocabulary)
        positions = torch.arange(len(text))[None]
        features = target.features(document.input_ids[None], positions, draft.required())
        batches.append((layout, features, positions))
    for _ in range(steps):
        least = 0.0  # log probability of the label that is known least
        for layout, features, positions in batches:
            hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, lm)
            (log_prob,) = draft.outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
            loss = -torch.where(layout.valid, log_prob, 0.0).sum() / layout.valid.sum()
            least = min(least, float(log_prob.detach()[layout.valid].min()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if least > math.log(0.5):
            return


def generate_plainly(
    target: FrozenTarget, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...]
) -> list[int]:
    """What ``transformers.generate`` continues ``prompt`` with, greedily."""
    output = target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture
def make_draft() -> Callable[..., DraftModel]:
    return build_draft


@pytest.fixture
def overfit_draft() -> Callable[..., None]:
    return overfit


@pytest.fixture
def plain_generate() -> Callable[..., list[int]]:
    return generate_plainly


@pytest.fixture(scope="session")
def enumeration() -> ModuleType:
    """``enumeration.py``: exact laws of what builders, policies and verifiers give."""
    spec = spec_from_file_location("enumeration", Path(__file__).parent / "enumeration.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
