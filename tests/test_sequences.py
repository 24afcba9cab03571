"""Mixed calls in any order, as a program makes them: each result is right."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from sequence_cases import run_sequences

NUM_CALLS = 12
FEW = {1: 7, 2: 9, 3: 4}
"""Sequences by the number of ranks."""
SLOW, MANY = 40, 200
"""More of them, which are slow, and which take an hour."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_ranks", "first", "count"),
    [
        *((ranks, 0, count) for ranks, count in FEW.items()),
        *(pytest.param(ranks, 100, SLOW, marks=pytest.mark.slow) for ranks in FEW),
        *(pytest.param(ranks, 200, MANY, marks=pytest.mark.soak) for ranks in FEW),
    ],
)
def test_mixed_calls(pool: Any, num_ranks: int, first: int, count: int) -> None:
    cases.skip_where_shapes_compile(pool)
    seeds = range(first, first + count)
    found = pool.run(run_sequences, seeds, NUM_CALLS, num_ranks=num_ranks, timeout_s=1700)
    wrong = [one for of_rank in found for one in of_rank]
    assert not wrong, "\n\n".join(wrong)
