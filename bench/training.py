"""A layer's forward and backward against its GEMMs alone: python bench/training.py --ranks 1

Verb `forward_backward`: gradients of x, topk_weights and both weights. impl `torch` is the layer
without communication, with autograd: two torch._grouped_mm and one kernel each for SwiGLU and its
gradient, on as many rows in expert order as this rank's experts receive. `torch_layer` sorts and
adds up the rows as well, which is a whole layer of one rank; `nccl` is sort, all-to-all of one
copy per (token, expert), the same GEMMs and back, on several. impl moe_engine has a line for each
save policy, or for "auto" and those of --policy; its ratio is its time over torch's, that of other
impls their time over that of moe_engine with "auto". With --capacity-factor, impl `moe_engine,
passes` is the layer on a Buffer with room for so many times the rows of balanced routing: `passes`
says in how many it runs, 1 where the rows have room.

us is that of forward and backward from Python, by CUDA events around loops that take turns;
forward_us is that of the forward alone. host_us is the time until Python goes on, from an idle GPU;
on several ranks it has the wait for the number of rows, which eager forwards read after their
exchange. saved_bytes: what the forward leaves allocated for the backward, besides its result.
peak_bytes: the most that forward and backward allocate at once beyond their arguments. Both leave
out symmetric memory, which layers share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
import typer
from _common import save, silu_mul_kernel, time_in_turns, timed_pool
from _layer import Experts, Tokens, num_passes, relative_error
from einops import einsum, rearrange, reduce

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.emulation import send_message

MODELS = "mixtral-8x7b", "qwen2-57b", "qwen3-30b", "deepseek-v3"
TOKENS = 4096, 8192
POLICIES = "auto", "none", "pre", "rows", "all"
ERROR = 1.2e-2
"""The largest relative difference of two gradients in bf16, which round differently."""
IN_PASSES, FORWARD = "moe_engine, passes", "forward"
HOST_CALLS = 20
Run = Callable[[], list[torch.Tensor]]


@triton.jit
def silu_mul_backward_kernel(grad, h, grad_h, N, BLOCK: tl.constexpr):
    """The gradient of silu(gate) * up for h [rows, 2 * N], by that of the result [rows, N]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(h + row * 2 * N + columns, mask=inside).to(tl.float32)
    up = tl.load(h + row * 2 * N + N + columns, mask=inside).to(tl.float32)
    da = tl.load(grad + row * N + columns, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    of_gate = da * up * s * (1 + gate * (1 - s))
    tl.store(grad_h + row * 2 * N + columns, of_gate.to(tl.bfloat16), mask=inside)
    tl.store(grad_h + row * 2 * N + N + columns, (da * gate * s).to(tl.bfloat16), mask=inside)


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up [rows, N] of h [rows, 2 * N], one kernel each way."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        columns = h.shape[1] // 2
        act = h.new_empty(len(h), columns)
        silu_mul_kernel[len(h), triton.cdiv(columns, 1024)](h, act, columns, BLOCK=1024)
        return act

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (h,) = ctx.saved_tensors
        columns, of_h = grad.shape[1], torch.empty_like(h)
        grid = len(h), triton.cdiv(columns, 1024)
        silu_mul_backward_kernel[grid](grad, h, of_h, columns, BLOCK=1024)
        return of_h


class AllToAll(torch.autograd.Function):
    """Rows to and from all ranks by NCCL."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.how = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received, group = ctx.how
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=group)
        return out, None, None, None


class Layer:
    """A model's layer on one rank, with gradients, and each way through it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: Experts,
        num_tokens: int,
        policies: Sequence[str],
        capacity_factor: float | None = None,
    ):
        self.group, self.experts, self.policies = group, experts, policies
        self.tokens = Tokens(group, experts.model, num_tokens, "uniform", dist.get_rank(group))
        self.x = self.tokens.x.requires_grad_()
        self.weights = self.tokens.weights.requires_grad_()
        self.leaves = self.x, self.weights, experts.up, experts.down
        self.dy = torch.randn_like(self.x)
        sizes = num_tokens, experts.hidden, experts.num_experts, experts.num_topk
        self.buffers = []
        for factor in [None] if capacity_factor is None else [None, capacity_factor]:
            options = Options(timeout_s=20.0, decode_tokens=0, capacity_factor=factor)
            self.buffers.append(Buffer.for_tokens(group, *sizes, options=options))

    def ours(self, buffer: Buffer, policy: str) -> torch.Tensor:
        up, down = self.leaves[2:]
        return moe_ffn(self.x, self.tokens.idx, self.weights, up, down, buffer, save=policy)

    def ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The layer by each of the policies, and in passes, by impl; "auto" first."""
        roomy, *small = self.buffers
        names = {
            one: "moe_engine" if one == "auto" else f"moe_engine, {one}" for one in self.policies
        }
        found = {name: partial(self.ours, roomy, one) for one, name in names.items()}
        if small:
            found[IN_PASSES] = partial(self.ours, *small, "auto")
        return found

    def passes(self) -> dict[str, Any]:
        """The fields of a line that say how the layer runs in passes."""
        buffer = self.buffers[-1]
        number = num_passes(self.ours(buffer, "auto"))
        return {"capacity_factor": buffer.options.capacity_factor, "passes": number}

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.check()
            buffer.destroy()

    def multiply(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The experts by torch."""
        up, down = self.leaves[2:]
        h = torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(SwiGlu.apply(h), down.transpose(1, 2), offs=ends)

    def sorted(self) -> torch.Tensor:
        """A layer by torch on one rank, or by NCCL on several; the host waits for the counts."""
        tokens, num_topk = self.tokens, self.tokens.idx.shape[1]
        flat = tokens.idx.flatten()
        order = flat.argsort(stable=True)
        rows = self.x[order // num_topk]
        counts = torch.bincount(flat, minlength=tokens.num_experts)
        ranks = tokens.num_ranks
        if ranks == 1:
            y = self.multiply(rows, counts.cumsum(0).int())
        else:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self.group)
            sent = reduce(counts, "(r l) -> r", "sum", r=ranks).tolist()
            received = reduce(theirs, "(r l) -> r", "sum", r=ranks).tolist()
            arrived = AllToAll.apply(rows, sent, received, self.group)
            local = torch.arange(len(counts) // ranks, device=flat.device).repeat(ranks)
            by_expert = local.repeat_interleave(theirs, output_size=sum(received))
            by_expert = by_expert.argsort(stable=True)
            ends = reduce(theirs, "(r l) -> l", "sum", r=ranks).cumsum(0).int()
            y = self.multiply(arrived[by_expert], ends)
            back = torch.empty_like(by_expert)
            back[by_expert] = torch.arange(len(back), device=back.device)
            y = AllToAll.apply(y[back], received, sent, self.group)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        y_TKH = rearrange(y[inverse], "(t k) h -> t k h", k=num_topk)
        return einsum(y_TKH, self.weights.to(y_TKH.dtype), "t k h, t k -> t h")

    def gradients(self, forward: Callable[[], torch.Tensor]) -> Run:
        """Forward and backward: (result, gradients)."""

        def run() -> list[torch.Tensor]:
            out = forward()
            return [out, *torch.autograd.grad(out, self.leaves, self.dy)]

        return run

    def gemms(self) -> Run:
        """Forward and backward of the GEMMs alone."""
        rows, ends = self.tokens.received()
        rows.requires_grad_()
        dy, leaves = torch.randn_like(rows), (rows, *self.leaves[2:])

        def run() -> list[torch.Tensor]:
            y = self.multiply(rows, ends)
            return [y, *torch.autograd.grad(y, leaves, dy)]

        return run


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 1,
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    policy: Annotated[list[str] | None, typer.Option(help='"auto" and these; else all.')] = None,
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="Also with room for so many times the rows of balanced routing."),
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""
    policies = POLICIES if policy is None else tuple(dict.fromkeys(("auto", *policy)))

    def show(rank: int, line: dict[str, Any]) -> None:
        save("training", path, **line)
        what = f"{line['model']:13} {line['tokens']:5} {line['impl']:18} {line['us']:8.0f} us"
        more = {key: line.get(key) for key in ("forward_us", "ratio", "host_us", "passes")}
        print(what, more, f"{(line['peak_bytes'] or 0) / 2**20:.0f} MiB", flush=True)

    with timed_pool(ranks, timeout_s=540) as pool:
        models = [model for model in MODELS if model.startswith(only)]
        pool.run(run_rank, models, policies, capacity_factor, on_message=show)


