"""GSM8K as a tinker-cookbook dataset, with a known share of its solutions made wrong.

The corruption gives the regularizers something to find. For each chosen training solution, one calculator annotation
`<<expression=result>>` gets another whole number near its result, in the annotation and where the text repeats it right
after; nothing else changes, so the annotation no longer holds and the steps that use the true result no longer follow
from it. Which solutions, which annotation and which number are drawn from `random.Random(f"{seed}:{row}")`.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import chz
import datasets
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

_DATA = Path(__file__).parent / "data"
_ANNOTATION = re.compile(r"<<(?P<expression>[^<>=]+)=(?P<result>-?\d+)(?P<decimals>\.\d+)?>>(?P=result)(?P=decimals)?")


@chz.chz
class Gsm8kBuilder(ChatDatasetBuilder):
    """Grade-school math problems with worked solutions; only the solution is trained on.

    Attributes:
        corrupted_share: the share of training solutions with one wrong annotation, 0 to 1; test data is never changed.
        seed: of the corruption.
        train_path: JSONL with `question` and `answer`; the rows that ship with the project by default.
        test_path: the same, held out.
    """

    corrupted_share: float = 0.0
    seed: int = 0
    train_path: str = str(_DATA / "gsm8k_train.jsonl")
    test_path: str = str(_DATA / "gsm8k_test.jsonl")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        rows = read_problems(Path(self.train_path))
        train = [row | {"answer": self._maybe_corrupt(index, row["answer"])} for index, row in enumerate(rows)]
        return self._dataset(train), self._dataset(read_problems(Path(self.test_path)))

    def _maybe_corrupt(self, index: int, answer: str) -> str:
        generator = random.Random(f"{self.seed}:{index}")
        return corrupt(answer, generator) if generator.random() < self.corrupted_share else answer

    def _dataset(self, rows: list[dict[str, str]]) -> SupervisedDataset:
        config = self.common_config
        return SupervisedDatasetFromHFDataset(
            datasets.Dataset.from_list(rows),
            batch_size=config.batch_size,
            map_fn=lambda row: conversation_to_datum(
                [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
                self.renderer,
                config.max_length,
                config.train_on_what or TrainOnWhat.LAST_ASSISTANT_MESSAGE,
            ),
        )


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems of a JSONL file.

    Raises:
        DataFormatError: a line is not JSON or lacks `question` or `answer`.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataFormatError(
                f"line {number} of {path} is not a JSON object with `question` and `answer` ({error})"
            ) from error
    return rows


def corrupt(answer: str, generator: random.Random) -> str:
    """One annotation of a solution made wrong; a solution without one that can be is returned as it is.

    >>> corrupt("He has 2+3 = <<2+3=5>>5 apples.", random.Random(0))
    'He has 2+3 = <<2+3=10>>10 apples.'
    """
    annotations = list(_ANNOTATION.finditer(answer))
    if not annotations:
        return answer
    chosen = generator.choice(annotations)
    wrong = str(int(chosen["result"]) + generator.choice([-3, -2, -1, 1, 2, 3, 5, 6, 9, 10]))
    return f"{answer[: chosen.start()]}<<{chosen['expression']}={wrong}>>{wrong}{answer[chosen.end() :]}"
