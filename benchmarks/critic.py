"""Baselines of several turns: group means, the critic of `flows.rl`, and the exact values.

The tiny model plays games of three turns on the engine. The first token of a turn chooses one of three classes, and the
prompt of the next turn names the classes chosen so far, so that all games can be enumerated: the engine returns the
model's probability of every token after every history. Values, advantages and the gradient of the expected reward with
respect to the logits of the classes are exact.

For the policies before and during training, the table has the error of the advantages and the spread and bias of the
gradient by baseline, and the exact reward after training with some of the baselines on equally many sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from statistics import fmean, stdev

import tinker
import torch
from rich.table import Table
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from torch import Tensor
from tqdm import tqdm

from benchmarks.scratch import KEY, bench_engine, scratch_home
from objectives.advantages import compute_gae
from tasks.rl.advantages import AdvantageSettings, compute_token_advantages, fit_critic
from tasks.rl.critic import Critic, turn_features

NUM_PROBLEMS, NUM_TURNS, NUM_CLASSES, GROUP_SIZE = 4, 3, 3, 8
SEEDS, NUM_JUDGED_SEEDS = range(10), 3
# Steps on which a critic is fitted before it is judged.
NUM_WARM_UP = 12
CODES = torch.randint(NUM_CLASSES, (NUM_PROBLEMS, NUM_TURNS), generator=torch.Generator().manual_seed(0))
REWARDS = ("each turn", "all turns")
HISTORIES = [history for length in range(NUM_TURNS) for history in product(range(NUM_CLASSES), repeat=length)]
INDEX = {history: index for index, history in enumerate(HISTORIES)}


@dataclass(frozen=True, slots=True)
class Games:
    """Played games.

    Attributes:
        problems_D: problem of each game, ``(D,)``.
        classes_DT: chosen classes, ``(D, T)``.
        rewards_DT: reward of each turn.
        groups_D: group of each game.
    """

    problems_D: Tensor
    classes_DT: Tensor
    rewards_DT: Tensor
    groups_D: Tensor

    @property
    def histories_DT(self) -> Tensor:
        """Index of the history before each turn."""
        index_DT = torch.zeros_like(self.classes_DT)
        first, code_D = 0, torch.zeros_like(self.problems_D)
        for turn in range(NUM_TURNS):
            index_DT[:, turn] = first + code_D
            first += NUM_CLASSES**turn
            code_D = code_D * NUM_CLASSES + self.classes_DT[:, turn]
        return index_DT


def rewards_of(problems_D: Tensor, classes_DT: Tensor, kind: str) -> Tensor:
    """Reward of each turn: a third for each right class, or 1 after the last turn if all are right."""
    is_right_DT = (classes_DT == CODES[problems_D]).float()
    if kind == "each turn":
        return is_right_DT / NUM_TURNS
    rewards_DT = torch.zeros_like(is_right_DT)
    rewards_DT[:, -1] = is_right_DT.prod(1)
    return rewards_DT


@dataclass(frozen=True, slots=True)
class Truth:
    """Exact figures of a policy.

    Attributes:
        probabilities_PHA: probability of each class after each history of a problem, float64.
        values_PH: expected return after each history.
        advantages_PHA: advantage of each class.
        gradient_PHA: gradient of the mean expected reward with respect to the logits of the classes.
    """

    probabilities_PHA: Tensor
    values_PH: Tensor
    advantages_PHA: Tensor
    gradient_PHA: Tensor

    @property
    def reward(self) -> float:
        """Mean expected reward."""
        return float(self.values_PH[:, 0].mean())


def enumerate_games(probabilities_PHA: Tensor, kind: str) -> Truth:
    """Compute the exact figures of a policy by a sum over all games."""
    games = torch.tensor(list(product(range(NUM_CLASSES), repeat=NUM_TURNS)))
    num_histories = len(HISTORIES)
    q_PHA = torch.zeros(NUM_PROBLEMS, num_histories, NUM_CLASSES, dtype=torch.float64)
    reached_PHA = torch.zeros_like(q_PHA)
    for problem in range(NUM_PROBLEMS):
        played = Games(torch.full((len(games),), problem), games, torch.empty(0), torch.empty(0))
        chances_DT = probabilities_PHA[problem][played.histories_DT, games]
        rewards_DT = rewards_of(played.problems_D, games, kind).double()
        for turn in range(NUM_TURNS):
            to_go_D = rewards_DT[:, turn:].sum(1)
            later_D = chances_DT[:, turn + 1 :].prod(1)
            place = (played.histories_DT[:, turn], games[:, turn])
            q_PHA[problem].index_put_(place, later_D * to_go_D, accumulate=True)
            reached_PHA[problem].index_put_(place, chances_DT.prod(1), accumulate=True)
    values_PH = (probabilities_PHA * q_PHA).sum(2)
    advantages_PHA = q_PHA - values_PH[:, :, None]
    # The gradient of a class's logprob is its one-hot vector minus the probabilities. Advantages have the mean 0 under
    # the probabilities, so only the one-hot vector contributes.
    return Truth(probabilities_PHA, values_PH, advantages_PHA, reached_PHA * advantages_PHA / NUM_PROBLEMS)


def play(truth: Truth, kind: str, num_groups: int, generator: torch.Generator) -> Games:
    """Draw groups of games from the probabilities; consecutive groups have the problems in rotation."""
    groups_D = torch.arange(num_groups).repeat_interleave(GROUP_SIZE)
    problems_D = groups_D % NUM_PROBLEMS
    classes_DT = torch.zeros(len(groups_D), NUM_TURNS, dtype=torch.int64)
    for turn in range(NUM_TURNS):
        histories_D = Games(problems_D, classes_DT, torch.empty(0), groups_D).histories_DT[:, turn]
        chances_DA = truth.probabilities_PHA[problems_D, histories_D]
        classes_DT[:, turn] = chances_DA.multinomial(1, generator=generator)[:, 0]
    return Games(problems_D, classes_DT, rewards_of(problems_D, classes_DT, kind), groups_D)


def groups_of(games: Games) -> list[TrajectoryGroup]:
    """Return games as groups of trajectories whose turns sample one token each."""
    groups: dict[int, list[Trajectory]] = {}
    columns = (games.groups_D, games.problems_D, games.classes_DT, games.rewards_DT)
    for group, problem, classes, rewards in zip(*(column.tolist() for column in columns), strict=True):
        prompts = [types.ModelInput.from_ints(_prompt(problem, tuple(classes[:turn]))) for turn in range(NUM_TURNS)]
        turns = [
            Transition(prompt, TokensWithLogprobs([choice], [0.0]), reward, episode_done=False)
            for prompt, choice, reward in zip(prompts, classes, rewards, strict=True)
        ]
        groups.setdefault(group, []).append(Trajectory(turns, types.ModelInput.empty()))
    return [TrajectoryGroup(group, [0.0] * len(group), [{} for _ in group]) for group in groups.values()]


def game_features(prompt: tinker.ModelInput, history: Sequence[Transition]) -> list[float]:
    """One-hot features of the problem and the turn, and of the problem and the class of each earlier turn."""
    problem, classes = bytes(prompt.to_ints()).decode()[1:].split(":")
    places = [(len(classes), 0), *((turn, 1 + int(choice)) for turn, choice in enumerate(classes))]
    features = [0.0] * (NUM_PROBLEMS * NUM_TURNS * (1 + NUM_CLASSES))
    for turn, column in places:
        features[(int(problem) * NUM_TURNS + turn) * (1 + NUM_CLASSES) + column] = 1.0
    return features


class Estimator:
    """Estimator of `flows.rl`; a critic estimates the values of a step before it learns from the step."""

    def __init__(self, settings: AdvantageSettings) -> None:
        self._settings = settings

    def __call__(self, games: Games, truth: Truth | None = None) -> Tensor:
        """Estimate the advantages of a step, ``(D, T)``."""
        groups, settings = groups_of(games), self._settings
        if settings.critic:
            self._settings = replace(settings, critic=fit_critic(groups, settings, settings.critic))
        return compute_token_advantages(groups, settings).advantages_T.view(-1, NUM_TURNS)


class ExactEstimator(Estimator):
    """Generalized advantage estimation with the exact values of the policy."""

    def __call__(self, games: Games, truth: Truth | None = None) -> Tensor:
        assert truth is not None
        values_DT = truth.values_PH[games.problems_D[:, None], games.histories_DT].float()
        mask, offsets = torch.ones(values_DT.numel(), dtype=torch.bool), NUM_TURNS * torch.arange(len(values_DT) + 1)
        decay = self._settings.decay
        advantages = compute_gae(games.rewards_DT.flatten(), values_DT.flatten(), mask, offsets, decay=decay)
        return advantages.view(-1, NUM_TURNS)


BUILT_IN, OF_GAMES = Critic("built-in", turn_features), Critic("of the games", game_features)
ESTIMATORS: Mapping[str, Callable[[], Estimator]] = {
    "group_mean": lambda: Estimator(AdvantageSettings()),
    "leave_one_out": lambda: Estimator(AdvantageSettings("leave_one_out")),
    "per_turn": lambda: Estimator(AdvantageSettings("per_turn")),
    "discounted": lambda: Estimator(AdvantageSettings("discounted")),
    "gae, decay 0.95": lambda: Estimator(AdvantageSettings("gae")),
    "critic, decay 1": lambda: Estimator(AdvantageSettings("gae", decay=1.0, critic=BUILT_IN)),
    "critic, decay 0.95": lambda: Estimator(AdvantageSettings("gae", critic=BUILT_IN)),
    "critic of the games, decay 1": lambda: Estimator(AdvantageSettings("gae", decay=1.0, critic=OF_GAMES)),
    "critic of the games, decay 0.95": lambda: Estimator(AdvantageSettings("gae", critic=OF_GAMES)),
    "exact values, decay 1": lambda: ExactEstimator(AdvantageSettings(decay=1.0)),
    "exact values, decay 0.95": lambda: ExactEstimator(AdvantageSettings()),
}
TRAINED = ("leave_one_out", "per_turn", "critic, decay 0.95", "critic of the games, decay 0.95")


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of an estimator for a policy.

    Attributes:
        error: root mean square error of the advantages over the root mean square of the exact ones.
        cosine: cosine of the mean gradient to the exact one.
        ratio: norm of the mean gradient over that of the exact one.
        spread: root mean square distance of the gradient of a step from its mean, over the norm of the exact one.
    """

    error: float
    cosine: float
    ratio: float
    spread: float


