"""The pages in a real browser: nothing it complains of, and no width at which the page itself has to be scrolled."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.pages import compare_page, report_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (320, 390, 1280)
_MEASURE = """
window.addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const root = frame.contentDocument.documentElement;
    found[frame.name] = [root.scrollWidth, frame.contentWindow.innerWidth, root.querySelectorAll("svg").length];
  }
  document.querySelector("output").textContent = JSON.stringify(found);
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_no_page_overflows_and_the_console_is_silent(
    comparison: dict[str, Any], report: dict[str, Any], tmp_path: Path
) -> None:
    """One browser for all: every page in a frame of every width. Two pages that are at fault show that it would see."""
    wide = '<!doctype html><div style="width: 2000px">wide</div>'
    pages = {"compare": compare_page(comparison), "report": report_page(report), "wide": wide}
    frames = "".join(
        f'<iframe name="{name}-{width}" srcdoc="{html.escape(text)}" style="width: {width}px; border: 0"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    dom, console = _browse(f"<!doctype html><body><output></output>{frames}<script>{_MEASURE}</script>", tmp_path)
    measured = json.loads(html.unescape(re.search(r"<output>(.*?)</output>", dom, re.S)[1]))  # type: ignore[index]
    assert len(measured) == 9
    for name, (needed, given, drawings) in measured.items():
        if name.startswith("wide"):
            assert needed == 2000 or needed > given, "the measurement would see a page that is too wide"
        else:
            assert needed <= given and drawings >= 6, (name, needed, given)
    assert console == []
    _, complaints = _browse("<!doctype html><script>console.error('planted')</script>", tmp_path)
    assert any("planted" in line for line in complaints), "the console would be heard"


def _browse(page: str, place: Path) -> tuple[str, list[str]]:
    """The page's elements after loading, and the lines of its console."""
    file = place / "page.html"
    file.write_text(page, encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,900"]
    profile = f"--user-data-dir={place / 'profile'}"
    run = subprocess.run(
        [CHROMIUM, *options, profile, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
