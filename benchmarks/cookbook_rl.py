"""``python -m benchmarks.cookbook_rl``: tinker-cookbook's RL loop with its config as the command line.

Its log gets the moment of each step, which its own times leave out what lies between.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import chz
from tinker_cookbook.rl import train
from tinker_cookbook.utils import ml_log


def main(config: train.Config) -> None:
    """Run it to its end."""
    setup = ml_log.setup_logging

    def setup_logging(*args: Any, **kwargs: Any) -> ml_log.Logger:
        logger = setup(*args, **kwargs)
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            log({**metrics, "logged_at": time.time()}, step=step)

        logger.log_metrics = log_metrics
        return logger

    ml_log.setup_logging = setup_logging
    asyncio.run(train.main(config))


if __name__ == "__main__":
    chz.nested_entrypoint(main)
