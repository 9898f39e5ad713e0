"""GSM8K as a tinker-cookbook dataset; optionally corrupts a known share of the training solutions.

The corruption gives the regularizers errors to detect. In each selected training solution, one calculator annotation
`<<a*b=c>>` of two integers is changed in one of two ways:

- operator: a different operator with the same result, so the annotation is false: `<<48/2=24>>` -> `<<48-2=24>>`;
- operand: a different number with its correct result. The annotation is true but does not follow from the earlier
  steps, and the later steps do not follow from it: `<<48+24=72>>72` -> `<<48+27=75>>75`.

A solver detects the first; the topology of the reasoning reveals the second. The solutions, annotations and changes are
drawn from `random.Random(f"{seed}:{row}")`.
"""

from __future__ import annotations

import json
import operator
import random
import re
from pathlib import Path
from typing import Any

import chz
import datasets
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

DATA = Path(__file__).parent / "data"
_ANNOTATION = re.compile(r"<<(?P<a>\d+)(?P<op>[-+*/])(?P<b>\d+)=(?P<c>\d+)>>(?P=c)(?![\d.])")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@chz.chz
class Gsm8kBuilder(ChatDatasetBuilder):
    """Grade-school math problems with worked solutions; only solution tokens have loss.

    Attributes:
        corrupted_share: share of training solutions to corrupt, 0 to 1; held-out solutions are never changed.
        contrast: put a corrupted copy of each solution next to it, so that scores can be compared: a batch has two
            completions of each problem. Held-out data has both as well. Requires `corrupted_share` 0.
        seed: seed of the corruption.
        train_path: JSONL with `question` and `answer`; default: rows that ship with the project.
        test_path: held-out JSONL in the same format.
    """

    corrupted_share: float = 0.0
    contrast: bool = False
    seed: int = 0
    train_path: str = str(DATA / "gsm8k_train.jsonl")
    test_path: str = str(DATA / "gsm8k_test.jsonl")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        rows = read_problems(Path(self.train_path))
        if self.contrast and self.corrupted_share:
            raise DataFormatError(
                f"contrast adds a corrupted copy of every solution, but corrupted_share is {self.corrupted_share:g}; "
                "use one of them"
            )
        train = [{"question": row["question"], "answers": self._answers(index, row)} for index, row in enumerate(rows)]
        held_out = read_problems(Path(self.test_path))
        test = [
            {"question": row["question"], "answers": self._contrast(index, row) if self.contrast else [row["answer"]]}
            for index, row in enumerate(held_out)
        ]
        return self._dataset(train), self._dataset(test)

    def _answers(self, index: int, row: dict[str, str]) -> list[str]:
        """Return the completions of a training problem."""
        if self.contrast:
            return self._contrast(index, row)
        answer, generator = row["answer"], random.Random(f"{self.seed}:{index}")
        return [corrupt(answer, generator) if generator.random() < self.corrupted_share else answer]

    def _contrast(self, index: int, row: dict[str, str]) -> list[str]:
        return [row["answer"], corrupt(row["answer"], random.Random(f"{self.seed}:{index}"))]

    def _dataset(self, rows: list[dict[str, Any]]) -> SupervisedDataset:
        config = self.common_config
        return SupervisedDatasetFromHFDataset(
            datasets.Dataset.from_list(rows),
            batch_size=config.batch_size,
            flatmap_fn=lambda row: [
                conversation_to_datum(
                    [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}],
                    self.renderer,
                    config.max_length,
                    config.train_on_what or TrainOnWhat.LAST_ASSISTANT_MESSAGE,
                )
                for answer in row["answers"]
            ],
        )


def read_problems(path: Path) -> list[dict[str, str]]:
    """Read the problems of a JSONL file.

    Raises:
        DataFormatError: a line is not JSON or lacks `question` or `answer`.
    """
    rows = []
    for number, line in enumerate(path.read_text().rstrip("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataFormatError(
                f"line {number} of {path} is not a JSON object with `question` and `answer` ({error})"
            ) from error
    return rows


def corrupt(answer: str, generator: random.Random) -> str:
    """Corrupt one annotation of a solution; return the solution unchanged if it has no annotation of two integers.

    >>> corrupt("He has 2+3 = <<2+3=5>>5 apples.", random.Random(1))
    'He has 2+3 = <<2*3=5>>5 apples.'
    >>> corrupt("He has 2+3 = <<2+3=5>>5 apples.", random.Random(0))
    'He has 2+3 = <<2+4=6>>6 apples.'
    """
    annotations = list(_ANNOTATION.finditer(answer))
    if not annotations:
        return answer
    chosen = generator.choice(annotations)
    change = generator.choice([_wrong_operator, _wrong_operand])
    return answer[: chosen.start()] + change(chosen, generator) + answer[chosen.end() :]


def _wrong_operator(annotation: re.Match[str], generator: random.Random) -> str:
    a, b, c = (int(annotation[name]) for name in "abc")
    wrong_operators = [op for op, apply in _OPERATIONS.items() if apply(a, b) != c]
    return f"<<{a}{generator.choice(wrong_operators)}{b}={c}>>{c}"


def _wrong_operand(annotation: re.Match[str], generator: random.Random) -> str:
    a, b, c = (int(annotation[name]) for name in "abc")
    op, increment = annotation["op"], generator.randint(1, 9)
    if op == "/":  # draw the result, so that it stays an integer
        return f"<<{b * (c + increment)}/{b}={c + increment}>>{c + increment}"
    a, b = generator.choice([(a + increment, b), (a, b + increment)])
    result = _OPERATIONS[op](a, b)
    return f"<<{a}{op}{b}={result}>>{result}"
