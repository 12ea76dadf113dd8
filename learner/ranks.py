"""Small exchanges between ranks: what must be identical everywhere before a decision. One rank pays nothing."""

import torch
import torch.distributed as dist


def sum_over_ranks(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Add float64 values of all ranks. Exact where every entry is 0 on all ranks but one."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Take the greatest of each entry over ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def gather_over_ranks(values: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return every rank's values, in rank order."""
    if dist.get_world_size() == 1:
        return [values]
    mine = values.to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.to(values.device) for part in parts]


def _reduce(values: torch.Tensor, device: torch.device, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if dist.get_world_size() == 1:
        return values
    shared = values.double().to(device)
    dist.all_reduce(shared, op=op)
    return shared.to(values.device)
