"""Internals of the Tinker SDK. Apart from benchmarks, only this module imports from `tinker.lib`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tinker
from tinker import types
from tinker.lib.base_url import resolve_base_url
from tinker.lib.public_interfaces.backcompat_sampling_client_future import BackcompatSamplingClientFuture

__all__ = ["SAMPLING_METHOD", "BackcompatSamplingClientFuture", "call_on_samples", "resolve_base_url"]

# Method of a sampling client through which `sample` and `compute_logprobs` send their requests.
SAMPLING_METHOD = "_sample_async_impl"


def call_on_samples(
    sampler: tinker.SamplingClient, callback: Callable[[types.ModelInput, int, types.SampleResponse], None]
) -> None:
    """Call a function with the prompt, the number of samples and the response of each request of a sampling client."""
    send = getattr(sampler, SAMPLING_METHOD)

    async def send_and_report(
        prompt: types.ModelInput, num_samples: int, *args: Any, **options: Any
    ) -> types.SampleResponse:
        response = await send(prompt, num_samples, *args, **options)
        callback(prompt, num_samples, response)
        return response

    setattr(sampler, SAMPLING_METHOD, send_and_report)
