"""Several engines behind one port: sessions on both, shared checkpoints and lists, and recovery from kills."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import test_cookbook_loops
import tinker
import zstandard
from engine_process import API_KEY, EngineProcess, running_engine, start_engine
from sft_config import sft_fields
from test_engine_command_line import CommandLine
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from train_steps import train

from engine.front.processes import EngineProcess as EngineProcessOfFront
from engine.front.processes import FrontError
from engine.front.upload import _json_id
from engine.part import owner
from engine.routes.body import MAX_JSON_VALUES
from flows.config.train import SftConfig
from flows.sft import sft

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::FutureWarning")]

Pair = tuple[tinker.ServiceClient, tinker.ServiceClient]

TWO = ["--device", "cpu", "--device", "cpu"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Front of two engines on the CPU."""
    with running_engine(tmp_path_factory.mktemp("front"), arguments=TWO) as front:
        yield front


def open_service(front: EngineProcess, **options: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=front.url, api_key=API_KEY, **options)


@pytest.fixture
def pair(engines: EngineProcess) -> Iterator[Pair]:
    """Two sessions, one on each engine."""
    with open_service(engines) as first, open_service(engines) as second:
        assert {engine_of(first), engine_of(second)} == {0, 1}
        yield first, second


def engine_of(service: tinker.ServiceClient) -> int:
    return owner(service.holder.get_session_id(), 2)


def new_trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()


def engine_processes(front: EngineProcess) -> list[psutil.Process]:
    """Return the engines of a front, in order."""
    return sorted(psutil.Process(front.process.pid).children(), key=lambda process: process.cmdline()[-1])


def test_concurrent_sessions_train_as_on_one_engine(
    engines: EngineProcess,
    pair: Pair,
    service: tinker.ServiceClient,
    batch: list[types.Datum],
) -> None:
    expected = train(new_trainer(service), batch, 3)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda service: train(new_trainer(service), batch, 3), pair)) == [expected, expected]
    metrics = httpx.get(f"{engines.url}/metrics").text.splitlines()
    trained = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in metrics if 'use="trained"' in line}
    tokens = 3 * sum(datum.model_input.length for datum in batch)
    for index in range(2):
        assert trained[f'tinker_engine_tokens_total{{engine="{index}",use="trained"}}'] >= tokens
    status = httpx.get(f"{engines.url}/status").json()
    assert status["figures"]["sessions"] == len(status["models"]) == 2
    assert "<title>tinker-flows engine</title>" in httpx.get(engines.url).text


def test_sessions_share_checkpoints(engines: EngineProcess, pair: Pair, batch: list[types.Datum]) -> None:
    """The other engine continues a run, samples from it, lists it once, and deletes it; files can be downloaded."""
    first, second = pair
    trainer = new_trainer(first)
    train(trainer, batch, 2)
    path = trainer.save_state("two").result().path
    assert path is not None
    losses = train(trainer, batch, 2)
    assert train(second.create_training_client_from_state_with_optimizer(path).result(), batch, 2) == losses

    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=8, seed=1)
    weights = trainer.save_weights_for_sampler("s").result().path
    samplers = [service.create_sampling_client(weights).result() for service in pair]
    sampled = [sampler.sample(prompt, 1, params).result().sequences[0].tokens for sampler in samplers]
    assert sampled[0] == sampled[1]

    rest = second.create_rest_client()
    links = rest.get_external_weights_urls(trainer.save_weights_external("e").result().path).result().urls
    assert all(link.startswith(engines.url) for link in links.values())
    with urllib.request.urlopen(links["adapter_config.json"]) as response:
        assert json.load(response)["r"] == 4
    with urllib.request.urlopen(links["adapter_model.safetensors"]) as response:
        assert len(response.read()) == int(response.headers["Content-Length"])

    listed = [checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints]
    assert listed.count(path) == listed.count(weights) == 1
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    for service in pair:
        with pytest.raises(tinker.RequestFailedError, match="There is no checkpoint"):
            service.create_training_client_from_state(path).result()


def test_sessions_opened_at_once_are_distributed(engines: EngineProcess) -> None:
    with httpx.Client(base_url=f"{engines.url}/api/v1", timeout=60) as http, ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: http.post("create_session", json={}).json()["session_id"], range(6)))
        for session in opened:
            http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert sorted(owner(session, 2) for session in opened) == [0, 0, 0, 1, 1, 1]


