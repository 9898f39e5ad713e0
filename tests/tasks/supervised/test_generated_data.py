"""Generated training data: majority answers and revisions, each sampled once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks import RunStorage
from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from objectives.jsonl_cache import JsonlCache
from tasks.common.builders import build
from tasks.common.datum_cache import load_cache
from tasks.common.graders import same_number
from tasks.common.sampling import Sampling
from tasks.common.task import inline_tasks
from tasks.supervised.constitution import RevisedBuilder
from tasks.supervised.generated_data import WRITTEN_NAME, AnswerSampler, CachedSampler
from tasks.supervised.self_training import SelfTrainingBuilder

pytestmark = pytest.mark.usefixtures("prefect_server")


@dataclass
class Scripted:
    """Sampling client with fixed answers by words of the prompt; records its prompts."""

    session: tinker.ServiceClient
    tokenizer: Tokenizer
    answers: dict[str, list[str]]
    prompts: list[str] = field(default_factory=list)

    async def sample(self, prompt: tinker.ModelInput, num_samples: int, sampling_params: Any) -> SimpleNamespace:
        text = str(self.tokenizer.decode(prompt.to_ints()))
        self.prompts.append(text)
        answers = next(answers for words, answers in reversed(self.answers.items()) if words in text)
        tokens_G = [self.tokenizer.encode(f"{answer}<|im_end|>") for answer in answers[:num_samples]]
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, stop_reason="stop") for tokens in tokens_G])


@pytest.fixture(scope="module")
def session(engine_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def tokenizer(session: tinker.ServiceClient) -> Tokenizer:
    return session.create_lora_training_client("tiny", rank=4).result().get_tokenizer()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunStorage(url=str(tmp_path / "runs")).run_directory("written") as directory:
        yield directory


def build_data(
    monkeypatch: pytest.MonkeyPatch, teacher: Scripted, directory: RunDirectory, kind: type, **params: Any
) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    def open_cached_sampler(_: object) -> CachedSampler:
        cache = JsonlCache()
        load_cache(cache, directory, WRITTEN_NAME)
        renderer = get_renderer("qwen3_instruct", teacher.tokenizer)
        sampler = AnswerSampler("scripted", teacher, renderer)  # pyright: ignore[reportArgumentType]
        return CachedSampler(sampler, cache, directory)

    target = "tasks.supervised.generated_data.GeneratedDataBuilder.open_cached_sampler"
    monkeypatch.setattr(target, open_cached_sampler)
    resources = {"session": teacher.session, "directory": directory, "base_model": "tiny"}
    common = {"common_config": {"max_length": 512, "batch_size": 1}}
    builder = f"{kind.__module__}:{kind.__name__}"
    return build("data", builder, params | common, teacher.tokenizer, lambda instance: instance(), resources)


def texts(dataset: SupervisedDataset | None, tokenizer: Tokenizer) -> list[str]:
    assert dataset is not None
    datums = [datum for index in range(len(dataset)) for datum in dataset.get_batch(index)]
    return [str(tokenizer.decode(datum.model_input.to_ints())) for datum in datums]


def write_rows(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


QUESTIONS = {"question": "What is 2 + 2 ?"}, {"question": "What is 3 + 4 ?"}


def test_majority_answers_are_trained_with_word_dropout_and_sampled_once(
    tmp_path: Path,
    session: tinker.ServiceClient,
    tokenizer: Tokenizer,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"2 + 2": ["It is 4.", "4", "4", "So 5"], "3 + 4": ["7", "8", "9", "10"]}
    teacher = Scripted(session, tokenizer, answers)
    labelled = write_rows(tmp_path / "labelled.jsonl", {"question": "What is 1 + 1 ?", "answer": "2"})
    params: dict[str, Any] = {
        "path": write_rows(tmp_path / "rows.jsonl", *QUESTIONS),
        "labelled_path": labelled,
        "test_path": labelled,
        "num_samples": 4,
        "max_kept": 2,
        "drop_words": 0.5,
    }
    train, test = build_data(monkeypatch, teacher, directory, SelfTrainingBuilder, **params)
    first, *generated = texts(train, tokenizer)
    assert "What is 1 + 1 ?" in first, "labeled rows have no noise"
    assert [text.rpartition("assistant\n")[2] for text in generated] == ["It is 4.", "4"]
    assert all("What is 2 + 2 ?" not in text for text in generated)
    assert generated[0].partition("assistant")[0] != generated[1].partition("assistant")[0], "the noise is independent"
    assert texts(test, tokenizer) == [first]
    assert len(teacher.prompts) == 2

    again, _ = build_data(monkeypatch, teacher, directory, SelfTrainingBuilder, **params)
    assert texts(again, tokenizer) == [first, *generated]
    assert len(teacher.prompts) == 2

    graded, _ = build_data(monkeypatch, teacher, directory, SelfTrainingBuilder, **params, grader=f"{__name__}:is_nine")
    assert texts(graded, tokenizer)[1].endswith("assistant\n9")
    nothing = params | {"labelled_path": None, "test_path": None, "min_agreement": 1.0}
    with pytest.raises(ConfigError, match="No generated answer meets"):
        build_data(monkeypatch, teacher, directory, SelfTrainingBuilder, **nothing)


def test_answers_to_another_chat_format_are_sampled(tokenizer: Tokenizer, directory: RunDirectory) -> None:
    """Answers that an earlier release has stored are used in any chat format, because their keys do not name one."""
    teacher = Scripted(cast(Any, None), tokenizer, {"": ["4"]})
    sampling, conversations = Sampling(1, 8, 1.0, 0), [[Message(role="user", content="2 + 2?")]]

    def sample(renderer_name: str) -> None:
        model = AnswerSampler("scripted", cast(Any, teacher), get_renderer(renderer_name, tokenizer))
        cache = JsonlCache()
        load_cache(cache, directory, WRITTEN_NAME)
        with inline_tasks():
            CachedSampler(model, cache, directory).sample(conversations, sampling)

    for name in ("qwen3_instruct", "role_colon", "qwen3_instruct", "role_colon"):
        sample(name)
    assert ["im_start" in prompt for prompt in teacher.prompts] == [True, False]

    text = f"scripted\0{sampling!r}\0{json.dumps(conversations[0])}"
    earlier = JsonlCache()
    earlier.put({hashlib.sha256(text.encode()).hexdigest(): ["four"]})
    directory.write_bytes(WRITTEN_NAME, f"{earlier.pop_unsaved()}\n".encode())
    sample("qwen3_instruct")
    assert len(teacher.prompts) == 2


def is_nine(row: dict[str, str], answer: str) -> bool:
    return same_number(answer, "9")


def test_revision_is_trained_without_its_critique(
    tmp_path: Path,
    session: tinker.ServiceClient,
    tokenizer: Tokenizer,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"2 + 2": ["Maybe 4."], "3 + 4": [""], "principle: Be sure.": ["It hedges."], "Write your": ["It is 4."]}
    teacher = Scripted(session, tokenizer, answers)
    rows = write_rows(tmp_path / "rows.jsonl", *QUESTIONS)
    params = {"path": rows, "test_path": rows, "principles": ["Be sure."]}
    train, test = build_data(monkeypatch, teacher, directory, RevisedBuilder, **params)
    (text,) = texts(train, tokenizer)
    assert text == texts(test, tokenizer)[0]
    assert "What is 2 + 2 ?" in text
    assert text.endswith("assistant\nIt is 4.")
    assert "Maybe" not in text
    # Two questions, one critique and one revision: the test set comes from the cache.
    assert len(teacher.prompts) == 4
    assert "Maybe 4." in teacher.prompts[2]
    assert "It hedges." in teacher.prompts[3]
    with pytest.raises(ConfigError, match=r"critique is 'Be kind\.', without the principle"):
        build_data(monkeypatch, teacher, directory, RevisedBuilder, **params, critique="Be kind.")
