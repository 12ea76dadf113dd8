"""One, two and three gloo ranks, any split of groups: the same advantages, loss and gradient.

Each rank holds some groups of a step. Scalars are gathered, so that every rank computes all advantages; denominators
are counted over all ranks; gradients are summed. A linear model over token features stands for the policy.

Covers slime PR 2235 (statistics reduced over some ranks), ms-swift #9917 and PR 9921 (KL gathered in another order or
twice), verl PR 5614 (sequence ratio without the data-parallel sum).
"""

import itertools
import multiprocessing
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from configs.schema import AlgorithmConfig
from estimators.aggregate import StepTotals, aggregate, count_totals
from estimators.kl import k1, kl_in_reward, kl_penalty, sequence_kl
from estimators.policy_loss import policy_loss
from estimators.registry import estimate_advantages
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.whitening import Moments, moments
from tests.estimators.samples import AGGREGATIONS, close, options

PROMPTS, SAMPLES, TOKENS, FEATURES, VOCABULARY = 5, 3, 6, 4, 7
JOIN_S = 120
SPLITS = {  # number of ranks -> the rank of each group, several ways; some leave a rank without a group
    1: ((0, 0, 0, 0, 0),),
    2: ((0, 0, 0, 1, 1), (1, 0, 1, 0, 1), (1, 1, 1, 1, 1)),
    3: ((0, 1, 2, 0, 1), (2, 2, 0, 0, 0), (1, 1, 0, 2, 1)),
}
CASES: dict[str, AlgorithmConfig] = {
    f"{estimator} {scale} {loss} {aggregation}": options(
        advantage_estimator=estimator, scale_rewards=scale, policy_loss=loss, aggregation=aggregation, **others
    )
    for (estimator, scale, loss, others), aggregation in zip(
        [
            ("rloo", "none", "rloo_sequence", {}),
            ("rloo", "batch", "ppo_clip", {}),
            ("grpo", "group", "ppo_clip", {"kl_in_reward": False, "kl_estimator": "k3"}),
            ("grpo", "batch", "gspo", {"kl_in_reward": False, "kl_estimator": "unbiased"}),
            ("reinforce_plus_plus", "batch", "ppo_clip", {"whiten_over": "sequence"}),
            ("reinforce_plus_plus", "batch", "cispo", {"whiten_over": "token"}),
            ("reinforce", "none", "reinforce", {}),
            ("reinforce_plus_plus_token", "none", "ppo_clip", {"discount": 0.9}),
        ],
        itertools.cycle(AGGREGATIONS),
    )
}


def step_inputs() -> dict[str, Tensor]:
    """Draw a step of P groups of K responses; one reward is invalid, one response has no chosen token."""
    generator = torch.Generator().manual_seed(0)
    shape = (PROMPTS, SAMPLES, TOKENS)
    lengths = torch.randint(1, TOKENS + 1, shape[:2], generator=generator)
    mask = torch.arange(TOKENS) < lengths[..., None]
    mask[:, :, 1] &= torch.rand(shape[:2], generator=generator) < 0.7  # observations
    mask[3, 2] = False
    valid = torch.ones(shape[:2], dtype=torch.bool)
    valid[1, 0] = False
    rewards = torch.where(valid, torch.randn(shape[:2], generator=generator, dtype=torch.float64), torch.nan)
    return {
        "features": torch.randn((*shape, FEATURES), generator=generator, dtype=torch.float64),
        "ids": torch.randint(0, VOCABULARY, shape, generator=generator),
        "noise": torch.randn((2, *shape), generator=generator, dtype=torch.float64) * 0.3,
        "weights": torch.randn((FEATURES, VOCABULARY), generator=generator, dtype=torch.float64) * 0.5,
        "mask": mask & valid[..., None],
        "valid": valid,
        "rewards": rewards,
    }


