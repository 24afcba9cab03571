"""Dispatch and combine against NCCL's all-to-all, and DeepEP where it is installed:
python bench/dispatch_combine.py --core

Checks each shape against the all-to-all before timing it. remote_gbs counts the bytes that leave
the rank with the most of them, whichever form a verb takes. `ratio` of impl moe_engine is the time
over the floor: the busiest direction of any rank at the speed of `plain push`, a kernel that only
copies as many bytes to all ranks, on 24 SMs in the same run, at the best pace of three. `ratio` of
other impls is their time over that of moe_engine.

us of moe_engine and ElasticBuffer (ours, DeepEP V2's calls, by token and by expert) is that of a
call in a CUDA graph; that of nccl, deep_ep and "moe_engine, counts on
the host", a dispatch that returns them, is that of a single call from Python. eager_us is that of a
loop of calls from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
import typer
from _common import draw_topk, save, time_calls, time_eager, timed_pool
from _deep_ep import NormalMode, deep_ep

from moe_engine import Buffer, ElasticBuffer, Options
from moe_engine.device.lang import ticks
from moe_engine.emulation import send_message
from moe_engine.layer_config import MODELS
from moe_engine.timing import time_graph

Times = tuple[float, dict[str, float | None]]
"""Microseconds, and the fields of `time_eager`."""


@dataclass(frozen=True)
class Shape:
    """model, tokens per rank, routing, type of the payload, numbers of programs to try."""

    model: str
    tokens: int
    routing: str = "uniform"
    dtype: str = "bf16"
    sms: tuple[int, ...] = (16,)


CORE = [
    Shape("deepseek-v3", 8192, sms=(4, 8, 16, 24, 32)),
    Shape("deepseek-v3", 4096, sms=(8, 16, 24)),
    Shape("deepseek-v3", 8192, "zipf"),
    Shape("deepseek-v3", 8192, dtype="fp8"),
    Shape("deepseek-v3", 128),
    Shape("deepseek-v3", 1024),
    Shape("deepseek-v3", 16384),
    Shape("qwen3-30b", 8192),
    Shape("mixtral-8x7b", 8192),
]
CORE_OF_2 = [Shape("deepseek-v3", 8192)]
FULL = [
    Shape(model, tokens, routing, dtype, (4, 8, 16, 24, 32))
    for model in ("deepseek-v3", "qwen2-57b", "qwen3-30b", "mixtral-8x7b")
    for tokens in (128, 1024, 4096, 8192, 16384)
    for routing in ("uniform", "zipf")
    for dtype in ("bf16", "fp8")
]


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 4,
    core: Annotated[bool, typer.Option(help="Only the points of the summary.")] = False,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs, then on two of them."""
    with timed_pool(ranks, timeout_s=540) as pool:

        def show(rank: int, line: dict[str, Any]) -> None:
            print(save("dispatch_combine", path, **line), flush=True)

        pool.run(run_rank, CORE if core else FULL, on_message=show)
        if ranks > 2:
            pool.run(run_rank, CORE_OF_2 if core else FULL, num_ranks=2, on_message=show)


def run_rank(group: dist.ProcessGroup, shapes: list[Shape]) -> None:
    """All shapes on one rank; rank 0 reports."""
    for shape in shapes:
        bench = Bench(group, shape)
        nccl = bench.time_nccl() if shape.dtype == "bf16" else {}
        push_us = bench.time_plain_push()
        bench.send(impl="plain push", us=push_us, num_comm_sms=24, remote_gbs=bench.sent / push_us)
        for num_sms in shape.sms:
            Buffer.set_num_sms(num_sms)
            times = bench.time_ours()
            for (verb, form), (us, eager) in times.items():
                if form == "counts":
                    bench.send(verb=verb, impl="moe_engine, counts on the host", us=us, **eager)
                    continue
                sent = {"dispatch": bench.sent, "combine": bench.returned}.get(verb)
                floor = push_us * bench.busiest / bench.sent
                bench.send(
                    verb=verb,
                    impl="moe_engine",
                    us=us,
                    num_comm_sms=num_sms,
                    remote_gbs=sent and sent / us,
                    ratio_to=f"floor, {form}" if sent else None,
                    ratio=sent and us / floor,
                    **eager,
                )
            others = {"deep_ep": bench.time_deep_ep(num_sms)}
            others["ElasticBuffer"] = bench.time_elastic(num_sms, do_expand=False)
            others["ElasticBuffer, by expert"] = bench.time_elastic(num_sms, do_expand=True)
            if num_sms == 16:
                others["nccl"] = nccl
            for impl, theirs in others.items():
                for verb, (us, eager) in theirs.items():
                    ours = next(time for (v, _), (time, _) in times.items() if v == verb)
                    sent = {"dispatch": bench.sent, "combine": bench.returned}.get(verb)
                    bench.send(
                        verb=verb,
                        impl=impl,
                        us=us,
                        num_comm_sms=None if impl == "nccl" else num_sms,
                        remote_gbs=sent / us if sent and impl.startswith("Elastic") else None,
                        ratio_to="moe_engine",
                        ratio=us / ours,
                        **eager,
                    )
        bench.buffer.destroy()


