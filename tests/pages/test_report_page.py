"""The page of a run: its figures, its gaps, and answers round by round."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any

import pytest

from dflash_lightning.pages import report_page


def test_it_stands_alone_and_holds_every_chart(report: dict[str, Any], outline: ModuleType) -> None:
    page = report_page(report)
    found = outline.Outline(page)
    assert found.loaded == ["data:,"] and "script" not in found.tags
    for title in (
        *("Learning curve of tau", "Survival by slot while training", "Survival by slot", "Tokens added by a round"),
        *(
            "Time of a token at batch 1",
            "Where the time of a round goes",
            "Speed against batch size",
            "Speed-up against batch size",
        ),
    ):
        assert "<svg" in outline.figure_of(page, title), title
    assert found.tags.count("article") == 10
    assert "Missing: batch 16: only 8 prompts." in found.text


def test_speed_at_batch_1_never_stands_alone_and_says_of_how_few_prompts(
    report: dict[str, Any], outline: ModuleType
) -> None:
    tiles = re.search(r'<div class="tiles">.*?</div></div>', report_page(report), re.S)
    assert tiles is not None
    text = outline.plain(tiles[0])
    gain = 48.2 * 8**0.5 / (25.0 * 8**0.7)
    assert (
        f"1.94x speed-up at batch 1 over the same loop without drafts, on 8 prompts only; {gain:.2f}x at batch 8"
        in text
    )
    assert (
        "2 / 17 answers that repeat themselves / are cut at the limit of 40; tau 2.38 without those that repeat" in text
    )
    assert "not measured in batches" in outline.plain(report_page(report | {"speed": None}))


def test_the_last_bar_is_the_ceiling(report: dict[str, Any], outline: ModuleType) -> None:
    figure = outline.figure_of(report_page(report), "Tokens added by a round")
    bars = re.findall(r'<rect[^>]*height="([\d.]+)"[^>]*class="bar (s\d)"><title>tokens (\d+): ([\d.]+)', figure)
    assert [(kind, tokens) for _, kind, tokens, _ in bars] == [*(("s1", str(n)) for n in range(1, 7)), ("s2", "7")]
    counts = report["decoding"]["histogram"]
    for (height, *_, shown), count in zip(bars, counts, strict=True):
        assert float(shown) == pytest.approx(100 * count / sum(counts), rel=0.01)
        assert float(height) / float(bars[0][0]) == pytest.approx(count / counts[0], abs=0.01)
    assert "every draft of the block stood in 4.5 % of rounds" in outline.plain(figure)
    assert "18 rounds that were cut short are left out" in outline.plain(figure)


def test_answers_show_rounds_in_turn_and_strike_out_what_was_rejected(
    report: dict[str, Any], outline: ModuleType
) -> None:
    page = report_page(report)
    first = re.search(r"<article.*?</article>", page, re.S)
    assert first is not None
    rounds = re.findall(
        r'<span title="round (\d+): (\d) of (\d) drafts stand">(.*?)</span>(?=<span title|</pre>)', first[0], re.S
    )
    assert [int(number) for number, *_ in rounds] == list(range(1, 11))
    assert rounds[1][3].startswith('<span class="drafted r1"> words</span><del>')
    assert '<del><i> not</i><i>⏎</i></del><span class="own r1"> own1</span>' in rounds[1][3] + "</span>"
    assert "<del>" not in rounds[3][3] and "</span>" in rounds[3][3], "nothing was rejected"
    assert "adds 0 &lt;numbers&gt; &amp; more." in first[0]
    assert page.count("repeats itself</p>") == 1 and page.count("cut at the length limit") == 10


def test_a_hundred_rejected_nodes_are_not_all_written(report: dict[str, Any]) -> None:
    report["answers"][0]["rounds"][0] |= {"rejected": [f"node{n}" for n in range(100)], "branched": True}
    page = report_page(report)
    assert page.count('<del class="nodes">') == 1
    assert "node15" in page and "node16" not in page and " +84</del>" in page


@pytest.mark.parametrize(
    ("change", "title", "said"),
    [
        ({"history": []}, "Learning curve of tau", "measured nothing while it trained"),
        ({"history": [{"step": 5.0, "decode/tau": math.nan}]}, "Learning curve of tau", "measured nothing"),
        ({"speed": None}, "Speed against batch size", "Ask for it with --batch-sizes"),
        (
            {"decoding": {"histogram": [0, 0], "survival": [None], "rounds": 0}},
            "Survival by slot",
            "No round was drafted",
        ),
        ({"decoding": {"histogram": [0, 0], "survival": [None]}}, "Tokens added by a round", "No round was drafted"),
    ],
)
def test_a_chart_without_values_says_why(
    change: dict[str, Any], title: str, said: str, report: dict[str, Any], outline: ModuleType
) -> None:
    page = report_page(report | change)
    figure = outline.figure_of(page, title)
    assert said in figure and "<svg" not in figure
    outline.Outline(page)


def test_a_report_without_a_round_has_marks_and_no_zeros(report: dict[str, Any], outline: ModuleType) -> None:
    none = dict.fromkeys(
        ("tau", "tau_interval", "tau_without_loops", "speedup_over_autoregressive", "answers", "speed")
    )
    page = report_page(report | none | {"decoding": {}, "settings": {}, "versions": None, "asked": None})
    tiles = outline.plain(page[page.index('class="tiles"') : page.index("<h2>")])
    assert "n/a tokens per round" in tiles and "n/a speed-up at batch 1" in tiles
    assert "None were recorded." in page and "Versions: nothing is known." in page


def test_what_makes_figures_doubtful_comes_first(report: dict[str, Any]) -> None:
    page = report_page(report | {"warnings": ["warning: 9 of 40 <loops>"], "verdict": "NO", "finished": False})
    head = page[page.index("<main>") : page.index('class="tiles"')]
    for said in ("<li>9 of 40 &lt;loops&gt;</li>", "worth nothing", "The run is not finished"):
        assert said in head
