"""Cuts samples into micro-batches: a prefix tree per group, several trees per row, several rows per forward.

The K samples of a group share their prompt, and often the beginning of their responses. A tree holds every shared token
once; a token attends to its ancestors; its position is its depth. So each sample sees exactly what it would see alone,
and the prompt costs one forward instead of K (exact in fp32; benchmarks/learner.py has the gain).
The last token of a response predicts nothing and is left out.

Pure numpy: what a mask looks like to a model is decided in `families.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.types import Group

SampleKey = tuple[int, int]  # (key of the group as given to `plan`, index of the sample in the group)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Some samples of one group, every shared prefix stored once."""

    tokens: np.ndarray  # (L,) int64
    depths: np.ndarray  # (L,) int64, position of a token in its sample
    starts: tuple[int, ...]  # per sample: its first node of its own; its path before that is shared
    paths: tuple[np.ndarray, ...]  # per sample: nodes of its tokens, from the first of the prompt
    keys: tuple[SampleKey, ...]
    targets: tuple[np.ndarray, ...]  # per sample: (T,) response tokens, predicted at the last T nodes of its path

    @property
    def size(self) -> int:
        """Tokens of the tree."""
        return len(self.tokens)

    def mask(self) -> np.ndarray:
        """Return (L, L) bool: node i sees node j, which is i itself or an ancestor."""
        sees = np.zeros((self.size, self.size), dtype=bool)
        for start, path in zip(self.starts, self.paths, strict=True):
            shared = int(
                np.searchsorted(path, start)
            )  # paths ascend: what lies before `start` belongs to earlier samples
            own = path[shared:]
            sees[own[:, None], path[None, :shared]] = True
            sees[own[:, None], own[None, :]] = np.tri(len(own), dtype=bool)
        return sees


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B rows of C tokens for one forward, and the M (node, next token) pairs whose logprobs are wanted."""

    rows: tuple[tuple[Tree, ...], ...]
    width: int  # C, tokens of the longest row
    keys: tuple[SampleKey, ...]  # samples in the order of the pairs
    lengths: np.ndarray  # (samples,) response tokens of each
    nodes: np.ndarray  # (U,) int64 ascending, places in the flattened rows at which the head runs
    pair_nodes: np.ndarray  # (M,) int64, index into `nodes`
    pair_tokens: np.ndarray  # (M,) int64, token predicted there

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.rows) * self.width


def build_tree(prompt: np.ndarray, responses: Sequence[np.ndarray], keys: Sequence[SampleKey]) -> Tree:
    """Store prompt and responses so that each shared prefix appears once.

    Responses are sorted, so that each shares its longest prefix with its neighbour.

    Args:
        prompt: (P,) token ids, at least one.
        responses: per sample (T,) token ids, at least one.
        keys: per sample, returned with the tree.
    """
    order = sorted(range(len(responses)), key=lambda i: responses[i].tolist())
    tokens, depths, starts, paths = ([np.asarray(prompt)], [np.arange(len(prompt))], [0], [])
    size, previous, path = len(prompt), responses[order[0]][:0], np.arange(len(prompt))
    for i in order:
        inputs = responses[i][:-1]
        shared = _common_prefix(previous, inputs)
        own = np.arange(size, size + len(inputs) - shared)
        path = np.concatenate([path[: len(prompt) + shared], own])
        tokens.append(inputs[shared:])
        depths.append(np.arange(len(prompt) + shared, len(path)))
        if paths:
            starts.append(size)
        paths.append(path)
        size, previous = size + len(own), inputs
    return Tree(
        tokens=np.concatenate(tokens).astype(np.int64),
        depths=np.concatenate(depths).astype(np.int64),
        starts=tuple(starts),
        paths=tuple(paths),
        keys=tuple(keys[i] for i in order),
        targets=tuple(responses[i].astype(np.int64) for i in order),
    )


def plan(
    groups: Mapping[int, Group],
    chosen: Mapping[int, Sequence[int]],
    *,
    max_tokens: int,
    share: bool,
    attention_cost: float = 0.0,
    whole_groups: bool = False,
    one_tree_per_row: bool = False,
) -> list[MicroBatch]:
    """Cut the chosen samples into micro-batches of at most `max_tokens` tokens, padding included.

    A single sample longer than that gets a micro-batch of its own. The plan depends on nothing but its arguments.

    Args:
        groups: the groups of this rank, by a number of the caller's.
        chosen: per group, the samples to compute; a group without any takes no part.
        max_tokens: budget of one forward.
        share: compute prefixes once where that costs less than computing samples apart.
        attention_cost: cost of one attended token beside the cost of a token (`families.attention_cost`).
        whole_groups: never cut a group into several micro-batches; a group larger than the budget exceeds it.
        one_tree_per_row: leave rows padded, for models that take no block mask.
    """
    items = []
    for g, samples in chosen.items():
        trees = _trees(groups[g], g, samples, max_tokens, share, attention_cost)
        items += [trees] if whole_groups and trees else [[tree] for tree in trees]
    items.sort(key=lambda trees: -max(tree.size for tree in trees))  # stable: ties keep the order of the groups
    bins: list[_Bin] = []
    for trees in items:
        if not any(candidate.add(trees) for candidate in bins):
            bins.append(_Bin(trees, max_tokens, one_tree_per_row))
    return [micro_batch(candidate.rows) for candidate in bins]


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks, the greatest first, each to the least loaded; identical on every rank."""
    loads, shares = [0.0] * num_ranks, [[] for _ in range(num_ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[i]
        shares[rank].append(i)
    return [sorted(share) for share in shares]


class _Bin:
    """A micro-batch being filled: rows of the width of its first and longest tree."""

    def __init__(self, trees: list[Tree], max_tokens: int, one_tree_per_row: bool) -> None:
        self.one_tree_per_row = one_tree_per_row
        self.width = max(tree.size for tree in trees)
        self.max_rows = max(1, max_tokens // self.width)
        self.rows: list[list[Tree]] = []
        self.room: list[int] = []
        self._place(trees, limit=len(trees))  # a whole group larger than the budget is taken all the same

    def add(self, trees: list[Tree]) -> bool:
        """Take the trees if they all fit."""
        return self._place(trees, limit=self.max_rows)

    def _place(self, trees: list[Tree], limit: int) -> bool:
        room, places = list(self.room), []
        for tree in trees:
            row = next((r for r, free in enumerate(room) if free >= tree.size), len(room))
            if row == len(room):
                room.append(self.width)
            room[row] -= self.width if self.one_tree_per_row else tree.size
            places.append(row)
        if len(room) > max(limit, self.max_rows):
            return False
        self.rows += [[] for _ in range(len(room) - len(self.rows))]
        for tree, row in zip(trees, places, strict=True):
            self.rows[row].append(tree)
        self.room = room
        return True


def _trees(
    group: Group, index: int, samples: Sequence[int], max_tokens: int, share: bool, attention_cost: float
) -> list[Tree]:
    """Cut one group into trees of the number of samples that costs least."""
    if not samples:
        return []
    prompt = np.asarray(group.draw.prompt.token_ids)
    responses = {k: np.asarray(group.samples[k].token_ids) for k in samples}
    order = sorted(samples, key=lambda k: responses[k].tolist())
    best: list[Tree] = []
    best_cost = np.inf
    size = len(order) if share else 1
    while size >= 1:
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        trees = [build_tree(prompt, [responses[k] for k in part], [(index, k) for k in part]) for part in parts]
        cost = sum(tree.size * (1.0 + attention_cost * tree.size) for tree in trees)
        if cost < best_cost and (size == 1 or max(tree.size for tree in trees) <= max_tokens):
            best, best_cost = trees, cost
        size = -(-size // 2) if size > 1 else 0
    return best


def micro_batch(rows: Sequence[Sequence[Tree]]) -> MicroBatch:
    """Lay trees out in rows and list the pairs to score."""
    width = max(sum(tree.size for tree in row) for row in rows)
    keys, lengths, places, tokens = [], [], [], []
    for r, row in enumerate(rows):
        offset = r * width
        for tree in row:
            for key, path, target in zip(tree.keys, tree.paths, tree.targets, strict=True):
                keys.append(key)
                lengths.append(len(target))
                places.append(offset + path[len(path) - len(target) :])
                tokens.append(target)
            offset += tree.size
    nodes, pair_nodes = np.unique(np.concatenate(places), return_inverse=True)
    return MicroBatch(
        rows=tuple(tuple(row) for row in rows),
        width=width,
        keys=tuple(keys),
        lengths=np.asarray(lengths),
        nodes=nodes,
        pair_nodes=pair_nodes,
        pair_tokens=np.concatenate(tokens),
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
