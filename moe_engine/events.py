"""Events in DeepEP's form: a point on a CUDA stream that another stream can wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from .checks import check_flag
from .device.lang import INTERPRETED
from .errors import DtypeError


class EventHandle:
    """The current stream, as far as it has been filled now. On a CPU, nothing to wait for."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and not INTERPRETED:
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, or none, and the tensors that must live until it has been waited for.

    `event` may be assigned later; without one, a wait waits for nothing. As a context manager it
    waits on exit, so that the block overlaps with what the event ends:

        with event: ...                        # then wait
        with event(release_handle=True): ...   # then wait, and drop the event and the tensors
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._release_on_exit = False
        self._hooks: list[Callable[[], Any]] = []

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait; then run the hooks. `release_handle` drops the event."""
        check_flag("release_handle", release_handle)
        if self.event is not None:
            if not isinstance(self.event, EventHandle):
                raise DtypeError(
                    f"event is a {type(self.event).__name__}; it must be a moe_engine.EventHandle, "
                    "or None."
                )
            self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Call `hook` once, after the next wait."""
        if not callable(hook):
            raise DtypeError(f"hook is a {type(hook).__name__}; it must be a function.")
        self._hooks.append(hook)

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This event; `release_handle` is for the `with` block that follows."""
        check_flag("release_handle", release_handle)
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release, self._release_on_exit = self._release_on_exit, False
        self.current_stream_wait(release)