def test_runs_and_checkpoints_are_listed_once(engines: EngineProcess, pair: Pair, tmp_path: Path) -> None:
    trainers = [new_trainer(service) for service in pair]
    rest = tinker.RestClient(base_url=engines.url, api_key=API_KEY)
    times = {run.training_run_id: run.last_request_time for run in rest.list_training_runs().result().training_runs}
    for trainer in trainers:
        assert times[trainer.model_id] == rest.get_training_run(trainer.model_id).result().last_request_time
        assert httpx.get(f"{engines.url}/runs/{trainer.model_id}/queue/stats").json()["waiting"] == 0
    paths = [trainer.save_state("a").result().path for trainer in trainers]
    command_line = CommandLine(engines.url)
    runs = [run["training_run_id"] for run in command_line.json("run", "list", "--limit", "0")["runs"]]
    assert [runs.count(trainer.model_id) for trainer in trainers] == [1, 1]
    listed = command_line.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert [[checkpoint["tinker_path"] for checkpoint in listed].count(path) for path in paths] == [1, 1]
    download = command_line("checkpoint", "download", str(paths[0]), "--output", str(tmp_path))
    assert download.returncode == 0, download.stderr
    assert {file.name for file in tmp_path.glob("*/*")} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_are_listed_and_searched_across_engines(engines: EngineProcess) -> None:
    rest = tinker.RestClient(base_url=engines.url, api_key=API_KEY)
    opened: list[str] = []
    with (
        open_service(engines, display_name="counted 0") as first,
        open_service(engines, display_name="counted 1") as second,
    ):
        opened += [first.holder.get_session_id(), second.holder.get_session_id()]
        with open_service(engines, display_name="counted 2") as third:
            opened.append(third.holder.get_session_id())
        assert rest.list_sessions(limit=3).result().sessions == opened[::-1]
        assert rest.list_sessions(limit=1, offset=1).result().sessions == [opened[1]]
        request = types.SessionSearchRequest(display_name="counted", limit=2)
        page = rest.search_sessions(request).result()
        last = rest.search_sessions(request.model_copy(update={"cursor": page.next_cursor})).result()
        assert [session.session_id for session in (*page.sessions, *last.sessions)] == opened[::-1]
        assert last.next_cursor is None
    assert rest.get_session(opened[0]).result().display_name == "counted 0"


def test_request_is_forwarded_wherever_its_id_is(engines: EngineProcess, pair: Pair, batch: list[types.Datum]) -> None:
    """Ids behind a long field, ids of another engine in metadata, compressed and chunked bodies, and invalid ones."""
    for service, other in (pair, pair[::-1]):
        session, foreign = service.holder.get_session_id(), other.holder.get_session_id()
        with httpx.Client(base_url=f"{engines.url}/api/v1", timeout=60) as http:
            content = {
                "user_metadata": {"session_id": foreign, "filler": "x" * 60_000},
                "base_model": "tiny",
                "lora_config": {"rank": 1},
                "model_seq_id": 7,
                "session_id": session,
            }
            model = http.post("create_model", json=content).json()["model_id"]
            request = types.ForwardBackwardRequest(types.ForwardBackwardInput(batch * 100, "cross_entropy"), model, 1)
            body = forward_backward_request_to_proto(request).SerializeToString()
            headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
            sent = http.post("forward_backward", content=zstandard.compress(body), headers=headers).json()
            assert sent["request_id"] == f"{model}:1"
            chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
            repeat = http.post("forward_backward", content=chunks, headers={"Content-Type": "application/x-protobuf"})
            assert repeat.json() == sent
            headers = {"Accept": "application/x-protobuf"}
            result = http.post("retrieve_future", json={"request_id": sent["request_id"]}, headers=headers)
            assert result.headers["content-type"] == "application/x-protobuf"
            late = zstandard.compress(b" " * 100_000 + json.dumps({"model_id": model}).encode())
            info = http.post("get_info", content=late, headers={"Content-Encoding": "zstd"})
            assert info.json()["lora_rank"] == 1
            assert http.post("retrieve_future", content=b"{").status_code == 422
            assert http.post("retrieve_future", json={"request_id": f"{model}:9"}).status_code == 404
            assert http.post("session_heartbeat", json={"session_id": "nobody"}).status_code == 410


