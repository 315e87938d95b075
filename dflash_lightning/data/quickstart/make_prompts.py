"""Prompts of the quickstart's splits, made from templates and fillings: one fixed result, no randomness.

    python -m dflash_lightning.data.quickstart.make_prompts --out prompts/

Templates are held out whole: each belongs to ``train``, ``validation`` or ``test``. Validation and test ask for the
same functions and classes as training, in words that training has not seen. ``test_new_names`` goes further: the
templates of ``test`` with *fillings* (function and class names) that occur in no training prompt. All of them ask for
short pieces of Python in similar words, so every split is **in-domain**, and a number measured on it says nothing about
other prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test", "test_new_names"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test", "test_new_names")
PER_TEMPLATE: dict[Split, int] = {"train": 40, "validation": 8, "test": 8, "test_new_names": 8}

# Prompt templates: (pool of fillings, split, text). A template's name is its pool and its number within the pool.
TEMPLATES: tuple[tuple[str, str, str], ...] = (
    ("function", "train", "Write a Python function `{signature}` that {does}."),
    ("function", "train", "Implement the Python function `{signature}`. It should {do}."),
    ("function", "train", "Define a function `{signature}` in Python that {does}."),
    ("function", "train", "I need a Python function named `{name}` that {does}. Its signature is `{signature}`."),
    ("function", "train", "Create a Python function `{signature}` to {do}."),
    ("function", "train", "How can I {do} in Python? Write a function `{signature}`."),
    ("function", "train", "Please write a short Python function `{signature}` that {does}, with an example call."),
    ("function", "train", "Write a function in Python to {do}."),
    ("function", "train", "Complete this Python function, which should {do}:\n\n```python\ndef {signature}:\n```"),
    ("function", "train", 'Complete this Python code:\n\n```python\ndef {signature}:\n    """{Do}."""\n```'),
    ("function", "train", "Write a Python program with a function `{signature}` that {does}, and print an example."),
    ("function", "train", "Write a Python function `{signature}` that {does}. Do not import any modules."),
    ("function", "train", "Write a simple function `{signature}` that {does}. Use Python."),
    ("function", "train", "Show me how to {do} in Python."),
    ("function", "train", "Give me Python code to {do}. Call the function `{name}`."),
    ("function", "train", "Write a Python function `{signature}` with a docstring. The function {does}."),
    ("function", "train", "Write a Python function `{signature}` that {does}, and explain how it works."),
    ("function", "train", "Using Python, write a function called `{name}` that {does}."),
    ("function", "validation", "Write the Python function `{signature}`, which {does}."),
    ("function", "validation", "Can you write a Python function to {do}? Name it `{name}`."),
    ("function", "validation", "Write a function `{signature}` in Python. It {does}."),
    ("function", "test", "Please implement a function `{signature}` in Python that {does}."),
    ("function", "test", "Write Python code for a function `{name}` that {does}."),
    ("function", "test", "I want to {do} in Python. Please write the function `{signature}`."),
    ("function", "test", "Write a Python function that {does}. Name it `{name}`."),
    ("snippet", "train", "Explain what this Python function does:\n\n```python\n{code}\n```"),
    ("snippet", "train", "Describe step by step how this code works:\n\n```python\n{code}\n```"),
    ("snippet", "train", "Add type hints to this Python function:\n\n```python\n{code}\n```"),
    ("snippet", "train", "Write an example that calls this Python function:\n\n```python\n{code}\n```"),
    ("snippet", "train", "Rewrite this function in a shorter way:\n\n```python\n{code}\n```"),
    ("snippet", "validation", "Explain this Python code:\n\n```python\n{code}\n```"),
    ("snippet", "test", "What does this Python function do?\n\n```python\n{code}\n```"),
    ("snippet", "test", "Rewrite this Python function with type hints:\n\n```python\n{code}\n```"),
    ("bug", "train", "Fix the bug in this Python function:\n\n```python\n{code}\n```"),
    ("bug", "train", "This Python code does not work as it should. Correct it:\n\n```python\n{code}\n```"),
    ("bug", "test", "This Python function has a bug. Fix it:\n\n```python\n{code}\n```"),
    ("class", "train", "Write a Python class `{name}` with the methods {methods}."),
    ("class", "train", "Implement a class `{name}` in Python. It has the methods {methods}."),
    ("class", "train", "Create a Python class named `{name}` that has the methods {methods}, and show how to use it."),
    ("class", "validation", "Please write a Python class `{name}` that has the methods {methods}."),
    ("class", "test", "Define a Python class `{name}` with the methods {methods}."),
)


@dataclass(frozen=True)
class Prompt:
    """One user turn, the template it was made from and the filling's name."""

    text: str
    template: str
    filling: str

    def row(self) -> dict[str, object]:
        return {"turns": [self.text], "template": self.template, "filling": self.filling}


