"""Fixtures of the flows; one MLflow store for all."""

from __future__ import annotations

import pytest
from mlflow_store import new_store


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a SQLite tracking store."""
    return new_store(tmp_path_factory.mktemp("mlflow"))
