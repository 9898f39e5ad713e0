"""Correction between sampler and trainer in the config of rl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_config import rl_fields

from flows.config.rl import BOUNDED_CORRECTION, UNBOUNDED_CORRECTION, RlConfig
from objectives.losses.policy.correction import Correction


def correction_of(**fields: Any) -> Correction | None:
    return RlConfig.model_validate(rl_fields(Path("there"), "corrected", "") | fields).base_correction()


def test_the_modes_that_train_on_older_samples_are_corrected() -> None:
    stream, late = {"mode": "stream", "num_minibatches": 2}, {"mode": "async"}
    assert correction_of() is None
    assert correction_of(schedule=stream) == correction_of(schedule=late) == UNBOUNDED_CORRECTION
    assert correction_of(schedule=late, objective={"base_loss": "ppo"}) == BOUNDED_CORRECTION
    assert correction_of(schedule=late, correction="none") is None
    assert correction_of(schedule=late, objective={"base_loss": {"name": "dro"}}) is None
    assert correction_of(correction={"trust_region": 0.1}) == Correction(trust_region=0.1)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({}, "it has no field that changes the loss"),
        ({"high": 3.0}, "high bounds the multiplier of the ratio token or sequence"),
        ({"ratio": "token", "low": 3.0}, r"low=3 and high=2\.0; set 0 <= low <= high"),
    ],
)
def test_settings_without_effect_are_refused(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correction_of(correction=correction)
