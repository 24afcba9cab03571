"""A Buffer that one rank asks for with bad values: all ranks raise at once, and go on."""

from __future__ import annotations

import os
import re
import time
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist

from moe_engine import (
    BackendError,
    Buffer,
    LayerConfig,
    MoeEngineError,
    Options,
    ShapeError,
    agreement,
    moe_ffn,
)
from moe_engine.emulation import RankPool
from moe_engine.hardware import H100, H200

LONGEST_S = 60.0
"""Far below the deadline of a wait, and above what a machine under load takes."""
NAN, INF = float("nan"), float("inf")
BYTES = 1 << 20
SIZES = (2, 16), (8, 32, 16), (8, 16, 16)
"""Of x, w_gate_up and w_down."""

ARGUMENTS = {  # keywords of a Buffer, and a pattern of the error
    "bytes as a string": ({"num_nvl_bytes": "1MB"}, "num_nvl_bytes is '1MB'; it must be an int"),
    "bytes as a float": ({"num_nvl_bytes": 1e6}, r"num_nvl_bytes is 1000000\.0"),
    "bytes as a bool": ({"num_rdma_bytes": True}, "num_rdma_bytes is True"),
    "bytes as a tensor": ({"num_rdma_bytes": torch.tensor(64)}, "num_rdma_bytes is a Tensor"),
    "negative bytes": ({"num_nvl_bytes": -1}, "num_nvl_bytes is -1; it must be 0 or more"),
    "more bytes than there are": ({"num_nvl_bytes": 1 << 60}, "num_nvl_bytes is .* 0 to"),
    "comm": ({"comm": object()}, "comm="),
    "an unknown backend": ({"backend": "pigeon"}, "backend is 'pigeon'"),
    "no backend": ({"backend": None}, "backend is a NoneType"),
    "the other kind of backend": ({"backend": "collective"}, "backend differs between ranks"),
    "no options": ({"options": None}, "options is a NoneType"),
    "options as a dict": ({"options": {"num_slots": 2}}, "options is a dict"),
    "a word for a flag": ({"low_latency_mode": "yes"}, "low_latency_mode is 'yes'"),
    "masking on one rank": ({"enable_shrink": True}, "enable_shrink differs between ranks"),
}
GROUPS = {
    "a number for group": ({"group": 7}, "group is 7; it must be a torch.distributed"),
    "a name for group": ({"group": "world"}, "group is 'world'"),
    "ranks for group": ({"group": [0, 1]}, "group is a list"),
}
OPTIONS = {
    "negative seconds": ({"timeout_s": -1.0}, r"timeout_s is -1\.0; it must be positive"),
    "no seconds": ({"timeout_s": 0}, "timeout_s is 0"),
    "nan seconds": ({"timeout_s": NAN}, "timeout_s is nan"),
    "seconds without end": ({"timeout_s": INF}, "timeout_s is inf"),
    "seconds as a string": ({"timeout_s": "10"}, "timeout_s is a str"),
    "one slot": ({"num_slots": 1}, "num_slots is 1"),
    "many slots": ({"num_slots": 17}, "num_slots is 17"),
    "half a slot": ({"num_slots": 2.5}, r"num_slots is 2\.5"),
    "negative tokens": ({"max_tokens": -1}, "max_tokens is -1"),
    "bytes for tokens": ({"max_tokens": 1 << 30}, "max_tokens is 1073741824; .* 0 to 4194304"),
    "tokens as a float": ({"max_tokens": 8.0}, r"max_tokens is 8\.0"),
    "negative decode tokens": ({"decode_tokens": -1}, "decode_tokens is -1"),
    "another capacity": ({"capacity_factor": 1.5}, "capacity_factor differs between ranks"),
    "no capacity": ({"capacity_factor": 0}, "capacity_factor is 0"),
    "other slots": ({"num_slots": 3}, "num_slots differs between ranks: 2 on rank 0, 3 on rank 1"),
    "debug as a word": ({"debug": "on"}, "debug is 'on'"),
    "a layer without programs": (
        {"layer": LayerConfig(num_push_programs=0)},
        "num_push_programs is 0",
    ),
    "a layer of halves": ({"layer": LayerConfig(num_stages=1.5)}, r"num_stages is 1\.5"),
    "a layer as a dict": ({"layer": {}}, "layer is a dict"),
}
TOKENS = {  # keywords of for_tokens
    "bytes for tokens": ({"max_tokens": 1 << 30}, "max_tokens is 1073741824; .* 0 to 4194304"),
    "negative tokens": ({"max_tokens": -1}, "max_tokens is -1"),
    "half a token": ({"max_tokens": 2.5}, r"max_tokens is 2\.5"),
    "no columns": ({"hidden": 0}, "hidden is 0"),
    "other tokens": ({"max_tokens": 9}, "max_tokens differs between ranks"),
    "other columns": ({"hidden": 1 << 14}, r"memory \(.* differs between ranks"),
    "no experts": ({"num_experts": 0}, "num_experts is 0"),
    "too many experts": ({"num_experts": 70_000}, "num_experts is 70000"),
    "other experts": ({"num_experts": 16}, "max_experts differs between ranks"),
    "experts as a string": ({"num_experts": "8"}, "num_experts is '8'"),
    "no top-k": ({"num_topk": 0}, "num_topk is 0"),
    "a dtype as a string": ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    "one slot": ({"options": Options(num_slots=1)}, "num_slots is 1"),
    "no options": ({"options": 3}, "options is a int"),
}
VARIABLES = {
    "a word": ("soon", "MOE_ENGINE_TIMEOUT_S is 'soon'"),
    "not a number": ("nan", "MOE_ENGINE_TIMEOUT_S"),
    "without end": ("inf", "MOE_ENGINE_TIMEOUT_S"),
    "negative": ("-3", "MOE_ENGINE_TIMEOUT_S"),
}


