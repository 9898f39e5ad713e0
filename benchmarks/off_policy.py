"""Reward after a fixed number of tokens, by correction and by the age of the sampler.

The tiny model on the engine learns which of four classes of tokens each of its prompts asks for. The reward is the
share of such tokens: 0.25 for a model that knows nothing. The sampler's weights are 1, 4 or 16 updates old, as in mode
`async`, and the losses and corrections are those of `flows.rl`. The peer is the base loss alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import tinker
import torch
from rich.table import Table
from tinker import types
from tqdm import tqdm

from benchmarks.scratch import KEY, bench_engine, scratch_home
from objectives import Objective, OnePass, forward_backward_regularized
from objectives.losses.policy.correction import Correction

NUM_CLASSES, GROUP_SIZE, LENGTH = 4, 16, 8
AGES, SEEDS = (1, 4, 16), (0, 1, 2)
BASE_LOSS = "importance_sampling"
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "token ratio, truncated at 2": Correction(ratio="token", high=2.0),
    "sequence ratio, truncated at 2": Correction(ratio="sequence", high=2.0),
    "off-policy mask at 0.05": Correction(off_policy_above=0.05),
    "token ratio truncated, off-policy mask": Correction(ratio="token", high=2.0, off_policy_above=0.05),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled completion.

    Attributes:
        prompt: number of its prompt, and the class that the prompt asks for.
        tokens: its tokens.
        logprobs: logprobs of the tokens under the sampler, in nats.
    """

    prompt: int
    tokens: Sequence[int]
    logprobs: Sequence[float]

    @property
    def reward(self) -> float:
        """Share of `LENGTH` tokens that belong to the class of the prompt."""
        return sum(token % NUM_CLASSES == self.prompt for token in self.tokens) / LENGTH

    def datum(self, advantage: float) -> tinker.Datum:
        """Return the datum that trains on the completion with an advantage for each token."""
        prompt = prompt_tokens(self.prompt)
        untrained, num = [0.0] * (len(prompt) - 1), len(self.tokens)
        tensors = {
            "target_tokens": torch.tensor([*prompt[1:], *self.tokens]),
            "logprobs": torch.tensor([*untrained, *self.logprobs]),
            "advantages": torch.tensor([*untrained, *[advantage] * num]),
            "mask": torch.tensor([*untrained, *[1.0] * num]),
        }
        inputs = {name: types.TensorData.from_torch(tensor) for name, tensor in tensors.items()}
        return tinker.Datum(model_input=types.ModelInput.from_ints([*prompt, *self.tokens[:-1]]), loss_fn_inputs=inputs)


def measure(*, num_steps: int = 60, learning_rate: float = 5e-3) -> Table:
    """Return the mean reward of the last tenth of the steps with its standard deviation over the seeds."""
    num_tokens = num_steps * NUM_CLASSES * GROUP_SIZE * LENGTH
    table = Table(
        title=f"Reward (at most 1) after {num_tokens:,} sampled tokens, over {len(SEEDS)} seeds", title_justify="left"
    )
    table.add_column("correction")
    for age in AGES:
        table.add_column(f"age {age}", justify="right")
    with (
        scratch_home() as folder,
        bench_engine(folder, "tiny") as url,
        tinker.ServiceClient(base_url=url, api_key=KEY) as session,
    ):
        for name, correction in tqdm(CORRECTIONS.items(), desc="off_policy"):
            cells = []
            for age in AGES:
                rewards = [train(session, correction, age, seed, num_steps, learning_rate) for seed in SEEDS]
                cells.append(f"{fmean(rewards):.3f} ± {stdev(rewards):.3f}")
            table.add_row(name, *cells)
    return table


def train(
    session: tinker.ServiceClient,
    correction: Correction | None,
    age: int,
    seed: int,
    num_steps: int,
    learning_rate: float,
) -> float:
    """Train on samples of weights that are `age` updates old; return the mean reward over the last tenth of the steps.

    The reward of a step is that of the newest weights.
    """
    client = session.create_lora_training_client("tiny", rank=8, seed=seed).result()
    samplers = deque([client.save_weights_and_get_sampling_client().result()], maxlen=age + 1)
    rewards: list[float] = []
    with Objective(BASE_LOSS) as objective, OnePass(objective, session) as one_pass:
        objective.correct(correction)
        for step in range(num_steps):
            groups = sample(samplers[0], (seed, step))
            data = [completion.datum(advantage) for group in groups for completion, advantage in _advantages(group)]
            pending = forward_backward_regularized(client, data, one_pass, step=step, num_steps=num_steps)
            client.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
            pending.result()
            samplers.append(client.save_weights_and_get_sampling_client().result())
            if step >= num_steps - max(num_steps // 10, 1):
                latest = sample(samplers[-1], (seed, num_steps + step))
                rewards += [completion.reward for group in latest for completion in group]
    return fmean(rewards)


def sample(sampler: tinker.SamplingClient, key: tuple[int, int]) -> list[list[Completion]]:
    """Sample a group of completions of each prompt; `key` determines the seeds."""
    seeds = torch.randint(2**31, (NUM_CLASSES,), generator=torch.Generator().manual_seed(key[0] * 10**6 + key[1]))
    pending = [
        sampler.sample(
            types.ModelInput.from_ints(prompt_tokens(prompt)),
            GROUP_SIZE,
            types.SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed),
        )
        for prompt, seed in enumerate(seeds.tolist())
    ]
    groups: list[list[Completion]] = []
    for prompt, request in enumerate(pending):
        sequences = request.result().sequences
        groups.append([Completion(prompt, sequence.tokens, sequence.logprobs or []) for sequence in sequences])
    return groups


def prompt_tokens(prompt: int) -> list[int]:
    """Return the tokens of a prompt."""
    return list(f"Q{prompt}:".encode())


def _advantages(group: Sequence[Completion]) -> list[tuple[Completion, float]]:
    """Return the completions of a group with their rewards minus the mean, as `group_mean` does."""
    mean = fmean(completion.reward for completion in group)
    return [(completion, completion.reward - mean) for completion in group]
