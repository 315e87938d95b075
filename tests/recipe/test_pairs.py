"""Parts that do not go together are refused before weights are loaded; both are named, and what to use instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.conditioning import Conditioning
from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead
from dflash_lightning.loss import LossTerm
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.build import list_faults

PARTS = """
from dflash_lightning.decoding.builder import BestChain
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.verifier import MatchVerifier
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy


class Needy(BlockTransformer):
    name = "needy_of_test_pairs"
    needs = frozenset({"tides"})

    def __init__(self, *, num_layers: int = 1) -> None:
        super().__init__(num_layers=num_layers)


class AnchorFirst(MarginalHead):
    name = "anchor_first_of_test_pairs"
    label_layouts = ("anchor_first",)


class Speaking(MarginalHead):
    name = "speaking_of_test_pairs"
    signals = ("tide",)


class Listening(CrossEntropy):
    name = "listening_of_test_pairs"
    reads = ("tide",)


class Sampled(BestChain):
    name = "sampled_of_test_pairs"
    drawn = "sampled"


class Tree(BestChain):
    name = "tree_of_test_pairs"
    trees = True


class OnlyRules(MatchVerifier):
    name = "only_rules_of_test_pairs"
    judges = frozenset({"delta"})


class OnlyChains(MatchVerifier):
    name = "only_chains_of_test_pairs"
    trees = False


class ByChance(MatchVerifier):
    name = "by_chance_of_test_pairs"
    repeatable = False


class Reading(WidthPolicy):
    name = "reading_of_test_pairs"
    sees = "laws"
    reads = ("tide",)

    def width(self, draft, where):
        return where.requests


class Looking(Reading):
    name = "looking_of_test_pairs"
    sees = "drawn"
    reads = ()
