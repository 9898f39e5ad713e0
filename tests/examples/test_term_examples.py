"""The examples of single terms run, and their terms read the data as described; their data can be written again."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest
from mlflow import MlflowClient
from scipy.stats import entropy

from examples import term_data
from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.sft import sft

ROOT = Path(__file__).parents[2]
History = Callable[[str], list[float]]
RunExample = Callable[..., History]


@pytest.fixture
def run_example(tmp_path: Path, prefect_server: str, engine_url: str, monkeypatch: pytest.MonkeyPatch) -> RunExample:
    """Run two steps of an example with overrides; return its metrics by name."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.chdir(ROOT)

    def run(name: str, *overrides: str) -> History:
        tracking = f"sqlite:///{tmp_path / 'mlflow.db'}"
        places = [f"base_url={engine_url}", f"storage={tmp_path / 'runs'}", f"tracking={tracking}"]
        fields = ["num_steps=2", "checkpoint_every=2", "eval_every=0", *overrides]
        result = sft(load_config(SftConfig, ROOT / "examples" / f"{name}.yaml", [*places, *fields]))
        client = MlflowClient(tracking)
        return lambda key: [point.value for point in client.get_metric_history(result.mlflow_run_id, key)]

    return run


def test_fairness_compares_the_groups(run_example: RunExample) -> None:
    history = run_example("fairness")
    for term, metric in (("demographic_parity", "rate"), ("worst_group", "loss")):
        old, young, values = (history(f"term/{term}/{name}") for name in (f"{metric}_old", f"{metric}_young", "value"))
        combine = max if term == "worst_group" else lambda a, b: abs(a - b)
        assert values == pytest.approx([combine(*pair) for pair in zip(old, young, strict=True)], rel=1e-4)
        assert all(share > 0 for share in history(f"term/{term}/grad_share"))


def test_knowledge_contradicts_one_answer_of_each_question(run_example: RunExample) -> None:
    history = run_example("knowledge")
    counts = {name: history(f"term/knowledge/{name}") for name in ("contradicted", "confirmed", "unknown")}
    assert counts == {"contradicted": [8.0] * 2, "confirmed": [8.0] * 2, "unknown": [0.0] * 2}
    assert history("term/knowledge/trained_prompts") == [1.0] * 2


def test_simulation_scores_every_throw(run_example: RunExample) -> None:
    history = run_example("simulation")
    assert history("term/simulation/timed_out") == [0.0] * 2
    assert all(0.1 < mean < 0.4 for mean in history("term/simulation/score_mean"))
    assert history("term/simulation/trained_prompts") == [1.0] * 2


def test_the_divergence_from_the_odds_is_the_loss_without_their_entropy(run_example: RunExample) -> None:
    history = run_example("odds", "eval_every=2")
    lines = (term_data.DATA / "draws_test.jsonl").read_text().splitlines()
    held_out = fmean(float(entropy(list(json.loads(line)["distribution"].values()))) for line in lines)
    losses, values = history("test/nll"), history("test/term/label_divergence_topk/value")
    assert [loss - value for loss, value in zip(losses, values, strict=True)] == pytest.approx([held_out] * 2, abs=1e-4)
    assert values[1] < values[0]


def test_the_clerk_is_biased_in_the_data() -> None:
    rows = [json.loads(line) for line in (term_data.DATA / "loans.jsonl").read_text().splitlines()]
    rates = [
        [row["completions"] == ["yes"] for row in rows if row["labels"]["group"] == group]
        for group in (term_data.OLD, term_data.YOUNG)
    ]
    assert sum(rates[0]) / len(rates[0]) > sum(rates[1]) / len(rates[1]) + 0.1
    assert all(("accepted" in row["labels"]) == (row["completions"] == ["yes"]) for row in rows)


def test_throws_land_where_the_equations_of_motion_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without air, a ball lands after v^2 sin(2a) / g."""
    monkeypatch.setattr(term_data, "_DRAG", 0.0)
    for angle, speed in ((45, 20), (30, 15), (60, 25)):
        range_m = speed**2 * math.sin(2 * math.radians(angle)) / 9.81
        assert term_data.land(angle, speed) == pytest.approx(range_m, abs=0.3)


@pytest.mark.parametrize("text", ["To reach 0 m, throw at 45 degrees with 1 m/s", "", "with 9 m/s"])
def test_a_text_without_a_throw_scores_worst(text: str) -> None:
    assert term_data.miss(text) == 1.0


def test_the_data_is_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = term_data.DATA
    monkeypatch.setattr(term_data, "DATA", tmp_path)
    monkeypatch.setattr(term_data, "CAPITALS", tmp_path / "capitals.sqlite")
    term_data.main()
    for path in sorted(tmp_path.glob("*.jsonl")):
        assert path.read_text() == (shipped / path.name).read_text()
    tables = []
    for path in (tmp_path, shipped):
        with closing(sqlite3.connect(path / "capitals.sqlite")) as database:
            tables.append(database.execute("SELECT * FROM capitals").fetchall())
    assert tables[0] == tables[1]
