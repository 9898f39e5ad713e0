"""Commands that talk to trained weights: `tinker-flows sample` and `tinker-flows chat`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tinker
from engine_process import API_KEY
from sft_config import sft_fields
from tinker import types
from tinker_cookbook.renderers import get_renderer

from deployments.command_line import main
from flows.config.train import SftConfig
from flows.runs.result import TrainResult
from flows.sft import sft

PROMPTS = ["Say hello.", "Count to three."]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, prefect_server: str, engine_url: str) -> TrainResult:
    folder = tmp_path_factory.mktemp("talk")
    fields = sft_fields(folder, "talk", f"sqlite:///{folder / 'mlflow.db'}", engine_url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", API_KEY)
        return sft(SftConfig.model_validate(fields | {"num_steps": 2, "eval_every": 0}))


@pytest.fixture
def storage(result: TrainResult, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    return str(Path(result.directory).parent)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    output = capsys.readouterr()
    assert exit_info.value.code == 0, output.err
    return output.out


def sampled_texts(result: TrainResult, engine_url: str, seed: int) -> list[str]:
    """Sample greedily with the SDK alone."""
    with tinker.ServiceClient(base_url=engine_url, api_key=API_KEY) as service:
        trainer = service.create_training_client_from_state(result.state_path).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        renderer = get_renderer("qwen3_instruct", trainer.get_tokenizer())
        texts = []
        for prompt in PROMPTS:
            tokens = renderer.build_generation_prompt([{"role": "user", "content": prompt}])
            params = types.SamplingParams(max_tokens=12, temperature=0, seed=seed, stop=renderer.get_stop_sequences())
            sequence = sampler.sample(tokens, 1, params).result().sequences[0]
            texts.append(str(renderer.parse_response(sequence.tokens)[0]["content"]))
    return texts


def test_samples_equal_those_of_the_sdk(
    result: TrainResult, storage: str, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--storage", storage, "--temperature", "0", "--max-tokens", "12", "--renderer", "qwen3_instruct"]
    rows = json.loads(run_command(capsys, "sample", "talk@final", *PROMPTS, *options, "--json"))
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["answer"] for row in rows] == sampled_texts(result, engine_url, seed=0)
    assert all(row["truncated"] == (row["num_tokens"] == 12) for row in rows)
    shown = run_command(capsys, "sample", "talk", PROMPTS[0], *options, "-n", "2")
    first, second, end = shown.split("(cut after max_tokens=12)\n")
    assert first == second  # greedy
    assert not end


def test_chat_continues_the_conversation(
    storage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question after /reset gets the answer of a first question; a second question has a history."""
    lines = [PROMPTS[0], PROMPTS[0], "/reset", PROMPTS[0], "/reset now", PROMPTS[0], "/rest"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    shown = run_command(capsys, "chat", "talk@final", "--storage", storage, "--temperature", "0", "--max-tokens", "12")
    answers = shown.split("(cut after max_tokens=12)\n")
    assert len(answers) == 5
    assert answers[-1].startswith("Unknown command /rest. Commands: /reset starts")
    assert answers[0] == answers[2] == answers[3] != answers[1]


def test_unknown_run(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"error: Run 'talc' does not exist in .* contains talk"):
        main(["sample", "talc", "Hello", "--storage", storage])