def new_buffer(group, **changes):
    return Buffer(**{"group": group, "num_nvl_bytes": BYTES} | changes)


def for_tokens(group, **changes):
    sizes = {"max_tokens": 8, "hidden": 16, "num_experts": 8, "num_topk": 2}
    return Buffer.for_tokens(**{"group": group} | sizes | changes)


def ask(group, table, make):
    """(each error's text, seconds it took); rank 1 makes a bad Buffer, the others a good one."""
    is_bad = dist.get_rank(group) == dist.get_world_size(group) - 1
    seen = {}
    for name, (changes, _) in table.items():
        start = time.monotonic()
        try:
            make(**({"group": group} | (changes if is_bad else {})))
            seen[name] = "no error", 0.0
        except MoeEngineError as error:
            seen[name] = str(error), time.monotonic() - start
    make(group).destroy()
    return seen


def options_of(group, **changes):
    return new_buffer(group, options=Options(**changes))


def check_told(seen, table):
    for told in seen:
        for name, (_, pattern) in table.items():
            text, seconds = told[name]
            assert re.search(pattern, text), f"{name}: {text}"
            assert seconds < LONGEST_S, name


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "table"),
    [(new_buffer, ARGUMENTS), (options_of, OPTIONS), (for_tokens, TOKENS)],
    ids=["arguments", "options", "tokens"],
)
def test_one_rank_is_refused_and_all_are_told(pool, make, table, num_ranks):
    if num_ranks == 1:  # who is alone cannot differ
        table = {name: row for name, row in table.items() if "differs" not in row[1]}
    check_told(pool.run(ask, table, make, num_ranks=num_ranks), table)


def share_experts(group):
    """The errors of Buffers for 7 experts, and of a layer whose ranks have all 8 experts each."""
    with pytest.raises(ShapeError, match="num_experts is 7; it must be a positive multiple"):
        for_tokens(group, num_experts=7)
    buffer, device = for_tokens(group), cases.device()
    x, up, down = (torch.zeros(size, device=device).bfloat16() for size in SIZES)
    routed = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
    args = x, *(one.to(device) for one in routed)
    with pytest.raises(ShapeError, match="w_gate_up has 8 experts, which on 2 ranks are 16, and"):
        moe_ffn(*args, up, down, buffer)
    moe_ffn(*args, up[:4], down[:4], buffer)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed"):
        buffer.check()


def test_ranks_share_the_experts(pool):
    pool.run(share_experts, num_ranks=2)


def ask_with_variable(group, table):
    seen = {}
    for name, (value, _) in table.items():
        if group.rank() == 1:
            os.environ["MOE_ENGINE_TIMEOUT_S"] = value
        try:
            seen |= ask(group, {name: ({}, "")}, new_buffer)
        except MoeEngineError as error:  # of the good Buffer at the end
            seen[name] = str(error), 0.0
        os.environ.pop("MOE_ENGINE_TIMEOUT_S", None)
    new_buffer(group).destroy()
    return seen


