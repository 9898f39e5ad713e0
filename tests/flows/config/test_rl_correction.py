"""Correction between sampler and trainer in the config of rl, and the reason for none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_config import rl_fields
from torch import Tensor

from flows.config.rl import BOUNDED_CORRECTION, UNBOUNDED_CORRECTION, RlConfig
from flows.rl import describe_correction
from flows.runs.start.config_record import FORMAT_OF_CORRECTIONS
from objectives.batch import Batch, Outputs
from objectives.losses.policy.correction import Correction
from objectives.objective import Objective
from objectives.term import regularizer


def make_config(**fields: Any) -> RlConfig:
    return RlConfig.model_validate(rl_fields(Path("there"), "corrected", "") | fields)


def correction_of(**fields: Any) -> Correction | None:
    return make_config(**fields).base_correction()


@regularizer("test_registered_base", needs=("advantages",))
def registered_base(outputs: Outputs, batch: Batch) -> Tensor:
    assert batch.advantages_DT is not None, "guaranteed by needs"
    return -outputs.logprobs_DT * batch.advantages_DT


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


@pytest.mark.parametrize(
    ("base_loss", "fields", "started_with", "expected"),
    [
        ("importance_sampling", {}, FORMAT_OF_CORRECTIONS, "ratio token, off_policy_above 0.05"),
        ("importance_sampling", {"correction": "none"}, FORMAT_OF_CORRECTIONS, "none"),
        ("importance_sampling", {"schedule": {"mode": "sync"}}, FORMAT_OF_CORRECTIONS, "none"),
        (
            "importance_sampling",
            {},
            FORMAT_OF_CORRECTIONS - 1,
            "none: the run was started before corrections existed",
        ),
        (
            "dro",
            {},
            FORMAT_OF_CORRECTIONS,
            "none: a correction would change the penalty of dro, which depends on the sampler's logprobs",
        ),
        (
            "test_registered_base",
            {},
            FORMAT_OF_CORRECTIONS,
            "none: the base loss test_registered_base is a registered term, and only policy losses have corrections",
        ),
    ],
)
def test_a_run_says_why_it_does_not_correct(
    base_loss: str, fields: dict[str, Any], started_with: int, expected: str
) -> None:
    config = make_config(**{"schedule": {"mode": "async"}, "objective": {"base_loss": base_loss}} | fields)
    with Objective.from_spec(config.objective, config.seed) as objective:
        objective.correct(config.base_correction() if started_with >= FORMAT_OF_CORRECTIONS else None)
        assert describe_correction(config, objective, started_with) == expected
