"""The device language: every function of device/lang.py, on two ranks where it needs a peer."""

import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import device
from device_cases import DONE, FLAGS, POISON, make_context

from moe_engine import symm
from moe_engine.device import lang, programs
from moe_engine.device.context import PHASE_ROWS, ContextField, Phase, Report
from moe_engine.dispatch import receive_kernels

TRITON_TYPES = {
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def meet(group):
    if torch.cuda.is_available() and not lang.INTERPRETED:
        torch.cuda.synchronize()
    dist.barrier(group)


# --- Addresses -------------------------------------------------------------------------------


@triton.jit
def store_addresses(context, out, offset, NUM_RANKS: tl.constexpr):
    own = lang.own_block(context) + offset
    for rank in range(0, NUM_RANKS):
        tl.store(out + rank, lang.symm_at(own, rank, context))
    addresses = own + tl.arange(0, 4) * 8
    tl.store(out + NUM_RANKS + tl.arange(0, 4), lang.symm_at(addresses, NUM_RANKS - 1, context))


def find_addresses(group):
    block, context, _ = make_context(group)
    out = torch.zeros(group.size() + 4, dtype=torch.int64, device=context.device)
    store_addresses[(1,)](context, out, 24, NUM_RANKS=group.size())
    return block.peer_addresses.tolist(), out.tolist()


def test_symm_at_finds_the_same_offset_on_every_rank(pool):
    for peers, out in pool.run(find_addresses, num_ranks=2):
        assert out[:2] == [address + 24 for address in peers]
        assert out[2:] == [peers[1] + 24 + 8 * i for i in range(4)]


# --- Rows ------------------------------------------------------------------------------------


@triton.jit
def push_rows(
    context,
    source,
    dst_rows,
    due_in,
    peer,
    num_rows,
    num_vecs,
    row_bytes,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TAIL_VECS: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_ROWS)
    mask = rows < num_rows
    dst_row = tl.load(dst_rows + rows, mask=mask, other=0)
    to = lang.symm_at(lang.own_block(context) + dst_row * row_bytes, peer, context)
    from_rows = source + rows * num_vecs
    now = lang.ticks()
    # fmt: off
    due = lang.put_rows(
        lang.as_pointer(to, DTYPE), from_rows, num_vecs, mask, now, 100, ALIGNED, 8, TAIL_VECS
    )
    # fmt: on
    tl.store(due_in, due - now)
    if DTYPE == tl.int8:  # two more values by `put`, after the rows
        end = lang.symm_at(lang.own_block(context) + 2048, peer, context)
        lang.put(lang.as_pointer(end + rows, DTYPE), (rows + 1).to(tl.int8), rows < 2)


def push_to_next(group, source, row_bytes, aligned, num_tail=0):
    block, context, _ = make_context(group)
    dst_rows = torch.tensor([5, 0, 3], device=context.device)
    due_in = dst_rows.new_zeros(1)
    push_rows[(1,)](
        context,
        source.to(context.device),
        dst_rows,
        due_in,
        1 - group.rank(),
        len(source),
        source.shape[1],
        row_bytes,
        DTYPE=TRITON_TYPES[source.dtype],
        ALIGNED=aligned,
        BLOCK_ROWS=4,
        TAIL_VECS=num_tail,
    )
    meet(group)
    return block.local.cpu(), due_in.item()


@pytest.mark.parametrize(
    ("dtype", "num_vecs", "row_bytes", "aligned"),
    [
        (torch.int32, 12, 48, True),
        (torch.int32, 20, 96, True),  # a gap after each row
        (torch.int32, 9, 36, False),
        (torch.int16, 7, 14, False),
        (torch.int8, 13, 13, False),
    ],
)
@pytest.mark.parametrize("num_tail", [0, 8])
def test_put_rows_writes_the_rows_and_nothing_else(
    pool, dtype, num_vecs, row_bytes, aligned, num_tail
):
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(-100, 100, (3, num_vecs), generator=generator).to(dtype)
    whole, rest = divmod(num_vecs, 8)
    in_part = 0 if num_tail else 100 * rest // 8
    for got, due_in in pool.run(push_to_next, source, row_bytes, aligned, num_tail, num_ranks=2):
        assert due_in == 100 * whole + in_part
        expected = torch.full((FLAGS,), POISON, dtype=torch.uint8)
        for row, dst_row in zip(source, (5, 0, 3), strict=True):
            data = row.view(torch.uint8)
            expected[dst_row * row_bytes : dst_row * row_bytes + len(data)] = data
        if dtype == torch.int8:
            expected[2048:2050] = torch.tensor([1, 2])
        assert got[:FLAGS].equal(expected)


@triton.jit
def take_turns(out, ahead):
    """What `pace` adds to a time that lies so many ns ahead of now."""
    due = lang.ticks() + ahead
    tl.store(out, (lang.pace(due, 7) - due).to(tl.int64))


def take_two_turns(group):
    """One that is near, and one since which the clock has gone halfway round."""
    added = []
    for ahead in (1_000_000, 1 << 30):
        out = torch.zeros(1, dtype=torch.int64, device=device())
        take_turns[(1,)](out, ahead)
        added.append(int(out))
    return added


def test_a_turn_is_not_far_ahead(pool):
    [(near, far)] = pool.run(take_two_turns, num_ranks=1)
    assert near == 7
    assert far < -(1 << 29)


@triton.jit
def count_received(context, prefix, out, max_rows):
    tl.store(out, receive_kernels.num_received(prefix, max_rows, context))


def count_rows(group):
    """As many as this rank's prefix sums say, of which others may have changed the last one."""
    _, context, _ = make_context(group)
    out, found = torch.zeros(1, dtype=torch.int32, device=context.device), []
    for last in (3, 9, -5):
        prefix = torch.tensor([[1] * 2, [last] * 2], dtype=torch.int32, device=context.device)
        count_received[(1,)](context, prefix, out, 8)
        found.append(int(out))
    return found


def test_received_rows_lie_in_the_result(pool):
    assert pool.run(count_rows, num_ranks=2) == [[3, 8, 0]] * 2


# --- Signals ---------------------------------------------------------------------------------


@triton.jit
def push_and_notify(context, values, epoch, flag_offset, peer, AFTER_TMA: tl.constexpr):
    i = tl.arange(0, 64)
    own = lang.own_block(context)
    to = lang.as_pointer(lang.symm_at(own, peer, context), tl.int32)
    lang.put(to + i, tl.load(values + i), i < 64)
    zero = tl.arange(0, 1)
    lang.notify(own + flag_offset, peer + zero, zero == 0, epoch, context, AFTER_TMA=AFTER_TMA)


@triton.jit
def wait_and_copy(context, out, epoch, flag_offset, peer, BEFORE_TMA: tl.constexpr):
    one = tl.arange(0, 1)
    own = lang.own_block(context)
    flags = own + flag_offset + one * 8
    token = lang.wait(flags, one == 0, epoch, one + peer, context, PHASE_ROWS, BEFORE_TMA)
    rows = lang.as_pointer(lang.consume_token(own, token), tl.int32)
    i = tl.arange(0, 64)
    tl.store(out + i, tl.load(rows + i))
    tl.store(out + 64, token)


def exchange_with_a_slow_rank(group, tma):
    """Rank 1 is late by half a second; each rank sends 64 values and waits for its peer's."""
    _, context, report = make_context(group)
    peer = 1 - group.rank()
    values = torch.arange(64, dtype=torch.int32, device=context.device) + 100 * group.rank()
    out = torch.zeros(65, dtype=torch.int32, device=context.device)
    if group.rank() == 1:
        time.sleep(0.5)
    sent = time.monotonic()
    push_and_notify[(1,)](context, values, 3, FLAGS + 8, peer, AFTER_TMA=tma)
    wait_and_copy[(1,)](context, out, 3, FLAGS + 8, peer, BEFORE_TMA=tma)
    got = out.tolist()
    return sent, time.monotonic(), got, report.tolist()


@pytest.mark.parametrize("tma", [False, True])
def test_wait_returns_once_a_slow_peer_has_written_and_notified(pool, tma):
    results = pool.run(exchange_with_a_slow_rank, tma, num_ranks=2)
    for rank, (_, received, got, report) in enumerate(results):
        assert received > results[1 - rank][0]
        assert got == [100 * (1 - rank) + i for i in range(64)] + [1]
        assert not any(report)


@triton.jit
def wait_for_flags(context, out, mask, epoch, NUM: tl.constexpr):
    i = tl.arange(0, NUM)
    flags = lang.own_block(context) + 3072 + i * 8
    wanted = tl.load(mask + i) != 0
    token = lang.wait(flags, wanted, epoch, 10 + i, context, PHASE_ROWS)
    tl.store(out, token)
    tl.store(out + 1, lang.is_broken(context).to(tl.int32))


def wait_with_mask(group, raised, masks, timeout_s):
    """For each mask: the token, BROKEN, the report and the seconds of one wait at epoch 5."""
    block, context, report = make_context(group, timeout_s)
    flags = block.local[FLAGS : FLAGS + 64].view(torch.int64)
    flags.copy_(torch.tensor(raised))
    out = torch.zeros(2, dtype=torch.int32, device=context.device)
    answers = []
    for mask in masks:
        start = time.monotonic()
        mask = torch.tensor(mask, dtype=torch.int32, device=context.device)
        wait_for_flags[(1,)](context, out, mask, 5, NUM=8)
        token, broken = out.tolist()
        answers.append((token, broken, report.tolist()[:4], time.monotonic() - start))
        context[ContextField.TIMEOUT_NS] = 3600 * 10**9
    return answers


def test_wait_looks_at_the_flags_under_its_mask_alone(pool):
    raised = [5, 9, 5, 0, 4, 5, 6, 0]
    masks = [[1, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0] * 8]
    [answers] = pool.run(wait_with_mask, raised, masks, 60.0, num_ranks=1)
    for token, broken, report, _ in answers:
        assert (token, broken, report) == (1, 0, [0, 0, 0, 0])


def test_wait_ends_at_its_deadline_and_later_ones_at_once(pool):
    raised = [5, 9, 5, 0, 4, 5, 6, 0]
    masks = [[1, 1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 1]]
    [(first, second)] = pool.run(wait_with_mask, raised, masks, 0.3, num_ranks=1)
    expected = [0, 0, 0, 0]
    expected[Report.VALID], expected[Report.PEER] = 1, 14  # the flag that is one epoch late
    expected[Report.PHASE], expected[Report.EPOCH] = Phase.ROWS, 5
    assert first[:3] == (0, 1, expected)
    assert 0.3 <= first[3] < 30
    assert second[:3] == (0, 1, expected)  # the first failure stays
    assert second[3] < 30  # its own deadline is an hour


@triton.jit
def fail_twice(context):
    for peer in range(1, 3):
        lang.report_failure(tl.full((), 0, tl.int64) + peer, 7, context, PHASE_ROWS)


def report_two_failures(group):
    _, context, report = make_context(group)
    fail_twice[(1,)](context)
    return int(context[ContextField.BROKEN]), report.tolist()[:4]


def test_the_first_failure_is_the_one_reported(pool):
    [(broken, report)] = pool.run(report_two_failures, num_ranks=1)
    assert broken == 1
    assert (report[Report.VALID], report[Report.PEER], report[Report.EPOCH]) == (1, 1, 7)


# --- End of a call ---------------------------------------------------------------------------


@triton.jit
def arrive(context, marks, out, NUM_PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    tl.store(marks + program, program + 1)
    last = programs.is_last_program(context)
    if last:
        tl.atomic_add(out, 1)
        total = tl.sum(tl.load(marks + tl.arange(0, NUM_PROGRAMS), volatile=True), 0)
        tl.store(out + 1, total)


def count_last_programs(group):
    _block, context, _report = make_context(group)
    answers = []
    for _ in range(2):
        marks = torch.zeros(16, dtype=torch.int32, device=context.device)
        out = torch.zeros(2, dtype=torch.int32, device=context.device)
        arrive[(16,)](context, marks, out, NUM_PROGRAMS=16)
        answers.append((*out.tolist(), int(context[ContextField.FINISHED])))
    return answers


def test_one_program_is_the_last_and_sees_the_others_stores(pool):
    [answers] = pool.run(count_last_programs, num_ranks=1)
    assert answers == [(1, 16 * 17 // 2, 0)] * 2


@triton.jit
def end_call(context, out):
    tl.store(out, lang.current_epoch(context))
    programs.finish_call(context)


def end_calls(group):
    block, context, _ = make_context(group)
    done = block.local[DONE : DONE + 8 * group.size()].view(torch.int64)
    out = torch.zeros(1, dtype=torch.int64, device=context.device)
    answers = []
    for _ in range(2):
        end_call[(1,)](context, out)
        meet(group)
        answers.append((int(out), int(context[ContextField.EPOCH]), done.tolist()))
        meet(group)
    return answers


def test_finish_call_raises_done_everywhere_and_advances_the_epoch(pool):
    for answers in pool.run(end_calls, num_ranks=2):
        assert answers == [(1, 1, [1, 1]), (2, 2, [2, 2])]


# --- Arithmetic ------------------------------------------------------------------------------


@triton.jit
def multiply(a, b, acc, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    tile_a = tl.load(a + m * K + k[None, :])
    tile_b = tl.load(b + k[:, None] * N + n)
    tl.store(out + m * N + n, lang.dot(tile_a, tile_b, tl.load(acc + m * N + n)))


def run_dot(group, a, b, acc):
    a, b, acc = (x.to(symm.resolve_device(None)) for x in (a, b, acc))
    out = torch.full_like(acc, float("nan"))
    multiply[(1,)](a, b, acc, out, M=a.shape[0], K=a.shape[1], N=b.shape[1])
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_values_and_sums_in_fp32(pool, dtype):
    generator = torch.Generator().manual_seed(0)
    a, b, acc = (
        torch.randn(shape, generator=generator) for shape in ((32, 64), (64, 16), (32, 16))
    )
    a, b = a.to(dtype), b.to(dtype)
    [out] = pool.run(run_dot, a, b, acc, num_ranks=1)
    reference = acc.double() + a.double() @ b.double()
    torch.testing.assert_close(out.double(), reference, rtol=0, atol=2e-5)  # tf32 is off by 1e-2


@triton.jit
def round_all(x, out, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, lang.round_to(tl.load(x + i), DTYPE))


def run_round_to(group, x, dtype):
    x = x.to(symm.resolve_device(None))
    out = torch.empty_like(x, dtype=dtype)
    round_all[(len(x) // 4096,)](x, out, DTYPE=TRITON_TYPES[dtype], BLOCK=4096)
    return out.cpu()


SPECIAL_BITS = [
    *(0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF),  # infinity and NaN
    *(0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000),  # the largest, and what rounds to infinity
    *(0x00000000, 0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x00800000),  # subnormal
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF),  # ties, and next to one
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_to_is_nearest_even(pool, dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32)
    bits[: len(SPECIAL_BITS)] = torch.tensor(SPECIAL_BITS)
    bits[len(bits) // 2 :] = bits[: len(bits) // 2] ^ -(2**31)  # the same with the other sign
    x = bits.view(torch.float32)
    [out] = pool.run(run_round_to, x, dtype, num_ranks=1)
    expected = x.to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    same = out.view(bits) == expected.view(bits)
    assert (same | (out.isnan() & expected.isnan())).all()


# --- Operators: the emulation does those of one type by numpy ----------------------------------


@triton.jit
def operate(integers, longs, floats, out):
    i = tl.arange(0, 8)
    x, y, z = tl.load(integers + i), tl.load(longs + i), tl.load(floats + i)
    first = tl.load(integers)
    more = x + (1 << 30)
    results = (
        x + x, x - 3, 3 + x, first * x, x * first, 2 * x, more + more, y + (1 << 40),
        y + y, x * y, y - x, x + z, z * z, z * 2, z - first,
        x < y, x <= y, x == first, first != x, z >= x, (x > 1) & (y > 1), (x < 0) | (x == 3),
        x & 3, x | y, (x[:, None] + y[None, :]).sum(0), tl.load(longs + first + i // 2 % 4),
    )  # fmt: skip
    for number in tl.static_range(len(results)):
        tl.store(out + number * 8 + i, results[number].to(tl.float64))


def test_operators(pool):
    for have, want in pool.run(run_operators, num_ranks=1):
        assert torch.equal(have, want)


def run_operators(group):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-4, 9, (8,), generator=generator) for _ in range(2))
    x, z = x.int(), torch.randn(8, generator=generator)
    x[0], (i, first) = 1, (torch.arange(8), torch.tensor(1, dtype=torch.int32))
    more = x + (1 << 30)
    want = [
        x + x, x - 3, 3 + x, first * x, x * first, 2 * x, more + more, y + (1 << 40),
        y + y, x * y, y - x, x + z, z * z, z * 2, z - first,
        x < y, x <= y, x == first, first != x, z >= x, (x > 1) & (y > 1), (x < 0) | (x == 3),
        x & 3, x | y, (x[:, None] + y[None, :]).sum(0), y[first + i // 2 % 4],
    ]  # fmt: skip
    device = make_context(group)[1].device
    out = torch.zeros(len(want), 8, dtype=torch.float64, device=device)
    operate[(1,)](x.to(device), y.to(device), z.to(device), out)
    return out.cpu(), torch.stack([one.double() for one in want])
