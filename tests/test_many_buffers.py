"""Buffers that are made and destroyed again and again leave nothing."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from contextlib import suppress
from pathlib import Path

import cases
import pytest
import torch

from moe_engine import Buffer, moe_ffn

HIDDEN, EXPERTS, TOPK, COLUMNS = 64, 2, 1, 64
BEFORE, TIMES = 20, 200
"""Buffers before the first look at what the process has, and after it."""


def resident_bytes() -> int:
    """The memory of this process, after the allocator has given back what it could."""
    with suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def objects() -> Counter[str]:
    """How many objects there are, by type."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects())


def make_and_destroy(group, calls):
    """What this process has more of after TIMES more Buffers, with or without calls: objects by
    type, resident bytes, open files, bytes of the GPU that torch has and that anyone has. Then the
    bytes of one Buffer."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=cases.device())
    idx = torch.zeros(1, TOPK, dtype=torch.int64, device=x.device)
    weights = torch.ones(1, TOPK, device=x.device)
    up, down = x.new_ones(EXPERTS, 2 * COLUMNS, HIDDEN), x.new_ones(EXPERTS, HIDDEN, COLUMNS)
    num_bytes = 0

    def use_buffers(number):
        nonlocal num_bytes
        for _ in range(number):
            buffer = Buffer.for_tokens(group, 64, HIDDEN, EXPERTS, TOPK)
            num_bytes = buffer.num_nvl_bytes + buffer.num_rdma_bytes
            if calls:
                per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
                layout = None, per_rank, None, in_rank, per_expert
                rows, _, _, _, handle, _ = buffer.dispatch(x, *layout, idx, weights)
                buffer.combine(rows, handle)
                moe_ffn(x, idx, weights, up, down, buffer, 1)
            buffer.destroy()

    def look():
        gpu = [0, 0]
        if x.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            gpu = [torch.cuda.memory_allocated(), total - free]
        return objects(), resident_bytes(), len(list(Path("/proc/self/fd").iterdir())), *gpu

    use_buffers(BEFORE)
    before, *sizes_before = look()
    use_buffers(TIMES)
    after, *sizes_after = look()
    more = [b - a for a, b in zip(sizes_before, sizes_after, strict=True)]
    return {kind: after[kind] - before[kind] for kind in after}, *more, num_bytes


def check(pool, calls):
    """Nothing has grown by as much as every tenth Buffer would make it."""
    few = TIMES // 10
    for objects, resident, files, allocated, on_gpu, num_bytes in pool.run(
        make_and_destroy, calls, num_ranks=1
    ):
        assert max(objects.values()) < TIMES // 2, objects
        assert resident < few * num_bytes
        assert files < few
        assert allocated < few * num_bytes
        assert on_gpu < TIMES * num_bytes // 2


@pytest.mark.parametrize("calls", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_destroyed_buffers_leave_nothing(pool, calls):
    check(pool, calls)


@pytest.mark.gpu
def test_destroyed_buffers_leave_nothing_on_a_gpu(pool):
    check(pool, True)