def memory(run: Run, forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    """saved_bytes and peak_bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before - out.numel() * out.itemsize
    del out
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return {"saved_bytes": saved, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def largest_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest relative error of parts, as in fp32 the whole might not fit."""
    return max(map(relative_error, one.chunk(16), other.chunk(16)))


def host_us(run: Run) -> float:
    """See above: the median of HOST_CALLS."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        since = perf_counter()
        run()
        times.append((perf_counter() - since) * 1e6)
    torch.cuda.synchronize()
    return round(median(times), 1)


def run_rank(
    group: dist.ProcessGroup,
    models: list[str],
    policies: Sequence[str] = POLICIES,
    capacity_factor: float | None = None,
) -> None:
    """All points on one rank; rank 0 reports."""
    for model in models:
        experts = Experts.of(group, model)
        for weight in (experts.up, experts.down):
            weight.requires_grad_()
        for num_tokens in TOKENS:
            measure(Layer(group, experts, num_tokens, policies, capacity_factor))
        del experts
        torch.cuda.empty_cache()


def measure(layer: Layer) -> None:
    """One shape, by each policy and impl."""
    group, experts = layer.group, layer.experts
    common = dict(verb="forward_backward", model=experts.model, tokens=len(layer.x), dtype="bf16")
    common |= dict(ranks=layer.tokens.num_ranks, routing="uniform")

    def send(impl: str, us: float, **line: Any) -> None:
        if dist.get_rank(group) == 0:
            send_message({"peak_bytes": None, **common, "impl": impl, "us": us, **line})

    by_sort, ways = layer.gradients(layer.sorted), layer.ways()
    runs = {impl: layer.gradients(forward) for impl, forward in ways.items()}
    want, errors = by_sort(), {}
    for impl, run in runs.items():
        errors[impl] = max(map(largest_error, run(), want))
        assert errors[impl] < ERROR, errors
    del want
    by_torch = layer.gemms()
    forwards = {("moe_engine", FORWARD): ways["moe_engine"], ("sorted", FORWARD): layer.sorted}
    if IN_PASSES in ways:
        forwards[IN_PASSES, FORWARD] = ways[IN_PASSES]
    us = time_in_turns({"torch": by_torch, "sorted": by_sort, **runs, **forwards}, group)
    gemm_us, ours_us = us["torch"], us["moe_engine"]
    for impl, run in runs.items():
        ratio = dict(ratio_to="torch", ratio=round(us[impl] / gemm_us, 3), error=errors[impl])
        line: dict[str, Any] = ratio | memory(run, ways[impl])
        if impl in ("moe_engine", IN_PASSES):
            line |= {"forward_us": us[impl, FORWARD], "host_us": host_us(run)}
        if impl == IN_PASSES:
            line |= layer.passes()
        send(impl, us[impl], **line)
    layer.close()
    ratio = dict(ratio_to="moe_engine", ratio=round(gemm_us / ours_us, 3))
    send("torch", gemm_us, host_us=host_us(by_torch), **ratio)
    line = memory(by_sort, layer.sorted) | {"forward_us": us["sorted", FORWARD]}
    name = "torch_layer" if layer.tokens.num_ranks == 1 else "nccl"
    ratio = dict(ratio_to="moe_engine", ratio=round(us["sorted"] / ours_us, 3))
    send(name, us["sorted"], **ratio, **line)


if __name__ == "__main__":
    typer.run(main)