@triton.jit(do_not_specialize=["ns_per_block"])
def plain_push_kernel(
    source, peers, rank, num_vecs, ns_per_block, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy `num_vecs` int32 vectors to each other rank, blocks to them in turn; no signals.
    Programs take turns: one begins a block every `ns_per_block`."""
    others: tl.constexpr = RANKS - 1
    num_blocks = tl.cdiv(num_vecs, BLOCK) * others
    begin = ticks()
    for turn in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        while ticks() - begin < turn * ns_per_block:
            pass
        peer = (rank + 1 + turn % others) % RANKS
        vecs = turn // others * BLOCK + tl.arange(0, BLOCK)
        inside = tl.max_constancy(vecs < num_vecs, 4)
        to = tl.load(peers + peer).to(tl.pointer_type(tl.int32))
        to = tl.multiple_of(to + vecs, 16)
        tl.store(to, tl.load(source + vecs, mask=inside), mask=inside)


class Bench:
    """One shape on one rank: inputs, a Buffer, and the bytes of all ranks, in thousands."""

    def __init__(self, group: dist.ProcessGroup, shape: Shape):
        self.num_experts, hidden, _, num_topk = MODELS[shape.model]
        self.shape, self.group, self.rank = shape, group, dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        torch.manual_seed(self.rank)
        self.x = torch.randn(shape.tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.scales: torch.Tensor | None = None
        if shape.dtype == "fp8":
            self.x = self.x.to(torch.float8_e4m3fn)
            self.scales = torch.rand(shape.tokens, hidden // 128, device="cuda")
        seed = self.rank
        self.idx = draw_topk(shape.routing, shape.tokens, self.num_experts, num_topk, seed)
        self.weights = torch.rand(shape.tokens, num_topk, device="cuda")
        self.buffer = Buffer.for_tokens(
            group,
            shape.tokens,
            hidden,
            self.num_experts,
            num_topk,
            options=Options(timeout_s=20.0),
        )
        per_rank = self.buffer.get_dispatch_layout(self.idx, self.num_experts)[0]
        matrix = [torch.empty_like(per_rank) for _ in range(self.num_ranks)]
        dist.all_gather(matrix, per_rank, group=group)
        rows = torch.stack(matrix).double().fill_diagonal_(0)
        self.row_kb = self.x[0].nbytes / 1e3
        self.row_kb += 0 if self.scales is None else self.scales[0].nbytes / 1e3
        self.sent, self.returned = (float(rows.sum(d).max()) * self.row_kb for d in (1, 0))
        self.busiest = max(self.sent, self.returned)

    def send(self, **line: Any) -> None:
        """One result line from rank 0, rounded."""
        if self.rank == 0:
            shape = self.shape
            fields = dict(model=shape.model, tokens=shape.tokens, routing=shape.routing)
            digits = {"us": 1, "remote_gbs": 1, "ratio": 3}
            for name, number in digits.items():
                if line.get(name) is not None:
                    line[name] = round(line[name], number)
            send_message(fields | dict(ranks=self.num_ranks, dtype=shape.dtype) | line)

    def time_plain_push(self) -> float:
        """Microseconds to copy `sent` bytes to the other ranks, evenly, on 24 SMs."""
        engine: Any = self.buffer._engine
        layout, peers = engine.slots.layout, engine.slots.block.peer_addresses
        regions = peers + layout.slots + self.rank * layout.region_bytes
        num_vecs = int(self.sent * 1e3 / 4 / (self.num_ranks - 1))
        source = torch.empty(num_vecs, dtype=torch.int32, device="cuda").random_()
        block = 4096

        def push_at(gbs: float) -> Callable[[], None]:
            args = source, regions, self.rank, num_vecs, round(4 * block / gbs)
            return lambda: plain_push_kernel[(24,)](*args, RANKS=self.num_ranks, BLOCK=block)

        return min(time_graph(push_at(gbs), 10, 7, self.group) for gbs in (325, 335, 1e6))

    def time_ours(self) -> dict[tuple[str, str], Times]:
        """Times by verb and form."""
        buffer, x = self.buffer, self.x if self.scales is None else (self.x, self.scales)
        layout = partial(buffer.get_dispatch_layout, self.idx, self.num_experts)
        per_rank, _, per_expert, in_rank, _ = layout()
        args = None, per_rank, None, in_rank, per_expert, self.idx, self.weights
        counted = partial(buffer.dispatch, x, *args)
        recv_x, *_, handle, _ = counted()
        rows = recv_x[0] if isinstance(recv_x, tuple) else recv_x
        self.check(rows)
        owned = partial(counted, num_worst_tokens=len(rows))

        def in_place() -> None:
            owned(in_place=True)
            buffer.release()

        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("dispatch", "in place"): in_place,
            ("dispatch", "owned"): owned,
            ("dispatch_cached", ""): partial(buffer.dispatch, x, handle),
            ("layout", ""): layout,
        }
        if self.shape.dtype == "bf16":
            out, *_ = buffer.combine(rows, handle)
            copies = in_rank.sum(1, keepdim=True)
            torch.testing.assert_close(out, (self.x.float() * copies).bfloat16())
            calls["combine", "sum"] = partial(buffer.combine, rows, handle)
        times = {}
        for name, call in calls.items():
            us = time_graph(call, 10, 7, self.group)
            times[name] = us, time_eager([call], self.group, us)
        times["dispatch", "counts"] = self.time_from_python(counted)
        buffer.check()
        return times

    def time_elastic(self, num_sms: int, do_expand: bool) -> dict[str, Times]:
        """Times of DeepEP V2's calls on this engine, without counts on the host."""
        tokens, (_, hidden, _, num_topk) = self.shape.tokens, MODELS[self.shape.model]
        sizes = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=num_topk)
        buffer = ElasticBuffer(self.group, **sizes, num_gpu_timeout_secs=20)
        x = self.x if self.scales is None else (self.x, self.scales)
        send = partial(buffer.dispatch, x, num_sms=num_sms)
        how: dict[str, Any] = dict(num_experts=self.num_experts, do_expand=do_expand)
        dispatch = partial(send, self.idx, self.weights, **how, do_cpu_sync=False)
        rows, _, _, handle, _ = dispatch()
        cached = partial(send, handle=handle, do_expand=do_expand)
        calls: dict[str, Callable[[], Any]] = {"dispatch": dispatch, "dispatch_cached": cached}
        if self.scales is None:
            calls["combine"] = partial(buffer.combine, rows, handle, num_sms=num_sms)
        times = {}
        for verb, call in calls.items():
            us = time_graph(call, 10, 7, self.group)
            times[verb] = us, time_eager([call], self.group, us)
        buffer.destroy()
        return times

    def time_from_python(self, call: Callable[[], Any]) -> Times:
        """Times of a call that no graph can hold."""
        return time_calls(call, self.group, 7), time_eager([call], self.group)

    def check(self, recv_x: torch.Tensor) -> None:
        """The rows of dispatch are those of an all-to-all of the same tokens."""
        num_local = self.num_experts // self.num_ranks
        x, recv_x = self.x.view(torch.uint8), recv_x.view(torch.uint8)
        sent = [
            x[(self.idx // num_local == rank).any(1)].contiguous() for rank in range(self.num_ranks)
        ]
        sizes = torch.tensor([len(part) for part in sent], device="cuda")
        recv = torch.empty_like(sizes)
        dist.all_to_all_single(recv, sizes, group=self.group)
        rows = x.new_empty(int(recv.sum()), x.shape[1])
        dist.all_to_all_single(
            rows, torch.cat(sent), recv.tolist(), sizes.tolist(), group=self.group
        )
        assert torch.equal(rows, recv_x)

    def time_nccl(self) -> dict[str, Times]:
        """Times of both as one copy per (token, expert): sort, all-to-all, weighted sum."""
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

        return {"dispatch": self.time_from_python(send), "combine": self.time_from_python(back)}

    def time_deep_ep(self, num_sms: int) -> dict[str, Times]:
        """Times of DeepEP's normal calls; empty where it is not installed. Its dispatch brings the
        counts to the host."""
        package = deep_ep(self.num_ranks)
        if package is None or self.shape.dtype != "bf16":
            return {}
        package.Buffer.set_num_sms(num_sms)
        args = self.x, self.idx, self.weights, self.num_experts
        theirs = NormalMode(package, self.group, *args)
        rows = theirs.dispatch_cached()
        calls: dict[str, Callable[[], Any]] = {
            "layout": theirs.layout,
            "dispatch": theirs.dispatch,
            "dispatch_cached": theirs.dispatch_cached,
            "combine": partial(theirs.combine, rows),
        }
        times = {verb: self.time_from_python(call) for verb, call in calls.items()}
        theirs.close()
        return times


if __name__ == "__main__":
    typer.run(main)
