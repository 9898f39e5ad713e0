"""Curves of recipes, drawn from runs on the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from examples.curves import DRAWINGS, curves, draw, lines, train


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", DRAWINGS)
def test_every_variant_runs_and_is_drawn(
    recipe: str, tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe == "multiply":
        pytest.importorskip("reasoning_gym", reason="pip install -c constraints.txt -e '.[gym]'")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    locations = [f"base_url={engine_url}", f"storage={tmp_path}", f"tracking=sqlite:///{tmp_path / 'mlflow.db'}"]
    short = ["model=tiny", "num_steps=2", "eval_every=2", "checkpoint_every=2"]
    drawing = DRAWINGS[recipe]
    results = train(recipe, drawing, [*locations, *short])
    assert len({result.run_name for result in results.values()}) == len(drawing.variants)
    drawn_curves = {
        label: points for panel in drawing.panels.values() for label, points in curves(panel, results).items()
    }
    for label, points in drawn_curves.items():  # steps without complete completions have no score
        assert {step for step, _ in points} <= ({0, 2} if label.startswith("test/") else {0, 1})
    assert len(lines(drawing, results)) == len(drawn_curves) > 0
    draw(drawing, results, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (880, 330)
