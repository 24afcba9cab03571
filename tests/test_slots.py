"""How a push deals its rows to programs and ranks, and how work is handed out by claims."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from device_cases import make_context
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import symm
from moe_engine.device import programs, push
from moe_engine.device.context import ContextField


@triton.jit
def mark_spans(marks, num_chunks, SPAN: tl.constexpr):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for turn in range(0, push.num_spans(num_chunks, num_programs, SPAN)):
        first, end = push.span(turn, num_chunks, program, num_programs, SPAN)
        for chunk in range(first, end):
            tl.atomic_add(marks + program * (num_chunks + 1) + chunk, 1)
    here = push.num_chunks_here(num_chunks, program, num_programs, SPAN)
    tl.store(marks + program * (num_chunks + 1) + num_chunks, here)


def spans(group, num_programs, num_chunks, span):
    marks = torch.zeros(num_programs, num_chunks + 1, dtype=torch.int32)
    marks = marks.to(symm.resolve_device(None))
    mark_spans[(num_programs,)](marks, num_chunks, SPAN=span)
    return marks[:, :-1].cpu(), marks[:, -1].cpu()


@given(
    num_programs=st.integers(1, 9),
    num_chunks=st.integers(0, 40),
    span=st.sampled_from([1, 2, 4]),
)
def test_every_chunk_is_pushed_once_and_programs_end_together(pool, num_programs, num_chunks, span):
    [(marks, counts)] = pool.run(spans, num_programs, num_chunks, span, num_ranks=1)
    assert (marks.sum(0) == 1).all()
    totals = marks.sum(1)
    assert torch.equal(totals, counts.long())
    assert totals.max() - totals.min() <= 1


def test_spans_of_the_example(pool):
    [(marks, _)] = pool.run(spans, 2, 7, 2, num_ranks=1)
    assert [row.nonzero().flatten().tolist() for row in marks] == [[0, 1, 4, 6], [2, 3, 5]]


@triton.jit
def take_all(context, takers, count):
    piece = programs.claim(context)
    while piece < count:
        tl.atomic_add(takers + piece, 1)
        piece = programs.claim(context)
    programs.end_push(context)
    if programs.is_last_program(context):
        tl.store(takers + count, programs.is_pushing(tl.num_programs(0), context).to(tl.int32))
        tl.store(
            takers + count + 1, programs.is_pushing(tl.num_programs(0) + 1, context).to(tl.int32)
        )
        programs.finish_call(context)


def claims(group):
    _block, context, _report = make_context(group)
    answers = []
    for _ in range(2):
        takers = torch.zeros(102, dtype=torch.int32, device=context.device)
        take_all[(6,)](context, takers, 100)
        answers.append(takers.tolist())

    return answers, [
        int(context[word])
        for word in (ContextField.CLAIMED, ContextField.PUSHED, ContextField.EPOCH)
    ]


def test_each_piece_is_claimed_once_in_every_call(pool):
    [(answers, words)] = pool.run(claims, num_ranks=1)
    assert answers == [[1] * 100 + [0, 1]] * 2
    assert words == [0, 0, 2]
