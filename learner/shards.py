"""What each rank holds of weights and moments, whatever the ZeRO stage: what a checkpoint is made of.

A shard is a stretch of one flat tensor. Together the ranks' own shards cover every trained tensor exactly once, so that a checkpoint has no
copy of anything and any number of ranks at any stage can read it. Knows DeepSpeed's optimizers by their attributes; imports nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WEIGHT = "weight"  # the float32 masters; every other kind is a moment of the optimizer (exp_avg, exp_avg_sq)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A stretch of one tensor: live memory, so reading into it changes the rank's state."""

    kind: str  # WEIGHT or a moment
    name: str  # of the parameter
    start: int  # index of its first element in the flat tensor
    data: torch.Tensor  # (length,) float32
    everywhere: bool  # every rank holds the whole tensor


def own(shard: Shard, rank: int, num_ranks: int) -> Shard:
    """Cut a shard down to what this rank writes: a tensor that all ranks hold is shared out."""
    if not shard.everywhere:
        return shard
    first, end = (len(shard.data) * r // num_ranks for r in (rank, rank + 1))
    return Shard(kind=shard.kind, name=shard.name, start=first, data=shard.data[first:end], everywhere=False)


class Shards:
    """All that one rank holds of what training changes."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], optimizer: Any, stage: int, rank: int) -> None:
        """Take the trained parameters by name and DeepSpeed's optimizer (at stage 0: torch's own)."""
        self._named, self._optimizer, self._stage, self._rank = named, optimizer, stage, rank

    def weights(self) -> Iterator[Shard]:
        """List the masters to write."""
        for name, param in self._named:
            if self._stage < 3:
                yield Shard(kind=WEIGHT, name=name, start=0, data=param.data.view(-1), everywhere=True)
            else:
                yield from self._stretch(WEIGHT, name, param, self._optimizer.fp32_partitioned_groups_flat)

    def moments(self) -> Iterator[Shard]:
        """List the optimizer's moments; none before the first update."""
        for name, param in self._named:
            for kind in self._kinds():
                if self._stage == 0:
                    data = self._optimizer.state[param][kind].view(-1)
                    yield Shard(kind=kind, name=name, start=0, data=data, everywhere=True)
                else:
                    yield from self._stretch(kind, name, param, [self._inner.state[flat][kind] for flat in self._flats()])

    def masters(self) -> Iterator[Shard]:
        """List every copy of the weights that must be read back."""
        yield from self.weights()
        if self._stage in (1, 2):
            for name, param in self._named:
                yield from self._stretch(WEIGHT, name, param, self._flats())

    def num_updates(self) -> float:
        """Return the updates behind the moments, as the optimizer counts them (it leaves out those that were skipped)."""
        state = self._inner.state.get(self._flats()[0], {})
        return float(state.get("step", 0.0))

    def prepare(self, kinds: Sequence[str], num_updates: float) -> None:
        """Make room for moments of these kinds, in the place of any that are there; then read into `masters` and `moments`."""
        if self._stage == 3:
            self._optimizer.checkpoint_event_prologue()
        for flat in self._flats():
            self._inner.state[flat] = {kind: torch.zeros_like(flat) for kind in kinds}
            if kinds:
                on = flat.device if self._inner.defaults.get("fused") else "cpu"
                self._inner.state[flat]["step"] = torch.tensor(num_updates, dtype=torch.float32, device=on)
        if self._stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False  # linked again by the next update

    def settle(self) -> None:
        """Take over what was read."""
        if self._stage == 3:
            optimizer = self._optimizer
            for half, full in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True):
                half.data.copy_(full.data)
            optimizer.checkpoint_event_epilogue()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._optimizer if self._stage == 0 else self._optimizer.optimizer

    def _flats(self) -> Sequence[torch.Tensor]:
        """List what the inner optimizer updates: the parameters, or this rank's part of them in a row."""
        if self._stage == 0:
            return [param for _, param in self._named]
        if self._stage == 3:
            return self._optimizer.fp32_partitioned_groups_flat
        return self._optimizer.single_partition_of_fp32_groups

    def _kinds(self) -> list[str]:
        state: Mapping[str, Any] = self._inner.state.get(self._flats()[0], {})
        return [kind for kind, value in state.items() if isinstance(value, torch.Tensor) and value.ndim > 0]

    def _stretch(self, kind: str, name: str, param: Any, flats: Sequence[torch.Tensor]) -> Iterator[Shard]:
        """Find this rank's part of a parameter in its rows."""
        if self._stage == 3:
            group, offset, padded = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
            start = self._rank * padded
            length = min(padded, param.ds_numel - start)
        elif param._hp_mapping is None:
            return
        else:
            place = param._hp_mapping
            group, offset = place.param_group_index, place.hp_fragment_address.start
            start, length = place.lp_fragment_address.start, place.lp_fragment_address.numel
        if length > 0:
            data = flats[group].detach()[offset : offset + length]
            yield Shard(kind=kind, name=name, start=start, data=data, everywhere=False)