def judge(estimator: Estimator, truth: Truth, kind: str, num_steps: int, seed: int) -> Quality:
    """Measure an estimator on steps of one group per problem; a critic has learned from all preceding steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_WARM_UP):
        estimator(play(truth, kind, NUM_PROBLEMS, generator), truth)
    gradients, errors, squares = list[Tensor](), 0.0, 0.0
    for _ in range(num_steps):
        games = play(truth, kind, NUM_PROBLEMS, generator)
        advantages_DT = estimator(games, truth).double()
        place = (games.problems_D[:, None].expand(-1, NUM_TURNS), games.histories_DT, games.classes_DT)
        exact_DT = truth.advantages_PHA[place]
        errors += float((advantages_DT - exact_DT).square().sum())
        squares += float(exact_DT.square().sum())
        gradient_PHA = torch.zeros_like(truth.gradient_PHA)
        gradient_PHA.index_put_(place, advantages_DT, accumulate=True)
        scores_DTA = advantages_DT[:, :, None] * truth.probabilities_PHA[place[0], place[1]]
        gradient_PHA.index_put_(place[:2], -scores_DTA, accumulate=True)
        gradients.append(gradient_PHA.flatten() / len(games.problems_D))
    by_step, exact = torch.stack(gradients), truth.gradient_PHA.flatten()
    mean, norm = by_step.mean(0), exact.norm()
    return Quality(
        (errors / squares) ** 0.5,
        float(mean @ exact / mean.norm() / norm),
        float(mean.norm() / norm),
        float((by_step - mean).square().sum(1).mean().sqrt() / norm),
    )


class Player:
    """The tiny model on the engine, and its training with one baseline."""

    def __init__(self, session: tinker.ServiceClient, kind: str, seed: int) -> None:
        self._kind, self._seed, self._step = kind, seed, 0
        self._client = session.create_lora_training_client("tiny", rank=8, seed=seed).result()
        self._sampler = self._client.save_weights_and_get_sampling_client().result()

    def truth(self) -> Truth:
        """Enumerate the games of the current weights."""
        pending = [
            [
                self._sampler.sample(
                    types.ModelInput.from_ints([*_prompt(problem, history), 0]),
                    1,
                    types.SamplingParams(max_tokens=1),
                    include_prompt_logprobs=True,
                    topk_prompt_logprobs=264,
                )
                for history in HISTORIES
            ]
            for problem in range(NUM_PROBLEMS)
        ]
        probabilities_PHA = torch.zeros(NUM_PROBLEMS, len(HISTORIES), NUM_CLASSES, dtype=torch.float64)
        for problem, requests in enumerate(pending):
            for index, request in enumerate(requests):
                rows = request.result().topk_prompt_logprobs
                assert rows is not None
                last = rows[-1]
                assert last is not None
                tokens, logprobs = zip(*last, strict=True)
                classes = torch.tensor(tokens) % NUM_CLASSES
                chances = torch.tensor(logprobs, dtype=torch.float64).exp()
                probabilities_PHA[problem, index].index_add_(0, classes, chances)
        sums = probabilities_PHA.sum(2)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-3), "the engine returned all tokens"
        return enumerate_games(probabilities_PHA / sums[:, :, None], self._kind)

    def train(self, estimator: Estimator, num_steps: int, learning_rate: float) -> None:
        """Train on steps of one group per problem."""
        for _ in range(num_steps):
            games, tokens_DT, logprobs_DT = self._play()
            advantages_DT = estimator(games)
            data = [
                _datum(_prompt(int(games.problems_D[row]), tuple(games.classes_DT[row, :turn].tolist())), *values)
                for row in range(len(games.problems_D))
                for turn in range(NUM_TURNS)
                for values in [(tokens_DT[row][turn], logprobs_DT[row][turn], float(advantages_DT[row, turn]))]
            ]
            self._client.forward_backward(data, "importance_sampling")
            self._client.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
            self._sampler = self._client.save_weights_and_get_sampling_client().result()
            self._step += 1

    def _play(self) -> tuple[Games, list[list[int]], list[list[float]]]:
        """Play one group per problem on the engine."""
        groups_D = torch.arange(NUM_PROBLEMS).repeat_interleave(GROUP_SIZE)
        classes_DT = torch.zeros(len(groups_D), NUM_TURNS, dtype=torch.int64)
        tokens_DT, logprobs_DT = [list[int]() for _ in groups_D], [list[float]() for _ in groups_D]
        for turn in range(NUM_TURNS):
            pending = [
                self._sampler.sample(
                    types.ModelInput.from_ints(_prompt(int(problem), tuple(classes_DT[row, :turn].tolist()))),
                    1,
                    types.SamplingParams(max_tokens=1, seed=hash((self._seed, self._step, turn, row)) % 2**30),
                )
                for row, problem in enumerate(groups_D)
            ]
            for row, request in enumerate(pending):
                (sequence,) = request.result().sequences
                assert sequence.logprobs is not None
                tokens_DT[row].append(sequence.tokens[0])
                logprobs_DT[row].append(sequence.logprobs[0])
                classes_DT[row, turn] = sequence.tokens[0] % NUM_CLASSES
        rewards_DT = rewards_of(groups_D, classes_DT, self._kind)
        return Games(groups_D, classes_DT, rewards_DT, groups_D), tokens_DT, logprobs_DT


def _prompt(problem: int, history: tuple[int, ...]) -> list[int]:
    return list(f"Q{problem}:{''.join(map(str, history))}".encode())


def _datum(prompt: list[int], token: int, logprob: float, advantage: float) -> tinker.Datum:
    untrained = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": torch.tensor([*prompt[1:], token]),
        "logprobs": torch.tensor([*untrained, logprob]),
        "advantages": torch.tensor([*untrained, advantage]),
    }
    tensors = {name: types.TensorData.from_torch(tensor) for name, tensor in inputs.items()}
    return tinker.Datum(model_input=types.ModelInput.from_ints(prompt), loss_fn_inputs=tensors)


def measure(*, num_steps: int = 20, num_judged: int = 300, learning_rate: float = 1e-2) -> Table:
    """Return the quality of each baseline, and the reward that it leads to.

    Args:
        num_steps: updates of each training run.
        num_judged: steps from which the quality is measured, per seed and policy.
    """
    num_tokens = num_steps * NUM_PROBLEMS * GROUP_SIZE * NUM_TURNS
    title = f"Baselines of games of {NUM_TURNS} turns, mean of {NUM_JUDGED_SEEDS} seeds, rewards of {len(SEEDS)}"
    table = Table(title=title, title_justify="left")
    for column in ("reward for", "policy", "baseline"):
        table.add_column(column)
    for column in ("error", "cosine", "ratio of norms", "spread", f"reward after {num_tokens:,} tokens"):
        table.add_column(column, justify="right")
    with (
        scratch_home() as folder,
        bench_engine(folder, "tiny") as url,
        tinker.ServiceClient(base_url=url, api_key=KEY) as session,
    ):
        for kind in REWARDS:
            _add_rows(table, session, kind, num_steps, num_judged, learning_rate)
    return table


def _add_rows(
    table: Table, session: tinker.ServiceClient, kind: str, num_steps: int, num_judged: int, rate: float
) -> None:
    truths: dict[str, list[Truth]] = {"untrained": [], "half trained": []}
    rewards: dict[str, list[float]] = {name: [] for name in TRAINED}
    for name, seed in tqdm(list(product(TRAINED, SEEDS)), desc=f"critic: reward for {kind}"):
        player, estimator = Player(session, kind, seed), ESTIMATORS[name]()
        for policy in truths:
            if name == TRAINED[0] and seed < NUM_JUDGED_SEEDS:
                truths[policy].append(player.truth())
            player.train(estimator, num_steps // 2, rate)
        rewards[name].append(player.truth().reward)
    for policy, of_policy in truths.items():
        for name, make in ESTIMATORS.items():
            qualities = [judge(make(), truth, kind, num_judged, seed) for seed, truth in enumerate(of_policy)]
            figures = [f"{fmean(column):.2f}" for column in zip(*map(astuple, qualities), strict=True)]
            reached = rewards.get(name, []) if policy == "half trained" else []
            reward = f"{fmean(reached):.3f} ± {stdev(reached):.3f}" if reached else ""
            before = f"{policy} ({fmean(truth.reward for truth in of_policy):.2f})"
            table.add_row(kind, before, name, *figures, reward)
