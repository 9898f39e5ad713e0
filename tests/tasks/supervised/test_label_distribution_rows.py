"""Rows with a distribution over labels: their datums, and rows with errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from tasks.supervised.label_distributions import LabelDistributionBuilder

VOTES: dict[str, Any] = {"prompt": "Is the soup good?", "distribution": {"yes": 7, "no": 3}}
UNSURE: dict[str, Any] = {"prompt": "Is the film good?", "distribution": {"maybe": 0.4, "yes": 0.4}}


def builder(tmp_path: Path, *rows: Mapping[str, Any], max_length: int | None = None) -> LabelDistributionBuilder:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(tmp_path),
        renderer_name="qwen3_instruct",
        max_length=max_length,
        batch_size=len(rows),
    )
    return LabelDistributionBuilder(common_config=common, path=str(path))


def test_the_answer_of_a_datum_is_the_distribution(tmp_path: Path) -> None:
    rows = builder(tmp_path, VOTES, UNSURE)
    train, test = rows()
    assert test is None
    (first, second), renderer = train.get_batch(0), rows.renderer
    for row, datum in ((VOTES, first), (UNSURE, second)):
        prompt = renderer.build_generation_prompt([Message(role="user", content=row["prompt"])])
        assert datum.model_input.to_ints() == prompt.to_ints()
        targets_TK, weights_TK = (datum.loss_fn_inputs[key].to_torch() for key in ("target_tokens", "weights"))
        assert targets_TK.shape == weights_TK.shape == (prompt.length, 3)
        assert not weights_TK[:-1].any()
        total = sum(row["distribution"].values())
        for index, label in enumerate(("maybe", "no", "yes")):
            assert targets_TK[-1, index] == renderer.tokenizer.encode(label, add_special_tokens=False)[0]
            torch.testing.assert_close(weights_TK[-1, index].item(), row["distribution"].get(label, 0) / total)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Good?", "distribution": {"yes": 1, "yep": 1}}, "'yep' and 'yes' begin with the same token"),
        ({"prompt": "Good?", "distribution": {"yes": -1, "no": 2}}, "numbers of at least 0"),
        ({"prompt": "Good?", "distribution": {"yes": 0}}, "one of them above 0"),
        ({"prompt": "Good?", "distribution": {"yes": float("inf")}}, "Infinity is not a value of JSON"),
        ({"prompt": "Good?", "distribution": {"yes": float("nan")}}, "NaN is not a value of JSON"),
        ({"prompt": "Good?", "distribution": {}}, "one of them above 0"),
        ({"prompt": "Good?", "distribution": {"yes": "7"}}, "write numbers by label"),
        ({"prompt": ["Good?"], "distribution": {"yes": 7}}, "write a text"),
        ({"prompt": "Good?"}, "with prompt and distribution"),
        ({"prompt": "Good? " * 50, "distribution": {"yes": 7}}, "leaves no room for an answer in 32 tokens: raise"),
    ],
)
def test_a_row_with_an_error_is_refused(tmp_path: Path, row: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        builder(tmp_path, row, max_length=32)()[0].get_batch(0)
