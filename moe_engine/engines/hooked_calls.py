"""Calls in two halves: the second one is launched at once, or by a hook, in any order of calls."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device.lang import INTERPRETED
from ..device.ring import COUNT_MASK
from ..dispatch.low_latency import LowLatencyTokens
from ..errors import BackendError, CapacityError
from ..kinds import Described
from ..low_latency_handle import LowLatencySizes
from ..options import Options
from ..symm.device_context import DeviceContext
from ..symm.layout import RankMemory
from ..symm.ring import MAX_LOCAL_EXPERTS
from .base import ContextEngine, LayerInputs

Receive = Callable[[], None]


@dataclass(slots=True)
class InFlight:
    """A call that this rank sent, in which memory, whether its receiving half was launched, and
    where the first tensor of the handle lies that it returned, if it did."""

    memory: RankMemory[Any]
    received: bool = False
    handle_at: int | None = None


class HookedCalls(ContextEngine):
    """An engine of such calls, `num_slots` of which may wait for their hooks."""

    def __init__(self, memories: Sequence[RankMemory[Any]], num_slots: int):
        """memories: of all calls, which ranks have allocated together."""
        self._calls = deque[InFlight]()  # from the first one on whose hook was not called yet
        self.memories, self.num_slots = memories, num_slots
        self._contexts = [memory.context for memory in memories]

    @property
    @abstractmethod
    def next_memory(self) -> RankMemory[Any]:
        """That of the next call."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Ranks of the group."""

    def owner(self, memory: RankMemory[Any]) -> Any:
        """What the body of a call in this memory gets as its first argument."""
        return self

    # --- Verbs -------------------------------------------------------------------------------

    @abstractmethod
    def dispatch(
        self,
        tokens: LowLatencyTokens,
        recv_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[Any, Receive | None]:
        """Send the tokens and pack what arrives; with `hooked` the latter when the returned
        function is called."""

    @abstractmethod
    def new_handle(self, got: Any, sizes: LowLatencySizes) -> Any:
        """The handle of the last dispatch, which returned `got`."""

    @abstractmethod
    def expert_rows(
        self,
        y: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        out: torch.Tensor | None,
    ) -> Any:
        """What `combine` takes: experts' rows, to be added up into `out`, None for a new tensor."""

    @abstractmethod
    def combine(
        self,
        rows: Any,
        num_experts: int,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Receive | None]:
        """Return the experts' rows and add them up; with `hooked` the latter when the returned
        function is called: (out, memory that the function uses or None, the function)."""

    @abstractmethod
    def fits(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """Whether calls of this size have room."""

    @abstractmethod
    def moe_ffn(
        self, inputs: LayerInputs, max_tokens: int, described: Described | None = None
    ) -> torch.Tensor:
        """The experts of a layer for up to `max_tokens` tokens of each rank, without a wait of the
        host: a dispatch, two GEMMs bound by the weights' bytes, a combine. `described`: the kind of
        these arguments in a Buffer; an engine of one memory prepares its calls by it."""

    @abstractmethod
    def fits_layer(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """Whether the calls of a layer have room, of rows with so many bytes of payload."""

    def takes(
        self,
        max_tokens: int | None,
        row_bytes: int,
        num_topk: int,
        num_experts: int,
        options: Options,
    ) -> bool:
        """Whether a layer of up to so many tokens per rank is one for `moe_ffn`."""
        if max_tokens is None or max_tokens > options.decode_tokens or options.layer is not None:
            return False
        if num_experts > min(COUNT_MASK.value, self.num_ranks * MAX_LOCAL_EXPERTS):
            return False
        return self.fits_layer(max_tokens, num_topk, row_bytes)

    def again(self, described: Described, num_calls: int = 1) -> Any:
        """What `dispatch`, `combine` or `moe_ffn`, which is two calls, launched for arguments that
        were described, as the last time with arguments of their kind, and without a hook. None
        where it must be called."""

    # --- Memory ------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory."""
        return sum(memory.layout.num_bytes for memory in self.memories)

    def contexts(self) -> list[DeviceContext]:
        """See `base.Engine`."""
        return self._contexts

    @property
    def describe(self) -> Callable[..., Described]:
        """Tells the kind of the next call; see `PreparedCalls.describe`."""
        return self.next_memory.calls.describe

    def free(self) -> None:
        """Give the memory back."""
        for memory in self.memories:
            memory.free()

    # --- Calls -------------------------------------------------------------------------------

    def _call(
        self,
        body: Callable[..., Any],
        *args: Any,
        hooked: bool = False,
        num_calls: int = 1,
        described: Described | None = None,
    ) -> Any:
        """Launch a call, see `PreparedCalls`: both halves, or with `hooked` the first one."""
        memory = self.next_memory
        self._check_hooks(num_calls)
        phases = "send" if hooked else "both"
        if described is not None and not hooked:
            described.kind.whole = body
        result = memory.calls(body, self.owner(memory), *args, phases, described=described)
        self._note_calls(memory, num_calls, not hooked)
        return result

    def _note_calls(self, memory: RankMemory[Any], num_calls: int, received: bool = True) -> None:
        """Calls were launched."""
        if self._calls or not received:
            self._calls.extend(InFlight(memory, received) for _ in range(num_calls))
        if INTERPRETED:
            self._check_emulated()

    def _check_hooks(self, num_calls: int) -> None:
        """CapacityError where so many calls would need the memory of one whose hook was not called
        yet."""
        if self._calls and len(self._calls) + num_calls > self.num_slots:
            raise CapacityError(
                f"{self.num_slots} low-latency calls began after one whose hook was not called "
                "yet. Call the hook before, or make the Buffer with more Options.num_slots."
            )

    def _note_handle(self, first: torch.Tensor) -> None:
        """The last call returned a handle, of which this is the first tensor."""
        if self._calls:
            self._calls[-1].handle_at = first.data_ptr()

    def check_received(self, first: torch.Tensor) -> None:
        """BackendError where the dispatch that returned the handle, of which this is the first
        tensor, has not received its rows."""
        if not self._calls:
            return
        of = (one for one in reversed(self._calls) if one.handle_at == first.data_ptr())
        call = next(of, None)
        if call is not None and not call.received:
            raise BackendError(
                "handle is that of a low_latency_dispatch whose hook was not called: its rows have "
                "not arrived. Call the hook that it returned before low_latency_combine."
            )

    def _check_local_experts(self, num_experts: int) -> None:
        """CapacityError for more experts on a rank than these calls take."""
        num_local = num_experts // self.num_ranks
        if num_local > MAX_LOCAL_EXPERTS:
            raise CapacityError(
                f"{num_experts} experts on {self.num_ranks} ranks are {num_local} on each; "
                f"low-latency calls take at most {MAX_LOCAL_EXPERTS}. Use more ranks, or dispatch."
            )

    def _too_large(
        self, max_tokens: int, num_bytes: int, num_topk: int, num_experts: int
    ) -> CapacityError:
        """The error of calls for which there is too little memory; num_bytes: of a token."""
        return CapacityError(
            f"low-latency calls of up to {max_tokens} tokens per rank, {num_bytes} bytes and "
            f"top-{num_topk} of {num_experts} experts do not fit this Buffer's low-latency memory "
            f"of {self.num_bytes} bytes. Make it with the num_rdma_bytes of "
            "Buffer.get_low_latency_rdma_size_hint(...)."
        )

    def _hook(
        self,
        body: Callable[..., None],
        *args: Any,
        uses: Sequence[torch.Tensor | None],
        described: Described | None,
    ) -> Receive:
        """A function that launches the second half of the last call, once. uses: the tensors that
        it reads and writes."""
        call, callers = self._calls[-1], self._calls[-1].memory.context.callers
        caller, owner = callers.running, self.owner(call.memory)
        used = [one for one in uses if one is not None]
        make = call.memory.calls.later(body, owner, *args, uses=used, described=described)

        def receive() -> None:
            if not call.received:
                callers.running = caller
                make()
                if INTERPRETED:
                    self._check_emulated()
                call.received = True
                while self._calls and self._calls[0].received:
                    self._calls.popleft()

        return receive
