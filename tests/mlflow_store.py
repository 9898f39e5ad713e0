"""MLflow store of a test, copied from the template of the installed version: creating its tables takes seconds."""

from pathlib import Path

from blocks import MLflowTracking


def new_store(folder: Path) -> str:
    """Create a SQLite tracking store in a folder; return its URI."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    MLflowTracking(tracking_uri=uri, experiment="Default").get_client()
    return uri
