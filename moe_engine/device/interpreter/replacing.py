"""What replaces a member of Triton, and what was there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_replacements: list[tuple[Any, str, Any]] = []


def in_place_of(owner: Any, name: str) -> Callable[[Any], Any]:
    """A decorator: from `replace_all` on, the function is this member of `owner`, and its
    `general` is what was there. In several places, it is that of the first line."""

    def register(function: Any) -> Any:
        _replacements.append((owner, name, function))
        return function

    return register


def replace_all() -> None:
    """Put all functions in their places."""
    for owner, name, function in _replacements:
        function.general = getattr(owner, name)
        setattr(owner, name, function)