def one_step(algorithm: AlgorithmConfig, owner: tuple[int, ...], rank: int) -> dict[str, Tensor]:
    """Compute advantages, loss and gradient of the step on this rank, which owns some groups."""
    step = step_inputs()
    own = [group for group, its_rank in enumerate(owner) if its_rank == rank]
    weights = step["weights"].requires_grad_()
    logits = step["features"][own] @ weights
    logprobs_NT = logits.log_softmax(-1).gather(-1, step["ids"][own][..., None])[..., 0].flatten(0, 1)
    mask_NT = step["mask"][own].flatten(0, 1)
    old_NT = logprobs_NT.detach() + step["noise"][0, own].flatten(0, 1)
    ref_NT = logprobs_NT.detach() + step["noise"][1, own].flatten(0, 1)
    totals = summed_totals(count_totals(mask_NT, TOKENS))
    kl_in_the_reward = algorithm.kl_in_reward is not False
    if algorithm.advantage_estimator == "reinforce_plus_plus_token":
        advantages = token_advantages(algorithm, step, own, k1(old_NT, ref_NT), mask_NT)
        shown = all_groups(advantages.reshape(len(own), SAMPLES, TOKENS), own)
    else:
        kl_PK = all_groups(sequence_kl(old_NT, ref_NT, mask_NT).reshape(len(own), SAMPLES), own)
        rewards_PK = kl_in_reward(step["rewards"], kl_PK, algorithm.beta) if kl_in_the_reward else step["rewards"]
        num_tokens_PK = step["mask"].sum(dim=2)
        shown = estimate_advantages(algorithm, rewards_PK, step["valid"], num_tokens_PK)
        advantages = shown[own].reshape(-1, 1)
    loss = torch.zeros((), dtype=torch.float64)
    for part in torch.arange(len(mask_NT)).split(2):  # micro-batches that cut groups
        loss_NT, _ = policy_loss(algorithm, logprobs_NT[part], old_NT[part], advantages[part], mask_NT[part])
        loss = loss + aggregate(loss_NT, mask_NT[part], algorithm.aggregation, totals)
        if not kl_in_the_reward:
            kind = algorithm.kl_estimator
            assert kind is not None
            kl_NT = kl_penalty(kind, logprobs_NT[part], ref_NT[part], old_NT[part], mask_NT[part])
            loss = loss + algorithm.beta * aggregate(kl_NT, mask_NT[part], algorithm.aggregation, totals)
    gradient = torch.autograd.grad(loss, weights)[0] if own else torch.zeros_like(weights)
    loss = loss.detach()
    dist.all_reduce(loss)
    dist.all_reduce(gradient)
    return {"advantages": shown, "loss": loss, "gradient": gradient}


def token_advantages(algorithm, step, own, kl_NT, mask_NT) -> Tensor:
    valid_N = step["valid"][own].flatten()
    returns_NT = reinforce_plus_plus_token(
        step["rewards"][own].flatten(), valid_N, kl_NT, mask_NT, beta=algorithm.beta, discount=algorithm.discount
    )
    chosen_NT = mask_NT & valid_N[:, None]
    mine = moments(returns_NT, chosen_NT)
    numbers = torch.tensor([mine.count, mine.total, mine.centered_squares], dtype=torch.float64)
    gathered = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers)
    population = Moments(count=0.0, total=0.0, centered_squares=0.0)
    for count, total, squares in (part.tolist() for part in gathered):
        population = population + Moments(count=count, total=total, centered_squares=squares)
    return whiten_tokens(returns_NT, chosen_NT, population)


def summed_totals(mine: StepTotals) -> StepTotals:
    counts = torch.tensor([mine.num_tokens, mine.num_sequences, mine.num_samples])
    dist.all_reduce(counts)
    num_tokens, num_sequences, num_samples = counts.tolist()
    return StepTotals(
        num_tokens=num_tokens, num_sequences=num_sequences, num_samples=num_samples, max_new_tokens=TOKENS
    )


def all_groups(own_values: Tensor, own: list[int]) -> Tensor:
    """Put each group's values in its row on every rank."""
    values = torch.zeros((PROMPTS, *own_values.shape[1:]), dtype=torch.float64)
    values[own] = own_values.detach()
    dist.all_reduce(values)
    return values


def worker(rank: int, num_ranks: int, folder: str) -> None:
    """Run every case and split on one rank; save what it found."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{num_ranks}"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
    found = {
        (name, owner): one_step(algorithm, owner, rank)
        for owner in SPLITS[num_ranks]
        for name, algorithm in CASES.items()
    }
    torch.save(found, f"{folder}/{num_ranks}.{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[int, int], dict]:
    """Results of every rank of every number of ranks; the processes run at the same time, from one import of torch."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload([__name__])
    contexts = [
        start_processes(worker, (n, str(folder)), nprocs=n, join=False, start_method="forkserver") for n in SPLITS
    ]
    deadline = time.monotonic() + JOIN_S
    for context in contexts:
        assert context is not None
        while not context.join(timeout=1):  # raises what a rank raised
            if time.monotonic() > deadline:
                for process in filter(None, context.processes):
                    process.kill()
                pytest.fail(f"ranks must end within {JOIN_S} s")
    return {
        (n, rank): torch.load(Path(folder) / f"{n}.{rank}.pt", weights_only=True) for n in SPLITS for rank in range(n)
    }


@pytest.mark.parametrize("name", CASES)
def test_any_split_over_any_number_of_ranks_gives_the_same(found, name):
    one = found[1, 0][name, SPLITS[1][0]]
    assert one["advantages"].abs().sum() > 1 and one["gradient"].abs().sum() > 1e-2
    for (num_ranks, rank), results in found.items():
        for owner in SPLITS[num_ranks]:
            got = results[name, owner]
            for quantity in ("advantages", "loss", "gradient"):
                assert close(got[quantity], one[quantity], 1e-12), (num_ranks, rank, owner, quantity)


def test_statistics_of_one_rank_would_differ(found):
    """The cases can fail: batch statistics over the groups of one rank give other advantages."""
    step = step_inputs()
    algorithm = CASES["grpo batch gspo constant_length"]
    whole = found[1, 0]["grpo batch gspo constant_length", SPLITS[1][0]]["advantages"]
    local = estimate_advantages(algorithm, step["rewards"][:2], step["valid"][:2], step["mask"][:2].sum(dim=2))
    assert not close(local, whole[:2], 1e-2)
