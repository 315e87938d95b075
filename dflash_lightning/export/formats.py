"""All formats by name."""

from __future__ import annotations

from dflash_lightning.export.base import Exporter
from dflash_lightning.export.hf import HFExporter
from dflash_lightning.export.sglang import SGLangExporter
from dflash_lightning.export.specforge import SpecForgeExporter
from dflash_lightning.export.speculators import SpeculatorsExporter
from dflash_lightning.export.vllm import VLLMExporter
from dflash_lightning.export.zlab import ZLabExporter

FORMATS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        HFExporter(),
        ZLabExporter(),
        SGLangExporter(),
        VLLMExporter(),
        SpeculatorsExporter(),
        SpecForgeExporter(),
    )
}
