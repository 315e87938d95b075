"""Decoding on the command line and in recipes: one grammar, one check, and names that have changed."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dflash_lightning.bench import Measure
from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.cli import _parse
from dflash_lightning.commands.drafts import FoundDraft
from dflash_lightning.commands.ready import decoding_of, open_ready
from dflash_lightning.decoding.builder import BestFirstTree
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier
from dflash_lightning.head import PrefixHead
from dflash_lightning.recipe.build import list_faults
from dflash_lightning.recipe.decoding import decoding_node
from dflash_lightning.recipe.evaluation import has_evaluation
from dflash_lightning.recipe.faults import RecipeError
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.recipe.renamed import with_new_names
from dflash_lightning.run import read_recipe
from dflash_lightning.testing import toy_module

EVALUATE = ["evaluate", "--draft", "a", "b", "--prompts", "x.jsonl"]


def parsed(*words: str) -> argparse.Namespace:
    return _parse(list(words))


def test_settings_of_decoding_may_stand_anywhere_behind_the_command() -> None:
    """Also behind options that take several words, which would swallow them."""
    tree, budget, size = "decoding=tree", "decoding.builder.budget=5", ["--max-new-tokens", "7"]
    for words in (
        [*EVALUATE, tree, budget, *size],
        ["evaluate", "--draft", "a", tree, "b", "--prompts", "x.jsonl", budget, *size],
        ["evaluate", tree, budget, *EVALUATE[1:], *size],
    ):
        args = parsed(*words)
        assert (args.draft, args.prompts) == (["a", "b"], ["x.jsonl"])
        settings = decoding_of(args)
        assert isinstance(settings.builder, BestFirstTree) and settings.builder.budget == 5
        assert (settings.max_new_tokens, settings.batch_size, settings.temperature) == (7, 1, 0.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"max_new_tokens": 256, "batch_size": 1, "compile": "auto", "temperature": 0.0}),
        (["--eager", "--temperature", "0.5"], {"compile": False, "temperature": 0.5}),
        (["--compile", "decoding=sampling", "--seed", "-3"], {"compile": True, "temperature": 1.0, "seed": -3}),
        (["decoding=sampling", "decoding.temperature=0.3"], {"temperature": 0.3}),
        (["decoding.max_new_tokens=9", "decoding.block_size=4"], {"max_new_tokens": 9, "block_size": 4}),
    ],
)
def test_words_go_before_an_option_and_that_before_the_commands_own_defaults(
    words: list[str], expected: dict[str, Any]
) -> None:
    settings = decoding_of(parsed("generate", "--draft", "a", "--prompt", "decoding=x", *words))
    assert {name: getattr(settings, name) for name in expected} == expected


def test_parts_are_named_or_written_out() -> None:
    report, regenerate = ["report", "run"], ["regenerate", "x.jsonl", "--target", "t", "--out", "o"]
    assert isinstance(decoding_of(parsed(*regenerate, "decoding.verifier=match")).verifier, MatchVerifier)
    assert isinstance(decoding_of(parsed(*EVALUATE, "decoding=block_verification")).verifier, BlockVerifier)
    assert decoding_of(parsed(*report, "decoding=confidence")).policy.threshold == 0.5
    assert decoding_of(parsed(*EVALUATE, "decoding=sampled_tree")).builder.budget == 16


def test_costs_are_kept_with_a_run_where_there_is_one() -> None:
    """In its recipe; not where a drafter is evaluated anywhere, nor by a bench, which measures many runs alike."""
    assert load_recipe("smoke", ["decoding=caddtree", "run_dir=runs/mine"]).decoding.builder.folder == "runs/mine"
    assert decoding_of(parsed(*EVALUATE, "decoding=cast")).builder.folder is None
    chosen = decoding_of(parsed(*EVALUATE, "decoding=bastion", "decoding.builder.folder=here"))
    assert chosen.builder.folder == "here"
    assert Measure(prompts={"a": "b"}, decodings=["caddtree"]).decoding("caddtree").builder.folder is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1"], r"optim\.lr=1: is no setting of decoding, and this command takes no others"),
        (["decoding=forest"], r"decoding=forest: no such option.*Allowed: .*tree"),
        (["decoding.temprature=1"], r"decoding\.temprature: unknown key.*'temperature'"),
        (["decoding.batch_size=0"], r"decoding\.batch_size: 0 is not 1 or more"),
        (["decoding.temperature=x"], r"decoding\.temperature: 'x' \(str\) does not fit"),
        (["decoding.top_k=3", "--top-k", "4"], r"decoding\.top_k: is given twice, by --top-k too"),
        (["decoding.verifier=greedy"], r"decoding\.verifier: 'greedy' is what null means now"),
        (["decoding.packed=false"], r"1 fault.*\n.*decoding\.packed: is called decoding\.prepacked now"),
        (["decoding.verifier=auto"], r"decoding\.verifier: 'auto' is what null means now"),
    ],
)
def test_other_words_are_refused_without_an_import(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        decoding_node(parsed("evaluate", *words, *EVALUATE[1:]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-k", "5"], r"--top-k: 5 would be ignored at temperature 0"),
        (["decoding=tree", "decoding.verifier=block"], r"decoding\.verifier: BlockVerifier judges"),
        (["decoding=tree", "decoding.builder.budget=0"], r"budget: 0 leaves no draft"),
        (["decoding.builder=match"], r"decoding\.builder: 'match' is no builder"),
        (
            ["decoding.builder={_target_: dflash_lightning.decoding.verifier.MatchVerifier}"],
            r"makes a MatchVerifier\. Decoding\.builder takes a Dr",
        ),
        (["decoding.verifier=token", "decoding.builder=best_chain"], r"RejectionVerifier judges \['sampled'\] drafts"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_before_anything_is_loaded(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        decoding_of(parsed(*EVALUATE, *words))


def test_what_a_drafter_cannot_do_is_refused_before_its_target_is_looked_for() -> None:
    nowhere = argparse.Namespace(target="nowhere", device=None, dtype=None, other_target=False)
    draft = FoundDraft(toy_module(head=PrefixHead(state_size=4, rank=2)).draft_model, Path("mine"))
    settings = decoding_of(parsed(*EVALUATE, "decoding=treeflash"))
    with pytest.raises(ValueError, match=r"decoding\.builder: TableTree .* keeps a state along a path"):
        open_ready([draft], nowhere, settings, [[1]])
    with pytest.raises(RecipeError, match=r"decoding\.builder\.second: null, but DualTree"):
        decoding_of(parsed(*EVALUATE, "decoding=d2sd"))
    settings = decoding_of(parsed(*EVALUATE, "decoding=d2sd", "decoding.builder.second=runs/nowhere"))
    with pytest.raises(ValueError, match=r"decoding\.builder\.second: there is no runs/nowhere"):
        open_ready([draft], nowhere, settings, [[1]])


def test_a_recipe_is_told_what_its_head_does_not_say_and_its_blocks_do_not_have() -> None:
    def faults(word: str) -> dict[str, str]:
        return {fault.where: str(fault) for fault in list_faults(load_recipe("smoke", [word]))}

    found = faults("decoding=confidence")
    assert "reads the signals confidence, but the drafter's head offers none" in found["decoding.policy"]
    assert "99 slots, but blocks of" in faults("decoding.block_size=99")["decoding.block_size"]
    found = faults("decoding.packed=true")
    assert found["decoding.packed"].endswith("is called decoding.prepacked now. Write decoding.prepacked.")


def test_what_a_run_has_saved_under_earlier_names_is_read_under_todays(tmp_path: Path) -> None:
    """A recipe of one's own with these names is told so; a run's goes on."""
    saved = OmegaConf.to_container(load_recipe("smoke"), resolve=False)
    saved["decoding"] |= {"packed": False, "verifier": "auto"}
    own = {"_target_": saved["decoding"]["_target_"], "packed": True, "verifier": "match"}
    saved["callbacks"]["speculative_eval"]["decoding"] = own
    for folder in ("run", "mine"):
        (tmp_path / folder).mkdir()
        OmegaConf.save(OmegaConf.create(saved), tmp_path / folder / "recipe.yaml")
    (tmp_path / "run" / "run.json").write_text("{}")
    cfg = load_recipe(str(tmp_path / "run"))
    assert cfg.decoding.prepacked is False and "packed" not in cfg.decoding and "verifier" not in cfg.decoding
    node = cfg.callbacks.speculative_eval.decoding
    assert (node.prepacked, node.verifier) == (True, "match") and "packed" not in node
    read = read_recipe(tmp_path / "run" / "recipe.yaml")["decoding"]
    assert read == OmegaConf.to_container(cfg.decoding, resolve=True)
    assert with_new_names({"decoding": "${other}"}) == {"decoding": "${other}"}
    where = {fault.where for fault in list_faults(load_recipe(str(tmp_path / "mine")))}
    assert {"decoding.packed", "decoding.verifier"} <= where


class Derived(SpeculativeEval):
    """Somebody's own evaluation."""


