"""The engine as a Hugging Face hub for tokenizers, for clients without internet and without access to its disk."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from engine_process import API_KEY

from engine.compute.base import BaseModel
from engine.hub_files import hub_model, hub_names

BY_NAME = """
import sys, tinker, transformers
ids = transformers.AutoTokenizer.from_pretrained("tiny").encode("a é")
service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model="tiny").result()
assert sampler.get_tokenizer().encode("a é") == ids
try:
    transformers.AutoTokenizer.from_pretrained("no/such-model")
except OSError:
    print(ids)
service.close("success").result()
"""


def test_tokenizer_loads_by_name(engine_url: str, tmp_path: Path) -> None:
    hub_settings = {"HF_ENDPOINT": engine_url, "HF_HOME": str(tmp_path), "TINKER_BASE_URL": engine_url}
    environment = {**os.environ, **hub_settings, "TINKER_API_KEY": API_KEY, "HF_TOKEN": ""}
    environment.pop("HF_HUB_OFFLINE", None)
    process = subprocess.run(
        [sys.executable, "-c", BY_NAME], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert process.stdout.strip() == "[97, 32, 195, 169]", process.stderr


def test_hub_serves_only_tokenizer_and_configuration_files(engine_url: str, base: BaseModel) -> None:
    with httpx.Client(base_url=engine_url) as http:
        info = http.get("/api/models/tiny").json()
        files = {sibling["rfilename"] for sibling in info["siblings"]}
        assert {"config.json", "tokenizer.json"} <= files
        assert not [file for file in files if file.endswith("safetensors")]
        assert {entry["path"] for entry in http.get("/api/models/tiny/tree/main").json()} == files
        head = http.head("/tiny/resolve/main/config.json")
        assert head.headers["X-Repo-Commit"] == info["sha"]
        assert int(head.headers["Content-Length"]) == (base.loaded.path / "config.json").stat().st_size
        assert head.headers["ETag"] == f'"{hub_model(base.loaded).etags["config.json"]}"'
        for path, code in (
            ("/tiny/resolve/main/model.safetensors", "EntryNotFound"),
            ("/tiny/resolve/main/../../../etc/passwd", "EntryNotFound"),
            ("/tiny/resolve/main/%2e%2e/config.json", "EntryNotFound"),
            ("/other/tiny/resolve/main/config.json", "RepoNotFound"),
        ):
            response = http.get(path)
            assert response.status_code == 404
            assert response.headers.get("X-Error-Code", code) == code


@pytest.mark.parametrize("name", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_built_in_model_has_its_hub_name(base: BaseModel, name: str) -> None:
    assert name in hub_names(replace(base.loaded, name="smollm2-135m"))
