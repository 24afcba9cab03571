"""Random uses of random shapes, several on one Buffer, against what each rank knows to be right."""

from __future__ import annotations

import random

import cases
import pytest
import torch
from rounds import FEW, MOST, VERBS, Round, new_buffer, outcome

SOME, MANY = 2, 25
"""Cases of each number of ranks."""


def draw_case(generator: random.Random) -> tuple[list[Round], int]:
    """Rounds of one shape, by any of the verbs, and the experts of a rank."""
    hidden, num_topk = 4 * generator.randint(1, 20), generator.randint(1, 6)
    num_local = generator.randint(1, 7)
    num_topk = min(num_topk, num_local)  # distinct experts exist on any number of ranks
    rounds = []
    for _ in range(generator.randint(1, 4)):
        verb = generator.choice(VERBS)
        most = FEW if verb in ("low_latency", "decode") else MOST
        num_tokens = tuple(generator.randint(0, most) for _ in range(4))
        kind = generator.choice(cases.ROUTINGS)
        seed, with_weights = generator.randint(0, 10**6), generator.random() < 0.5
        rounds.append(Round(verb, seed, hidden, num_topk, with_weights, num_tokens, kind))
    return rounds, num_local


def run_cases(group, drawn):
    """Every round of every case that did not come out right on this rank."""
    wrong = []
    for rounds, num_local in drawn:
        first = rounds[0]
        buffer = new_buffer(group, first.hidden, num_local, first.num_topk, timeout_s=60.0)
        ring, slots = buffer._low_latency.ring, buffer._engine.slots
        for block, layout in ((slots.block, slots.layout), (ring.block, ring.layout)):
            block.local[layout.slots :].fill_(0xFF)  # what is read must have been written
        torch.distributed.barrier(group)
        with cases.filled_memory():
            results = [outcome(one, buffer, num_local) for one in rounds]
        wrong += [pair for pair in zip(rounds, results, strict=True) if pair[1] != "right"]
        torch.distributed.barrier(group)
        buffer.destroy()
    return wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "num_cases"),
    [
        *((2, SOME), (3, SOME)),
        *(pytest.param(n, SOME, marks=pytest.mark.slow) for n in (1, 4)),
        *(pytest.param(n, MANY, marks=pytest.mark.soak) for n in (1, 2, 3, 4)),
    ],
)
def test_any_uses_of_any_shape(pool, num_ranks, num_cases):
    cases.skip_where_shapes_compile(pool)
    generator = random.Random(num_ranks)
    drawn = [draw_case(generator) for _ in range(num_cases)]
    for wrong in pool.run(run_cases, drawn, num_ranks=num_ranks, timeout_s=580):
        assert wrong == []
