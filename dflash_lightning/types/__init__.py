"""Values that pass between the parts of the framework.

Dimension legend, used in every shape annotation of the package:

``B`` batch rows, ``S`` positions of a (packed) row, ``N`` blocks of a row, ``K`` slots of a block (the anchor is slot
0), ``Kp`` those of them that predict, ``H`` hidden size, ``T`` tapped target layers, ``L`` draft layers, ``V``
vocabulary rows, ``D`` head dimension, ``Hq``/``Hkv`` query/key-value heads, ``R`` rows handed over in one piece, ``M``
documents of a row.
"""

from dflash_lightning.types.alignment import LABEL_LAYOUTS, Alignment, LabelLayout, SlotInputs
from dflash_lightning.types.batch import BlockLayout, Document, SlotTotals, StepContext, TrainBatch
from dflash_lightning.types.carried import Carried
from dflash_lightning.types.facts import TargetFacts
from dflash_lightning.types.features import FeatureSpec, TargetFeatures
from dflash_lightning.types.rounds import DecodedRound, Segment, label_log_probs, segments
from dflash_lightning.types.scores import Scores, best_chain, gather_lanes, token_ids

__all__ = [
    "LABEL_LAYOUTS",
    "Alignment",
    "BlockLayout",
    "Carried",
    "DecodedRound",
    "Document",
    "FeatureSpec",
    "LabelLayout",
    "Scores",
    "Segment",
    "SlotInputs",
    "SlotTotals",
    "StepContext",
    "TargetFacts",
    "TargetFeatures",
    "TrainBatch",
    "best_chain",
    "gather_lanes",
    "label_log_probs",
    "segments",
    "token_ids",
]
