"""Why a run ended before its last step: a tag of its MLflow run, until it goes on."""

from __future__ import annotations

from tasks.metrics import MetricsLog

TAG = "tinker_flows.stopped"


def note_end(log: MetricsLog, why: str) -> None:
    """Keep the sentence that a run ends with."""
    log.tag(TAG, why)


def forget_end(log: MetricsLog) -> None:
    """Drop the sentence of an earlier part: the run goes on."""
    if TAG in log.client.get_run(log.run_id).data.tags:
        log.client.delete_tag(log.run_id, TAG)
