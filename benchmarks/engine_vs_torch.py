"""Training step on the local engine, against a plain loop with torch and peft.

Both train a LoRA adapter of rank 8 on the same sequences and model, with weights of the same dtype and with the same
number of threads. The peer pads all sequences to the longest, the engine within micro-batches of similar length. Our
step goes through the SDK, HTTP and the engine process; the peer is a loop as written in a notebook. Of two rows with
the tiny model, one waits for each step, as the peer does, and one sends the next step first, as `Trainer` does where
no term needs a forward pass, and as tinker-cookbook's loops do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import tinker
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rows import Row, on_device
from benchmarks.scratch import scratch_home, solutions
from blocks.files.local import home
from blocks.servers.processes import local_engine
from engine.models import DtypeName, resolve_model

RANK, ALPHA = 8, 32
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
RAGGED = [16, 24, 32, 48, 64, 96, 160, 320]  # mean 95
TOLERANCES: dict[DtypeName, float] = {"float32": 1e-4, "bfloat16": 2e-2}  # of the initial loss, relative
ADAM = tinker.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)

Steps = Callable[[int], float]  # run a number of steps; return the last loss


def measure(
    *,
    repetitions: int = 7,
    steps: int = 10,
    with_smollm: bool = True,
    device: str = "cpu",
    dtype: DtypeName = "float32",
) -> list[Row]:
    """Return two rows for the tiny model and two for SmolLM2, whose repetitions are single steps.

    The second SmolLM2 row has a batch of mixed lengths, which the peer pads to the longest and the engine sorts. On a
    GPU a third one has a batch of 8,192 tokens.
    """
    shapes = [[128] * 8, RAGGED, *([[128] * 64] if device != "cpu" else [])]
    with scratch_home():
        rows = [
            _measure("tiny", [128] * 16, repetitions, steps, device, dtype, sends_ahead=sends_ahead)
            for sends_ahead in (False, True)
        ]
        if with_smollm:
            rows += [_measure("smollm2-135m", lengths, min(repetitions, 3), 1, device, dtype) for lengths in shapes]
    return rows


def _measure(  # noqa: PLR0913
    model: str,
    lengths: Sequence[int],
    repetitions: int,
    steps: int,
    device: str,
    dtype: DtypeName,
    *,
    sends_ahead: bool = False,
) -> Row:
    path = resolve_model(model, home() / "cache")
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = [datum for length in lengths for datum in solutions(tokenizer, num_datums=1, num_tokens=length)]
    threads = 1 if model == "tiny" else torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            local_engine(model=model, dtype=dtype, threads=threads, device=device) as service,
            service.get_client() as session,
        ):
            client = session.create_lora_training_client(model, rank=RANK, seed=0).result()
            sides = (_sdk_steps(client, batch, sends_ahead=sends_ahead), _torch_steps(str(path), batch, device, dtype))
            first, expected = (run(1) for run in sides)
            for run in sides:
                run(1)  # the warm-up: on a GPU, the second pass of a shape becomes a CUDA graph
            if not math.isclose(first, expected, rel_tol=TOLERANCES[dtype]):
                raise RuntimeError(f"The first loss of {model} is {first} here but {expected} in plain torch.")
            ours, peer = [], []
            for _ in tqdm(range(repetitions), desc=f"engine_vs_torch: {model}"):
                ours.append(_time(sides[0], steps))
                peer.append(_time(sides[1], steps))
    finally:
        torch.set_num_threads(before)
    shape = (
        f"{len(lengths)} x {lengths[0]}"
        if len(set(lengths)) == 1
        else f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)}"
    )
    ours, peer = ([sum(lengths) / (ms / 1000) for ms in side] for side in (ours, peer))
    return Row(
        f"engine_vs_torch: forward_backward + optim_step, {model}, {shape} tokens{on_device(device, dtype)}"
        f"{', sent one step ahead' if sends_ahead else ''}",
        "tokens/s",
        ours,
        peer,
        peer_name=f"torch + peft + AdamW, {dtype}",
        note=f"{threads} thread{'s' if threads > 1 else ''}; the initial loss of both is {first:.4f}",
    )


def _time(run: Steps, steps: int) -> float:
    """Return the milliseconds per step."""
    started = perf_counter()
    run(steps)
    return 1000 * (perf_counter() - started) / steps


def _sdk_steps(client: tinker.TrainingClient, batch: list[tinker.Datum], *, sends_ahead: bool) -> Steps:
    def run(steps: int) -> float:
        loss, unread = 0.0, deque[Any]()
        for _ in range(steps):
            unread.append((client.forward_backward(batch, "cross_entropy"), client.optim_step(ADAM)))
            if len(unread) > sends_ahead:
                loss = _read(*unread.popleft())
        return _read(*unread.popleft()) if unread else loss

    return run


def _read(output: tinker.APIFuture[tinker.ForwardBackwardOutput], updated: tinker.APIFuture[Any]) -> float:
    loss = output.result().metrics["loss:sum"]
    updated.result()
    return loss


def _torch_steps(path: str, batch: Sequence[tinker.Datum], device: str, dtype: DtypeName) -> Steps:
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = get_peft_model(base.to(device), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(weights, lr=ADAM.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    tokens_B = [torch.tensor(datum.model_input.to_ints()) for datum in batch]
    tokens_BT = pad_sequence(tokens_B, batch_first=True).to(device)
    targets_BT, weights_BT = (
        pad_sequence([datum.loss_fn_inputs[key].to_torch() for datum in batch], batch_first=True).to(device)
        for key in ("target_tokens", "weights")
    )

    def step() -> float:
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none"
        )
        loss = (losses * weights_BT.flatten()).sum()
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    def run(steps: int) -> float:
        return [step() for _ in range(steps)][-1]

    return run
