"""The page of a comparison: every figure stands in it, every gap is one, and no text becomes markup."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from dflash_lightning.pages import compare_page


def test_the_page_stands_alone_and_is_well_formed(comparison: dict[str, Any], outline: ModuleType) -> None:
    found = outline.Outline(compare_page(comparison))
    assert found.loaded == ["data:,"] and "script" not in found.tags
    assert found.tags.count("svg") >= 8 and found.tags.count("main") == 1


def test_figures_stand_in_the_table_with_spread_and_interval(comparison: dict[str, Any], outline: ModuleType) -> None:
    page = compare_page(comparison)
    rows = outline.rows_of(page, "method")
    tau = comparison["methods"][1]["tau"]["greedy"]["all"]
    assert rows["dspark"][1] == f"{tau['mean']:.2f} ± {tau['spread']:.2f} {tau['low']:.2f} to {tau['high']:.2f}"
    assert rows["dflash (baseline)"][3] == "is the baseline"
    assert rows["dspark"][3].startswith("▲ +0.30") and rows["d_pace"][3].startswith("▼ \N{MINUS SIGN}0.31")
    assert rows["forward_kl"][3].startswith("+0.01"), "an interval across zero says neither better nor worse"
    assert re.search(r"<tr><th[^>]*>dspark.*?<td>12 of 12</td>", page, re.S)
    assert "head: markov instead of marginal" in page


def test_a_gap_is_marked_and_never_a_zero(comparison: dict[str, Any], outline: ModuleType) -> None:
    page = compare_page(comparison)
    rows = outline.rows_of(page, "method")
    assert rows["eagle3"] == ["n/a"] * len(rows["eagle3"])
    assert rows["dflash_ar"][0] == "2" and rows["dflash_ar"][2] == "n/a"
    assert outline.rows_of(page, "tau, greedy")["eagle3"] == ["n/a"] * 4
    assert outline.rows_of(page, "drafts that stand up to slot")["eagle3"] == ["n/a"] * 7
    (beside,) = [t.split("</table>")[0] for t in page.split("<table>") if "cut at the limit" in t.split("</table>")[0]]
    beside = re.findall(r"<tr>.*?</tr>", beside, re.S)[-1]
    assert outline.plain(beside) == "eagle3" + " n/a" * 5, "counts over no answer are no zeros"
    for title in ("tau, greedy", "speed-up at batch 8"):
        drawn = re.search(rf"<svg[^>]*><title>{title}</title>.*?</svg>", page, re.S)
        assert drawn is not None and "no value" in drawn[0]
    head = page.index("Not everything was measured")
    assert head < page.index("seed 3: no measured.json") < page.index("Tokens per round")
    assert "Not shown, for a value is missing: dflash_ar, eagle3." in page


@pytest.mark.parametrize("missing", ["paired", "speed", "survival", "degenerate", "identical", "expected_tau", "loss"])
def test_whatever_a_comparison_lacks_the_page_is_written(
    missing: str, comparison: dict[str, Any], outline: ModuleType
) -> None:
    for method in comparison["methods"]:
        method.pop(missing, None)
    comparison.pop("gaps")
    outline.Outline(compare_page(comparison))
    for method in comparison["methods"]:
        method[missing] = None
    outline.Outline(compare_page(comparison | {"baseline": None, "differences": None, "protocol": None}))


def test_texts_are_never_markup(comparison: dict[str, Any], outline: ModuleType) -> None:
    attack = "</title><script>alert(1)</script>\" onload='x' & \x00"
    comparison["methods"][0]["name"] = attack
    comparison["gaps"] = comparison["methods"][1]["gaps"] = [attack]
    comparison["differences"] = {attack: [attack]}
    comparison["protocol"] = {attack: attack}
    comparison["baseline"] = attack
    page = compare_page(comparison)
    found = outline.Outline(page)
    assert "script" not in found.tags and "\x00" not in page
    assert "<script>alert(1)</script>" in found.text


@pytest.mark.parametrize(
    ("change", "said"), [({"version": 2}, "version 2 cannot be shown, only 1"), ({"methods": []}, "it holds no method")]
)
def test_what_is_no_comparison_is_refused(change: dict[str, Any], said: str, comparison: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=said):
        compare_page(comparison | change)


def test_methods_of_several_folders_keep_their_whole_names(comparison: dict[str, Any], outline: ModuleType) -> None:
    comparison["methods"][1]["name"] = "ablation/no_features"
    rows = outline.rows_of(compare_page(comparison), "method")
    assert {"ablation/no_features", "bench/dflash (baseline)"} <= rows.keys()
