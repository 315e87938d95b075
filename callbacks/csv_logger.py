"""A table of figures that goes on where a run was cut; Lightning's begins anew and deletes what was there."""

from __future__ import annotations

import csv

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter


class _AppendingWriter(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Keep the rows that are there, and their columns."""
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


class AppendingCSVLogger(CSVLogger):
    """``metrics.csv`` and ``hparams.yaml`` in ``save_dir/name/version``; a resumed run adds its rows below the others.

    Rows that were written after the checkpoint that a run resumes from stand there twice: the later one counts.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:  # type: ignore[override]
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _AppendingWriter(log_dir=self.log_dir)
        return self._experiment  # type: ignore[return-value]
