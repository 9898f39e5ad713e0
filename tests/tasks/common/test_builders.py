"""Parameters of builders: nested mappings and lists, and the defaults of the run."""

from __future__ import annotations

import asyncio
import gzip
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
from pydantic import SecretStr
from tinker import types
from tinker_cookbook.recipes.rubric.data import Rubric, RubricBasedDatapoint
from tinker_cookbook.renderers import Message
from tinker_cookbook.tokenizer_utils import register_tokenizer

from blocks import TinkerService
from blocks.errors import ConfigError
from blocks.servers.processes import free_port
from blocks.storage import RunDirectory
from engine.tiny import byte_tokenizer
from tasks.common.builders import build, data_errors, takes
from tasks.rl.rollout_source import build_environments

TOKENIZER: Any = byte_tokenizer()


@chz.chz
class Source:
    path: str
    session: str = ""


@chz.chz
class Filtered(Source):
    words: Sequence[str] = ()


@chz.chz
class Mixture:
    sources: list[Source]
    weights: tuple[float, ...] = ()


@chz.chz
class Leaving:
    @chz.init_property
    def key(self) -> str:
        sys.exit("no key")


class Kind(Enum):
    FIRST = "first"
    LAST = "last"


@chz.chz
class Chosen:
    kind: Kind
    other: Kind | None = None


@chz.chz
class Everything:
    mixtures: list[Mixture]
    names: list[str] = chz.field(default_factory=list)
    rows: list[dict[str, Any]] = chz.field(default_factory=list)
    anything: Any = None


def made(name: str, **params: Any) -> Any:
    """Builder that these parameters give, with `session` from the run."""

    def call(builder: Any) -> tuple[Any, Any]:
        return builder, None

    return build("data", f"{__name__}:{name}", params, TOKENIZER, call, {"session": "the run's"})[0]


def test_lists_of_builders_equal_builders_by_index() -> None:
    """Index keys are the form that chz itself documents."""
    by_list = made("Mixture", sources=[{"path": "a"}, {"path": "b", "session": "own"}], weights=[1.0, 2.0])
    by_index = made(
        "Mixture",
        **{"sources.0.path": "a", "sources.1.path": "b", "sources.1.session": "own"},
        weights={0: 1.0, 1: 2.0},
    )
    assert by_list == by_index
    assert by_list == Mixture(
        sources=[Source(path="a", session="the run's"), Source(path="b", session="own")], weights=(1.0, 2.0)
    )


def test_lists_of_builders_may_be_nested_and_polymorphic() -> None:
    built = made(
        "Everything",
        mixtures=[{"sources": [{"path": "a"}]}, {"sources": [f"{__name__}:Filtered"]}],
        **{"mixtures.1.sources.0.path": "b", "mixtures.1.sources.0.words": ["x", "y"]},
        names=["n"],
        rows=[{"a": 1}],
        anything=[{"a": [1]}],
    )
    session = "the run's"
    assert built == Everything(
        mixtures=[
            Mixture(sources=[Source(path="a", session=session)]),
            Mixture(sources=[Filtered(path="b", session=session, words=["x", "y"])]),
        ],
        names=["n"],
        rows=[{"a": 1}],
        anything=[{"a": [1]}],
    )
    assert made("Everything", mixtures=[]) == Everything(mixtures=[])


def test_wrong_items_of_lists_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"sources\.0\.pth"):
        made("Mixture", sources=[{"pth": "a"}])
    with pytest.raises(ConfigError, match="An item of the list sources is empty"):
        made("Mixture", sources=[{"path": "a"}, {}])
    with pytest.raises(ConfigError, match=r"names\.1"):
        made("Everything", mixtures=[], names=["a", 3])


@pytest.mark.parametrize(("name", "params"), [("kind", {}), ("other", {"kind": "first"})])
def test_a_wrong_value_of_an_enum_is_answered_with_its_values(name: str, params: dict[str, str]) -> None:
    params |= {name: "middle"}
    with pytest.raises(ConfigError, match=rf"^data\.params\.{name} is 'middle': use one of first, last\.$"):
        made("Chosen", **params)
    assert not takes("data", f"{__name__}:Chosen", params, "session")


def test_an_exit_of_a_builder_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"The data source .* could not be read \(SystemExit: no key\): check"):
        made("Leaving")
    with pytest.raises(ConfigError, match=r"Batch 3 could not be read \(SystemExit: 3\)"), data_errors("Batch 3"):
        sys.exit(3)


