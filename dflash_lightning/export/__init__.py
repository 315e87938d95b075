"""Writing drafters for the programs that serve them, and checking what was written."""

from dflash_lightning.export.base import DTYPES, Exporter, ExportFacts
from dflash_lightning.export.card import serving
from dflash_lightning.export.check import Outcome, check
from dflash_lightning.export.exported import Exported
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.export.replay import merge_observed
from dflash_lightning.export.write import check_format, export

__all__ = [
    "DTYPES",
    "FORMATS",
    "ExportFacts",
    "Exported",
    "Exporter",
    "Outcome",
    "check",
    "check_format",
    "export",
    "merge_observed",
    "serving",
]
