"""Figures for MLflow, by its own client."""

from __future__ import annotations

import time
from typing import Any, cast

from fivefold.integrations import needs
from fivefold.trace import StepFigures
from fivefold.train.logger import LogWriter

__all__ = ["MLflow"]


class MLflow(LogWriter):
    """A run of MLflow with a metric for each scalar.

    Args:
        experiment: made if there is none of this name.
        tracking_uri: of a server, or of a store; default: MLflow's own, MLFLOW_TRACKING_URI.
        run_name: of a new run.
        run_id: of a run that goes on; a new one by default.

    Raises `UsageError` without the package mlflow (extra `mlflow`, which is mlflow-skinny).
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        needs("mlflow")
        self._experiment, self._uri = experiment, tracking_uri
        self._run_name, self.run_id = run_name, run_id
        self._mlflow: Any = None
        self._client: Any = None

    def open(self) -> None:
        """Find or make experiment and run. Raises what MLflow does."""
        import mlflow as package  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow = cast(Any, package)
        self._client = client = mlflow.MlflowClient(tracking_uri=self._uri)
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
            return
        found = client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else client.create_experiment(self._experiment)
        self.run_id = client.create_run(number, run_name=self._run_name).info.run_id

    def __call__(self, figures: StepFigures) -> None:
        """A value for each scalar that is known."""
        metric, now_ms = self._mlflow.entities.Metric, int(time.time() * 1000)
        scalars = figures.scalars().items()
        self._client.log_batch(
            self.run_id,
            metrics=[metric(name, value, now_ms, figures.step) for name, value in scalars],
        )

    def close(self, *, failed: bool = False) -> None:
        """End the run, as failed if it is."""
        if self.run_id is not None and self._client is not None:
            self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
