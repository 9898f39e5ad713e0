"""GSM8K as a tinker-cookbook dataset, with a known share of its solutions made wrong.

The corruption gives the regularizers something to find. In each chosen training solution one calculator annotation
`<<a*b=c>>` of two whole numbers is changed, in one of two ways:

- operator: another operator, the same result, so the annotation does not hold: `<<48/2=24>>` -> `<<48-2=24>>`;
- operand: one number is another and the result follows from it, so the annotation holds, but no longer from the
  steps before it, and the steps after it no longer follow from its result: `<<48+24=72>>72` -> `<<48+27=75>>75`.

The first is for a solver to find, the second for the shape of the reasoning. Which solutions, which annotation and
which change are drawn from `random.Random(f"{seed}:{row}")`.
"""

from __future__ import annotations

import json
import operator
import random
import re
from pathlib import Path

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
    """Grade-school math problems with worked solutions; only the solution is trained on.

    Attributes:
        corrupted_share: the share of training solutions that are made wrong, 0 to 1; test data is never changed.
        seed: of the corruption.
        train_path: JSONL with `question` and `answer`; the rows that ship with the project by default.
        test_path: the same, held out.
    """

    corrupted_share: float = 0.0
    seed: int = 0
    train_path: str = str(DATA / "gsm8k_train.jsonl")
    test_path: str = str(DATA / "gsm8k_test.jsonl")

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
    """One annotation of a solution made wrong; a solution without one of two whole numbers is returned as it is.

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
    others = [op for op, apply in _OPERATIONS.items() if apply(a, b) != c]
    return f"<<{a}{generator.choice(others)}{b}={c}>>{c}"


def _wrong_operand(annotation: re.Match[str], generator: random.Random) -> str:
    a, b, c = (int(annotation[name]) for name in "abc")
    op, more = annotation["op"], generator.randint(1, 9)
    if op == "/":  # the result is drawn, so that it stays whole
        return f"<<{b * (c + more)}/{b}={c + more}>>{c + more}"
    a, b = generator.choice([(a + more, b), (a, b + more)])
    result = _OPERATIONS[op](a, b)
    return f"<<{a}{op}{b}={result}>>{result}"
