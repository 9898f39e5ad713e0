"""Pairs of answers to sums, a sure one and one that hedges: `python -m examples.preferences` writes the files.

Both answers have the right sum and are about as long, so neither truth nor length says which is the better one. Which
of them is the completion A is drawn. The sums of the held-out pairs are not among those that are trained on.
`sums.jsonl` has one answer to each of the others, of either kind: what `examples/rlhf.yaml` begins with.
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
    """All pairs, as lines of tinker-cookbook's `ComparisonBuilderFromJsonl`."""
    draw = random.Random("preferences")
    sums = draw.sample([(a, b) for a in range(2, 60) for b in range(2, 60)], _NUM_TRAIN + _NUM_TEST)
    return [_comparison(a, b, draw) for a, b in sums]


def demonstrations() -> list[dict[str, Any]]:
    """One answer to each of the sums that are trained on, sure or hedging, as conversations."""
    draw = random.Random("demonstrations")
    pairs = [row["comparison"] for row in comparisons()[:_NUM_TRAIN]]
    return [{"messages": each["prompt_conversation"] + each[f"completion_{draw.choice('AB')}"]} for each in pairs]


def _comparison(a: int, b: int, draw: random.Random) -> dict[str, Any]:
    sure, hedging = ([_said(draw.choice(each).format(sum=a + b))] for each in (SURE, HEDGING))
    label = draw.choice("AB")
    return {
        "comparison": {
            "prompt_conversation": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "completion_A": sure if label == "A" else hedging,
            "completion_B": hedging if label == "A" else sure,
        },
        "label": label,
    }


def _said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def main() -> None:
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
