"""``python -m benchmarks.cookbook_dpo``: tinker-cookbook's DPO loop with its config as the command line."""

from __future__ import annotations

import chz
from tinker_cookbook.preference import train_dpo

if __name__ == "__main__":
    chz.nested_entrypoint(train_dpo.main)
