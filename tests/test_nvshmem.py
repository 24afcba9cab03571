"""The backend 'nvshmem': its host side with a stand-in for NVSHMEM on the CPU, and all of it on
GPUs that have NVSHMEM."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
from unittest import mock

import nvshmem_cases
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from nvshmem_cases import install, stand_in

from moe_engine import Buffer, nvshmem_library, symm
from moe_engine.device import lang
from moe_engine.device import nvshmem as verbs
from moe_engine.device.context import PHASE_ROWS, ContextField
from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import BackendError, OutOfStep
from moe_engine.launch import launch
from moe_engine.symm import base, nvshmem
from moe_engine.symm.base import environment
from moe_engine.symm.device_context import DeviceContext
from moe_engine.symm.nvshmem import NvshmemTensor
from moe_engine.symm.slots import SlotLayout

CPU = torch.device("cpu")


@pytest.fixture
def cpu_pool(pool):
    if pool.device != "cpu":
        pytest.skip("NVSHMEM's stand-in is one for CPU ranks")
    return pool


def errors_of(pool, function, *args, num_ranks=2):
    """The exceptions of the ranks, all of which must raise."""
    with pytest.raises(RankError) as caught:
        pool.run(function, *args, num_ranks=num_ranks)
    assert sorted(caught.value.errors) == list(range(num_ranks))
    return list(caught.value.errors.values())


# --- What is installed -----------------------------------------------------------------------


def test_what_is_installed_is_found(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "3.5.21")
    found = nvshmem_library.installed()
    assert found == (tmp_path / "lib/libnvshmem_device.bc", (3, 5, 21))
    assert not found.has_ibgda()
    found.bitcode.write_bytes(b"..nvshmemi_ibgda_rma..")
    assert found.has_ibgda()


@pytest.mark.parametrize("version", ["3.3.9", "3.7.2", "4.0.0"])
def test_versions_that_cannot_be_linked_are_refused(tmp_path, monkeypatch, version):
    install(tmp_path, monkeypatch, version)
    with pytest.raises(
        BackendError, match=f"NVSHMEM {version} in .* {nvshmem_library.INSTALL_TESTED}"
    ):
        nvshmem_library.installed()


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "3.6.5")
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(BackendError, match=r"nvshmem4py cannot be imported .* pip install 'moe"):
        nvshmem_library.api.__wrapped__()
    (tmp_path / nvshmem_library.HEADER).unlink()
    nvshmem_library._at.cache_clear()
    with pytest.raises(BackendError, match=r"has no include/.*: pip install --no-deps"):
        nvshmem_library.installed()
    nvshmem_cases.uninstall(monkeypatch)
    with pytest.raises(BackendError, match="NVSHMEM is not installed: pip install 'moe_engine"):
        nvshmem_library.installed()


@pytest.mark.parametrize(
    ("host", "is_right"),
    [((3, 4, 5), False), ((3, 6, 5), True), ((3, 7, 0), True), ((4, 0, 0), False)],
)
def test_the_host_library_is_as_new_as_the_bitcode(tmp_path, monkeypatch, host, is_right):
    install(tmp_path, monkeypatch, "3.6.5")
    package = nvshmem_cases.StandIn(host)
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setitem(sys.modules, "nvshmem.core", package)
    get = nvshmem_library.api.__wrapped__
    if is_right:
        assert nvshmem_library.host_version(get()) == host
    else:
        with pytest.raises(BackendError, match=r"bitcode .* is of 3\.6\.5"):
            get()


def test_kernels_wait_for_the_start():
    with stand_in() as package:
        with pytest.raises(BackendError, match="sends uses NVSHMEM, which is not initialised"):
            nvshmem_library.initialize_module(7, "sends")
        package.status = package.InitStatus.STATUS_IS_INITIALIZED
        nvshmem_library.initialize_module(7, "sends")
        assert package.modules == [7]


def load_and_identify(group):
    """What the installed library says in a process without a GPU."""
    from moe_engine.symm.nvshmem import unique_id

    package = nvshmem_library.api()
    assert nvshmem_library.waiting_calls().nvshmem_malloc
    return nvshmem_library.host_version(package), nvshmem_library.is_initialized(), unique_id()


@pytest.mark.skipif(nvshmem_cases.MISSING is not None, reason=str(nvshmem_cases.MISSING))
def test_the_installed_library_is_loaded():
    with RankPool(1) as own:  # a process that ends soon, as the library stays
        [(version, is_initialized, identifier)] = own.run(load_and_identify)
    assert version >= nvshmem_library.installed().version and not is_initialized
    assert any(identifier._data.tobytes()[4:])


# --- The host side, with a stand-in for NVSHMEM ----------------------------------------------


def allocate_twice(group, node_size):
    """What a rank sees of two blocks, of which one is freed before the other is made."""
    with environment({"MOE_ENGINE_NODE_SIZE": str(node_size)}), stand_in() as library:
        first = NvshmemTensor(group, 512, CPU)
        own = first.local.data_ptr()
        zeros = not first.local.any()
        first.free()
        first.free()
        second = NvshmemTensor(group, 256, CPU)
        far = [rank for rank in range(group.size()) if not second.peer_addresses[rank]]
        for rank in far:
            with pytest.raises(BackendError, match=f"rank {rank} is not mapped"):
                second.peer(rank)
        second.peer(group.rank())[3] = 5
        assert second.local[3] == 5
        assert int(second.peer_addresses[group.rank()]) == second.local.data_ptr()
        assert second.network == second.pes.data_ptr()
        return zeros, library.freed == [own], library.identifiers, second.pes.tolist(), far


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_ranks_start_once_and_know_their_elements(cpu_pool, node_size):
    """Ranks of other nodes are not mapped."""
    results = cpu_pool.run(allocate_twice, node_size, num_ranks=4)
    for rank, (zeros, was_freed, identifiers, pes, far) in enumerate(results):
        assert zeros and was_freed
        assert len(identifiers) == 1 and identifiers == results[0][2]
        assert pes == [3, 2, 1, 0]
        assert far == [other for other in range(4) if other // node_size != rank // node_size]


def allocate_in_two_groups(group, outside):
    """A second group of other ranks, or ranks that something else has put into a larger job."""
    pair = dist.new_group([0, 1])
    with stand_in() as library:
        if outside:
            library.status, library.num_pes, library.pe = 2, 4, group.rank()
        elif group.rank() < 2:
            NvshmemTensor(pair, 256, CPU)
        if not outside or group.rank() < 2:
            NvshmemTensor(pair if outside else group, 256, CPU)
        else:
            raise BackendError("NVSHMEM runs over 4 processes")


@pytest.mark.parametrize(
    ("outside", "text"), [(False, "runs over other ranks"), (True, "runs over 4 processes")]
)
def test_other_ranks_are_refused(cpu_pool, outside, text):
    for error in errors_of(cpu_pool, allocate_in_two_groups, outside, num_ranks=3):
        assert type(error) is BackendError and text in str(error)


def allocate(group, num_bytes, node_size="1", **how):
    with environment({"MOE_ENGINE_NODE_SIZE": node_size}), stand_in(**how):
        NvshmemTensor(group, num_bytes, CPU, timeout_s=20)


def allocate_with_a_small_heap(group):
    allocate(group, 2048, heap=1024)


def allocate_apart(group):
    allocate(group, 64, "2", apart=(0,) if group.rank() == 0 else ())


def test_what_cannot_be_allocated_is_refused(cpu_pool):
    for error in errors_of(cpu_pool, allocate_with_a_small_heap):
        assert type(error) is BackendError and "NVSHMEM_SYMMETRIC_SIZE" in str(error)
    for node_size in ("-1", "0", "two"):
        for error in errors_of(cpu_pool, allocate, 64, node_size):
            assert f"MOE_ENGINE_NODE_SIZE is '{node_size}'" in str(error)
    for error in errors_of(cpu_pool, allocate_apart):
        assert type(error) is BackendError and "rank 1 on rank 0, of the same node" in str(error)


def start_in_vain(group, what):
    dist.barrier(group)
    with stand_in(silent=(what,)):
        begin = time.monotonic()
        with pytest.raises(OutOfStep, match=f"did not {what}"):
            NvshmemTensor(group, 64, CPU, timeout_s=5)
        with pytest.raises(BackendError, match="did not end"):
            NvshmemTensor(group, 64, CPU, timeout_s=20)
        return time.monotonic() - begin


@pytest.mark.parametrize("what", ["start", "allocate"])
def test_calls_that_do_not_end_are_given_up(cpu_pool, what):
    assert max(cpu_pool.run(start_in_vain, what, num_ranks=2)) < 50


def free_in_vain(group):
    dist.barrier(group)
    with stand_in(silent=("free",)):
        block = NvshmemTensor(group, 64, CPU, timeout_s=5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            block.free()
        return [str(one.message) for one in caught]


def test_freeing_ends_without_the_others(cpu_pool):
    for [text] in cpu_pool.run(free_in_vain, num_ranks=2):
        assert "stays allocated until this process ends" in text


def find_elements(group):
    """What a kernel finds by the context of a rank."""
    layout = SlotLayout(group.size(), 1024)
    with stand_in():
        block = NvshmemTensor(group, layout.num_bytes, CPU)
        context = DeviceContext(layout, group.rank(), block, 60.0)
    address = int(context.fields[ContextField.NETWORK])
    return list((ctypes.c_int32 * group.size()).from_address(address))


def test_kernels_find_the_elements(cpu_pool):
    assert cpu_pool.run(find_elements, num_ranks=3) == [[2, 1, 0]] * 3


# --- Several hosts, which the ranks only say that they have ----------------------------------


def make_on_hosts(group, backend, host_of_rank):
    """The backend of a Buffer, what it warned of, and how many tokens each rank got."""
    with (
        mock.patch.object(base, "this_host", lambda: host_of_rank[group.rank()]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        buffer = Buffer(group, 1 << 20, backend=backend)
    topk_idx = torch.arange(4, device=buffer.device).view(4, 1) % group.size()
    layout = buffer.get_dispatch_layout(topk_idx, group.size())
    x = torch.ones(4, 8, dtype=torch.bfloat16, device=buffer.device)
    got, *_, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
    )
    out, _, _ = buffer.combine(got, handle)
    assert out.equal(x)
    buffer.destroy()
    return buffer.backend, [str(one.message) for one in caught], len(got)


def test_auto_takes_collective_over_several_hosts(pool):
    """With a warning of one rank that says why and what to do; on one host nothing changes."""
    results = pool.run(make_on_hosts, "auto", ["here", "there"], num_ranks=2)
    assert [(backend, rows) for backend, _, rows in results] == [("collective", 4)] * 2
    [text] = results[0][1]
    assert "they run on 2, and NVSHMEM cannot serve them" in text and "'collective'" in text
    assert results[1][1] == []
    for backend, texts, rows in pool.run(make_on_hosts, "auto", ["here", "here"], num_ranks=2):
        assert (backend, texts, rows) == (symm_backend(pool), [], 4)


def symm_backend(pool):
    return "emulated" if pool.device == "cpu" else "torch"


def test_an_explicit_backend_is_refused_over_several_hosts(pool):
    hosts = ["here", "there"]
    for error in errors_of(pool, make_on_hosts, symm_backend(pool), hosts):
        assert type(error) is BackendError and "needs all ranks on one host" in str(error)


# --- On GPUs ---------------------------------------------------------------------------------


@verbs.uses_nvshmem
@triton.jit(do_not_specialize=["num_bytes", "turn", "rank", "other"])
def send_and_answer_kernel(context, num_bytes, turn, rank, other):
    """Write bytes into the own block, send them behind them with a flag, and wait for the same from
    the other rank; then answer by a word, behind a fence, and wait for that."""
    own = lang.own_block(context)
    lane = tl.arange(0, 1)
    bytes_at = tl.arange(0, 1024)
    source = lang.as_pointer(own, tl.uint8) + bytes_at
    tl.store(source, (bytes_at + rank + turn).to(tl.uint8), mask=bytes_at < num_bytes)
    verbs.send(own + 1024, own, num_bytes, own + 4096, turn, other, context)
    flags = own + 4096 + lane * 8
    token = lang.wait(flags, lane == 0, turn, lane + other, context, PHASE_ROWS)
    if token != 0:
        verbs.send_bytes(own + 2048, own + 1024, num_bytes, other, context)
        verbs.fence(other, context)
        verbs.send_word(own + 4104, turn, other, context)
        verbs.quiet(context)
        lang.wait(flags + 8, lane == 0, turn, lane + other, context, PHASE_ROWS)


def round_trips(group):
    """What returns of what was sent, for sizes that are multiples of 16 bytes and others."""
    device = symm.resolve_device(None)
    block = symm.allocate(group, 8192, "nvshmem")
    report = torch.zeros(64, dtype=torch.int64).pin_memory()
    fields = [0] * ContextField.PEERS + block.peer_addresses.tolist()
    fields[ContextField.TIMEOUT_NS] = 30_000_000_000
    fields[ContextField.REPORT] = report.data_ptr()
    fields[ContextField.RANK], fields[ContextField.NUM_RANKS] = group.rank(), group.size()
    fields[ContextField.NETWORK] = block.network
    context = torch.tensor(fields, device=device)
    results = []
    for turn, num_bytes in enumerate((1024, 16, 7), start=2):
        dist.barrier(group)
        sizes = num_bytes, turn, group.rank(), 1 - group.rank()
        launch(send_and_answer_kernel, (1,), context, *sizes)
        torch.cuda.synchronize()
        results.append((num_bytes, turn, block.local[2048 : 2048 + num_bytes].cpu()))
    far = block.peer_addresses.eq(0).tolist()
    dist.barrier(group)
    block.free()
    again = symm.allocate(group, 8192, "nvshmem")
    zeros = not again.local.any()
    again.free()
    return results, far, zeros, int(report[0])


@pytest.mark.gpu
@pytest.mark.skipif(nvshmem_cases.MISSING is not None, reason=str(nvshmem_cases.MISSING))
def test_rows_arrive_through_nvshmem():
    """Of two ranks that stand for two nodes, on one GPU or two."""
    with RankPool(2, "cuda", env={"MOE_ENGINE_NODE_SIZE": "1"}) as own:
        results = own.run(round_trips)
    for rank, (sent, far, zeros, failures) in enumerate(results):
        assert far == [other != rank for other in range(2)]
        assert zeros and not failures
        for num_bytes, turn, returned in sent:
            expected = (torch.arange(num_bytes) + rank + turn).to(torch.uint8)
            assert returned.equal(expected)


def test_after_an_interrupted_call_there_is_no_other(monkeypatch):
    """It goes on, and NVSHMEM takes one at a time."""
    monkeypatch.setattr(nvshmem, "_has_failed", False)
    ends = threading.Event()

    def interrupted(*_):
        raise KeyboardInterrupt

    with mock.patch.object(threading.Thread, "join", interrupted), pytest.raises(KeyboardInterrupt):
        nvshmem.bounded(ends.wait, "allocate", CPU, 10.0)
    with pytest.raises(BackendError, match="did not end"):
        nvshmem.bounded(lambda: 1, "allocate", CPU, 10.0)
    ends.set()
