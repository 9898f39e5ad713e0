"""The benchmark of corrections on the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker

from benchmarks.off_policy import LENGTH, Completion, prompt_tokens, train
from objectives.losses.policy.correction import Correction


@pytest.fixture
def session(engine_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service


def test_completions_have_rewards_and_datums() -> None:
    completion = Completion(1, [5, 9, 4], [-1.0, -2.0, -3.0])
    assert completion.reward == 2 / LENGTH
    datum, prompt = completion.datum(0.5), prompt_tokens(1)
    assert datum.model_input.to_ints() == [*prompt, 5, 9]
    assert datum.loss_fn_inputs["target_tokens"].data == [*prompt[1:], 5, 9, 4]
    assert sum(datum.loss_fn_inputs["advantages"].data) == 1.5
    assert datum.loss_fn_inputs["logprobs"].data[-3:] == [-1.0, -2.0, -3.0]


def test_a_ratio_matters_only_off_policy(session: tinker.ServiceClient) -> None:
    """On-policy the ratios are 1; after two updates at a high rate they are not."""
    correction, seed, learning_rate = Correction(ratio="none"), 0, 2e-2
    alone, corrected = (train(session, kind, 0, seed, 2, learning_rate) for kind in (None, correction))
    assert alone == pytest.approx(corrected, abs=0.02)
    alone, corrected = (train(session, kind, 2, seed, 3, learning_rate) for kind in (None, correction))
    assert alone != pytest.approx(corrected, abs=1e-6)
