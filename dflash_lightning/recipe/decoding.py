"""Decoding as the command line asks for it: settings as in a recipe, and short options for the commonest of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from dflash_lightning.recipe.arguments import Reader, from_source
from dflash_lightning.recipe.faults import Fault, RecipeError
from dflash_lightning.recipe.load import load_with_faults
from dflash_lightning.recipe.nodes import NodeChecker
from dflash_lightning.recipe.ranges import range_faults
from dflash_lightning.recipe.renamed import renamed_faults
from dflash_lightning.recipe.tree import plain_tree
from dflash_lightning.recipe.words import DECODING, is_decoding_word

# Short options and the settings they are short for.
SHORT = {
    "max_new_tokens": "max_new_tokens",
    "batch_size": "batch_size",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "compiling": "compile",
}


def decoding_node(args: argparse.Namespace, read: Reader = from_source) -> dict[str, Any]:
    """The node of ``DecodingSettings`` that a command's words, short options and own defaults come to.

    A word or a short option goes before an option of the group, and that before ``args.decoding_defaults``.

    Args:
        args: with ``overrides`` (words), ``decoding_defaults`` and the short options, null where not given.
        read: how classes are looked up; from their source unless they may be imported.

    Raises:
        RecipeError: every fault at once: other settings than those of decoding, unknown keys, wrong values, and a
            setting that is given twice.
    """
    words: Sequence[str] = args.overrides
    short = {SHORT[name]: value for name, value in vars(args).items() if name in SHORT and value is not None}
    faults = [_other(word) for word in words if not is_decoding_word(word)]
    given = {word.lstrip("+~").partition("=")[0] for word in words}
    faults += [_twice(key) for key in short if f"{DECODING}.{key}" in given]
    if faults:
        raise RecipeError(faults, _NAME)
    cfg, faults, _ = load_with_faults("dflash", words)
    if cfg is None or faults:
        raise RecipeError(faults, _NAME)
    if DECODING not in cfg:
        raise RecipeError([Fault(f"~{DECODING}", "leaves nothing to decode with", "Leave the word out")], _NAME)
    asked = plain_tree(OmegaConf.create({DECODING: cfg[DECODING], "seed": 0}), faults)
    if faults:
        raise RecipeError(faults, _NAME)
    node = {**args.decoding_defaults, **asked[DECODING], **short}
    renamed = list(renamed_faults({DECODING: node}))
    faults = [*renamed, *NodeChecker(read).value(node, Any, DECODING)]
    faults = [*renamed, *(fault for fault in faults if fault.where not in {new.where for new in renamed})]
    known = {fault.where for fault in faults}
    faults += [fault for fault in range_faults({DECODING: node}) if fault.where not in known]
    if faults:
        raise RecipeError([_as_written(fault, short) for fault in faults], _NAME)
    return node


_NAME = "the settings of decoding"


def _other(word: str) -> Fault:
    do = "Write decoding=OPTION, decoding.KEY=VALUE or one of the command's options; dflash recipes lists options"
    return Fault(word, "is no setting of decoding, and this command takes no others", do)


def _twice(key: str) -> Fault:
    option = _option(key)
    return Fault(f"{DECODING}.{key}", f"is given twice, by {option} too", f"Leave {option} out")


def _option(key: str) -> str:
    return "--eager" if key == "compile" else f"--{key.replace('_', '-')}"


def _as_written(fault: Fault, short: Mapping[str, Any]) -> Fault:
    """The fault of a setting that was given by a short option, under that option's name."""
    key = fault.where.removeprefix(f"{DECODING}.")
    return Fault(_option(key), fault.what, fault.do) if key in short else fault
