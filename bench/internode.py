"""Dispatch and combine of ranks on several nodes. Between hosts that NVSHMEM connects:

    torchrun --nnodes 2 --nproc_per_node 8 bench/internode.py

Between GPUs of one host, whose memory NVSHMEM keeps from the kernels as if they were of other
nodes; the same calls on one node are then timed beside them:

    python bench/internode.py --ranks 2 --nodes 2

Checks each shape against an all-to-all before timing it. us is that of a call in a CUDA graph, the
median of the slowest rank; remote_gbs counts what the rank sends over the network that sends most:
one row for each token and other node. `ratio` is the time over that on one node, where it is one
host: what going through staging and NVSHMEM costs where the network is as fast as NVLink, and on
nodes of several ranks (--ranks 4 --nodes 2) what forwarding costs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save, timed_pool
from dispatch_combine import Bench, Shape
from einops import reduce

from moe_engine import Buffer
from moe_engine.emulation import send_message
from moe_engine.symm.base import environment

SHAPES = [
    Shape("deepseek-v3", 4096, dtype="fp8"),
    Shape("deepseek-v3", 4096),
    Shape("deepseek-v3", 128),
    Shape("qwen3-30b", 4096),
]
NUM_SMS = 24


def main(
    ranks: Annotated[int, typer.Option(help="GPUs of this host to use, without torchrun.")] = 2,
    nodes: Annotated[int, typer.Option(help="Nodes that they stand for, without torchrun.")] = 2,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on the ranks of torchrun, else on GPUs of this host."""

    def show(rank: int, line: dict[str, Any]) -> None:
        print(save("internode", path, **line), flush=True)

    if "WORLD_SIZE" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        for line in run_rank(dist.group.WORLD, SHAPES, None):
            show(0, line)
        dist.destroy_process_group()
        return
    with timed_pool(ranks, timeout_s=540) as pool:
        pool.run(report_rank, SHAPES, ranks // nodes, on_message=show)


def report_rank(group: dist.ProcessGroup, shapes: list[Shape], node_size: int) -> None:
    """`run_rank` in a pool."""
    for line in run_rank(group, shapes, node_size):
        send_message(line)


def run_rank(
    group: dist.ProcessGroup, shapes: list[Shape], node_size: int | None
) -> list[dict[str, Any]]:
    """The result lines of all shapes on rank 0, none on others. node_size: ranks of this host that
    stand for a node; they are timed as one node, too."""
    Buffer.set_num_sms(NUM_SMS)
    lines = []
    for shape in shapes:
        with environment({} if node_size is None else {"MOE_ENGINE_NODE_SIZE": str(node_size)}):
            times, facts = time_shape(group, shape)
        near = {} if node_size is None else time_shape(group, shape)[0]
        for verb, us in times.items():
            lines.append(
                dict(
                    verb=verb,
                    model=shape.model,
                    tokens=shape.tokens,
                    routing=shape.routing,
                    dtype=shape.dtype,
                    ranks=group.size(),
                    impl=f"moe_engine, {facts['nodes']} nodes, {facts['backend']}",
                    us=round(us, 1),
                    num_comm_sms=NUM_SMS,
                    remote_gbs=round(facts[verb] / us, 1) if verb in facts else None,
                    ratio_to="moe_engine, 1 node" if near else None,
                    ratio=round(us / near[verb], 3) if near else None,
                )
            )
    return lines if dist.get_rank(group) == 0 else []


def time_shape(group: dist.ProcessGroup, shape: Shape) -> tuple[dict[str, float], dict[str, Any]]:
    """(microseconds of each verb; nodes, backend, and thousands of bytes over the network)."""
    bench = Bench(group, shape)
    buffer, times = bench.buffer, bench.time_ours()
    in_rank = buffer.get_dispatch_layout(bench.idx, bench.num_experts)[3]
    in_node = reduce(in_rank, "t (node rank) -> t node", "any", node=buffer.num_nodes)
    own = bench.rank // (bench.num_ranks // buffer.num_nodes)
    rows = in_node.sum(0)
    rows[own] = 0
    most = rows.sum()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    facts: dict[str, Any] = dict(nodes=buffer.num_nodes, backend=buffer.backend)
    facts |= {
        verb: float(most) * bench.row_kb for verb in ("dispatch", "dispatch_cached", "combine")
    }
    buffer.destroy()
    forms = ("dispatch", "owned"), ("dispatch_cached", ""), ("combine", "sum"), ("layout", "")
    return {verb: times[verb, form][0] for verb, form in forms if (verb, form) in times}, facts


if __name__ == "__main__":
    typer.run(main)
