"""What dispatch and combine of ElasticBuffer must give, in plain torch over a process group."""

import math

import torch
import torch.distributed as dist

from .envs import get_global_seed

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def dispatch(
    x: Payload,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Payload, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by token that this rank receives, by source rank, then token: (x as it was given, local
    ids, -1 for experts of others, weights, source rank * num_max_tokens_per_rank + token int32,
    rows of each source rank int32 on the CPU)."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = num_experts // num_ranks
    owner_TK = torch.where(topk_idx < 0, -1, topk_idx // num_local)
    ranks = torch.arange(num_ranks, device=topk_idx.device)
    to, token = (owner_TK == ranks[:, None, None]).any(2).nonzero(as_tuple=True)
    num_sent = torch.bincount(to, minlength=num_ranks).tolist()
    num_received = _exchange(torch.tensor(num_sent, device=token.device), *[[1] * num_ranks] * 2)
    sizes = num_received.tolist(), num_sent
    tensors = *(x if isinstance(x, tuple) else (x,)), topk_idx, topk_weights
    *rows, ids, weights = (_exchange(one[token], *sizes) for one in tensors)
    source = _exchange((rank * num_max_tokens_per_rank + token).int(), *sizes)
    local = ids - rank * num_local
    ids = torch.where((local >= 0) & (local < num_local), local, -1)
    received = (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]
    return received, ids, weights, source, num_received.int().cpu()


def _exchange(rows: torch.Tensor, num_received: list[int], num_sent: list[int]) -> torch.Tensor:
    """Send the first num_sent[0] rows to rank 0, and so on. They travel as bytes, through memory of
    the host in a gloo group, which exchanges nothing else."""
    of_host = dist.get_backend() == "gloo"
    data = rows.cpu() if of_host else rows
    data = data.reshape(len(rows), math.prod(rows.shape[1:])).contiguous().view(torch.uint8)
    out = data.new_empty(sum(num_received), data.shape[1])
    dist.all_to_all_single(out, data, num_received, num_sent)
    return out.to(rows.device).view(rows.dtype).view(len(out), *rows.shape[1:])


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """bf16 [N, K, H] that follow from the number of each token (source rank *
    num_max_tokens_per_rank + token), k and the global seed: equal on all ranks."""
    del num_max_tokens_per_rank
    device = src_token_global_idx.device
    numbers = src_token_global_idx.long()[:, None] * num_topk + torch.arange(num_topk).to(device)
    phase = (numbers * 40503 % 65536 + 1).float() / 65536
    columns = torch.arange(1, hidden + 1, device=device, dtype=torch.float32)
    return torch.cos(phase[:, :, None] * columns + get_global_seed()).bfloat16()


def ordered_accumulate(
    data: torch.Tensor, initial_value: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, H]: initial_value [N, H], then data [N, K, H] in the order of k, added up in fp32 and
    rounded once."""
    total = data.new_zeros(data[:, 0].shape, dtype=torch.float32)
    if initial_value is not None:
        total += initial_value
    for k in range(data.shape[1]):
        total += data[:, k].float()
    return total.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """[T, H]: the sum of bias and y [T, K, H], the result of each expert of a token, 0 where there
    is none. reduce_in_local: each rank first adds up its rows of a token, and rounds;
    reduce_in_scaleup: each NVLink domain does so then. A sum takes the place of the last row that
    is in it."""
    num_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _sum_groups(y, topk_idx // num_local)
    if reduce_in_scaleup:
        y = _sum_groups(y, topk_idx // (num_local * num_scaleup_ranks))
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    initial = sum((one.float() for one in biases[1:]), biases[0].float()) if biases else None
    return ordered_accumulate(y, initial)


def _sum_groups(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """y [T, K, H] with the sum of each group [T, K] of a token at the last k of it, else 0."""
    num_topk, out = y.shape[1], torch.zeros_like(y)
    for k in range(num_topk):
        same = group == group[:, k : k + 1]
        is_last = ~same[:, k + 1 :].any(1)
        rows = torch.where(same[:, : k + 1, None], y[:, : k + 1], 0)
        out[:, k] = torch.where(is_last[:, None], ordered_accumulate(rows), 0)
    return out
