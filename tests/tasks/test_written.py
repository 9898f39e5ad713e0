"""Data that a model writes: of the samples that agree, or of revisions, each sampled once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks import RunStorage
from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from objectives.kept import Kept
from tasks.constitution import RevisedBuilder
from tasks.data import build
from tasks.features import load_kept
from tasks.graders import same_number
from tasks.self_training import SelfTrainingBuilder
from tasks.written import WRITTEN_NAME, Author, Notebook

pytestmark = pytest.mark.usefixtures("prefect_server")


@dataclass
class Scripted:
    """A teacher that says what it is told to, to whatever contains some words; and notes what it was asked."""

    session: tinker.ServiceClient
    tokenizer: Tokenizer
    says: dict[str, list[str]]
    asked: list[str] = field(default_factory=list)

    async def sample(self, prompt: tinker.ModelInput, num_samples: int, sampling_params: Any) -> SimpleNamespace:
        text = str(self.tokenizer.decode(prompt.to_ints()))
        self.asked.append(text)
        answers = next(answers for words, answers in reversed(self.says.items()) if words in text)
        said = [self.tokenizer.encode(f"{each}<|im_end|>") for each in answers[:num_samples]]
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=each, stop_reason="stop") for each in said])


@pytest.fixture(scope="module")
def session(engine_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def tokenizer(session: tinker.ServiceClient) -> Tokenizer:
    return session.create_lora_training_client("tiny", rank=4).result().get_tokenizer()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunStorage(url=str(tmp_path / "runs")).run_directory("written") as opened:
        yield opened


def play(
    monkeypatch: pytest.MonkeyPatch, teacher: Scripted, directory: RunDirectory, kind: type, **params: Any
) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    def open_notebook(_: object) -> Notebook:
        kept = Kept()
        load_kept(kept, directory, WRITTEN_NAME)
        renderer = get_renderer("qwen3_instruct", teacher.tokenizer)
        return Notebook(Author("scripted", teacher, renderer), kept, directory)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("tasks.written.WrittenBuilder.open_notebook", open_notebook)
    of_run = {"session": teacher.session, "directory": directory, "base_model": "tiny"}
    common = {"common_config": {"max_length": 512, "batch_size": 1}}
    builder = f"{kind.__module__}:{kind.__name__}"
    return build("data", builder, params | common, teacher.tokenizer, lambda made: made(), of_run)


def texts(dataset: SupervisedDataset | None, tokenizer: Tokenizer) -> list[str]:
    assert dataset is not None
    datums = [datum for index in range(len(dataset)) for datum in dataset.get_batch(index)]
    return [str(tokenizer.decode(each.model_input.to_ints())) for each in datums]


def write_rows(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


QUESTIONS = {"question": "What is 2 + 2 ?"}, {"question": "What is 3 + 4 ?"}


def test_what_most_samples_say_is_learned_with_words_dropped_and_asked_for_once(
    tmp_path: Path,
    session: tinker.ServiceClient,
    tokenizer: Tokenizer,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = {"2 + 2": ["It is 4.", "4", "4", "So 5"], "3 + 4": ["7", "8", "9", "10"]}
    teacher = Scripted(session, tokenizer, says)
    labelled = write_rows(tmp_path / "labelled.jsonl", {"question": "What is 1 + 1 ?", "answer": "2"})
    params: dict[str, Any] = {
        "path": write_rows(tmp_path / "rows.jsonl", *QUESTIONS),
        "labelled_path": labelled,
        "test_path": labelled,
        "num_samples": 4,
        "max_kept": 2,
        "drop_words": 0.5,
    }
    train, test = play(monkeypatch, teacher, directory, SelfTrainingBuilder, **params)
    first, *taught = texts(train, tokenizer)
    assert "What is 1 + 1 ?" in first, "labelled rows have no noise"
    assert [each.rpartition("assistant\n")[2] for each in taught] == ["It is 4.", "4"]
    assert all("What is 2 + 2 ?" not in each for each in taught)
    assert taught[0].partition("assistant")[0] != taught[1].partition("assistant")[0], "each has noise of its own"
    assert texts(test, tokenizer) == [first]
    assert len(teacher.asked) == 2

    again, _ = play(monkeypatch, teacher, directory, SelfTrainingBuilder, **params)
    assert texts(again, tokenizer) == [first, *taught]
    assert len(teacher.asked) == 2

    graded, _ = play(monkeypatch, teacher, directory, SelfTrainingBuilder, **params, grader=f"{__name__}:is_nine")
    assert texts(graded, tokenizer)[1].endswith("assistant\n9")
    nothing = params | {"labelled_path": None, "test_path": None, "min_agreement": 1.0}
    with pytest.raises(ConfigError, match="Nothing that was written is fit"):
        play(monkeypatch, teacher, directory, SelfTrainingBuilder, **nothing)


def is_nine(row: dict[str, str], answer: str) -> bool:
    return same_number(answer, "9")


def test_the_revision_of_an_answer_is_learned_without_its_critique(
    tmp_path: Path,
    session: tinker.ServiceClient,
    tokenizer: Tokenizer,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = {"2 + 2": ["Maybe 4."], "3 + 4": [""], "principle: Be sure.": ["It hedges."], "Write your": ["It is 4."]}
    teacher = Scripted(session, tokenizer, says)
    rows = write_rows(tmp_path / "rows.jsonl", *QUESTIONS)
    params = {"path": rows, "test_path": rows, "principles": ["Be sure."]}
    train, test = play(monkeypatch, teacher, directory, RevisedBuilder, **params)
    (learned,) = texts(train, tokenizer)
    assert learned == texts(test, tokenizer)[0]
    assert "What is 2 + 2 ?" in learned
    assert learned.endswith("assistant\nIt is 4.")
    assert "Maybe" not in learned
    # The question without an answer is asked again, but not what follows from the other.
    assert len(teacher.asked) == 4
    assert "Maybe 4." in teacher.asked[2]
    assert "It hedges." in teacher.asked[3]