"""
AXES: list[Any] = [Conditioning, DraftBuilder, WidthPolicy, Verifier, Drafter, DraftHead, LossTerm]


@pytest.fixture
def faults_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``faults_with(**parts)``: the faults of a recipe with the classes above in place of its own."""
    (tmp_path / "own_pairs.py").write_text(PARTS)
    (tmp_path / "mine.yaml").write_text("# Mine.\ndefaults: [dflash, _self_]\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def find(*extra: str, **parts: str) -> list[str]:
        words = [
            f"{key}={{_target_:own_pairs.{name}}}" for key, name in parts.items() if key not in ("head", "drafter")
        ]
        words += [f"{key}._target_=own_pairs.{parts[key]}" for key in ("head", "drafter") if key in parts]
        words = [word.replace("__", ".") for word in words]
        cfg = load_recipe(str(tmp_path / "mine.yaml"), [*words, *extra])
        return [str(fault) for fault in list_faults(cfg) if not str(fault).startswith(("data.train", "callbacks.spec"))]

    yield find
    sys.modules.pop("own_pairs", None)
    for axis in AXES:
        for name in [name for name in axis.registry if name.endswith("of_test_pairs")]:
            del axis.registry[name]


def test_the_recipe_without_them_has_no_fault(faults_with: Any) -> None:
    assert faults_with() == []


@pytest.mark.parametrize(
    ("parts", "extra", "words"),
    [
        (
            {"drafter": "Needy"},
            [],
            ("conditioning: ", "'needy_of_test_pairs'", "tides", "'kv_injection'", "use another drafter"),
        ),
        (
            {"head": "AnchorFirst"},
            [],
            ("block.label_layout: ", "'anchor_first_of_test_pairs'", "'same_position'", "Use"),
        ),
        ({"head": "Speaking"}, [], ("head.tide: ", "no loss term", "Add one that reads it")),
        ({"loss__own": "Listening"}, [], ("loss.own: ", "'tide'", "head 'marginal'", "Choose a head")),
        (
            {"decoding__builder": "Sampled", "decoding__verifier": "OnlyRules"},
            ["decoding.temperature=1"],
            ("decoding.verifier: ", "OnlyRules judges ['delta']", "Sampled makes 'sampled'", "Use"),
        ),
        (
            {"decoding__builder": "Tree", "decoding__verifier": "OnlyChains"},
            [],
            ("decoding.verifier: ", "OnlyChains judges chains", "Tree makes trees", "Use"),
        ),
        (
            {"decoding__policy": "Reading"},
            [],
            ("decoding.policy: ", "Reading reads the signals tide", "head offers none", "Use"),
        ),
        (
            {},
            ["loss=forward_kl", "data.cache_features=ram", "data.feature_products=bfloat16"],
            ("data.feature_products: ", "bfloat16", "loss.forward_kl", "Set it to auto"),
        ),
        ({}, ["loss=bv", "loss.bv.anneal=2"], ("loss.bv.anneal: ", "2 is not a share", "Use 0..1")),
        (
            {},
            ["conditioning=carryover", "trainer.accumulate_grad_batches=2"],
            ("trainer.accumulate_grad_batches: ", "2", "'carryover'", "Use 1"),
        ),
        ({}, ["head=prefix", "head.init_std=-1"], ("head.init_std: ", "-1 is not 0 or more", "Set a number 0 or more")),
        ({}, ["data.num_workers=-1"], ("data.num_workers: ", "-1 is not 0 or more", "Set a whole number 0 or more")),
        (
            {},
            ["head=prefix", "block.label_layout=anchor_first", "block.block_size=8", "head.pure_slots=8"],
            ("head.pure_slots: ", "8 leaves none of 8 drafts", "from 0 to 7"),
        ),
        (
            {},
            ["loss=stepped", "block=growing", "loss.stepped_cross_entropy.trained=24"],
            ("loss.stepped_cross_entropy.trained: ", "24", "more than 23 drafts", "from 0 to 23"),
        ),
        (
            {},
            ["drafter=conv_transformer", "drafter.kernel_size=17"],
            ("drafter.kernel_size: ", "17 slots", "a block has 16", "from 1 to 16"),
        ),
        (
            {},
            ["drafter=hybrid", "conditioning=seeded_target_kv", "drafter.state_kernel=99"],
            ("drafter.state_kernel: ", "99 slots", "a block has 16"),
        ),
        (
            {},
            ["head=markov", "head.variant=recurrent", "decoding=treeflash"],
            ("decoding.builder: ", "TableTree", "keeps a state along a path", "decoding=pctree"),
        ),
        (
            {},
            ["block=tokens", "drafter=causal_transformer", "decoding=treeflash"],
            ("decoding.builder: ", "TableTree", "keeps a state along a path"),
        ),
        *(
            ({}, ["measure=bench", f"measure.decodings=[greedy,{name}]"], ("measure.decodings: ", said, "Leave "))
            for name, said in (
                ("confidence", "confidence: ConfidencePolicy reads the signals confidence"),
                ("d2sd", "null, but DualTree asks a second drafter"),
            )
        ),
        ({}, ["decoding=d2sd"], ("decoding.builder.second: ", "null, but DualTree asks", "Name one")),
        (
            {},
            ["decoding=d2sd", "decoding.builder.second=runs/nowhere"],
            ("decoding.builder.second: ", "there is no runs/nowhere", "Give a run folder"),
        ),
        (
            {},
            ["callbacks=[speculative_eval,rollout,checkpoint]", "callbacks.rollout.documents=0"],
            ("callbacks.rollout.documents: ", "0 is not 1 or more", "null answers all"),
        ),
        (
            {},
            ["callbacks=[speculative_eval,block_growth,checkpoint]", "callbacks.block_growth.ceiling=2"],
            ("callbacks.block_growth.ceiling: ", "2 is not between 0 and 1"),
        ),
        (
            {},
            ["callbacks=[speculative_eval,rollout,checkpoint]"],
            ("callbacks.rollout: ", "read no rounds", "Use block=recorded"),
        ),
        (
            {},
            ["callbacks=[block_growth,checkpoint_last]", "block=growing"],
            ("callbacks.block_growth: ", "nothing is decoded", "Add callbacks=[speculative_eval,block_growth"),
        ),
        (
            {},
            ["block=recorded", "loss=on_policy"],
            ("loss.on_policy: ", "no callback records any", "Add callbacks=[speculative_eval,rollout"),
        ),
        (
            {},
            ["loss=on_policy", "trainer.accumulate_grad_batches=2"],
            ("trainer.accumulate_grad_batches: ", "2", "loss.on_policy", "Use 1"),
        ),
        (
            {},
            ["conditioning=carryover", "block=tokens", "drafter=causal_transformer"],
            ("conditioning: ", "'carryover'", "'causal_transformer'", "Use"),
        ),
        (
            {"decoding__policy": "Looking", "decoding__verifier": "ByChance"},
            ["decoding.temperature=1"],
            ("decoding.policy: ", "Looking looks at the drafts that it cuts", "ByChance rejects", "Use"),
        ),
    ],
)
def test_what_does_not_go_together_is_named_with_both_and_a_way_out(
    faults_with: Any, parts: dict[str, str], extra: list[str], words: tuple[str, ...]
) -> None:
    found = faults_with(*extra, **parts)
    (fault,) = [text for text in found if text.startswith(words[0])]
    assert all(word in fault for word in words), fault


def test_what_goes_together_is_let_through(faults_with: Any) -> None:
    together = {"head": "Speaking", "loss__own": "Listening", "decoding__policy": "Reading"}
    assert faults_with(**together) == []
    assert faults_with(decoding__builder="Tree", decoding__verifier="OnlyRules") == []
    assert faults_with("head=markov", "head.variant=gated", "decoding=treeflash") == []
    at_their_ends = ["block=growing", "loss=stepped", "loss.stepped_cross_entropy.trained=23"]
    assert faults_with(*at_their_ends, "drafter=conv_transformer", "drafter.kernel_size=24") == []


NEITHER = """from dflash_lightning.head import DraftHead


class Half(DraftHead):
    def build(self, config):
        pass
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", r"^head\._target_: 'half_head\.Half' lacks open, outputs, so none can be made\. Write what it lacks"),
        (
            "\n    def outputs(self, hidden, layout, lm):\n        return None\n",
            r"^head\._target_: 'half_head\.Half' does not import \(Half brings its own 'outputs' .* Define both",
        ),
    ],
)
def test_a_head_without_open_is_a_fault_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, words: str
) -> None:
    (tmp_path / "half_head.py").write_text(NEITHER + more)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_head", raising=False)
    found = [str(fault) for fault in list_faults(load_recipe("dflash", ["head._target_=half_head.Half"]))]
    sys.modules.pop("half_head", None)
    (fault,) = [text for text in found if text.startswith("head")]
    assert re.search(words, fault), fault
