"""``python -m benchmarks.cookbook_sft``: tinker-cookbook's supervised loop with its config as the command line."""

from __future__ import annotations

import asyncio

import chz
from tinker_cookbook.supervised import train


def main(config: train.Config) -> None:
    asyncio.run(train.main(config))


if __name__ == "__main__":
    chz.nested_entrypoint(main)
