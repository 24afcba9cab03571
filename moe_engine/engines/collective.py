"""The collective engine: the same calls by torch.distributed's all-to-all, on any device and
network.

It is plain torch on each rank, so it needs neither peer access nor Triton. Every call synchronises
the host with the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from .. import reference
from ..callers import Callers
from ..checks import packed
from ..device.context import CALLER, DISPATCH_OF_HANDLE, REFUSED_CALLS, SIGNATURE, Kind
from ..device.context import SIGNATURE_WORDS as WORDS
from ..dispatch import DispatchLayout, Received, Tokens
from ..errors import BackendError, CapacityError, MoeEngineError, RoutingError, bad_ids
from ..kinds import Described
from ..kinds import Kind as KindOfCall
from ..symm.device_context import DeviceContext
from ..symm.mismatch import mismatch, out_of_step_by_refusal
from .base import (
    NUM_SMS,
    Arrived,
    BiasGradients,
    Gradients,
    Handle,
    Into,
    LayerInputs,
    Saved,
    WeightGradients,
    check_backward,
    memory_of,
)
from .layer_by_verbs import LayerByVerbs


class CollectiveEngine(LayerByVerbs):
    """Calls through `all_to_all_single` over `group` (None: one rank). `num_sms` changes nothing:
    the group's backend chooses its SMs."""

    handle_type: ClassVar[Any] = Handle

    def __init__(self, group: dist.ProcessGroup | None, callers: Callers):
        self.group, self._callers = group, callers
        self.has_sent, self._num_calls = False, 0
        self._ended: MoeEngineError | None = None
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self._num_bad_ids = self._told_bad_ids = 0
        self._kept: torch.Tensor | None = None

    def _exchange(
        self, rows: torch.Tensor, send_splits: list[int], recv_splits: list[int]
    ) -> torch.Tensor:
        """Exchange rows of any dtype, grouped by destination, for rows grouped by source."""
        self.has_sent = True
        if self.group is None:
            return rows
        row_shape = rows.shape[1:]
        row_bytes = row_shape.numel() * rows.itemsize
        # Flat first: a dimension of size 0 or 1 may have any stride, and a view as bytes may not.
        flat = rows.reshape(-1).view(torch.uint8).view(rows.shape[0], row_bytes)
        out = flat.new_empty(sum(recv_splits), row_bytes)
        dist.all_to_all_single(out, flat, recv_splits, send_splits, group=self.group)
        return out.view(-1).view(rows.dtype).view(out.shape[0], *row_shape)

    @property
    def describe(self) -> Callable[..., Described]:
        """See `base.Engine`; nothing is prepared here."""
        return lambda *args, sized=(), weights=None: Described(KindOfCall(), None)

    def again(self, described: Described, **numbers: int) -> None:
        """See `base.Engine`."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, described: Described | None = None
    ) -> DispatchLayout:
        """See `reference.layout`. Ids out of range count as -1, and `check` reports them."""
        bad = (topk_idx < -1) | (topk_idx >= num_experts)
        self._num_bad_ids += int(bad.sum())
        layout = reference.layout(topk_idx.masked_fill(bad, -1), num_experts, self.num_ranks)
        return DispatchLayout(*layout)

    def _count(self, tokens: Tokens, layout: DispatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank_prefix_matrix [R, R], counts of all ranks [R, E])."""
        num_experts, row = layout.num_experts, tokens.row
        sizes = row.payload_bytes, row.num_topk, num_experts, tokens.x.itemsize, row.num_scales
        self._open(Kind.DISPATCH, tokens.x, *sizes)
        gathered = self._gather(
            torch.cat([layout.num_tokens_per_expert, layout.num_tokens_per_rank])
        )
        return gathered[:, num_experts:].cumsum(0).int(), gathered[:, :num_experts]

    def _open(self, kind: Kind, x: torch.Tensor, *sizes: int, dispatched: int = -1) -> None:
        """Begin a call: compare its signature with those of all ranks, as kernels do. It goes first
        and alone, as ranks that differ in it would differ in the lengths of rows. sizes: the fields
        of a signature after the verb; dispatched: the number of the dispatch whose handle the call
        has. ShapeError or OutOfStep, on all ranks, where signatures differ."""
        self._num_calls += 1
        words = [int(kind), *sizes, *[0] * (WORDS.value - 1 - len(sizes))]
        for name, word in (
            (DISPATCH_OF_HANDLE, self._num_calls if dispatched < 0 else dispatched),
            (CALLER, self._callers.running),
            (REFUSED_CALLS, self._callers.num_refused),
        ):
            words[SIGNATURE.index(name)] = word
        everyone = self._gather(torch.tensor(words, dtype=torch.int64, device=x.device)).tolist()
        self._compare_refusals([theirs[SIGNATURE.index(REFUSED_CALLS)] for theirs in everyone])
        for peer, theirs in enumerate(everyone):
            pairs = zip(SIGNATURE, words, theirs, strict=False)
            found = {name: (one, other) for name, one, other in pairs if one != other}
            if found:
                self._end(mismatch(self.rank, peer, found, self._callers))

    def _open_again(
        self,
        kind: Kind,
        x: torch.Tensor,
        handle: Handle,
        weights: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Begin a call that has a handle. weights [N, K] and scales [N, S] may travel with x."""
        number = int(handle.signature[SIGNATURE.index(DISPATCH_OF_HANDLE)])
        num_topk, num_scales = (0 if one is None else one.shape[1] for one in (weights, scales))
        sizes = x.shape[1] * x.itemsize, num_topk, 0, x.itemsize, num_scales
        self._open(kind, x, *sizes, dispatched=number)

    def _compare_refusals(self, counts: Sequence[int]) -> None:
        """Raise OutOfStep, on all ranks, where these have refused other numbers of calls."""
        if len(set(counts)) == 1:
            return
        texts = [""] * self.num_ranks
        dist.all_gather_object(texts, self._callers.last_refused, group=self.group)
        ours, pick = counts[self.rank], min if counts[self.rank] == max(counts) else max
        peer = counts.index(pick(counts))
        refused = peer if counts[peer] > ours else self.rank
        more = abs(counts[peer] - ours)
        self._end(out_of_step_by_refusal(self.rank, peer, refused, more, texts[refused]))

    def _end(self, error: MoeEngineError) -> NoReturn:
        """Raise what ends the calls of all ranks."""
        self._ended = error
        raise error

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        self.has_sent = True
        if self.group is None:
            return row[None]
        out = row.new_empty(self.num_ranks, row.numel())
        dist.all_gather(list(out.unbind(0)), row, group=self.group)
        return out

    def _splits(self, prefix: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to and received from each rank."""
        counts = torch.diff(prefix, dim=0, prepend=prefix.new_zeros(1, self.num_ranks)).tolist()
        return counts[self.rank], [row[self.rank] for row in counts]

    def dispatch(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        num_worst_tokens: int,
        num_sms: int = NUM_SMS,
        owned: bool = True,
        described: Described | None = None,
    ) -> Arrived:
        """See `KernelEngine.dispatch`; rows in place are kept here until `release`."""
        out, counts, handle = self._dispatch(tokens, layout, num_worst_tokens)
        num_local = layout.num_experts // self.num_ranks
        own = counts[:, self.rank * num_local :][:, :num_local]
        per_expert = [] if num_worst_tokens else own.sum(0).tolist()
        group_counts = counts.sum(0).int()
        if owned:
            return Arrived(out, per_expert, handle, group_counts)
        self._kept, row_bytes = out.x, out.x.shape[1] * out.x.itemsize
        rows = torch.arange(len(out.x), dtype=torch.int64, device=out.x.device)
        address = rows * row_bytes + out.x.data_ptr()
        return Arrived(out._replace(x=address), per_expert, handle, group_counts)

    def _dispatch(
        self, tokens: Tokens, layout: DispatchLayout, num_worst_tokens: int = 0
    ) -> tuple[Received, torch.Tensor, Handle]:
        """Rows of this rank's own; how many rows each rank sends to each expert [R, E]."""
        num_experts = layout.num_experts
        num_local = num_experts // self.num_ranks
        idx, head = reference.send_plan(layout.is_token_in_rank, tokens.topk_idx, num_experts)
        prefix, counts = self._count(tokens, layout)
        send, recv = self._splits(prefix)
        sent = [idx[rank, :num].long() for rank, num in enumerate(send)]
        flat = torch.cat(sent)
        x = self._exchange(tokens.x[flat], send, recv)
        src = self._exchange(flat.int(), send, recv)
        ids = weights = None
        if tokens.topk_idx is not None and tokens.topk_weights is not None:
            first = torch.cat(
                [torch.full_like(part, rank * num_local) for rank, part in enumerate(sent)]
            )
            local = tokens.topk_idx[flat] - first[:, None]
            here = (local >= 0) & (local < num_local)
            ids = self._exchange(torch.where(here, local, -1), send, recv)
            weights = torch.where(here, tokens.topk_weights[flat], 0.0)
            weights = self._exchange(weights, send, recv)
        scales = None if tokens.scales is None else self._exchange(tokens.scales[flat], send, recv)
        out = _pad(Received(x, scales, ids, weights, src), num_worst_tokens)
        signature = prefix.new_zeros(WORDS.value)
        signature[SIGNATURE.index(DISPATCH_OF_HANDLE)] = self._num_calls
        handle = Handle(prefix, idx, signature, out.src_idx, layout.is_token_in_rank, head)
        return out, counts, handle

    def release(self) -> None:
        """Let the rows in place go."""
        self._kept = None

    def dispatch_cached(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        handle: Handle,
        num_sms: int = NUM_SMS,
        described: Described | None = None,
    ) -> Received:
        """See `KernelEngine.dispatch_cached`."""
        self._open_again(Kind.CACHED_DISPATCH, x, handle, scales=scales)
        send, recv = self._splits(handle.rank_prefix_matrix)
        flat = torch.cat([handle.send_token_idx[rank, :num] for rank, num in enumerate(send)])
        rows = self._exchange(x[flat.long()], send, recv)
        if scales is not None:
            scales = self._exchange(scales[flat.long()], send, recv)
        src_idx = handle.recv_src_idx
        received = Received(rows, scales, None, None, src_idx[: sum(recv)])
        return _pad(received, src_idx.numel())

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        num_sms: int = NUM_SMS,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `KernelEngine.combine`."""
        self._open_again(Kind.COMBINE, x, handle, topk_weights)
        send, recv = self._splits(handle.rank_prefix_matrix)
        rows = self._exchange(x[: sum(recv)], recv, send)
        out = torch.zeros(
            handle.send_head.shape[0], x.shape[1], dtype=torch.float32, device=x.device
        )
        for part in bias:
            out += part.float()
        # A returned row is at the start of its rank's rows plus its row number among them.
        first_rows = [sum(send[:rank]) for rank in range(self.num_ranks)]
        starts = torch.tensor(first_rows, dtype=torch.int64, device=x.device)
        order = [head[head >= 0] for head in handle.send_head.unbind(1)]
        tokens = [(head >= 0).nonzero().flatten() for head in handle.send_head.unbind(1)]
        at = [starts[head % self.num_ranks] + head // self.num_ranks for head in order]
        for token, row in zip(tokens, at, strict=True):
            out[token] += rows[row].float()
        weights = None
        if topk_weights is not None:
            returned = self._exchange(topk_weights[: sum(recv)], recv, send)
            weights = topk_weights.new_zeros(out.shape[0], topk_weights.shape[1])
            for token, row in zip(tokens, at, strict=True):
                weights[token] += returned[row]
        return out.to(x.dtype), weights

    def tokens_of(self, inputs: LayerInputs) -> Tokens:
        """See `LayerByVerbs`; rows of layers with e4m3 weights travel in bf16."""
        return Tokens(*inputs[:3])

    def most_received(self, tokens: Tokens, num_experts: int) -> int:
        """See `LayerByVerbs`: they cannot."""
        raise BackendError(
            "a layer of a Buffer with backend 'collective' in a CUDA graph's capture, where the "
            "host cannot read how many rows come. Call it outside of graphs."
        )

    def expert_sums(self, rows: LayerInputs, num_rows: int) -> torch.Tensor:
        """See `LayerByVerbs`; the experts are `reference.expert_rows`."""
        return _expert_sums(rows)

    def moe_ffn_backward(
        self, dy: torch.Tensor, inputs: LayerInputs, saved: Saved, into: Into
    ) -> Gradients:
        """See `base.Engine`: dy to where x went, and the gradients of rows back by `combine`."""
        check_backward(dy, inputs, (None, saved.tensors[0]))
        rows, _, handle = self.bring_again(inputs.packed, saved)
        grad = self.dispatch_cached(packed(dy), None, handle).x
        found = self._expert_gradients(rows, grad, memory_of(into, inputs))
        dx, topk_grads = self.combine(found.x, handle, found.topk_weights, ())
        assert topk_grads is not None
        return found._replace(x=dx, topk_weights=topk_grads)

    def _expert_gradients(
        self, rows: LayerInputs, grad: torch.Tensor, into: WeightGradients | None
    ) -> Gradients:
        """Those of `expert_sums`, given that of the sums; by autograd, once more for gradients of
        weights that come later."""
        of_biases = dict(gate_up=rows.b_gate_up, down=rows.b_down)
        wanted = [name for name, b in of_biases.items() if b is not None and b.requires_grad]
        names = "x", "topk_weights", *(f"b_{name}" for name in wanted)
        of_rows, of_weights, *found = self._gradients(rows, grad, *names, into=into)
        biases = BiasGradients(**dict(zip(wanted, found, strict=True)))

        def later(into: WeightGradients) -> None:
            if into != WeightGradients(None, None):
                self._gradients(rows, grad, into=into)

        return Gradients(of_rows, of_weights, later if into is None else None, into, biases)

    def _gradients(
        self,
        rows: LayerInputs,
        grad: torch.Tensor,
        *names: str,
        into: WeightGradients | None = None,
    ) -> list[torch.Tensor]:
        """Those of the named tensors of `_expert_sums`, given that of the sums; those of weights go
        `into` this memory, rounded once: autograd gets them in the dtype of sums."""
        into = into or WeightGradients(None, None)
        both = ("w_gate_up", into.gate_up), ("w_down", into.down)
        outs = {name: out for name, out in both if out is not None}
        leaves = {name: getattr(rows, name).detach().requires_grad_() for name in names}
        for name in outs:
            w = getattr(rows, name)
            wide = torch.promote_types(w.dtype, torch.float32)
            leaves[name] = w.detach().to(wide).requires_grad_()
        with torch.enable_grad():
            sums = _expert_sums(rows._replace(**leaves))
            found = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
            if sums.requires_grad:  # not where no row depends on a leaf
                found = torch.autograd.grad(sums, [*leaves.values()], grad, materialize_grads=True)
        for out, one in zip(outs.values(), found[len(names) :], strict=True):
            out.copy_(one + out if into.accumulate else one)
        return list(found[: len(names)])

    def contexts(self) -> list[DeviceContext]:
        """None: a call that breaks off here breaks the process group."""
        return []

    @property
    def has_ended(self) -> bool:
        """See `base.Engine`."""
        return self._ended is not None

    def check(self) -> bool:
        """See `base.Engine`."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        self.has_sent = False
        self._told_bad_ids = self._num_bad_ids
        return self._told_bad_ids > 0

    def check_ids(self, result: object = None) -> None:
        """See `base.Engine`."""
        num_bad, self._told_bad_ids = self._told_bad_ids, 0
        self._num_bad_ids -= num_bad
        if num_bad:
            raise RoutingError(bad_ids(self.rank, num_bad), result)

    def free(self) -> None:
        """Nothing to give back."""


def _expert_sums(rows: LayerInputs) -> torch.Tensor:
    """What this rank's experts give for rows [N, H], one weighted sum for each; in the dtype of
    the rows, under autocast too, as kernels do."""
    with torch.autocast(rows.x.device.type, enabled=False):
        of_experts = reference.expert_rows(rows.x, rows.topk_idx, *rows[3:])
        return reference.sum_topk(of_experts, rows.topk_weights)


def _pad(rows: Received, num_rows: int) -> Received:
    """`rows` with room for `num_rows` (0: as they are); ids past the received rows are -1."""
    extra = num_rows - rows.x.shape[0]
    if not num_rows or extra == 0:
        return rows
    if extra < 0:
        raise CapacityError(
            f"num_worst_tokens is {num_rows}, but {rows.x.shape[0]} rows came. Use the number of "
            "ranks times the largest number of tokens on a rank."
        )

    def extend(tensor: torch.Tensor | None, value: float) -> torch.Tensor | None:
        if tensor is None:
            return None
        padding = tensor.new_empty((extra, *tensor.shape[1:]))
        return torch.cat([tensor, padding.fill_(value)])

    x, src_idx = extend(rows.x, 0.0), extend(rows.src_idx, 0)
    assert x is not None
    assert src_idx is not None
    ids, weights = extend(rows.topk_idx, -1), extend(rows.topk_weights, 0.0)
    return Received(x, extend(rows.scales, 0), ids, weights, src_idx)
