"""How DeepEP's tests start their ranks, and what callers ask of the machine."""

import os
import random
import re
import subprocess

import torch
import torch.distributed as dist

from moe_engine.symm.nodes import find_nodes

_seeds = {"local": 0, "global": 0}
_is_first_of_node = True


def init_seed(global_seed: int) -> None:
    """Seed torch and random with global_seed + rank."""
    _seeds.update({"local": global_seed + dist.get_rank(), "global": global_seed})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """The seed of this rank."""
    return _seeds["local"]


def get_global_seed() -> int:
    """The seed that all ranks know."""
    return _seeds["global"]


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Join the ranks of MASTER_ADDR:MASTER_PORT, where WORLD_SIZE counts the nodes and RANK is the
    one of this process: (rank, number of ranks, group).

    Rank r of a node takes GPU r modulo their number. The group is an NCCL group, or a gloo group
    where ranks share a GPU, which NCCL refuses, and where there is none. Tensors are bf16 and on
    that GPU by default.
    """
    global _is_first_of_node
    _is_first_of_node = local_rank == 0
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(local_rank % num_gpus)
        torch.set_default_device("cuda")
        if num_gpus < num_local_ranks:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    torch.set_default_dtype(torch.bfloat16)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("MASTER_PORT", "8361")
    num_nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    dist.init_process_group(
        "nccl" if num_gpus >= num_local_ranks else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    init_seed(seed)
    group = dist.new_group(list(range(dist.get_world_size())))
    return dist.get_rank(), dist.get_world_size(), group


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on all ranks, or on the first one of each node, and wait for one another."""
    if _is_first_of_node or not once_in_node:
        print(s, flush=True)
    dist.barrier()


def get_rdma_gbs() -> float:
    """GB/s of the network between nodes: 0, as this version uses none."""
    return 0.0


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of the NVLinks of GPU 0 in one direction, as nvidia-smi reports them, times `factor`; 0
    where it reports none."""
    try:
        report = subprocess.run(
            ["nvidia-smi", "nvlink", "--status", "--id=0"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return factor * sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", report.stdout)))


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """(nodes that a network connects, ranks of each). Collective."""
    return find_nodes(group)


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks): nodes and ranks of each, (1, R) without hybrid mode.
    Collective with it."""
    return find_nodes(group) if allow_hybrid_mode else (1, dist.get_world_size(group))
