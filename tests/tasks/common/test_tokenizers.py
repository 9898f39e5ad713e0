"""Thread safety of tokenizers, whoever opens them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoTokenizer

from engine.tiny import byte_tokenizer
from tasks.common.tokenizers import lock_tokenizers

TEXT = "ab<|im_end|>c é " * 100
NUM_THREADS = 16
NUM_CALLS = 10


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
