"""What all layers share: arithmetic of sizes, and what torch.compile and its modes do not see."""

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import BackendError
from .torch_privates import (
    FrameAction,
    FrameExecStrategy,
    current_graph_task,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])

FLAG_BYTES = 8
LINE_BYTES = 128
"""Rows begin at multiples of this, as the memory's lines do. A GEMM that gathers rows which begin
elsewhere reads two lines where one would do; DeepSeek-V3's up-projection took 40% longer so."""

ROUTED_ANEW = (
    "torch.utils.checkpoint has computed other tensors than in the forward, as it does where a "
    "router breaks ties otherwise. Pass it context_fn=save_routing_policy of "
    "moe_engine.checkpointing, on all ranks."
)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Smallest power of 2 that is at least `value`, 1 for 0. `triton.next_power_of_2` is made for
    kernels: on the host it takes microseconds, and a call needs tens of them."""
    return 1 << max(0, value - 1).bit_length()


def is_in_backward() -> bool:
    """Whether this thread is in a backward of autograd."""
    return current_graph_task() != -1


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """`ctx.saved_tensors` of a node of autograd. BackendError, with the remedy, where a checkpoint
    has computed other ones than its forward."""
    try:
        found: tuple[Any, ...] = ctx.saved_tensors
        return found
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        raise BackendError(f"{ROUTED_ANEW} {error}") from error


def untraced(function: F) -> F:
    """Let torch.compile break its graph at calls of `function`, and run it and all that it calls as
    plain Python. `torch.compiler.disable` does so at a microsecond for each call, and imports the
    compiler."""
    skip = FrameAction.SKIP
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