def is_new(name: str) -> bool:
    """Whether a function or class name is kept out of training, drawn from its hash: adding names moves no other."""
    return _bucket(name) < 16


def is_known(name: str) -> bool:
    """Whether a name may occur in training. A few names are in neither group."""
    return _bucket(name) >= 24


def _bucket(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100


def make_prompts(split: Split) -> list[Prompt]:
    """Prompts of one split, the same list on every machine. Templates take turns: any first N are a fair mix."""
    of_templates: list[list[Prompt]] = []
    for pool in _POOLS:
        belongs = is_new if split == "test_new_names" else is_known
        fillings = [f for f in _POOLS[pool]() if belongs(f["name"])]
        supply = cycle(sorted(fillings, key=lambda f: hashlib.sha256(f["name"].encode()).hexdigest()))
        for number, (of_pool, of_split, text) in enumerate(TEMPLATES):
            if (of_pool, of_split) != (pool, split.removesuffix("_new_names")):
                continue
            # A pool's templates take turns at its fillings, so that every filling is used about equally often.
            some = islice(supply, min(PER_TEMPLATE[split], len(fillings)))
            of_templates.append([Prompt(text.format(**f), f"{pool}-{number:02d}", f["name"]) for f in some])
    return [prompt for turn in zip_longest(*of_templates) for prompt in turn if prompt is not None]


def _lines(file: str) -> list[tuple[str, str]]:
    text = (files(__package__) / file).read_text(encoding="utf-8")
    pairs = [line.split(" | ", 1) for line in text.splitlines() if line]
    return [(left, right) for left, right in pairs]


def _functions() -> list[dict[str, str]]:
    """Fillings ``name(arguments) | do this``; the verb comes first, so its third person is made here."""
    fillings = []
    for signature, do in _lines("functions.txt"):
        verb, rest = do.split(" ", 1)
        third = verb + ("es" if verb.endswith(("ch", "sh", "s", "x")) else "s")
        does = f"{third} {rest}".replace(" and return ", " and returns ")
        name = signature.split("(")[0]
        fillings.append({"name": name, "signature": signature, "do": do, "Do": do[0].upper() + do[1:], "does": does})
    return fillings


def _classes() -> list[dict[str, str]]:
    fillings = []
    for name, methods in _lines("classes.txt"):
        *most, last = [f"`{method}`" for method in methods.split(", ")]
        fillings.append({"name": name, "methods": f"{', '.join(most)} and {last}"})
    return fillings


def _code(file: str) -> list[dict[str, str]]:
    text = (files(__package__) / file).read_text(encoding="utf-8")
    codes = [code.strip("\n") for code in text.split("---\n")]
    return [{"name": code.removeprefix("def ").split("(")[0], "code": code} for code in codes]


_POOLS = {
    "function": _functions,
    "snippet": lambda: _code("snippets.txt"),
    "bug": lambda: _code("bugs.txt"),
    "class": _classes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's prompts, one JSONL file per split.")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSONL file per split")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        prompts = make_prompts(split)
        lines = "".join(json.dumps(prompt.row()) + "\n" for prompt in prompts)
        (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{split}: {len(prompts)} prompts from {len({p.template for p in prompts})} templates")


if __name__ == "__main__":
    main()
