"""Metrics, logged models and registered versions of a run in MLflow."""