def test_a_bad_variable_is_told_to_all(pool):
    check_told(pool.run(ask_with_variable, VARIABLES, num_ranks=2), VARIABLES)


def buffers_of_a_part(group):
    """The errors of ranks 1 and 2 for a Buffer on the group of ranks 0 and 1, and for one on
    a group that is gone."""
    part = dist.new_group([0, 1])
    try:
        new_buffer(part).destroy()
        told = None
    except BackendError as error:
        told = str(error)
    if dist.get_rank() < 2:
        dist.destroy_process_group(part)
        with pytest.raises(BackendError, match="group cannot be used"):
            new_buffer(part)
    return told


def test_ranks_outside_of_the_group_are_told():
    cases.skip_without_interpreter()
    with RankPool(3) as ranks:
        first, second, third = ranks.run(buffers_of_a_part)
    assert first is second is None
    assert "not in the group" in third


def sizes_by_default_group(group):
    """Without a group the ranks are all, for sizes too: a layer of 8 tokens finds room."""
    buffer = Buffer.for_tokens(None, 8, 16, 4, 2, torch.float32, options=Options(decode_tokens=0))
    assert buffer.group_size == dist.get_world_size()
    x, w = cases.tokens(8, 16, 2, torch.float32, 0)
    idx = torch.arange(16).view(8, 2) % 4
    num_local = 4 // buffer.group_size
    up, down = torch.zeros(num_local, 16, 16), torch.zeros(num_local, 16, 8)
    args = [tensor.to(cases.device()) for tensor in (x, idx, w, up, down)]
    assert not moe_ffn(*args, buffer).any()
    buffer.destroy()


def test_the_default_group():
    cases.skip_without_interpreter()
    with RankPool(2) as ranks:
        ranks.run(sizes_by_default_group)
        for make in (new_buffer, for_tokens):
            check_told(ranks.run(ask, GROUPS, make), GROUPS)


def choose_on_other_gpus(group):
    """How a layer runs that a rank with an H100 would run in other stages than one with an H200."""
    kind = (H100, H200)[group.rank()]
    with mock.patch.object(agreement, "gpu", lambda device: kind):
        buffer = Buffer.for_tokens(group, 512, 4096, 4, 2, options=Options(decode_tokens=0))
    config = buffer.layer_config(torch.empty(2, 4096, 4096, dtype=torch.bfloat16), 2)
    buffer.destroy()
    return config


def test_ranks_choose_alike_on_gpus_of_two_kinds(pool):
    if pool.device == "cuda":
        pytest.skip("emulated: the ranks have GPUs of one kind")
    first, second = pool.run(choose_on_other_gpus, num_ranks=2)
    assert first == second and first.num_stages == 1 < first.num_return_stages


def test_numpy_integers_are_integers():
    numpy = pytest.importorskip("numpy")
    sizes = [numpy.int64(size) for size in (8, 32, 2, 8, 2)]
    assert Buffer.size_hint(*sizes) == Buffer.size_hint(8, 32, 2, 8, 2)
    options = Options(num_slots=numpy.int32(3), timeout_s=numpy.float32(5))
    buffer = Buffer(None, numpy.int64(BYTES), backend="collective", options=options)
    assert type(buffer.options.num_slots) is int
    assert buffer.options.timeout_s == 5.0


HINTS = {
    "size_hint": (Buffer.size_hint, (8, 32, 2, 8, 2, 2), 1),  # 0 tokens are fine
    "low latency": (Buffer.get_low_latency_rdma_size_hint, (8, 128, 2, 8, 2), 0),
}


@pytest.mark.parametrize("name", HINTS)
def test_sizes_of_a_hint(name):
    hint, good, first_positive = HINTS[name]
    assert hint(*good) > 0
    for index in range(len(good)):
        for bad in (0, -1, 2.5, "2", True, None, torch.tensor(8), [8], 10**5000):
            if bad == 0 and index < first_positive:
                continue
            with pytest.raises(MoeEngineError, match=r"must be|it must"):
                hint(*good[:index], bad, *good[index + 1 :])
