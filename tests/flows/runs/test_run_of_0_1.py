"""A run that release 0.1 started resumes in this release.

`data/run_of_0_1` is the home of such a run, stopped at the checkpoint of step 3 of 6: its directory, and its weights
and optimizer in the engine's state. `curve.json` has the metrics of all six steps of the uninterrupted run, by 0.1:

    python -m flows.sft --config examples/sft.yaml run_name=whole model=tiny lora_rank=4 learning_rate=1e-2 num_steps=6
        eval_every=0 checkpoint_every=3 data.params.common_config.batch_size=4 data.params.common_config.max_length=256
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from deployments.run_lookup import find_run, resume_config
from flows.config.train import SftConfig
from flows.sft import sft

DATA = Path(__file__).parent / "data" / "run_of_0_1"
FIRST_STEP, NUM_STEPS = 3, 6


@pytest.mark.usefixtures("prefect_server")
def test_a_run_of_release_0_1_continues_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(DATA, tmp_path / "home")
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)

    method, config = resume_config(find_run("whole", ""), [])
    assert method == "sft"
    assert isinstance(config, SftConfig)
    result = sft(config)

    assert (result.resumed_from, result.num_steps) == (FIRST_STEP, NUM_STEPS)
    client = MlflowClient(result.tracking_uri)
    for key, values in json.loads((DATA / "curve.json").read_text()).items():
        history = {point.step: point.value for point in client.get_metric_history(result.mlflow_run_id, key)}
        # Processors differ in the last bits, hence the tolerance.
        assert history == pytest.approx(dict(enumerate(values[FIRST_STEP:], start=FIRST_STEP)), abs=1e-4, rel=1e-4), key
