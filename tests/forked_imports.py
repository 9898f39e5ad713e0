"""Imports that the programs of `forked_program` share."""

from __future__ import annotations

from importlib import import_module

from blocks.garbage_collection import no_collections
from tasks.common.tokenizers import lock_tokenizers

MODULES = (
    "deployments.command_line",
    "flows.distill",
    "flows.dpo",
    "flows.evaluate",
    "flows.rl",
    "flows.runs.show",
    "flows.sft",
    "mlflow.store.tracking.sqlalchemy_store",
    "tasks.reports.charts",
)

with no_collections():
    for module in MODULES:
        import_module(module)
    lock_tokenizers()  # imports those of transformers
