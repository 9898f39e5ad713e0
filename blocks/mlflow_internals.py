"""Internals of MLflow that the project uses. Only this module imports them."""

from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_DOES_NOT_EXIST,
    ErrorCode,
)
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

__all__ = [
    "DATABASE_ENGINES",
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "ErrorCode",
    "SpanAttributeKey",
    "SystemMetricsMonitor",
    "TraceMetadataKey",
    "TraceTagKey",
    "TracingClient",
]
