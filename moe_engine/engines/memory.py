"""The calls of one memory, which the kernel engine makes of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..device.lang import INTERPRETED
from ..kinds import Described
from ..streams import is_captured
from ..symm.device_context import DeviceContext
from ..symm.slots import Slots
from .base import ContextEngine


class MemoryEngine(ContextEngine):
    """An engine whose calls run in `slots`, which may be replaced by more memory."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self._was_captured = False

    @property
    def context(self) -> DeviceContext:
        return self.slots.context

    def contexts(self) -> list[DeviceContext]:
        """See `base.Engine`."""
        return [self.slots.context]

    def check(self) -> bool:
        """See `base.Engine`."""
        return self.slots.context.begin_call()

    @property
    def describe(self) -> Callable[..., Described]:
        """See `base.Engine`."""
        return self.slots.calls.describe

    def call(self, body: Callable[..., Any], *args: Any, check: bool = True, **more: Any) -> Any:
        """Make a call, or a part of one, see `PreparedCalls`; then, where kernels are interpreted,
        raise what ended it."""
        self._was_captured = self._was_captured or is_captured(self.context.fields)
        result = self.slots.calls(body, self, *args, **more)
        if check:
            self._check_emulated()
        return result

    def whole_call(
        self, body: Callable[..., Any], *args: Any, described: Described | None, **more: Any
    ) -> Any:
        """`call` of what is all of a verb, which `again` repeats."""
        if described is not None:
            described.kind.whole = body
        return self.call(body, *args, described=described, **more)

    def again(self, described: Described, **numbers: int) -> Any:
        """See `base.Engine`."""
        if not self._was_captured:
            self._was_captured = is_captured(self.slots.context.fields)
        result = self.slots.calls.again(described, numbers)
        if INTERPRETED:
            self._check_emulated()
        return result

    def free(self) -> None:
        """Give the symmetric memory back."""
        self.slots.free()