def test_limits_of_a_single_engine_apply(engines: EngineProcess) -> None:
    with httpx.Client(base_url=engines.url, timeout=60) as http:
        assert http.get("/status", headers={"Origin": "http://elsewhere.example"}).status_code == 403
        assert http.get("/status", headers={"Host": "elsewhere.example"}).status_code == 403
        too_long = http.post("/api/v1/create_session", content=(b" " * 2**20 for _ in range(257)))
        assert too_long.status_code == 422
        assert "longer than 268435456 bytes" in too_long.json()["detail"]
        bomb, headers = zstandard.compress(bytes(300 * 2**20)), {"Content-Encoding": "zstd"}
        for route in ("forward_backward", "asample"):
            assert http.post(f"/api/v1/{route}", content=bomb, headers=headers).status_code == 422
        assert http.get("/api/v1/sessions", params={"limit": -1}).status_code == 422
        head = http.head("/tiny/resolve/main/tokenizer_config.json")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0


def test_too_many_values_are_not_parsed() -> None:
    """The engine rejects such a body too, whatever its session."""
    values = ",".join(["{}"] * 100)
    assert _json_id(f'{{"values": [{values}], "session_id": "a"}}'.encode()) == "a"
    values = ",".join(["{}"] * MAX_JSON_VALUES)
    assert _json_id(f'{{"values": [{values}], "session_id": "a"}}'.encode()) is None


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('a notice'); print('http://127.0.0.1:1', flush=True); input()", None),
        ("print('engine: The device is broken.'); print('a notice'); exit(1)", "The device is broken."),
        ("print('a notice'); exit(3)", "it ended with status 3, see the log."),
    ],
)
def test_other_lines_of_an_engine(program: str, reason: str | None) -> None:
    """A library may print a line before the URL or after an error."""

    async def main() -> None:
        engine = EngineProcessOfFront(0, "cpu", [])
        engine._command = [sys.executable, "-c", program]
        running = asyncio.create_task(engine.run())
        if reason is None:
            await asyncio.wait_for(engine.is_up.wait(), 60)
            assert engine.url == "http://127.0.0.1:1"
            engine.stop()
            await running
        else:
            with pytest.raises(FrontError, match=f"Engine 0 on cpu did not start, so all engines stop: {reason}"):
                await running

    asyncio.run(main())


def test_wrong_key_is_rejected_and_a_signal_stops_all(tmp_path: Path) -> None:
    environment = {"TINKER_ENGINE_API_KEY": "tml-right"}
    with running_engine(tmp_path / "front", arguments=TWO, environment=environment) as front:
        assert httpx.get(f"{front.url}/api/v1/healthz").json() == {"status": "ok"}
        for path in ("/status", "/metrics", "/api/v1/sessions", "/api/v1/training_runs"):
            assert httpx.get(f"{front.url}{path}").status_code == 401
        body = b" " * 20_000_000
        rejected = httpx.post(f"{front.url}/api/v1/asample", content=body, headers={"X-API-Key": "tml-wrong"})
        assert "is not the key of this engine" in rejected.json()["detail"]
        metrics = httpx.get(f"{front.url}/metrics", headers={"X-API-Key": "tml-right"}).text
        assert 'tinker_front_http_responses_total{status="401"} 5.0' in metrics
        assert not [line for line in metrics.splitlines() if "tinker_engine" in line and 'status="401"' in line]
        service = tinker.ServiceClient(base_url=front.url, api_key="tml-right")
        trainer = new_trainer(service)
        trainer._reserve_request_ids(1)  # a gap in the seq ids: the next request waits forever
        waiting = trainer.optim_step(types.AdamParams())
        front.process.send_signal(signal.SIGTERM)
        assert front.process.wait(timeout=60) == 0
        waiting.future().cancel()
        assert "Traceback" not in front.log.read_text()
        service.holder.close()


