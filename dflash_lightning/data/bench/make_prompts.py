"""Prompts of the bench in three domains, made from templates and fillings: one fixed result, no randomness.

    python -m dflash_lightning.data.bench.make_prompts --out prompts/

Domains are short Python functions (``code``), grade-school word problems (``arithmetic``) and everyday questions
(``chat``). Templates are held out whole: each belongs to ``train``, ``validation`` or ``test``, and test has a file per
domain. Fillings (functions, names, numbers, topics) are shared by the splits, so every number measured on test is
**in-domain**: new words, and mostly new fillings of them, from a kind of prompt that training has seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

from dflash_lightning.data.quickstart.make_prompts import TEMPLATES as CODE_TEMPLATES
from dflash_lightning.data.quickstart.make_prompts import functions, is_known

Domain = Literal["code", "arithmetic", "chat"]
Split = Literal["train", "validation", "test"]
DOMAINS: tuple[Domain, ...] = ("code", "arithmetic", "chat")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PER_DOMAIN: dict[Split, int] = {"train": 500, "validation": 16, "test": 40}


@dataclass(frozen=True)
class BenchPrompt:
    """One user turn, its domain and the template it was made from."""

    text: str
    domain: Domain
    template: str

    def row(self) -> dict[str, object]:
        """The prompt as a row of the JSONL file."""
        return {"turns": [self.text], "domain": self.domain, "template": self.template}


def make_prompts(split: Split, domain: Domain) -> list[BenchPrompt]:
    """Different prompts of one split and domain, the same list on every machine. Templates take turns."""
    texts = [(n, text) for n, (of_split, text) in enumerate(_templates(domain)) if of_split == split]
    of_templates = [
        _filled(text, domain, n, share) for (n, text), share in zip(texts, _shares(split, len(texts)), strict=True)
    ]
    return [prompt for turn in zip_longest(*of_templates) for prompt in turn if prompt is not None]


def _shares(split: Split, templates: int) -> list[int]:
    """How many prompts each template gives, so that they add up to the split's."""
    whole, rest = divmod(PER_DOMAIN[split], templates)
    return [whole + (n < rest) for n in range(templates)]


def _templates(domain: Domain) -> tuple[tuple[str, str], ...]:
    """Pairs (split, text) of a domain, in the order that numbers them."""
    if domain == "code":
        return CODE_TEMPLATES
    lines = (files(__package__) / f"{domain}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ", 1) for line in lines if " | " in line and not line.startswith("=")]
    return tuple((split, text) for split, text in pairs)


def _words(domain: Domain) -> dict[str, list[str]]:
    """The lines ``= KIND: a, b, c`` of a domain's file: what may fill ``{KIND}``."""
    lines = (files(__package__) / f"{domain}.txt").read_text(encoding="utf-8").splitlines()
    kinds = (line[2:].split(": ", 1) for line in lines if line.startswith("= "))
    return {kind: words.split(", ") for kind, words in kinds}


def _filled(text: str, domain: Domain, template: int, count: int) -> list[BenchPrompt]:
    """``count`` different prompts of one template."""
    name = f"{domain}-{template:02d}"
    fillings = _function_fillings(name) if domain == "code" else _word_fillings(name, _words(domain))
    # Two fillings may agree in all that a template shows; the second is left out.
    prompts = dict.fromkeys(text.format(**filling) for filling in islice(fillings, 20 * count))
    if len(prompts) < count:
        raise ValueError(f"template {name} has {len(prompts)} different prompts and needs {count}")
    return [BenchPrompt(prompt, domain, name) for prompt in islice(prompts, count)]


def _function_fillings(key: str) -> Iterator[dict[str, str]]:
    known = [filling for filling in functions() if is_known(filling["name"])]
    yield from sorted(known, key=lambda filling: _number(f"{key} {filling['name']}"))


def _word_fillings(key: str, words: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Endless fillings of a template: a word of every kind, and numbers a < b < c, few and many."""
    n = 0
    while True:
        filling = {kind: options[_number(f"{key} {kind} {n}") % len(options)] for kind, options in words.items()}
        few, some, many = (_number(f"{key} {size} {n}") for size in ("few", "some", "many"))
        a, b = 2 + few % 8, 10 + some % 15
        yield {**filling, "a": str(a), "b": str(b), "c": str(b + a + many % 40), "ab": str(a * b)}
        n += 1


def _number(key: str) -> int:
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)


def main() -> None:
    """Write the prompts: ``train.jsonl`` and ``validation.jsonl`` of all domains in turns, a test file per domain."""
    parser = argparse.ArgumentParser(description="Write the bench's prompts, one JSONL file per split.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSONL files")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        of_domains = [make_prompts(split, domain) for domain in DOMAINS]
        if split == "test":
            made = {f"test_{domain}": prompts for domain, prompts in zip(DOMAINS, of_domains, strict=True)}
        else:
            made = {split: [prompt for turn in zip(*of_domains, strict=True) for prompt in turn]}
        for name, prompts in made.items():
            lines = "".join(json.dumps(prompt.row()) + "\n" for prompt in prompts)
            (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
            print(f"{name}: {len(prompts)} prompts from {len({prompt.template for prompt in prompts})} templates")


if __name__ == "__main__":
    main()
