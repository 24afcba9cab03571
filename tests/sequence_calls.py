"""Dispatch and combine of every kind in sequences of mixed calls."""

from __future__ import annotations

import torch
from rounds import FEW
from sequence_values import NUM_LOCAL, TOPK, Rank

from moe_engine import low_latency_reference, ops, reference


class Exchanges(Rank):
    """Calls that send rows, and what they leave for later."""

    def dispatch(self) -> None:
        dtype = self.choose("dtype", torch.float32, torch.bfloat16)
        drawn = self.tokens(dtype)
        x, idx, weights = self.mine(drawn)
        layout = self.buffer.get_dispatch_layout(idx, self.num_experts)
        alignment = self.choose("alignment", 1, 4)
        worst = self.choose("worst", 0, 0, 3 * self.num_ranks)
        counts = layout[0], None, layout[3], layout[2]
        counted = reference.layout(drawn.idx[self.rank], self.num_experts, self.num_ranks)
        recv, ids, of, per_expert, handle, _ = self.buffer.dispatch(
            x, None, *counts, idx, weights, alignment, worst
        )
        received = reference.dispatch(*drawn, self.num_experts)
        want, num_rows = received[self.rank], len(received[self.rank].x)
        aligned = [-(-n // alignment) * alignment for n in want.num_tokens_per_expert]
        self.check(
            (recv[:num_rows], want.x),
            (ids[:num_rows], want.topk_idx),
            (of[:num_rows], want.topk_weights),
            (list(per_expert), [] if worst else aligned),
            (bool((ids[num_rows:] == -1).all()), True),
            (layout[0], counted[0]),
            (layout[2], counted[1]),
        )
        self.spoil(x, idx, weights)
        of_rows = [part.topk_weights for part in received]

        def combine() -> None:
            rows = torch.full_like(recv, torch.nan)
            rows[:num_rows] = want.x.to(dtype) * (self.rank + 2)
            returned = torch.zeros(len(rows), TOPK)
            returned[:num_rows] = of_rows[self.rank]
            biases = tuple(part[self.rank] for part in [drawn.x] * self.choose("biases", 0, 1, 2))
            has_weights = self.chance("weights", 0.5)
            out, out_weights, _ = self.buffer.combine(
                self.lying(rows), handle, returned if has_weights else None, biases or None
            )
            times = self.factors(drawn.idx[self.rank]) + len(biases)
            self.check((out, drawn.x[self.rank] * times))
            if has_weights:
                valid = drawn.idx[self.rank] >= 0
                self.check((out_weights, torch.where(valid, drawn.weights[self.rank], 0.0)))

        def again() -> None:
            other = self.choose("times", 2, 3)
            recv_again = self.buffer.dispatch(self.lying(drawn.x[self.rank] * other), handle)[0]
            self.check((recv_again[:num_rows], want.x * other))

        self.leave("combine", combine, "normal", often=True)
        self.leave("cached dispatch", again, "normal", often=True)

    def rows(self) -> None:
        """`ops.dispatch` and `ops.combine`; their backward comes later."""
        drawn = self.tokens()
        x, idx, weights = self.mine(drawn)
        alignment = self.choose("alignment", 1, 4)
        most = self.choose("max_rows", None, None, 32)
        in_flight, trains = self.chance("in flight"), self.chance("trains", 0.6)
        x, weights = (part.detach().requires_grad_(trains) for part in (x, weights))
        how = dict(max_rows=most, alignment=alignment, tag=self.choose("tag", None, "rows"))
        args = x, idx, weights, self.num_experts, self.buffer
        if in_flight:
            got = ops.dispatch_wait(ops.dispatch_start(*args, **how))
        else:
            got = ops.dispatch(*args, **how)
        scaled = got.rows * got.row_weights[:, None] * (self.rank + 2)
        if in_flight:
            out = ops.combine_wait(ops.combine_start(scaled, got.plan, self.buffer), got.plan)
        else:
            out = ops.combine(scaled, got.plan, self.buffer)
        own_x, own_idx, own_weights = (part[self.rank] for part in drawn)
        factors = self.factors(own_idx, own_weights)
        all_ids = torch.cat(drawn.idx)
        counts = torch.bincount(all_ids[all_ids >= 0], minlength=self.num_experts)
        self.check((out, own_x * factors), (got.counts, counts.int()))

        def backward() -> None:
            dx, dw = torch.autograd.grad(out, (x, weights), 2 * own_x)
            valid, owners = own_idx >= 0, own_idx // NUM_LOCAL
            dot = 2 * (own_x * own_x).sum(1, keepdim=True) * (owners + 2)
            self.check((dx, 2 * own_x * factors), (dw, torch.where(valid, dot, 0.0)))

        if trains:
            self.leave("backward of rows", backward, "normal")

    def low_latency(self) -> None:
        drawn = self.tokens(torch.bfloat16)
        x, idx, _ = self.mine(drawn)
        hooked = self.chance("hook", 0.6)
        forms: dict[str, bool] = {"use_fp8": self.hidden == 128 and self.chance("e4m3", 0.6)}
        if forms["use_fp8"]:
            forms["round_scale"] = self.chance("round_scale", 0.5)
        stats = torch.zeros(NUM_LOCAL, dtype=torch.int32)
        rows, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x, idx, FEW, self.num_experts, stats, return_recv_hook=hooked, **forms
        )
        if hooked:
            self.spoil(x, idx)
        sizes = drawn.x, drawn.idx, FEW, self.num_experts
        want, in_bf16 = (
            low_latency_reference.low_latency_dispatch(*sizes, **form)[self.rank]
            for form in (forms, {"use_fp8": False})
        )
        valid = (torch.arange(want.x.shape[1]) < want.counts[:, None])[..., None]

        def receive() -> None:
            if hook is not None:
                hook()
            self.check((counts, want.counts), (stats, want.counts))
            pairs = [(rows, want.x)]
            if forms["use_fp8"]:
                pairs = list(zip(rows, (want.x, want.scales), strict=True))
            self.check(*((_where(valid, one), _where(valid, other)) for one, other in pairs))
            self.leave("low-latency combine", combine, "normal", often=True)

        def combine() -> None:
            y = torch.where(valid, in_bf16.x * (self.rank + 2), torch.nan)
            ids, of = drawn.idx[self.rank].clone(), drawn.weights[self.rank].clone()
            out = torch.full_like(drawn.x[self.rank], torch.nan) if self.chance("out") else None
            is_hooked = self.chance("hook", 0.5)
            y, of = self.lying(y), self.lying(of)
            result, _, hook = self.buffer.low_latency_combine(
                y, ids, of, handle, return_recv_hook=is_hooked, out=out
            )
            factors = self.factors(drawn.idx[self.rank], drawn.weights[self.rank])
            right = drawn.x[self.rank].float() * factors

            def add_up() -> None:
                if hook is not None:
                    hook()
                self.check((result, right.bfloat16()))

            if is_hooked:
                self.spoil(ids, of)
                self.leave("hook of a combine", add_up, "normal")
            else:
                add_up()

        if hooked:
            self.leave("hook of a dispatch", receive, "normal")
        else:
            receive()

    def elastic_dispatch(self) -> None:
        buffer, drawn = self.elastic, self.tokens(torch.bfloat16)
        x, idx, weights = self.mine(drawn)
        expands, waits = self.chance("do_expand", 0.5), not self.chance("no sync")
        alignment = self.choose("alignment", 1, 4)
        has_weights = self.chance("weights", 0.6)
        copies = self.chance("copied", 0.7)
        rows, ids, of, handle, _ = buffer.dispatch(
            x, idx, weights if has_weights else None, num_experts=self.num_experts,
            expert_alignment=alignment, do_expand=expands, do_cpu_sync=waits,
            do_handle_copy=copies, do_zero_padding=expands,
        )  # fmt: skip
        received = reference.dispatch(*drawn, self.num_experts)
        places = [reference.place(one, *self.sizes, FEW, alignment) for one in received]
        want, place = received[self.rank], places[self.rank]
        sent = reference.expand(want.x, place) if expands else want.x
        self.check((rows[: len(sent)], sent))
        if not expands:
            self.check((ids[: len(sent)], want.topk_idx))
            if has_weights:
                self.check((of[: len(sent)], want.topk_weights))
        if copies:
            self.spoil(x, idx, weights)
        own_x, own_idx = drawn.x[self.rank], drawn.idx[self.rank]

        def combine() -> None:
            y = torch.zeros_like(rows)
            y[: len(sent)] = sent * (self.rank + 2)
            biases = [own_x] * self.choose("biases", 0, 1, 2)
            out, _, _ = buffer.combine(self.lying(y), handle, bias=tuple(biases) or None)
            ones = torch.ones_like(drawn.weights[self.rank])
            times = self.factors(own_idx, ones if expands else None) + len(biases)
            self.check((out, own_x.float() * times))

        def again() -> None:
            other = self.choose("times", 2, 3)
            of = drawn.weights[self.rank] * other if self.chance("weights", 0.5) else None
            got = buffer.dispatch(
                self.lying(own_x * other), topk_weights=of, handle=handle, do_expand=expands
            )
            if not expands or alignment == 1:  # else nothing is written to the padding
                self.check((got[0][: len(sent)], sent * other))
            if of is not None and not expands:
                self.check((got[2][: len(sent)], want.topk_weights * other))

        self.leave("elastic combine", combine, "elastic", often=True)
        self.leave("elastic cached dispatch", again, "elastic", often=True)


def _where(valid: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows, or their bytes in e4m3, with 0 where they are not valid."""
    return torch.where(valid, rows.view(torch.uint8) if rows.itemsize == 1 else rows, 0)
