"""Answers as they were made: which round gave which words, and what the target struck out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_lightning.pages.markup import Child, Html, tag
from dflash_lightning.pages.numbers import fixed, known
from dflash_lightning.pages.page import paragraph, section

_COLOURS = 6
_SHOWN = 16  # rejected drafts of a round; a tree may have a hundred
_LONG = 600  # characters of a prompt


def answers(found: Sequence[Mapping[str, Any]] | None) -> Html:
    """The section of the answers; null where none were recorded."""
    title = "Answers, round by round"
    if not found:
        return section(title, tag("p", "None were recorded.", class_="gap"))
    switch = tag("label", " show rejected drafts", for_="rejected")
    return section(
        title,
        paragraph(
            "Colours change with every round. ",
            tag("span", "Coloured", class_="sample drafted r0"),
            " tokens were drafted and stand; an ",
            tag("span", "underlined", class_="sample own r0"),
            " token is the target's own, after them; ",
            tag("del", "struck out"),
            " drafts were rejected. The first token comes with the prompt. Point at a round to see its number.",
        ),
        Html('<input type="checkbox" id="rejected" checked>'),
        switch,
        *(_answer(number, entry) for number, entry in enumerate(found, start=1)),
    )


def _answer(number: int, entry: Mapping[str, Any]) -> Html:
    tau = known(entry.get("tau"))
    said = [f"{entry.get('tokens')} tokens in {len(entry['rounds'])} rounds"]
    if tau is not None:
        said.append(f"tau {fixed(tau)}")
    if entry.get("finish") == "length":
        said.append("cut at the length limit")
    if entry.get("repeats_itself"):
        said.append("repeats itself")
    prompt = str(entry.get("prompt"))
    asked = prompt if len(prompt) <= _LONG else f"{prompt[:_LONG]} …"
    rounds = [_round(i, record) for i, record in enumerate(entry["rounds"])]
    return tag(
        "article",
        tag("h3", f"Prompt {number}"),
        tag("p", ", ".join(said), class_="meta"),
        tag("blockquote", asked),
        tag("pre", _text(entry.get("first")), rounds),
        class_="answer",
    )


def _round(index: int, record: Mapping[str, Any]) -> Html:
    accepted, rejected = record["accepted"], record["rejected"]
    colour = f"r{index % _COLOURS}"
    told = f"round {index + 1}: {len(accepted)} of {len(accepted) + len(rejected)} drafts stand"
    return tag(
        "span",
        tag("span", _text(accepted), class_=f"drafted {colour}") if accepted else None,
        _struck(rejected, record.get("branched", False)),
        tag("span", _text(record["own"]), class_=f"own {colour}") if record["own"] else None,
        title=told,
    )


def _text(pieces: Sequence[str] | None) -> str:
    return "".join(pieces or [])


def _struck(rejected: Sequence[str], branched: bool) -> Child:
    """Rejected drafts, on one line whatever they hold; nodes of a tree stand apart, for they are no text together."""
    if not rejected:
        return None
    shown: list[Child] = [tag("i", _flat(piece)) for piece in rejected[:_SHOWN]]
    more = len(rejected) - _SHOWN
    return tag("del", shown, f" +{more}" if more > 0 else None, class_="nodes" if branched else None)


def _flat(piece: str) -> str:
    return (piece or "\N{REPLACEMENT CHARACTER}").replace("\n", "⏎").replace("\t", "⇥")
