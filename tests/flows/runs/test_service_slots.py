"""Concurrency limits of services on the Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from sft_config import sft_fields
from waiting import wait_for

from flows.runs.blocks import limit_name, service_slot

ROOT = Path(__file__).parents[3]


def make_limit(service_url: str) -> None:
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit_name(service_url), limit=1))


def active_slots(service_url: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit_name(service_url)).active_slots


def test_second_run_waits_for_the_first(prefect_server: str) -> None:
    service = "http://service.example:9000/services/prod"
    make_limit(service)
    started, release, order = threading.Event(), threading.Event(), list[str]()

    @flow
    def first() -> None:
        with service_slot(service):
            started.set()
            release.wait(60)
            order.append("first")

    @flow
    def second() -> None:
        with service_slot(service):
            order.append("second")

    # Threads do not inherit the settings.
    def run(target) -> None:
        with temporary_settings({PREFECT_API_URL: prefect_server}):
            target()

    threads = [threading.Thread(target=run, args=(target,)) for target in (first, second)]
    threads[0].start()
    assert started.wait(60)
    assert active_slots(service) == 1
    threads[1].start()
    threads[1].join(3)  # time to enter if the limit failed
    release.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second"]
    assert active_slots(service) == 0


def test_no_wait_without_a_limit_or_a_server(prefect_server: str) -> None:
    @flow
    def run() -> str:
        with service_slot("http://unlimited.example:1"):
            pass
        with (
            temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
            service_slot("http://unlimited.example:1"),
        ):
            return "ran"

    assert run() == "ran"
    with pytest.raises(ZeroDivisionError), service_slot("http://unlimited.example:1"):
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_share_a_service_with_one_slot(tmp_path: Path, prefect_server: str, engine_url: str) -> None:
    make_limit(engine_url)
    tracking = f"sqlite:///{tmp_path / 'mlflow.db'}"
    env = {**os.environ, "PREFECT_API_URL": prefect_server, "TINKER_API_KEY": "tml-test"}
    runs = []
    for name in ("one", "other"):
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(sft_fields(tmp_path, name, tracking, engine_url) | {"num_steps": 2}))
        command = [sys.executable, "-m", "flows.sft", "--config", str(config)]
        runs.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL))
    assert [run.wait(400) for run in runs] == [0, 0]
    query = {"filter": {"event": {"prefix": ["prefect.concurrency-limit."]}, "order": "ASC"}, "limit": 50}

    def events_of_slots() -> list[str]:
        events = httpx.post(f"{prefect_server}/events/filter", json=query, timeout=30).json()["events"]
        own = [event for event in events if limit_name(engine_url) in json.dumps(event["resource"])]
        kinds = [event["event"].rpartition(".")[2] for event in own]
        return [kind for kind in kinds if kind != "created"]

    # The server records events in batches.
    wait_for(lambda: len(events_of_slots()) >= 4, "the events of both runs", 30)
    assert events_of_slots() == ["acquired", "released", "acquired", "released"]
