"""Report of a run: its page in a browser, hostile names, and the sensitivity to the weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browser, page_text
from mlflow import MlflowClient
from mlflow_store import new_store
from selenium.webdriver.remote.webdriver import WebDriver

from blocks.storage import RunStorage
from objectives.term_weights.targets import TargetSpec
from tasks.reports.run_report import (
    FACTORS,
    SENSITIVITY_COLUMNS,
    SENSITIVITY_NOTE,
    WINDOW,
    ReportExtras,
    _factor,
    _reasons_of_rise,
    report_markdown,
    sensitivity_cells,
    write_report,
)
from tasks.reports.summary import RunSummary
from tasks.reports.tables import Control, Estimate, HeldOutRow, TermRow, target_rows
from tasks.training.tracking.metrics import MetricsLog

HOSTILE = "</script><script>document.title='pwned'</script>"


def rl_history() -> dict[str, list[tuple[int, float]]]:
    steps = range(30)
    history = {
        "env/all/reward/total": [(step, step / 30) for step in steps],
        "test/env/all/reward/total": [(0, 0.1), (30, 0.9)],
        "env/all/num_letters": [(step, step / 3) for step in steps],
        "env/all/total_episodes": [(step, 16.0) for step in steps],
        "optim/entropy": [(step, 5 - step / 10) for step in steps],
        "test/exact_match": [(0, 0.0), (30, 0.5)],
        f"term/{HOSTILE}/skipped": [(3, 1.0), (4, 1.0)],
    }
    for name in ("base", "kl"):
        for field in ("value", "weight", "contribution", "grad_norm_weighted", "grad_share", "cosine_to_base"):
            history[f"term/{name}/{field}"] = [(step, 0.5) for step in steps]
    history["term/kl/multiplier"] = [(step, 0.1 * step) for step in steps]
    history["test/term/kl/value"] = [(0, 0.0), (30, 0.4)]
    return history


EFFECT = "Half of the problems gain more than the others."


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    client = MlflowClient(new_store(folder))
    experiment = client.create_experiment("x", artifact_location=str(folder / "artifacts"))
    tags = {"prefect.flow_name": "rl", "tinker_flows.warning.x": HOSTILE, "tinker_flows.term.kl": f"KL. {HOSTILE}"}
    run = client.create_run(experiment, tags=tags)
    client.log_param(run.info.run_id, "model", "tiny")
    history = rl_history()
    targets = target_rows(history, {"kl": TargetSpec(at_most=0.25)})
    control = {"exact_match": Control(Estimate(0.125))}
    with RunStorage(url=str(folder / "runs")).run_directory("mine") as directory:
        record = {"name": "30", "batch": 30, "epoch": 0, "final": True, "state_path": "tinker://a/weights/final"}
        directory.append_line("checkpoints.jsonl", json.dumps(record))
        log = MetricsLog(client, run.info.run_id)
        return Path(
            write_report.fn(
                directory, log, f"mine {HOSTILE}", history, ReportExtras("not registered", targets, control, EFFECT)
            )
        )


def test_the_page_is_one_file_with_every_section(page: Path) -> None:
    text = page.read_text()
    titles = ["What next?", "Results", "Parts of the reward", "Health of reinforcement learning", "Evaluators"]
    titles += ["What did each term do?", "Targets", "Held-out data", "Sensitivity to the weights"]
    assert [title for title in titles if f"<h2>{title}</h2>" not in text] == []
    assert "src=" not in text
    assert len(text) < 3e6
    assert HOSTILE not in text
    assert f"tinker-flows run rl --config {page.parent}/config.json run_name=NEW" in text
    assert "was skipped at 2 steps (3, 4)." in text
    assert "<b>not registered</b>" in text
    assert "<li>kl: KL. &lt;/script&gt;" in text


def test_effect_of_the_terms_is_the_value_minus_that_of_the_control(page: Path) -> None:
    text = page.read_text()
    assert "<th>without the terms<th>effect of the terms<tr>" in text
    assert "<b>Compared with a control without the terms, the terms raised exact_match by 0.375.</b>" in text
    assert f"<b>{EFFECT}</b>" in text
    assert "<tr><td>exact_match<td>0<td>0.5<td>0.125<td>+0.375<" in text


@pytest.fixture
def driver() -> Iterator[WebDriver]:
    with browser(1280, 1000) as driver:
        yield driver


def open_page(driver: WebDriver, page: Path, scheme: str) -> None:
    scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme_feature]})
    driver.get(page.as_uri())
    deadline = time.monotonic() + 60
    while not driver.execute_script("return document.body.dataset.drawn"):
        assert time.monotonic() < deadline, page_text(driver)[-2000:]
        time.sleep(0.1)


@pytest.mark.process
def test_the_page_draws_its_charts_without_a_network(page: Path, driver: WebDriver) -> None:
    fonts: dict[str, str] = {}
    for scheme in ("light", "dark"):
        open_page(driver, page, scheme)
        assert driver.get_log("browser") == []
        assert driver.title.startswith("mine ")
        num_plots = driver.execute_script("return document.querySelectorAll('.plot').length")
        drawn = driver.execute_script("return document.querySelectorAll('.plot .main-svg .subplot').length")
        assert drawn >= num_plots >= 6
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        fonts[scheme] = driver.execute_script("return document.querySelector('.plot').layout.font.color")
    assert fonts == {"light": "#1f2328", "dark": "#e6edf3"}


@pytest.mark.process
@pytest.mark.parametrize("width", [1280, 1920])
def test_the_page_fits_the_window_and_legends_are_outside_of_the_plots(
    page: Path, driver: WebDriver, width: int
) -> None:
    driver.set_window_size(width, 1000)
    open_page(driver, page, "light")
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    edges = driver.execute_script("""
        return [...document.querySelectorAll(".plot")].filter(plot => plot.querySelector(".legend")).map(plot => [
          plot.querySelector(".legend").getBoundingClientRect().bottom,
          plot.getBoundingClientRect().top + plot._fullLayout._size.t,
        ])""")
    assert len(edges) >= 4
    assert [(legend, area) for legend, area in edges if legend > area + 1] == []


def test_sensitivity_of_two_orthogonal_gradients() -> None:
    history = {
        "term/base/grad_norm_weighted": [(0, 3.0)],
        "term/a/grad_norm_weighted": [(0, 1.0)],
        "term/a/cosine_to_base": [(0, 0.0)],
        "term/monitor/grad_norm_weighted": [(0, 0.0)],
    }
    (row,) = sensitivity_cells(history, ("base", "a", "monitor"))
    assert len(row) == len(SENSITIVITY_COLUMNS)
    assert row == (
        "a",
        "14.3%",
        "40.0%",
        "76.9%",
        "+0.986",
        "+0.832",
        "+0.287",
        "x3 (x3 to x3)",
    )


@pytest.mark.parametrize("key", ["weight", "weight_balanced"])
def test_sensitivity_to_a_negative_weight(key: str) -> None:
    """The base gradient (1, 1) and the weighted one (0, -1) add up to (1, 0), and with twice the weight (1, -1)."""
    history = {
        "term/base/grad_norm_weighted": [(0, math.sqrt(2))],
        "term/a/grad_norm_weighted": [(0, 1.0)],
        "term/a/cosine_to_base": [(0, math.sqrt(0.5))],
        "term/a/weight": [(0, 1.0)],
        f"term/a/{key}": [(0, -1.0)],
    }
    (row,) = sensitivity_cells(history, ("base", "a"))
    for factor, text in zip(FACTORS, row[4:7], strict=True):
        total = (1.0, 1.0 - factor)
        assert float(text) == pytest.approx(sum(total) / math.sqrt(2) / math.hypot(*total), abs=5e-4)


def test_sensitivity_is_the_median_over_the_last_steps() -> None:
    """The last step alone has no gradient of the term, and the first is outside of the window."""
    norms = [9.0, *[1.0] * (WINDOW - 3), 3.0, 3.0, 0.0]
    history = {
        "term/base/grad_norm_weighted": [(step, 3.0) for step in range(len(norms))],
        "term/a/grad_norm_weighted": list(enumerate(norms)),
        "term/a/cosine_to_base": [(step, 0.0) for step in range(len(norms))],
    }
    (row,) = sensitivity_cells(history, ("base", "a"))
    assert row[:2] == ("a", "14.3%")
    assert row[-1] == "x3 (x1 to x3)"


def test_the_artifact_shows_the_spread_and_the_window_of_the_sensitivity() -> None:
    history = {
        "term/base/grad_norm_weighted": [(0, 3.0), (1, 3.0)],
        "term/a/grad_norm_weighted": [(0, 1.0), (1, 3.0)],
        "term/base/weight": [(1, 1.0)],
        "term/a/weight": [(1, 1.0)],
    }
    text = report_markdown(RunSummary("", (), (), (), (), {}, "", ()), history, ReportExtras())
    assert SENSITIVITY_NOTE in text
    assert f"last {WINDOW} steps (all of a shorter run)" in SENSITIVITY_NOTE
    assert "| x2 (x1 to x3) |" in text


def test_a_term_that_rises_although_it_is_minimized_is_explained() -> None:
    """A term with a limit may rise, and only other trained terms are a reason."""
    rows = [TermRow("base", 1.0, 1.0, 1.0, 0.9, 1.0), TermRow("kl", 0.1, 0.5, 0.05, 0.1, -0.75)]
    risen = HeldOutRow("kl", 0, 4, Estimate(0.1), Estimate(0.3), Estimate(0.2, 0.1), is_of_term=True)
    summary = RunSummary("", (), (risen,), (), (), {}, "", ())
    (text,) = _reasons_of_rise(summary, rows, {})
    assert text == (
        "kl rose although it is minimized: its share of the gradient was 10.0%, and the cosine of its gradient to that "
        "of the base loss -0.75."
    )
    assert _reasons_of_rise(summary, rows, {"kl": 0.5}) == []
    (text,) = _reasons_of_rise(summary, [*rows, TermRow("logic", 0.1, 1.0, 0.1, 0.1, 0.0)], {})
    assert text.endswith("Other terms change it, too.")
    fallen = replace(risen, change=Estimate(-0.2, 0.1))
    assert _reasons_of_rise(replace(summary, held_out=(fallen,)), rows, {}) == []


@pytest.mark.parametrize(("factor", "text"), [(2.5, "x2.5"), (1e13, "above x1000"), (math.inf, "none")])
def test_only_factors_of_use_are_named(factor: float, text: str) -> None:
    assert _factor(factor) == text
