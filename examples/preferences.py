"""Pairs of answers to a sum: a confident one is preferred to a hedging one.

`python -m examples.preferences` writes the files.

Both answers of a pair contain the correct sum and have about the same length, so neither correctness nor length reveals
the preferred one. The order of the two completions is random. No prompt of the held-out pairs occurs in training.
`sums.jsonl` has one answer, confident or hedging at random, to each training sum, for the warm start of
`examples/rlhf.yaml`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
SURE = (
    "It is {sum}, and that is certain.",
    "{sum}. You can rely on it.",
    "The answer is {sum}, without a doubt.",
    "That makes {sum}, I am sure of it.",
)
HEDGING = (
    "Perhaps {sum}, but I may be wrong.",
    "{sum}? You should ask others.",
    "I would guess {sum}, more or less.",
    "It might be {sum}, I do not know.",
)
_NUM_TRAIN, _NUM_TEST = 256, 64


def comparisons() -> list[dict[str, Any]]:
    """Return all pairs as rows for tinker-cookbook's `ComparisonBuilderFromJsonl`."""
    generator = random.Random("preferences")
    sums = generator.sample([(a, b) for a in range(2, 60) for b in range(2, 60)], _NUM_TRAIN + _NUM_TEST)
    return [_comparison(a, b, generator) for a, b in sums]


def demonstrations() -> list[dict[str, Any]]:
    """Return one answer, confident or hedging, to each training sum as conversations."""
    generator = random.Random("demonstrations")
    pairs = [row["comparison"] for row in comparisons()[:_NUM_TRAIN]]
    return [{"messages": pair["prompt_conversation"] + pair[f"completion_{generator.choice('AB')}"]} for pair in pairs]


def _comparison(a: int, b: int, generator: random.Random) -> dict[str, Any]:
    sure, hedging = ([_message(generator.choice(templates).format(sum=a + b))] for templates in (SURE, HEDGING))
    label = generator.choice("AB")
    return {
        "comparison": {
            "prompt_conversation": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "completion_A": sure if label == "A" else hedging,
            "completion_B": hedging if label == "A" else sure,
        },
        "label": label,
    }


def _message(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def main() -> None:
    """Run the command line."""
    rows = comparisons()
    parts: dict[str, list[Any]] = {
        "preferences_train": rows[:_NUM_TRAIN],
        "preferences_test": rows[_NUM_TRAIN:],
        "sums": demonstrations(),
    }
    for name, part in parts.items():
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