def test_an_evaluation_is_known_by_its_class() -> None:
    def nodes(*paths: str) -> list[dict[str, str]]:
        return [{"_target_": path} for path in paths]

    own = f"{__name__}.Derived"
    for path in ("dflash_lightning.callbacks.SpeculativeEval", own):
        assert has_evaluation(nodes("lightning.pytorch.callbacks.ModelCheckpoint", path))
    assert has_evaluation(nodes("dflash_lightning.callbacks.speculative_eval.SpeculativeEval"))
    for path in (f"{__name__}.NotASpeculativeEval", "nowhere.MySpeculativeEval", "dflash_lightning.callbacks.Stopper"):
        assert not has_evaluation(nodes(path))


class NotASpeculativeEval:
    """Ends like the class, which is what it was known by."""


def test_settings_of_a_builder_that_is_not_chosen_are_named() -> None:
    found = [str(fault) for fault in list_faults(load_recipe("dflash", ["decoding.builder.budget=32"]))]
    (fault,) = [text for text in found if text.startswith("decoding.builder")]
    assert "settings ['budget'] are given, but no class" in fault and "decoding.builder._target_" in fault


def test_an_option_that_had_another_name_is_told_its_new_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"loss=total_variation: no such option.*called tv now: write loss=tv"):
        load_recipe("dflash", ["loss=total_variation"])
    (tmp_path / "mine.yaml").write_text("defaults: [dflash, {override loss: total_variation}, _self_]\n")
    with pytest.raises(RecipeError, match=r"no option loss=total_variation lies in .*It is called tv now"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_a_tree_is_not_cut_by_a_signal_that_comes_token_by_token() -> None:
    """DSpark's confidence of a slot needs the token drafted before it, of which a tree has several."""

    def faults(*words: str) -> list[str]:
        found = list_faults(load_recipe("dspark", list(words)))
        return [str(fault) for fault in found if fault.where.startswith("decoding")]

    policy = "decoding.policy=confidence"
    for words in (["decoding=tree", policy], ["decoding=sampled_tree", policy]):
        (fault,) = faults(*words)
        assert "reads the signals confidence, which the drafter's head gives token by token" in fault
        assert "Use a builder of chains (decoding.builder=null)" in fault
    assert faults("decoding=tree") == faults("decoding=confidence") == []
