"""Thread safety of tokenizers, whoever opens them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizer

from engine.tiny import byte_tokenizer
from tasks.common.tokenizers import lock_tokenizers

TEXT = "ab<|im_end|>c é " * 100
NUM_THREADS = 16
NUM_CALLS = 10


class SlowTokenizer(PreTrainedTokenizer):
    """One token per byte in plain Python; an instance notes if two threads use it at once."""

    def __init__(self, **options: Any) -> None:
        self.users = self.most_users = 0
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        self.users += 1
        self.most_users = max(self.most_users, self.users)
        time.sleep(1e-4)
        self.users -= 1
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def test_tokenizers_are_never_used_by_two_threads_at_once(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizers: list[Any] = [byte_tokenizer(), get_tokenizer(str(tmp_path))]  # open before the lock
    lock_tokenizers()
    lock_tokenizers()
    tokenizers.append(AutoTokenizer.from_pretrained(tmp_path))  # opened by third-party code
    # The tiny model has one token per byte, which gives the expected tokens without a tokenizer.
    special = 258
    as_bytes = list(TEXT.encode())
    as_tokens = [*b"ab", special, *"c é ".encode()] * 100

    calls: list[tuple[Callable[[Any], object], object]] = [
        (lambda tokenizer: tokenizer.encode(TEXT), as_tokens),
        (lambda tokenizer: tokenizer.encode(TEXT, split_special_tokens=True), as_bytes),
        (lambda tokenizer: tokenizer.encode(TEXT, truncation=True, max_length=2), as_tokens[:2]),
        (lambda tokenizer: tokenizer([TEXT, "a"], padding=True)["attention_mask"][1][:2], [1, 0]),
        (lambda tokenizer: tokenizer.decode(as_tokens), TEXT),
        (lambda tokenizer: tokenizer.batch_decode([as_tokens, [97]]), [TEXT, "a"]),
        (lambda tokenizer: tokenizer.convert_tokens_to_ids("<|im_end|>"), special),
        (lambda tokenizer: tokenizer.eos_token_id, special),
        (lambda tokenizer: tokenizer.tokenize("a<|im_end|>"), ["a", "<|im_end|>"]),
        (
            lambda tokenizer: tokenizer.apply_chat_template(
                [{"role": "user", "content": "é"}], tokenize=True, return_dict=False
            ).count(special),
            1,
        ),
    ]

    def use(thread: int) -> None:
        for number in range(NUM_CALLS):
            call, expected = calls[(thread + number) % len(calls)]
            for tokenizer in tokenizers:
                assert call(tokenizer) == expected

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(use, range(NUM_THREADS)))


def test_slow_tokenizers_are_never_used_by_two_threads_at_once() -> None:
    """Also one of a class that was defined after the lock, as that of a model with its own code."""
    lock_tokenizers()

    class OwnCode(SlowTokenizer):
        def encode(self, text: str, **_: Any) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return [ord(token) for token in self._tokenize(text)]

    tokenizers = [SlowTokenizer(), OwnCode()]

    def use(_: int) -> None:
        for tokenizer in tokenizers:
            assert (
                len(tokenizer.encode("é!")) == len(tokenizer.tokenize("é!")) == len(tokenizer("é!")["input_ids"]) == 3
            )

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(use, range(NUM_CALLS * NUM_THREADS)))
    assert [tokenizer.most_users for tokenizer in tokenizers] == [1, 1]


@pytest.mark.process
@pytest.mark.parametrize(
    "opening",
    [
        "from tasks.evaluation.evaluators import build_evaluator; "
        "build_evaluator('tasks.evaluation.sampled:ExactMatch', "
        "{'file': 'x', 'prompt_field': 'a', 'answer_field': 'b'})",
        "from tasks.common.sampling import open_training_client; open_training_client(None, '/sampler_weights/', '')",
    ],
)
def test_weights_and_evaluators_lock_the_tokenizers_without_importing_the_generation(opening: str) -> None:
    """In a process of its own, because the lock is that of a process."""
    code = (
        f"import sys\nfrom contextlib import suppress\nwith suppress(Exception):\n    {opening}\n"
        "from transformers import PreTrainedTokenizerBase as base\nassert hasattr(base.encode, '__wrapped__')\n"
        "assert not {'sklearn', 'torch._dynamo', 'transformers.generation.utils'} & set(sys.modules)\n"
        "from transformers.utils import is_torch_available\nassert is_torch_available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


COMPLETE_MODEL = """
from tasks.common.tokenizers import lock_tokenizers
lock_tokenizers()
from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto import auto_factory


class Remote(PreTrainedModel):
    def prepare_inputs_for_generation(self):
        return {}


assert not issubclass(Remote, GenerationMixin)
assert issubclass(auto_factory.add_generation_mixin_to_remote_model(Remote), GenerationMixin)
"""


@pytest.mark.slow
@pytest.mark.process
def test_models_with_code_of_their_own_can_generate() -> None:
    subprocess.run([sys.executable, "-c", COMPLETE_MODEL], check=True, timeout=120)
