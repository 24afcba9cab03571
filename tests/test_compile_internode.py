"""The kernels of several nodes compiled for sm_90 without a GPU, with NVSHMEM linked: registers,
wide stores, and where a program sends."""

from __future__ import annotations

import re
from functools import cache

import launches
import nvshmem_cases
import pytest
import triton

from moe_engine import nvshmem_library
from moe_engine.tools.lone_rank import kernel_engine

pytestmark = [
    pytest.mark.skipif(nvshmem_cases.NO_BITCODE is not None, reason=str(nvshmem_cases.NO_BITCODE)),
    pytest.mark.skipif(
        not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
    ),
]
SENDERS = "exchange_internode", "open_internode", "send_rows", "node_sum"
WORDS = "forward", "internode_sum"  # these send words alone
PLAIN = "node_layout", "return_to_rails"  # these send nothing
OF_ONE_NODE = "layout", "layout_sum", "send_plan", "metadata", "push", "collect"
SENT = re.compile(r"call\.uni _Z\d+nvshmemi_transfer_put_signal")
STATE = nvshmem_library.STATE.decode()
NVSHMEM_STACK = 128
"""Bytes of stack that NVSHMEM's own functions take."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("open_internode", "node_sum")]


@cache
def recorded():
    """The launches of all calls by name; of those of one name, the first."""
    return {launch.name: launch for launch in reversed(launches.internode())}


def entry(name):
    """The PTX of the kernel itself, in which NVSHMEM's functions are called."""
    ptx = recorded()[name].compile().ptx
    return ptx[ptx.index(".visible .entry") :]


def test_no_launch_is_left_out():
    assert recorded().keys() == {*SENDERS, *WORDS, *PLAIN, *OF_ONE_NODE}


def test_nodes_of_one_rank_forward_nothing():
    """Nor do they sum before they send; and copies may begin while others send."""
    names = {launch.name for launch in launches.internode(num_nodes=launches.RANKS)}
    left_out = {"forward", "return_to_rails", "node_sum"}
    assert names == recorded().keys() - left_out | {"return_to_nodes", "release_rails"}
    for num_nodes in (1, 2, launches.RANKS):
        engine = kernel_engine(launches.RANKS, 64, launches.REGION_BYTES, num_nodes=num_nodes)
        overlaps = [engine._partition(20, owned).overlaps for owned in (True, False)]
        assert overlaps == [num_nodes == launches.RANKS, False]


@pytest.mark.parametrize("name", ["exchange_internode", "send_rows", *SLOW, *WORDS, *PLAIN])
def test_registers(name):
    """None are spilled by code of ours, and all programs of a launch fit."""
    launch = recorded()[name]
    built, is_linked = launch.compile(), name not in PLAIN
    assert built.spill_bytes <= NVSHMEM_STACK * is_linked
    assert built.registers * 32 * launch.options.num_warps <= 65536
    assert is_linked == (STATE in built.ptx)


def test_rows_are_stored_16_bytes_at_a_time():
    for name in ("send_rows", "forward", "return_to_rails"):
        assert "st.global.v4.b32" in entry(name)


def test_rows_return_to_nodes_of_one_rank():
    launch = next(
        one for one in launches.internode(num_nodes=launches.RANKS) if one.name == "return_to_nodes"
    )
    built = launch.compile()
    assert built.spill_bytes <= NVSHMEM_STACK
    assert built.registers * 32 * launch.options.num_warps <= 65536
    ptx = built.ptx[built.ptx.index(".visible .entry") :]
    assert "st.global.v4.b32" in ptx
    assert len(SENT.findall(ptx)) == 1


@pytest.mark.parametrize("name", ["exchange_internode", "send_rows", *SLOW])
def test_kernels_send_at_one_place(name):
    """`network.send` has the barriers around it, see `test_compile_nvshmem.py`."""
    assert len(SENT.findall(entry(name))) == 1


def test_a_header_is_written_before_it_is_sent():
    [before, _] = SENT.split(entry("exchange_internode"))
    assert "bar.sync" in before[before.rindex("st.global") :]
