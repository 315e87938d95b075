"""Lightning callbacks; import them as ``dflash_lightning.callbacks``."""

if __name__ != "dflash_lightning.callbacks":
    raise ImportError("import dflash_lightning.callbacks; the bare folder name is not a package")

from dflash_lightning.callbacks.activation_checkpointing import ActivationCheckpointing
from dflash_lightning.callbacks.block_growth import BlockGrowth
from dflash_lightning.callbacks.checkpoint_io import AtomicCheckpointIO
from dflash_lightning.callbacks.csv_logger import AppendingCSVLogger
from dflash_lightning.callbacks.expected_tau import ExpectedTau
from dflash_lightning.callbacks.rollout import Rollout
from dflash_lightning.callbacks.speculative_eval import SpeculativeEval
from dflash_lightning.callbacks.spent import TrainingCost
from dflash_lightning.callbacks.stopping import Stopper
from dflash_lightning.callbacks.training_bar import TrainingBar

__all__ = [
    "ActivationCheckpointing",
    "AppendingCSVLogger",
    "AtomicCheckpointIO",
    "BlockGrowth",
    "ExpectedTau",
    "Rollout",
    "SpeculativeEval",
    "Stopper",
    "TrainingBar",
    "TrainingCost",
]
