"""Metrics of a healthy step of rl, under the names that the health watch reads."""

from __future__ import annotations

from tasks.rl.health import LENGTH, REWARD

HEALTHY = {
    "optim/entropy": 2.0,
    "mismatch/kl_k3": 0.01,
    "rollout/truncated": 0.1,
    "rollout/repetition": 0.1,
    "rollout/logprob_error": 0.0,
    "env/all/by_group/frac_all_good": 0.3,
    "env/all/by_group/frac_all_bad": 0.2,
    "async/stale_share": 0.0,
    "rollout_errors/share_skipped": 0.0,
    "time/rollout": 4.0,
    "time/environment": 1.0,
    REWARD: 0.2,
    LENGTH: 50.0,
}
