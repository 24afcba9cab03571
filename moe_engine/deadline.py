"""The deadline of every wait, on the device and between hosts."""

from __future__ import annotations

import os

from .errors import BackendError

DEFAULT_S = 100.0
MOST_S = 1e9
"""About 30 years: in nanoseconds it fits an int64 of the device."""


def timeout_seconds() -> float:
    """The deadline of a wait: MOE_ENGINE_TIMEOUT_S, 100 s by default. BackendError where that is no
    number, not positive or beyond MOST_S."""
    text = os.environ.get("MOE_ENGINE_TIMEOUT_S", str(DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_S:  # NaN is neither
        raise BackendError(
            f"MOE_ENGINE_TIMEOUT_S is {text!r}; it must be a positive number of seconds, at most "
            f"{MOST_S:g}."
        )
    return seconds
