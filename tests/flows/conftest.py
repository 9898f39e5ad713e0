"""Fixtures of the flows; one MLflow store for all, because creating its tables takes seconds."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a SQLite tracking store."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