def test_parameters_that_a_builder_takes_from_the_run() -> None:
    for name, params, expected in (
        ("Source", {"path": "a"}, (True, False)),
        ("Mixture", {"sources": [{"path": "a"}]}, (True, False)),
        ("Everything", {"mixtures": [{"sources": [{"path": "a"}]}]}, (True, False)),
        ("Everything", {"mixtures": []}, (False, False)),
        ("Opened", {}, (False, False)),
        ("Stored", {}, (False, True)),
    ):
        builder = f"{__name__}:{name}"
        assert tuple(takes("data", builder, params, key) for key in ("session", "directory")) == expected, name


@chz.chz
class Stored:
    directory: RunDirectory = chz.field(meta_factory=None)


@chz.chz
class Opened:
    """Builder that opens its own client and tokenizer, as recipes do."""

    url: str | None = None
    key: str | None = None

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)


@chz.chz
class Nested:
    opened: list[Opened]


@pytest.fixture
def other_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL of a service in the environment that is not the run's and does not respond."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # `tinker auth login` stores a key in the home
    return url


def test_builders_that_open_clients_reach_the_service_of_the_run(engine_url: str, other_service: str) -> None:
    def models(builder: Any) -> tuple[Any, Any]:
        clients = [opened.client() for opened in builder.opened]
        return [client.create_sampling_client(base_model="tiny").result() for client in clients], None

    with TinkerService(base_url=engine_url, api_key=SecretStr("tml-test")).session():
        samplers, _ = build("data", f"{__name__}:Nested", {"opened": [{"url": None}, {"key": None}]}, TOKENIZER, models)
        prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
        for sampler in samplers:
            assert len(sampler.sample(prompt, 1, params).result().sequences) == 1
        # Explicit values are left alone.
        builder: Any = Opened(url=other_service, key="tml-own").client()
        assert (builder._base_url, builder._api_key) == (other_service, "tml-own")
        builder = Opened(key="tml-own").client()
        assert (builder._base_url, builder._api_key) == (None, "tml-own")
    builder = Opened().client()
    assert (builder._base_url, builder._api_key) == (None, None)


def test_rubric_recipe_runs_on_the_service_of_the_run(tmp_path: Path, engine_url: str, other_service: str) -> None:
    item = RubricBasedDatapoint([Message(role="user", content="1 + 1?")], [Rubric("Is it 2?")])
    (tmp_path / "rubric.jsonl").write_text(item.to_json() + "\n")
    params = {
        "renderer_name": "qwen3_instruct",
        "batch_size": 1,
        "train_group_size": 2,
        "train_datapoint_list_builder": "tinker_cookbook.recipes.rubric.data:RubricDatapointListBuilderFromJsonl",
        "train_datapoint_list_builder.jsonl_path": str(tmp_path / "rubric.jsonl"),
        "grader_llm_name": "tiny",
        "grader_renderer_name": "qwen3_instruct",
        "model_name_for_tokenizer": "tiny",
    }
    with TinkerService(base_url=engine_url, api_key=SecretStr("tml-test")).session() as session:
        resources = {"session": session, "base_model": "tiny"}
        register_tokenizer("tiny", lambda: TOKENIZER)  # as a run does
        builder = "tinker_cookbook.recipes.rubric.env:RubricGradedDatasetBuilder"
        train, _ = build_environments(builder, params, TOKENIZER, resources)
        (env, _) = asyncio.run(train.get_batch(0)[0].make_envs())
        tokens = TOKENIZER.encode("2<|im_end|>")
        # The untrained grader gives no score, which the recipe counts as 0.
        assert asyncio.run(env.step(tokens)).reward == 0


def test_a_data_file_that_a_builder_does_not_read_is_explained(tmp_path: Path) -> None:
    """Readers of this project skip byte order marks and empty lines; those of tinker-cookbook do not."""
    path = tmp_path / "conversations.jsonl"
    row = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    common = {"renderer_name": "qwen3_instruct", "max_length": 64, "batch_size": 1}
    params = {"file_path": str(path), "common_config": common}
    for content, message in (
        (BOM_UTF8 + row, "which starts with a byte order mark: save it as UTF-8 without the mark"),
        (gzip.compress(row), "which is compressed: decompress it with gunzip"),
        (row + b"\n" + row, "whose line 2 is empty: fix or remove it"),
        (row + b'{"a": }', "whose line 2 is not valid JSON: fix or remove it"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            build("data", builder, params, TOKENIZER, lambda found: found())
        assert str(caught.value) == f"{builder} cannot read the data file {path}, {message}."
    path.write_bytes(row)
    assert len(build("data", builder, params, TOKENIZER, lambda found: found())[0]) == 1
    with pytest.raises(ConfigError, match=r"^data\.params\.common_config\.batch_size is -2: set it to at least 1\.$"):
        build(
            "data", builder, params | {"common_config": common | {"batch_size": -2}}, TOKENIZER, lambda found: found()
        )
