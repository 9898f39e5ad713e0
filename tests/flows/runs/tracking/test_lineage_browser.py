"""MLflow's UI in a browser: from a registered version to its run, its data file and its rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import browser, link_of, page_text, wait_for_text
from mlflow_process import running_mlflow
from selenium.webdriver.remote.webdriver import WebDriver
from sft_config import sft_fields
from waiting import wait_for

from flows.config.train import SftConfig
from flows.sft import sft
from tasks.common.digests import digest_file

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(8)
]


def click(driver: WebDriver, text: str) -> None:
    """Click the innermost element that shows a text, in one script call because the page may re-render at any time."""
    script = """
        const shown = [...document.body.querySelectorAll("*")].filter(
            element => element.offsetParent && element.innerText.replace(/\\s+/g, " ").includes(arguments[0]));
        shown.at(-1)?.click();
        return shown.length > 0
    """
    wait_for(lambda: driver.execute_script(script, text), f"an element {text!r}")


@pytest.mark.slow
@pytest.mark.usefixtures("api_key", "prefect_server")
def test_a_registered_version_leads_to_its_rows(tmp_path: Path, engine_url: str) -> None:
    data = tmp_path / "additions.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    common = {"renderer_name": "role_colon", "max_length": 128, "batch_size": 4}
    changes: dict[str, Any] = {
        "data": {
            "builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder",
            "params": {"file_path": str(data), "common_config": common},
        },
        "objective": {},
        "num_steps": 2,
        "eval_every": 0,
        "register_as": "adder",
    }
    with running_mlflow(tmp_path) as mlflow, browser() as driver:
        sft(SftConfig.model_validate(sft_fields(tmp_path, "additions-run", mlflow, engine_url) | changes))
        digest = digest_file(data)
        driver.get(f"{mlflow}/#/models/adder/versions/1")
        wait_for_text(driver, "tinker_flows.run_name")
        driver.get(wait_for(lambda: link_of(driver, "additions-run"), "the link to the run"))
        wait_for_text(driver, f"additions.jsonl ({digest})")
        page = page_text(driver)
        assert "Logged models (1)" in page
        assert "checkpoint-final" in page
        assert "checkpoint final at step 2 → adder version 1" in page
        click(driver, f"additions.jsonl ({digest})")
        wait_for_text(driver, f"Path: {data}")
        details = page_text(driver).partition("Data details for")[2]
    assert f"Digest: {digest}" in details
    assert f"num rows: {len(ROWS)}" in details
    (path,) = re.findall(r"Path: (.*)", details)
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS
