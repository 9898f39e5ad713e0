"""Preference datasets of tinker-cookbook builders, and their batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import chz
import pytest
import tinker
import torch
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from transformers import AutoTokenizer

from blocks.errors import ConfigError
from blocks.files.local import home
from engine.models import resolve_model
from examples.preferences import DATA, comparisons
from objectives.batch import Outputs
from objectives.evaluate import evaluate_base
from objectives.labels import find_preference_pairs
from objectives.objective import Objective
from tasks.preference.dataset import Comparisons, Preference, Rendering, build_comparisons
from tasks.preference.pair_source import PairBatches, PairSource
from tasks.training.batch_source import TrainedBatch

JSONL = "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl"
KNOWN = "tinker_cookbook.recipes.preference.datasets"
TRAIN = str(DATA / "preferences_train.jsonl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("tiny", home() / "cache"))


def rendering(tokenizer: Any, max_length: int | None = 256) -> Rendering:
    return Rendering(get_renderer("role_colon", tokenizer), max_length)


def source(
    tokenizer: Any, *, max_length: int | None = 256, adds_mismatched: bool = False, loss: str = "dpo"
) -> PairSource:
    train, _ = build_comparisons(JSONL, {"train_path": TRAIN}, tokenizer)
    return PairSource(PairBatches(train, rendering(tokenizer, max_length), tokenizer, adds_mismatched), 4, 3, loss)


def last_contents(preference: Any) -> tuple[str, str, str]:
    return preference.prompt[-1]["content"], preference.chosen[-1]["content"], preference.rejected[-1]["content"]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_label_selects_the_chosen_answer(tmp_path: Path, tokenizer: Any) -> None:
    row = comparisons()[0]
    answers = [row["comparison"][f"completion_{letter}"][0]["content"] for letter in "AB"]
    write(tmp_path / "rows.jsonl", [row | {"label": label} for label in ("A", "Tie", "B")])
    train, test = build_comparisons(JSONL, {"train_path": str(tmp_path / "rows.jsonl")}, tokenizer)
    assert test is None
    chosen_and_rejected = [last_contents(train[index])[1:] for index in range(len(train))]
    assert chosen_and_rejected == [tuple(answers), tuple(reversed(answers))]


def test_batch_equals_the_cookbooks_and_has_labels(tokenizer: Any) -> None:
    ours = source(tokenizer)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer.name_or_path, renderer_name="role_colon", max_length=256, batch_size=4
    )
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=TRAIN), common_config=common
    )
    theirs, _ = builder()
    assert ours.steps_per_epoch == len(theirs) == 64
    for step in (0, 1, 64):
        epoch, index = divmod(step, len(theirs))
        theirs.set_epoch(seed=3 + epoch)
        batch = ours.batch_at(step)
        assert [plain(datum) for datum in batch.datums] == [plain(datum) for datum in theirs.get_batch(index)]
        assert batch.labels_D["desirable"].tolist() == [1, 0] * 4
        first_P, second_P = find_preference_pairs(batch)
        assert (second_P - first_P == 1).all()


def plain(datum: tinker.Datum) -> tuple[list[int], dict[str, list[float]]]:
    return datum.model_input.to_ints(), {key: list(value.data) for key, value in datum.loss_fn_inputs.items()}


def test_kto_batches_have_unrelated_answers(tokenizer: Any) -> None:
    batch = source(tokenizer).batch_at(0)
    wider = source(tokenizer, adds_mismatched=True, loss="kto").batch_at(0)
    assert wider.num_datums == batch.num_datums + 4
    assert wider.labels_D["desirable"].tolist()[8:] == wider.labels_D["pair"].tolist()[8:] == [-1] * 4
    assert wider.texts_D[8:] == (*wider.texts_D[2:8:2], wider.texts_D[0])


def test_pair_without_distinct_answers_after_truncation_is_skipped(tokenizer: Any) -> None:
    full = source(tokenizer).batch_at(0)
    lengths = sorted(full.offsets_D.diff().tolist())
    # All prompts have nearly the same length, so truncation shortens the answers.
    shorter = source(tokenizer, max_length=lengths[0] - 30).batch_at(0)
    assert shorter.labels_D["pair"].bincount().max() == 2
    assert max(map(len, shorter.texts_D)) < max(map(len, full.texts_D))
    with pytest.raises(ConfigError, match="max_length=16 leaves no pair with two distinct answers in a batch of 4"):
        source(tokenizer, max_length=16).batch_at(0)


def test_equal_answers_are_not_blamed_on_a_limit_that_is_not_set(tmp_path: Path, tokenizer: Any) -> None:
    rows = comparisons()[:1]
    rows[0]["comparison"]["completion_B"] = rows[0]["comparison"]["completion_A"]
    write(tmp_path / "equal.jsonl", rows)
    train, _ = build_comparisons(JSONL, {"train_path": str(tmp_path / "equal.jsonl")}, tokenizer)
    pairs = PairBatches(train, rendering(tokenizer, None), tokenizer, adds_mismatched=False)
    with pytest.raises(ConfigError, match="A batch of 1 pairs has no pair with two distinct answers: check the rows"):
        pairs.batch([0])


def test_batches_without_a_pair_are_found_in_advance(tokenizer: Any) -> None:
    """They are the steps at which reading the batch fails."""
    train, _ = build_comparisons(JSONL, {"train_path": TRAIN}, tokenizer)
    lengths = sorted(source(tokenizer).batch_at(0).offsets_D.diff().tolist())
    pairs = PairBatches(train, rendering(tokenizer, lengths[0] - 36), tokenizer, adds_mismatched=False)
    single = PairSource(pairs, 1, 3, "dpo")
    steps = range(200, 300)  # of two epochs
    failing = []
    for step in steps:
        try:
            single.batch_at(step)
        except ConfigError:
            failing.append(step)
    assert 0 < len(failing) < len(steps)
    assert single.untrained_steps(steps) == failing
    num_skipped = sum(not rendering(tokenizer, lengths[0] - 36).pair(pair, i) for i, pair in enumerate(train))
    expected = f"{num_skipped} of {len(train)} training pairs have no two distinct answers and are skipped"
    assert single.pop_warnings()["untrained_pairs"].startswith(expected)
    assert single.token_counts() == {step: 0 if step in failing else single.batch_at(step).num_tokens for step in steps}


def test_counting_tokens_keeps_the_datums_of_few_pairs() -> None:
    class Counted:
        model_input = SimpleNamespace(length=3)

    living: WeakSet[Counted] = WeakSet()
    most = 0

    def pair(preference: Any, index: int) -> list[Counted]:
        nonlocal most
        most = max(most, len(living))
        datums = [Counted(), Counted()]
        for datum in datums:
            living.add(datum)
        return datums

    pairs: Any = SimpleNamespace(comparisons=range(50), rendering=SimpleNamespace(pair=pair), adds_mismatched=False)
    pair_source = PairSource(pairs, 2, 0, "dpo")
    assert pair_source.untrained_steps(range(2)) == ()
    assert pair_source.token_counts() == {0: 12, 1: 12}
    assert most <= 4


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "simpo", "orpo", "bradley_terry"])
def test_every_preference_loss_raises_the_chosen_answers(name: str, tokenizer: Any) -> None:
    pairs = source(tokenizer, adds_mismatched=name == "kto", loss=name)
    batch = pairs.batch_at(0)
    logprobs_DT = torch.full((batch.num_tokens,), -2.0)
    objective = Objective(name)
    evaluation = evaluate_base(objective.base, Outputs(logprobs_DT, logprobs_DT), batch)
    direction_D = -torch.segment_reduce(evaluation.gradient_DT, "sum", offsets=batch.offsets_D)
    assert (direction_D[:8:2] > 0).all()
    assert (direction_D[1:8:2] < 0).all()
    terms = {f"term/base/{key}": value for key, value in ({"value": evaluation.value} | evaluation.metrics).items()}
    metrics = pairs.metrics(0, [TrainedBatch(batch, logprobs_DT)], terms)
    assert metrics.keys() == {
        f"{name}_loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "num_pairs"
    }  # fmt: skip
    assert metrics["num_pairs"] == 4


@chz.chz
class OtherBuilder:
    """Builder of another kind."""


def test_unusable_data_is_rejected(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="OtherBuilder is not a ComparisonDatasetBuilder; give its"):
        build_comparisons(f"{__name__}:OtherBuilder", {}, tokenizer)
    with pytest.raises(ConfigError, match=r"absent\.jsonl does not exist: set comparisons\.params\.train_path to"):
        build_comparisons(JSONL, {"train_path": str(tmp_path / "absent.jsonl")}, tokenizer)
    place = rf"absent\.jsonl does not exist in {re.escape(str(Path.cwd()))}: .*; a run resumes in the directory where"
    with pytest.raises(ConfigError, match=place):
        build_comparisons(JSONL, {"train_path": "absent.jsonl"}, tokenizer)
    write(tmp_path / "few.jsonl", comparisons()[:3])
    train, _ = build_comparisons(JSONL, {"train_path": str(tmp_path / "few.jsonl")}, tokenizer)
    with pytest.raises(ConfigError, match="has 3 comparisons and batch_size is 4"):
        PairSource(PairBatches(train, rendering(tokenizer), tokenizer, adds_mismatched=False), 4, 0, "dpo")


def hhh(folder: Path) -> None:
    start = "\n\nHuman: Hi.\n\nAssistant: "
    rows = [{"chosen": f"{start}Good {i}.", "rejected": f"{start}Bad {i}."} for i in range(4)]
    broken = {"chosen": f"{start}Good.\n\nHuman: And?\n\nAssistant: Yes.", "rejected": f"{start}Bad."}
    write(folder / "Anthropic/hh-rlhf/train.jsonl", [*rows, broken])
    write(folder / "Anthropic/hh-rlhf/test.jsonl", rows[:2])


def helpsteer3(folder: Path) -> None:
    context = [{"role": "user", "content": "Hi."}]
    rows = [
        {"context": context, "response1": answers[0], "response2": answers[1], "overall_preference": preference}
        for answers, preference in ((("Good.", "Bad."), -2), (("Bad.", "Good."), 1), (("Same.", "Same."), 0))
    ]
    for name, num_rows in (("train", 3), ("validation", 1024)):
        write(folder / f"nvidia/HelpSteer3/preference/{name}.jsonl", [rows[i % 3] for i in range(num_rows)])
    (folder / "nvidia/HelpSteer3/README.md").write_text(
        "---\nconfigs:\n- config_name: preference\n  data_files:\n  - {split: train, path: preference/train.jsonl}\n"
        "  - {split: validation, path: preference/validation.jsonl}\n---\n"
    )


def ultrafeedback(folder: Path) -> None:
    rows = [
        {"instruction": "Hi.", "chosen_response": f"Good {i}.", "rejected_response": f"Bad {i}."} for i in range(1028)
    ]
    write(folder / "argilla/ultrafeedback-binarized-preferences/train.jsonl", rows)


@pytest.mark.parametrize(
    ("write_dataset", "builder", "expected"),
    [
        (hhh, "HHHComparisonBuilder", (4, 2)),
        (helpsteer3, "HelpSteer3ComparisonBuilder", (2, 1024 - 1024 // 3)),
        (ultrafeedback, "UltraFeedbackComparisonBuilder", (4, 1024)),
    ],
)
def test_cookbook_builders_read_public_datasets(
    write_dataset: Callable[[Path], None], builder: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: Any
) -> None:
    """The builders read a local folder of the dataset's name before they ask the hub."""
    write_dataset(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", home() / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    params = {"test_size": 2} if write_dataset is hhh else {}
    train, test = build_comparisons(f"{KNOWN}:{builder}", params, tokenizer)
    assert isinstance(test, Comparisons)
    assert (len(train), len(test)) == expected
    for index in range(len(train)):
        prompt, chosen, rejected = last_contents(train[index])
        assert (prompt, chosen[:4], rejected[:3]) == ("Hi.", "Good", "Bad")


class PictureRenderer:
    """Renderer of a picture and the length of the last message."""

    def build_supervised_example(self, messages: list[dict[str, Any]]) -> tuple[tinker.ModelInput, torch.Tensor]:
        content = str(messages[-1]["content"])
        chunks = [
            tinker.EncodedTextChunk(tokens=[5]),
            tinker.types.ImageChunk(data=content[:1].encode(), format="png", expected_tokens=2),
            tinker.EncodedTextChunk(tokens=[7, len(content), 9]),
        ]
        return tinker.ModelInput(chunks=chunks), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(("rejected", "num_datums"), [("aaa", 2), ("b", 2), ("a", 0)])
def test_pairs_with_images_are_compared(rejected: str, num_datums: int) -> None:
    pictures: Any = PictureRenderer()
    preference = Preference([], [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": rejected}])
    assert len(Rendering(pictures, 64).pair(preference, 0)) == num_datums
