"""Dispatch and combine against NCCL's all-to-all: python bench/dispatch_combine.py --core

Checks each shape against the all-to-all before timing it. remote_gbs counts the bytes that leave
the rank with the most of them, whichever form a verb takes; `ratio` is the time over that of the
same bytes at LINK_GBS (impl moe_engine), or over the NCCL path (impl nccl).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import MODELS, draw_topk, save, time_calls, time_graph

from moe_engine import Buffer, Options
from moe_engine.emulation import RankPool, send_message

LINK_GBS = 351.0
"""What a plain push kernel reaches between these GPUs."""

# model, tokens per rank, routing, programs that push
CORE = [
    *(("deepseek-v3", 8192, "uniform", sms) for sms in (8, 16, 24)),
    ("deepseek-v3", 8192, "zipf", 16),
    ("deepseek-v3", 1024, "uniform", 16),
    ("qwen3-30b", 8192, "uniform", 16),
]
FULL = [
    (model, tokens, routing, sms)
    for model in ("deepseek-v3", "qwen2-57b", "qwen3-30b", "mixtral-8x7b")
    for tokens in (128, 1024, 4096, 8192, 16384)
    for routing in ("uniform", "zipf")
    for sms in (4, 8, 16, 24, 32)
]


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 4,
    core: Annotated[bool, typer.Option(help="Only the points of the summary.")] = False,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""
    with RankPool(ranks, "cuda", timeout_s=540) as pool:

        def show(rank: int, line: dict[str, Any]) -> None:
            print(save("dispatch_combine", path, **line), flush=True)

        pool.run(run_rank, CORE if core else FULL, on_message=show)


def run_rank(group: dist.ProcessGroup, points: list[tuple[str, int, str, int]]) -> None:
    """All points on one rank; rank 0 reports."""
    nccl: dict[tuple[str, int, str], tuple[float, float]] = {}
    for model, num_tokens, routing, num_sms in points:
        bench = Bench(group, model, num_tokens, routing)
        key = model, num_tokens, routing
        first = key not in nccl
        if first:
            nccl[key] = bench.time_nccl()
        Buffer.set_num_sms(num_sms)
        times = bench.time_ours()
        bench.buffer.destroy()
        if bench.rank:
            continue
        fields = dict(
            model=model, tokens=num_tokens, ranks=bench.num_ranks, routing=routing, dtype="bf16"
        )
        for form, (verb, us) in times.items():
            out = bench.sent if verb == "dispatch" else bench.returned
            send_message(
                fields
                | dict(verb=verb, impl="moe_engine", us=round(us, 1), num_comm_sms=num_sms)
                | dict(remote_gbs=round(out / us / 1e3, 1), ratio_to=f"link, {form}")
                | dict(ratio=round(us / (bench.busiest[verb] / LINK_GBS / 1e3), 3))
            )
        if first:
            for verb, us in zip(("dispatch", "combine"), nccl[key], strict=True):
                ours = next(time for v, time in times.values() if v == verb)
                send_message(
                    fields
                    | dict(verb=verb, impl="nccl", us=round(us, 1), ratio_to="moe_engine")
                    | dict(ratio=round(us / ours, 3))
                )


class Bench:
    """One shape on one rank: inputs, a Buffer, and the byte counts of all ranks."""

    def __init__(self, group: dist.ProcessGroup, model: str, num_tokens: int, routing: str):
        self.num_experts, hidden, _, num_topk = MODELS[model]
        self.group, self.rank = group, dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        torch.manual_seed(self.rank)
        self.x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.idx = draw_topk(routing, num_tokens, self.num_experts, num_topk, seed=self.rank)
        self.weights = torch.rand(num_tokens, num_topk, device="cuda")
        self.buffer = Buffer.for_tokens(
            group,
            num_tokens,
            hidden,
            self.num_experts,
            num_topk,
            options=Options(timeout_s=20.0),
        )
        per_rank = self.buffer.get_dispatch_layout(self.idx, self.num_experts)[0]
        matrix = [torch.empty_like(per_rank) for _ in range(self.num_ranks)]
        dist.all_gather(matrix, per_rank, group=group)
        rows = torch.stack(matrix).double().fill_diagonal_(0)
        row_bytes = self.x[0].nbytes
        self.sent, self.returned = (float(rows.sum(d).max()) * row_bytes for d in (1, 0))
        # No faster than the busiest direction of any link.
        busiest = max(self.sent, self.returned)
        self.busiest = {"dispatch": busiest, "combine": busiest}

    def time_ours(self) -> dict[str, tuple[str, float]]:
        """Microseconds by form: dispatch read in place and owned (with its layout), combine."""
        from moe_engine.engine import KernelEngine, Tokens

        engine = self.buffer._engine
        assert isinstance(engine, KernelEngine)

        def tokens() -> Tokens:
            layout = engine.layout(self.idx, self.num_experts)
            return Tokens(self.x, self.idx, self.weights, *layout)

        def in_place() -> None:
            engine.dispatch_in_place(tokens())
            engine.release()

        recv, _, handle = engine.dispatch(tokens(), 0)
        self.check(recv.x)
        out, _ = engine.combine(recv.x, handle, None, ())
        copies = handle.is_token_in_rank.sum(1, keepdim=True)
        torch.testing.assert_close(out, (self.x.float() * copies).bfloat16())

        def owned() -> None:
            engine.dispatch(tokens(), len(recv.x))

        def combine() -> None:
            engine.combine(recv.x, handle, None, ())

        times = {
            "in place": ("dispatch", time_graph(in_place, self.group, 10, 7)),
            "owned": ("dispatch", time_graph(owned, self.group, 10, 7)),
            "sum": ("combine", time_graph(combine, self.group, 10, 7)),
        }
        self.buffer.check()
        return times

    def check(self, recv_x: torch.Tensor) -> None:
        """The rows of dispatch are those of an all-to-all of the same tokens."""
        num_local = self.num_experts // self.num_ranks
        sent = [
            self.x[(self.idx // num_local == rank).any(1)].contiguous()
            for rank in range(self.num_ranks)
        ]
        sizes = torch.tensor([len(part) for part in sent], device="cuda")
        recv = torch.empty_like(sizes)
        dist.all_to_all_single(recv, sizes, group=self.group)
        rows = self.x.new_empty(int(recv.sum()), self.x.shape[1])
        dist.all_to_all_single(
            rows, torch.cat(sent), recv.tolist(), sizes.tolist(), group=self.group
        )
        assert torch.equal(rows, recv_x)

    def time_nccl(self) -> tuple[float, float]:
        """Dispatch and combine as one copy per (token, expert): sort, all-to-all, weighted sum."""
        num_local = self.num_experts // self.num_ranks
        flat = self.idx.flatten()
        num_topk = self.idx.shape[1]

        def send() -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
            order = flat.argsort()
            counts = torch.bincount(flat // num_local, minlength=self.num_ranks)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self.group)
            out, into = counts.tolist(), theirs.tolist()
            rows = self.x.new_empty(sum(into), self.x.shape[1])
            dist.all_to_all_single(rows, self.x[order // num_topk], into, out, group=self.group)
            return rows, order, out, into

        rows, order, out, into = send()

        def back() -> torch.Tensor:
            mine = rows.new_empty(sum(out), rows.shape[1])
            dist.all_to_all_single(mine, rows, out, into, group=self.group)
            total = torch.zeros(self.x.shape, device="cuda")
            return total.index_add_(0, order // num_topk, mine.float()).bfloat16()

        return time_calls(send, self.group, 7), time_calls(back, self.group, 7)


if __name__ == "__main__":
    typer.run(main)