def test_killed_engine_is_restarted_with_its_sessions(tmp_path: Path, batch: list[types.Datum]) -> None:
    """The other engine's clients notice nothing; those of the killed one continue as after a crash."""
    with (
        running_engine(tmp_path / "front", arguments=TWO) as front,
        open_service(front) as killed,
        open_service(front) as other,
    ):
        trainers = [new_trainer(killed), new_trainer(killed), new_trainer(other)]
        losses = train(trainers[2], batch, 2)
        assert [train(trainer, batch, 2) for trainer in trainers[:2]] == [losses, losses]
        trainers[0].save_state("saved").result()
        sampler = killed.create_sampling_client(base_model="tiny").result()
        params = types.SamplingParams(max_tokens=200, stop=[])
        waiting = [sampler.sample(types.ModelInput.from_ints([1]), 8, params) for _ in range(3)]
        sampler.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
        assert not waiting[-1].future().done()
        engine_processes(front)[engine_of(killed)].kill()
        expected = train(trainers[2], batch, 2)
        assert train(trainers[0], batch, 2) == expected
        assert all(len(sequence.tokens) == 200 for sample in waiting for sequence in sample.result().sequences)
        with pytest.raises(tinker.RequestFailedError, match="it has no checkpoint: create a new training client"):
            trainers[1].forward(batch, "cross_entropy").result()
        assert f"Engine {engine_of(killed)} on cpu ended with status -9 and is restarted" in front.log.read_text()
        with open_service(front) as service:
            new_trainer(service)


def test_killed_front_ends_its_engines_and_its_successors_restore_the_sessions(
    tmp_path: Path, batch: list[types.Datum]
) -> None:
    """First two engines restore them, then a single one."""
    folder = tmp_path / "front"
    with running_engine(folder, arguments=TWO) as front:
        port = ["--port", str(urlsplit(front.url).port)]
        services = [open_service(front) for _ in range(2)]
        trainers = [new_trainer(service) for service in services]
        losses = [train_and_save(trainer, batch) for trainer in trainers]
        children = [os.pidfd_open(process.pid) for process in engine_processes(front)]
        assert len(children) == 2
        front.process.kill()
        for child in children:
            assert select.select([child], [], [], 60)[0]
            os.close(child)
    with running_engine(folder, arguments=[*TWO, *port]) as front:
        assert httpx.get(f"{front.url}/status").json()["figures"]["models"] == 2
        losses += [train_and_save(trainer, batch) for trainer in trainers]
        front.process.kill()
    with running_engine(folder, arguments=port):
        losses += [train_and_save(trainer, batch) for trainer in trainers]
        for service in services:
            service.close("success").result()
    assert losses[::2] == losses[1::2]
    assert len(set(losses)) == 3


def train_and_save(trainer: tinker.TrainingClient, batch: list[types.Datum]) -> float:
    """Return the loss before an update whose result is saved."""
    (loss,) = train(trainer, batch, 1)
    trainer.save_state("last", overwrite=True).result()
    return loss


@pytest.mark.slow
def test_engine_that_cannot_start_stops_all(tmp_path: Path) -> None:
    with start_engine(tmp_path / "front", arguments=["--device", "cpu", "--device", "nothing"]) as process:
        assert process.wait(timeout=60) == 1
    last = (tmp_path / "front" / "engine.log").read_text().splitlines()[-1]
    assert last.startswith(
        "engine: Engine 1 on nothing did not start, so all engines stop: The device 'nothing' cannot"
    )


@pytest.mark.slow
def test_engine_that_cannot_restart_stops_all(tmp_path: Path, tiny_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_path, model)
    with start_engine(tmp_path / "front", [str(model)], TWO) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        shutil.rmtree(model)
        engines = psutil.Process(process.pid).children()
        engines[0].kill()
        assert process.wait(timeout=60) == 1
        assert not psutil.wait_procs(engines, timeout=60)[1]
    assert "did not start, so all engines stop: " in (tmp_path / "front" / "engine.log").read_text().splitlines()[-1]


@pytest.mark.usefixtures("prefect_server", "api_key")
def test_sft_flow_has_the_golden_losses(engines: EngineProcess, tmp_path: Path) -> None:
    fields = sft_fields(tmp_path, "behind-a-front", f"sqlite:///{tmp_path}/mlflow.db", engines.url)
    result = sft(SftConfig.model_validate(fields))
    golden = json.loads((Path(__file__).parents[1] / "flows" / "golden_sft.json").read_text())
    for key in ("loss/total", "train_mean_nll"):
        assert result.metrics[key] == pytest.approx(golden[key][-1][1], rel=1e-4)


@pytest.mark.slow
def test_cookbook_loops_learn(engines: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engines.url)
    test_cookbook_loops.test_supervised_loop_learns(tmp_path / "supervised")
    test_cookbook_loops.test_rl_loop_learns(tmp_path / "rl", "async", "importance_sampling")
