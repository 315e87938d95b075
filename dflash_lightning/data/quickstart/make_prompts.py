"""Prompts of the quickstart's splits, made from templates and fillings: one fixed result, no randomness.

    python -m dflash_lightning.data.quickstart.make_prompts --out prompts/

Templates are held out whole: each belongs to ``train``, ``validation`` or ``test``. Validation and test ask for the
same functions as training, in words that training has not seen. ``test_new_names`` goes further: the
templates of ``test`` with *fillings* (function names) that occur in no training prompt. All of them ask for
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
PER_TEMPLATE: dict[Split, int] = {"train": 40, "validation": 10, "test": 16, "test_new_names": 16}

# Prompt templates: (split, text). A template's name is its place in this list.
TEMPLATES: tuple[tuple[str, str], ...] = (
    ("train", "Write a Python function `{signature}` that {does}."),
    ("train", "Implement the Python function `{signature}`. It should {do}."),
    ("train", "Define a function `{signature}` in Python that {does}."),
    ("train", "I need a Python function named `{name}` that {does}. Its signature is `{signature}`."),
    ("train", "Create a Python function `{signature}` to {do}."),
    ("train", "How can I {do} in Python? Write a function `{signature}`."),
    ("train", "Please write a short Python function `{signature}` that {does}, with an example call."),
    ("train", "Write a function in Python to {do}."),
    ("train", "Complete this Python function, which should {do}:\n\n```python\ndef {signature}:\n```"),
    ("train", 'Complete this Python code:\n\n```python\ndef {signature}:\n    """{Do}."""\n```'),
    ("train", "Write a Python program with a function `{signature}` that {does}, and print an example."),
    ("train", "Write a Python function `{signature}` that {does}. Do not import any modules."),
    ("train", "Write a simple function `{signature}` that {does}. Use Python."),
    ("train", "Show me how to {do} in Python."),
    ("train", "Give me Python code to {do}. Call the function `{name}`."),
    ("train", "Write a Python function `{signature}` with a docstring. The function {does}."),
    ("train", "Write a Python function `{signature}` that {does}, and explain how it works."),
    ("train", "Using Python, write a function called `{name}` that {does}."),
    ("validation", "Write the Python function `{signature}`, which {does}."),
    ("validation", "Can you write a Python function to {do}? Name it `{name}`."),
    ("validation", "Write a function `{signature}` in Python. It {does}."),
    ("test", "Please implement a function `{signature}` in Python that {does}."),
    ("test", "Write Python code for a function `{name}` that {does}."),
    ("test", "I want to {do} in Python. Please write the function `{signature}`."),
    ("test", "Write a Python function that {does}. Name it `{name}`."),
)


@dataclass(frozen=True)
class Prompt:
    """One user turn, the template it was made from and the filling's name."""

    text: str
    template: str
    filling: str

    def row(self) -> dict[str, object]:
        """The prompt as a row of the JSONL file."""
        return {"turns": [self.text], "template": self.template, "filling": self.filling}


def is_new(name: str) -> bool:
    """Whether a function name is kept out of training, drawn from its hash: adding names moves no other."""
    return _bucket(name) < 16


def is_known(name: str) -> bool:
    """Whether a name may occur in training. A few names are in neither group."""
    return _bucket(name) >= 24


def _bucket(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100


def make_prompts(split: Split) -> list[Prompt]:
    """Prompts of one split, the same list on every machine. Templates take turns: any first N are a fair mix."""
    belongs = is_new if split == "test_new_names" else is_known
    fillings = [f for f in functions() if belongs(f["name"])]
    # Templates take turns at the functions, so that every function is used about equally often.
    supply = cycle(sorted(fillings, key=lambda f: hashlib.sha256(f["name"].encode()).hexdigest()))
    of_templates = [
        [Prompt(text.format(**f), f"function-{n:02d}", f["name"]) for f in islice(supply, PER_TEMPLATE[split])]
        for n, (of_split, text) in enumerate(TEMPLATES)
        if of_split == split.removesuffix("_new_names")
    ]
    return [prompt for turn in zip_longest(*of_templates) for prompt in turn if prompt is not None]


def functions() -> list[dict[str, str]]:
    """Fillings from lines ``name(arguments) | do this``; the verb comes first, so its third person is made here."""
    fillings = []
    for line in (files(__package__) / "functions.txt").read_text(encoding="utf-8").splitlines():
        signature, do = line.split(" | ", 1)
        verb, rest = do.split(" ", 1)
        third = verb + ("es" if verb.endswith(("ch", "sh", "s", "x")) else "s")
        does = f"{third} {rest}".replace(" and return ", " and returns ")
        name = signature.split("(")[0]
        fillings.append({"name": name, "signature": signature, "do": do, "Do": do[0].upper() + do[1:], "does": does})
    return fillings


def main() -> None:
    """Write the prompts of every split; the command line says where."""
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
