"""Clients of weights that are on the service: a checkpoint by its path, or the base model."""

from __future__ import annotations

import tinker
from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.service_errors import service_errors


def open_trainer(session: tinker.ServiceClient, path: str, model: str) -> tinker.TrainingClient | None:
    """A client that can run forward passes of the weights; None where they are for sampling only.

    Args:
        path: of a checkpoint, `tinker://...`; empty for the base model.
    """
    if "/sampler_weights/" in path:
        return None
    with service_errors(f"load {path or model}"):
        if not path:
            # An adapter that nothing has trained changes nothing.
            return session.create_lora_training_client(model, rank=1, seed=0).result()
        return session.create_training_client_from_state(path).result()


def open_sampler(session: tinker.ServiceClient, path: str, model: str) -> tuple[tinker.SamplingClient, Tokenizer]:
    """A client that samples from the weights, and the model's tokenizer."""
    trainer = open_trainer(session, path, model)
    with service_errors(f"load {path or model} for sampling"):
        if trainer is None:
            sampler = session.create_sampling_client(model_path=path).result()
            return sampler, sampler.get_tokenizer()
        # Also of the base model: a client that is asked for by its name alone knows no tokenizer of the local engine's.
        return trainer.save_weights_and_get_sampling_client().result(), trainer.get_tokenizer()
