"""Print the versions of the servers and SDKs below this project, as a row of the table in docs/servers.md."""

from __future__ import annotations

from importlib.metadata import version

PACKAGES = ("prefect", "mlflow", "tinker", "tinker-cookbook", "torch", "transformers")

if __name__ == "__main__":
    print(" | ".join(f"{package} {version(package)}" for package in PACKAGES))
