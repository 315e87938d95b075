"""The page of a comparison: every figure stands in it, every gap is one, and no text becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from dflash_lightning.pages import compare_page

VOID = {"meta", "link", "input"}


class Outline(HTMLParser):
    """Refuses markup that does not close, and collects text, tags and what might be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def rows_of(page: str, start: str) -> dict[str, list[str]]:
    """Cells of every row of the table whose head begins with ``start``, by the row's name, without markup."""
    table = next(t for t in re.findall(r"<table>.*?</table>", page, re.S) if plain(t).startswith(start))
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr>.*?</tr>", table, re.S)]
    return {plain(cells[0]): [plain(cell) for cell in cells[1:]] for cells in rows}


def plain(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup)).strip()


def test_the_page_stands_alone_and_is_well_formed(comparison: dict[str, Any]) -> None:
    found = Outline(compare_page(comparison))
    assert found.loaded == ["data:,"] and "script" not in found.tags
    assert found.tags.count("svg") >= 8 and found.tags.count("main") == 1


def test_figures_stand_in_the_table_with_spread_and_interval(comparison: dict[str, Any]) -> None:
    page = compare_page(comparison)
    rows = rows_of(page, "method")
    tau = comparison["methods"][1]["tau"]["greedy"]["all"]
    assert rows["dspark"][1] == f"{tau['mean']:.2f} ± {tau['spread']:.2f} {tau['low']:.2f} to {tau['high']:.2f}"
    assert rows["dflash (baseline)"][3] == "is the baseline"
    assert rows["dspark"][3].startswith("▲ +0.30") and rows["d_pace"][3].startswith("▼ \N{MINUS SIGN}0.31")
    assert rows["forward_kl"][3].startswith("+0.01"), "an interval across zero says neither better nor worse"
    assert "head: markov instead of marginal" in page


def test_a_gap_is_marked_and_never_a_zero(comparison: dict[str, Any]) -> None:
    page = compare_page(comparison)
    rows = rows_of(page, "method")
    assert rows["eagle3"] == ["n/a"] * len(rows["eagle3"])
    assert rows["dflash_ar"][0] == "2" and rows["dflash_ar"][2] == "n/a"
    assert rows_of(page, "tau, greedy")["eagle3"] == ["n/a"] * 4
    assert rows_of(page, "drafts that stand up to slot")["eagle3"] == ["n/a"] * 7
    for title in ("tau, greedy", "speed-up at batch 8"):
        drawn = re.search(rf"<svg[^>]*><title>{title}</title>.*?</svg>", page, re.S)
        assert drawn is not None and "no value" in drawn[0]
    head = page.index("Not everything was measured")
    assert head < page.index("seed 3: no measured.json") < page.index("Tokens per round")
    assert "Not shown, for a value is missing: dflash_ar, eagle3." in page


@pytest.mark.parametrize("missing", ["paired", "speed", "survival", "degenerate", "identical", "expected_tau", "loss"])
def test_whatever_a_comparison_lacks_the_page_is_written(missing: str, comparison: dict[str, Any]) -> None:
    for method in comparison["methods"]:
        method.pop(missing, None)
    comparison.pop("gaps")
    Outline(compare_page(comparison))
    for method in comparison["methods"]:
        method[missing] = None
    Outline(compare_page(comparison | {"baseline": None, "differences": None, "protocol": None}))


def test_texts_are_never_markup(comparison: dict[str, Any]) -> None:
    attack = "</title><script>alert(1)</script>\" onload='x' & \x00"
    comparison["methods"][0]["name"] = attack
    comparison["gaps"] = comparison["methods"][1]["gaps"] = [attack]
    comparison["differences"] = {attack: [attack]}
    comparison["protocol"] = {attack: attack}
    comparison["baseline"] = attack
    page = compare_page(comparison)
    found = Outline(page)
    assert "script" not in found.tags and "\x00" not in page
    assert "<script>alert(1)</script>" in found.text


@pytest.mark.parametrize(
    ("change", "said"), [({"version": 2}, "version 2 cannot be shown, only 1"), ({"methods": []}, "it holds no method")]
)
def test_what_is_no_comparison_is_refused(change: dict[str, Any], said: str, comparison: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=said):
        compare_page(comparison | change)


def test_methods_of_several_folders_keep_their_whole_names(comparison: dict[str, Any]) -> None:
    comparison["methods"][1]["name"] = "ablation/no_features"
    rows = rows_of(compare_page(comparison), "method")
    assert {"ablation/no_features", "bench/dflash (baseline)"} <= rows.keys()
