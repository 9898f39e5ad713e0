"""The example that learns to multiply, on the tiny model: both runs, and what is drawn of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from examples.margins import history
from examples.multiply import DISTANCE, HELD_OUT, TRAINED, draw, show, train_both


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_runs_on_the_tiny_model(tmp_path: Path, prefect_server, engine_url, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    overrides = [
        "model=tiny",
        f"base_url={engine_url}",
        f"storage={tmp_path}",
        f"tracking=sqlite:///{tmp_path / 'mlflow.db'}",
        "num_steps=2",
        "eval_every=2",
        "checkpoint_every=2",
        "environment.params.num_held_out=4",
    ]
    results = train_both(overrides)
    assert [result.run_name for result in results.values()] == ["multiply-with-kl", "multiply-without"]
    for result in results.values():
        assert list(history(result, HELD_OUT)) == [0, 2]
        assert list(history(result, TRAINED)) == list(history(result, DISTANCE)) == [0, 1]
    show(results)
    assert capsys.readouterr().out.startswith("step")
    draw(results, tmp_path / "multiply.png")
    with Image.open(tmp_path / "multiply.png") as image:
        assert image.size == (880, 330)
