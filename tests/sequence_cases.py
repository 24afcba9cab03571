"""Sequences of mixed calls on Buffers that stay, each of which every rank knows the result of.

All ranks draw the same sequence from its seed. A *start* is a call that may leave something for
later: a handle for combines, a forward for its backward, a low-latency call for its hook. What is
left is a `Later`, and a sequence makes these in any order among other starts. Values are as in
`rounds`; options, and how tensors lie, are drawn as well.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cases
import fuzz_values
import pytest
import torch
from rounds import FEW, MOST, Round, draw, expert_weights

from moe_engine import (
    Buffer,
    DelayedWgrad,
    ElasticBuffer,
    MoeEngineError,
    Options,
    RoutingError,
    WgradSink,
    calls_tagged,
    low_latency_reference,
    moe_ffn,
    ops,
    reference,
    start_moe_ffn,
)

NUM_LOCAL, HIDDEN, TOPK = 2, 16, 2
SAME = [odd for odd in fuzz_values.TENSORS if odd.outcome == fuzz_values.EQUAL]
REFUSED = [odd for odd in fuzz_values.TENSORS if odd.outcome == fuzz_values.REFUSED]
ACTIVATIONS = "swiglu", "swiglu", "geglu", "geglu_tanh", "silu", "relu2"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
MOST_LATER = 6

Pairs = list[tuple[Any, Any]]
"""(what came, what is right): tensors, or values that are equal."""


class Wrong(AssertionError):
    """A result is not right."""


class Drawn(NamedTuple):
    """The tokens of all ranks."""

    x: list[torch.Tensor]
    idx: list[torch.Tensor]
    weights: list[torch.Tensor]


@dataclass
class Later:
    """What an earlier call has left to do on `buffer`; `often`: it may be done many times."""

    name: str
    run: Callable[[], None]
    buffer: str
    often: bool = False


@dataclass
class Sequence:
    """One rank's part of a sequence: its Buffers, what is left to do, and what was called."""

    group: Any
    seed: int
    later: list[Later] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.rank, self.num_ranks = self.group.rank(), self.group.size()
        self.num_experts = NUM_LOCAL * self.num_ranks
        self.backend = self.rng.choice(("auto", "auto", "auto", "collective"))
        self.options = dict(
            decode_tokens=self.rng.choice((0, FEW, FEW)),
            debug=self.rng.random() < 0.2,
            capacity_factor=self.rng.choice((None, None, 1.0)),
        )
        self.log.append(f"{self.backend}, {self.options}")
        self.buffers: dict[str, Any] = {"normal": self._new_buffer()}

    def _new_buffer(self) -> Buffer:
        sizes = MOST, HIDDEN, self.num_experts, TOPK, torch.float32
        options = Options(timeout_s=60.0, max_experts=self.num_experts, **self.options)
        return Buffer.for_tokens(self.group, *sizes, self.backend, options)

    @property
    def buffer(self) -> Buffer:
        return self.buffers["normal"]

    @property
    def has_low_latency(self) -> bool:
        return self.backend != "collective" and self.options["decode_tokens"] > 0

    @property
    def elastic(self) -> ElasticBuffer:
        if "elastic" not in self.buffers:
            sizes = dict(num_max_tokens_per_rank=FEW, hidden=HIDDEN, num_topk=TOPK)
            self.buffers["elastic"] = ElasticBuffer(self.group, num_gpu_timeout_secs=60, **sizes)
        return self.buffers["elastic"]

    # --- Values ------------------------------------------------------------------------------

    def choose(self, name: str, *values: Any) -> Any:
        """One of the values, the same on all ranks, noted."""
        value = self.rng.choice(values)
        if not isinstance(value, torch.Tensor):
            self.log[-1] += f" {name}={value}"
        return value

    def chance(self, name: str, probability: float = 0.3) -> bool:
        is_so = self.rng.random() < probability
        if is_so:
            self.log[-1] += f" {name}"
        return is_so

    def tokens(self, dtype: torch.dtype = torch.float32, least: int = 0) -> Drawn:
        """From `least` to 3 tokens of each rank."""
        kind = self.choose("routing", *cases.ROUTINGS)
        counts = tuple(self.rng.randint(least, 3) for _ in range(self.num_ranks))
        self.log[-1] += f" tokens={counts}"
        verb = "low_latency" if dtype == torch.bfloat16 else "normal"
        seed = self.rng.randrange(10**6)
        return Drawn(*draw(Round(verb, seed, HIDDEN, TOPK, False, counts, kind), *self.sizes))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_ranks, NUM_LOCAL

    def mine(self, drawn: Drawn) -> tuple[torch.Tensor, ...]:
        """Own copies of this rank's tokens, each lying anyhow."""
        return tuple(self.lying(part[self.rank].clone()) for part in drawn)

    def lying(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, lying in another way now and then."""
        odd = self.rng.choice(SAME)
        if self.rng.random() < 0.2:
            self.log[-1] += f" {odd.name}"
            tensor = odd.make(tensor)
        return tensor

    def spoil(self, *tensors: torch.Tensor) -> None:
        """What a caller may do with its tensors after a call: write to them, or free them."""
        how = self.rng.choice(("keep", "write", "free"))
        self.log[-1] += f" then {how}"
        for tensor in tensors:
            if how == "write":
                tensor.fill_(-7)
            elif how == "free":
                tensor.untyped_storage().resize_(0)

    def check(self, *pairs: tuple[Any, Any], tolerance: float = 0.0) -> None:
        """Raise Wrong unless what came is right."""
        for number, (have, want) in enumerate(pairs):
            if isinstance(want, torch.Tensor):
                have = have.detach().cpu()
                if tuple(have.shape) != tuple(want.shape):
                    raise Wrong(f"part {number}: {tuple(have.shape)}, not {tuple(want.shape)}")
                if tolerance == 0.0:
                    is_right = torch.equal(have, want.to(have.dtype))
                else:
                    scale = float(want.double().norm().clamp_min(1.0))
                    is_right = float((have.double() - want.double()).norm()) <= tolerance * scale
                if not is_right:
                    raise Wrong(f"part {number}: {have.tolist()}, not {want.tolist()}")
            elif have != want:
                raise Wrong(f"part {number}: {have}, not {want}")

    def leave(self, name: str, run: Callable[[], None], buffer: str, often: bool = False) -> None:
        self.later.append(Later(name, run, buffer, often))

    def factors(self, idx: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """[T, 1]: the sum, over the ranks that a token is sent to, of the rank + 2; or with weights
        [T, K] over its experts, of their weight times that of their rank."""
        owners = torch.where(idx >= 0, idx // NUM_LOCAL, -1)
        if weights is not None:
            return torch.where(owners >= 0, weights * (owners + 2), 0.0).sum(1, keepdim=True)
        ranks = range(self.num_ranks)
        parts = [(owners == rank).any(1, keepdim=True) * (rank + 2.0) for rank in ranks]
        return torch.stack(parts).sum(0)

    # --- Dispatch and combine ------------------------------------------------------------------

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

    # --- Layers --------------------------------------------------------------------------------

    def layer(self) -> None:
        """A layer with any options, or the forward of one that trains."""
        dtype = self.choose("dtype", torch.float32, torch.float32, torch.bfloat16)
        drawn = self.tokens(dtype)
        x, idx, weights = self.mine(drawn)
        activation = self.choose("activation", *ACTIVATIONS)
        trains = self.chance("trains", 0.5)
        up, down = self._weights(activation, dtype)
        biases = [torch.full((NUM_LOCAL, up[0].shape[1]), 0.5, dtype=dtype)] * self.num_ranks
        biases = biases, [torch.full((NUM_LOCAL, HIDDEN), 0.25, dtype=dtype)] * self.num_ranks
        has_biases = self.chance("biases")
        more: dict[str, Any] = dict(activation=activation)
        if has_biases:
            more["biases"] = tuple(part[self.rank].clone() for part in biases)
        if self.chance("tag", 0.5):
            more["tag"] = self.rng.randrange(10)
        few = self.choose("max_tokens", None, FEW)
        of_reference = (biases if has_biases else ()), activation
        w = [up[self.rank].clone(), down[self.rank].clone()]
        layout = self._laid_out(w, more)
        counted = self.chance("return_counts", 0.2)
        call = moe_ffn
        if self.chance("started"):
            call = lambda *a, **k: start_moe_ffn(*a, **k).finish()  # noqa: E731
        bad = not trains and self.chance("bad ids", 0.1)
        given = idx.clone()
        if bad and len(idx):
            given[0, 0] = self.num_experts + 5
        for ids in drawn.idx if bad else ():
            ids[:1, 0] = -1
        leaves: list[torch.Tensor] = []
        if trains:
            x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
            more["save"] = self.choose("save", "auto", "none", "rows", "pre", "all")
            if self.backend == "collective" and more["save"] in ("pre", "all"):
                more["save"] = "rows"
            for one in layout:
                leaves.append(one.requires_grad_())
        sink, start = self._sink(layout, more) if trains else (None, [])
        operand = layout[0] if len(layout) == 2 else tuple(layout[:2])
        found = self._called(
            lambda: call(
                x, given, weights, operand, layout[-1], self.buffer, few,
                return_counts=counted, **more,
            ),
            bad and len(idx) > 0,
        )  # fmt: skip
        y = found[0] if counted else found
        if counted:
            all_ids = torch.cat(drawn.idx)
            counts = torch.bincount(all_ids[all_ids >= 0], minlength=self.num_experts)
            self.check((found[1], counts.int()))
        doubles = [
            [part.double() for part in parts] for parts in (drawn.x, drawn.weights, up, down)
        ]
        of_biases = [[part.double() for part in parts] for parts in of_reference[0]]
        args = doubles[0], drawn.idx, *doubles[1:], of_biases, activation
        tolerance = TOLERANCE[dtype]
        self.check((y, reference.moe_ffn(*args)[self.rank]), tolerance=tolerance)
        if not trains:
            self.spoil(x, given, weights)
            return

        def backward() -> None:
            self._move(layout)
            before = [None if one.grad is None else one.grad.clone() for one in leaves]
            dy = [part.to(dtype) for part in drawn.x]
            y.backward(dy[self.rank].clone())
            want = reference.moe_ffn_gradients(
                *drawn[:1], drawn.idx, drawn.weights, up, down, dy, *of_reference
            )[self.rank]
            self.check((x.grad, want[0]), (weights.grad, want[1]), tolerance=4 * tolerance)
            wgrad = more.get("wgrad")
            pairs = self._weight_gradients(want[2:4], leaves, layout, more, sink, start, before)
            if isinstance(wgrad, DelayedWgrad):

                def later() -> None:
                    self._move(layout)
                    wgrad.backward_dw()
                    self.check(*pairs(), tolerance=4 * tolerance)

                self.leave("delayed gradients", later, "normal")
            else:
                self.check(*pairs(), tolerance=4 * tolerance)

        self.leave("backward", backward, "normal")

    def _weights(self, activation: str, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
        one = Round("normal", self.rng.randrange(10**6), HIDDEN)
        up, down = expert_weights(one, *self.sizes)
        if activation in ("silu", "relu2"):
            up = [part[:, :8] for part in up]
        return [(part / 4).to(dtype) for part in up], [(part / 4).to(dtype) for part in down]

    def _laid_out(self, w: list[torch.Tensor], more: dict[str, Any]) -> list[torch.Tensor]:
        """The weights in one of the layouts that a layer takes."""
        up, down = w
        is_gated = more["activation"].startswith(("swiglu", "geglu"))
        layout = self.choose("layout", "concatenated", "interleaved", "pair") if is_gated else ""
        halves = up.view(NUM_LOCAL, 2, -1, HIDDEN) if is_gated else up
        if layout == "interleaved":
            more["layout"] = layout
            return [halves.transpose(1, 2).contiguous().view(up.shape), down]
        if layout == "pair":
            gate, up = halves.transpose(0, 1).contiguous()
            return [gate, up, down]
        return [up, down]

    def _sink(self, w: list[torch.Tensor], more: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """Where the gradients of weights go; what was there before."""
        way = self.choose("wgrad", "autograd", "sink", "delayed", "delayed sink")
        if way == "delayed":
            more["wgrad"] = DelayedWgrad()
        if "sink" not in way:
            return None, []
        kind = self.choose("sink", w[0].dtype, torch.float32)
        start = [torch.full(one.shape, 3.0, dtype=kind) for one in w]
        if len(w) == 3:
            both = torch.full((2, *w[0].shape), 3.0, dtype=kind)
            start = [*both, start[2]]
        into = start[0] if len(w) == 2 else tuple(start[:2])
        sink = WgradSink(into, start[-1], accumulate=self.chance("accumulate", 0.6))
        more["wgrad"] = DelayedWgrad(sink) if way == "delayed sink" else sink
        return sink, start

    def _weight_gradients(
        self, want: Any, leaves: Any, w: Any, more: Any, sink: Any, start: Any, before: Any
    ) -> Callable[[], Pairs]:
        """Gives the pairs of gradients of the weights, once they are there."""
        up, down = want
        wanted = self._laid_out_as(up, len(w), more), down
        wanted = [*wanted[0], wanted[1]]

        def pairs() -> Pairs:
            if sink is None:
                return [(leaf.grad, one) for leaf, one in zip(leaves, wanted, strict=True)]
            first = 3.0 if sink.accumulate else 0.0
            return [(have, one + first) for have, one in zip(start, wanted, strict=True)]

        return pairs

    def _laid_out_as(self, up: torch.Tensor, parts: int, more: Any) -> list[torch.Tensor]:
        if parts == 3:
            return list(up.view(NUM_LOCAL, 2, -1, HIDDEN).transpose(0, 1))
        if more.get("layout") == "interleaved":
            return [up.view(NUM_LOCAL, 2, -1, HIDDEN).transpose(1, 2).reshape(up.shape)]
        return [up]

    def _move(self, w: list[torch.Tensor]) -> None:
        """Give weights other memory, as FSDP does between a forward and its backward; those that
        are one memory stay."""
        if len(w) == 2 and self.chance("moved weights"):
            for one in w:
                one.data = one.data.clone()

    def _called(self, call: Callable[[], Any], has_bad_ids: bool) -> Any:
        """The result of a call of which this rank's ids may be bad; it is told of them once."""
        try:
            result = call()
        except RoutingError as error:
            if not has_bad_ids:
                raise
            return error.result
        if has_bad_ids:
            with pytest.raises(RoutingError):
                self.buffer.check()
        return result

    # --- Low latency -----------------------------------------------------------------------------

    def low_latency(self) -> None:
        if not self.has_low_latency:
            return self.layer()
        drawn = self.tokens(torch.bfloat16)
        x, idx, _ = self.mine(drawn)
        hooked = self.chance("hook", 0.6)
        stats = torch.zeros(NUM_LOCAL, dtype=torch.int32)
        rows, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x, idx, FEW, self.num_experts, stats, use_fp8=False, return_recv_hook=hooked
        )
        if hooked:
            self.spoil(x, idx)
        got = low_latency_reference.low_latency_dispatch(
            drawn.x, drawn.idx, FEW, self.num_experts, use_fp8=False
        )
        want = got[self.rank]

        def receive() -> None:
            if hook is not None:
                hook()
            valid = (torch.arange(rows.shape[1]) < counts[:, None])[..., None]
            self.check((counts, want.counts), (stats, want.counts))
            self.check((torch.where(valid, rows, 0), torch.where(valid, want.x, 0)))
            self.leave("low-latency combine", combine, "normal", often=True)

        def combine() -> None:
            y = torch.where(want.x != 0, want.x * (self.rank + 2), 0)
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

    # --- ElasticBuffer ---------------------------------------------------------------------------

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
            got = buffer.dispatch(self.lying(own_x * other), handle=handle, do_expand=expands)
            num_rows = len(sent) if not expands else place.num_expanded
            if not expands or alignment == 1:
                self.check((got[0][:num_rows], sent * other))

        self.leave("elastic combine", combine, "elastic", often=True)
        self.leave("elastic cached dispatch", again, "elastic", often=True)

    # --- Refused calls ---------------------------------------------------------------------------

    def refuse(self, only: int | None = None) -> None:
        """A call that all ranks are refused alike, or one of them alone."""
        drawn = self.tokens(torch.bfloat16, least=1)  # where there are none, all are alike
        x, idx, weights = (part[self.rank].clone() for part in drawn)
        up, down = (part[self.rank] for part in self._weights("swiglu", torch.bfloat16))
        odd = self.rng.choice(REFUSED)
        self.log[-1] += f" {odd.name}"
        verbs = ["layer", "started layer", "dispatch"]
        if self.has_low_latency:
            verbs.append("low latency")
        verb = self.choose("verb", *verbs)
        if only is not None and self.rank != only:
            return
        try:
            wrong = odd.make(x)
        except Exception:  # torch has no such tensor
            wrong = None
        with pytest.raises((MoeEngineError, TypeError)):
            if verb == "layer":
                moe_ffn(wrong, idx, weights, up, down, self.buffer)
            elif verb == "started layer":
                start_moe_ffn(wrong, idx, weights, up, down, self.buffer)
            elif verb == "low latency":
                self.buffer.low_latency_dispatch(wrong, idx, FEW, self.num_experts)
            else:
                layout = self.buffer.get_dispatch_layout(idx, self.num_experts)
                counts = layout[0], None, layout[3], layout[2]
                self.buffer.dispatch(wrong, None, *counts, idx, weights)

    def refuse_alone(self) -> None:
        """One rank is refused a call: all are out of step at the next one, and make a Buffer."""
        self._hooks()
        if self.num_ranks == 1:
            return self.refuse()
        self.refuse(self.choose("rank", *range(self.num_ranks)))
        drawn = self.tokens(torch.bfloat16)
        up, down = (part[self.rank] for part in self._weights("swiglu", torch.bfloat16))
        few = self.choose("max_tokens", None, FEW)
        try:
            moe_ffn(*(part[self.rank] for part in drawn), up, down, self.buffer, few)
            self.buffer.check()
        except MoeEngineError as error:
            if type(error).__name__ != "OutOfStep" or "refused" not in str(error):
                raise
        else:
            raise Wrong("a rank that was refused a call is not out of step")
        self.later = [one for one in self.later if one.buffer != "normal"]
        torch.distributed.barrier(self.group)
        self.buffer.destroy()
        self.buffers["normal"] = self._new_buffer()

    # --- The sequence ----------------------------------------------------------------------------

    def _hooks(self) -> None:
        """Finish low-latency calls, as new ones would need their memory."""
        for one in [one for one in self.later if one.name.startswith("hook")]:
            self.later.remove(one)
            one.run()

    def step(self) -> None:
        """One call."""
        starts = {
            self.dispatch: 2,
            self.rows: 2,
            self.layer: 6,
            self.low_latency: 3,
            self.elastic_dispatch: 2,
            self.refuse: 2,
            self.refuse_alone: 0.5,
        }
        if self.later and (self.rng.random() < 0.5 or len(self.later) > MOST_LATER):
            one = self.rng.choice(self.later)
            self.log.append(one.name)
            if not one.often or len(self.later) > MOST_LATER:
                self.later.remove(one)
            if one.name == "low-latency combine":
                self._hooks()
            one.run()
            return
        [start] = self.rng.choices(list(starts), list(starts.values()))
        self.log.append(start.__name__)
        if start.__name__ in ("low_latency", "layer"):
            self._hooks()
        tag = self.rng.choice((None, "some layer"))
        if tag is None:
            start()
        else:
            with calls_tagged(tag):
                start()

    def end(self) -> None:
        self.log.append("end")
        while hooks_or_backwards := [one for one in self.later if not one.often]:
            one = self.rng.choice(hooks_or_backwards)
            self.later.remove(one)
            self.log.append(one.name)
            one.run()
        for buffer in self.buffers.values():
            buffer.check()
        torch.distributed.barrier(self.group)
        for buffer in self.buffers.values():
            buffer.destroy()


def run_sequence(group: Any, seed: int, num_calls: int) -> str | None:
    """What was wrong on this rank in the sequence of this seed, or None."""
    sequence = Sequence(group, seed)
    for number in range(num_calls + 1):
        problem = None
        try:
            sequence.step() if number < num_calls else sequence.end()
        except BaseException:
            problem = traceback.format_exc(limit=-6)
        bad = torch.tensor(float(problem is not None))
        torch.distributed.all_reduce(bad, group=group)
        if bad:
            calls = "\n    ".join(sequence.log)
            return f"seed {seed}, rank {sequence.rank} of {sequence.num_ranks}: {calls}\n{problem}"
    return None


def run_sequences(group: Any, seeds: range, num_calls: int) -> list[str]:
    """What was wrong on this rank in these sequences, of which the first wrong one is the last."""
    torch.manual_seed(0)
    for seed in seeds:
        problem = run_sequence(group, seed, num_calls)
        if problem is not None:
            return [problem]
    return []
