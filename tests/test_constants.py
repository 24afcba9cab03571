"""What a kernel gets as one argument of compile-time constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import triton.language as tl

from moe_engine.device.constants import constants
from moe_engine.device.lang import INTERPRETED


class Sizes(NamedTuple):
    ROWS: Any
    DTYPE: Any


class Others(NamedTuple):
    ROWS: Any
    DTYPE: Any


def test_they_are_numbered_and_named_as_given():
    given = constants(Sizes(4, tl.int32))
    unwrapped = [getattr(value, "value", value) for value in given]
    assert unwrapped == [4, tl.int32]
    assert (given._fields, type(given).__name__) == (Sizes._fields, "Sizes")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes them unchanged")
def test_equal_ones_are_one_object_which_a_launch_looks_up_at_once():
    assert constants(Sizes(4, tl.int32)) is constants(Sizes(4, tl.int32))
    assert constants(Sizes(4, tl.int32)) != constants(Sizes(5, tl.int32))
    assert constants(Sizes(4, tl.int32)) != constants(Others(4, tl.int32))
