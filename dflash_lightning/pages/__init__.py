"""Pages that a browser shows without a network: a run's report, and methods compared.

A page is one HTML text with its style and its charts (SVG) in it, and without any script. Charts are drawn by
``charts`` and not by matplotlib: theirs follow the reader's dark mode and the width of a phone, and need no import.
"""

from dflash_lightning.pages.compare import compare_page
from dflash_lightning.pages.report import report_page

__all__ = ["compare_page", "report_page"]
