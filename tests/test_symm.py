"""Symmetric memory: bytes written through an address arrive; what is impossible is refused."""

import ctypes
import gc
import os
import signal
import time
from pathlib import Path

import cases
import numpy
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moe_engine import symm
from moe_engine.device import lang
from moe_engine.emulation import PerRank, RankError, RankPool
from moe_engine.errors import BackendError, OutOfStep, ShapeError
from moe_engine.symm import base, emulated, exchange
from moe_engine.symm.emulated import EmulatedTensor, File, _map

NUM_BYTES = 10_000  # not a multiple of a page
ROW = 64


def ranks_of(pool, num_ranks):
    if num_ranks > pool.num_ranks:
        pytest.skip(f"needs {num_ranks} ranks, the pool has {pool.num_ranks}")
    return {"num_ranks": num_ranks}


def errors_of(pool, function, *args, **kwargs):
    """The exceptions of the ranks, all of which must raise."""
    with pytest.raises(RankError) as caught:
        pool.run(function, *args, **kwargs)
    assert sorted(caught.value.errors) == list(range(kwargs.get("num_ranks", pool.num_ranks)))
    return list(caught.value.errors.values())


# --- Bytes arrive ----------------------------------------------------------------------------


@triton.jit
def write_rows(peer_addresses, rank, ROW: tl.constexpr):
    """Row `rank` of peer p becomes 16 * (rank + 1) + p."""
    peer = tl.program_id(0)
    address = tl.load(peer_addresses + peer) + rank * ROW
    value = tl.full((ROW,), 16, tl.int32) * (rank + 1) + peer
    tl.store(lang.as_pointer(address, tl.uint8) + tl.arange(0, ROW), value.to(tl.uint8))


def write_to_peers(group, backend):
    block = symm.allocate(group, NUM_BYTES, backend)
    assert (block.local.dtype, block.local.shape) == (torch.uint8, (NUM_BYTES,))
    assert (block.peer_addresses.dtype, block.peer_addresses.shape) == (
        torch.int64,
        (group.size(),),
    )
    assert block.peer_addresses.device == block.local.device == symm.resolve_device(None)
    assert int(block.peer_addresses[group.rank()]) == block.local.data_ptr()
    zeros = not block.local.any()
    dist.barrier(group)
    write_rows[(group.size(),)](block.peer_addresses, group.rank(), ROW)
    if block.local.is_cuda:
        torch.cuda.synchronize()
    dist.barrier(group)
    got = block.local.cpu()
    dist.barrier(group)
    block.free()
    assert block.local.numel() == 0 and not block.peer_addresses.any()
    block.free()
    return zeros, got


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bytes_written_through_an_address_reach_their_owner(pool, num_ranks):
    results = pool.run(write_to_peers, "auto", **ranks_of(pool, num_ranks))
    for rank, (zeros, got) in enumerate(results):
        expected = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        for source in range(num_ranks):
            expected[source * ROW : (source + 1) * ROW] = 16 * (source + 1) + rank
        assert zeros
        assert got.equal(expected)


def test_every_backend_serves_one_rank(pool):
    for backend in ("single", "emulated" if pool.device == "cpu" else "torch"):
        [(zeros, got)] = pool.run(write_to_peers, backend, num_ranks=1)
        assert zeros and got[:ROW].eq(16).all() and not got[ROW:].any()


def write_on_host(group):
    """One rank after the other writes its rank to the end of each block, without a kernel."""
    block = symm.allocate(group, NUM_BYTES)
    for rank in range(group.size()):
        if rank == group.rank():
            for address in block.peer_addresses.tolist():
                ctypes.memset(address + NUM_BYTES - 1 - rank, rank + 1, 1)
        dist.barrier(group)
    return block.local[-group.size() :].tolist()


def test_the_last_byte_is_mapped(pool):
    if pool.device != "cpu":
        pytest.skip("writes from the host")
    for got in pool.run(write_on_host):
        assert got == list(range(pool.num_ranks, 0, -1))


def write_over_gloo(group):
    cpu_group = dist.new_group(backend="gloo")
    return write_to_peers(cpu_group, "auto")


@pytest.mark.multi_gpu
def test_gpus_meet_over_a_cpu_only_group(pool):
    for rank, (zeros, got) in enumerate(pool.run(write_over_gloo)):
        assert zeros and got[ROW] == 32 + rank


def time_mapping(group):
    """When this rank had mapped its peers, and when allocate returned."""
    mapped = []
    map_one = emulated._map

    def slow_map(*args):
        if group.rank() == 1:
            time.sleep(0.3)
        mapped.append(time.monotonic())
        return map_one(*args)

    emulated._map = slow_map
    try:
        symm.allocate(group, NUM_BYTES)
    finally:
        emulated._map = map_one
    return mapped[-1], time.monotonic()


def test_no_rank_returns_before_all_have_mapped(pool):
    if pool.device != "cpu":
        pytest.skip("of the emulated backend")
    mapped, returned = zip(*pool.run(time_mapping, num_ranks=2), strict=True)
    assert min(returned) >= max(mapped)


# --- Memory goes away ------------------------------------------------------------------------


def collect_in_a_capture(group):
    """Memory of a Buffer that only a cycle holds, as the traceback of an exception makes one."""
    block = symm.allocate(group, NUM_BYTES)
    block.cycle = block
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    dist.barrier(group)
    with torch.cuda.graph(graph):
        x += 1
        del block
        gc.collect()
    graph.replay()
    return x.item()


@pytest.mark.gpu
def test_memory_may_be_collected_in_a_capture(pool):
    assert pool.run(collect_in_a_capture) == [1] * pool.num_ranks


def count_mappings() -> torch.Tensor:
    """How many blocks are mapped in this process, and how many files of blocks are open."""
    mapped = Path("/proc/self/maps").read_text().count("/memfd:moe_engine")
    links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    return torch.tensor([mapped, sum("/memfd:moe_engine" in link for link in links)])


def free_with_view(group):
    gc.collect()  # blocks of other tests, which else could go while these are counted
    before = count_mappings()
    block = symm.allocate(group, NUM_BYTES, "emulated")
    counts = [count_mappings()]
    view = block.local[:ROW]
    dist.barrier(group)
    block.free()
    block.free()
    counts.append(count_mappings())
    view += 1
    assert bytes(view) == b"\1" * ROW
    del view
    counts.append(count_mappings())
    return [(n - before).tolist() for n in counts]


def test_free_unmaps_all_but_what_a_view_needs(pool):
    if pool.device != "cpu":
        pytest.skip("of the emulated backend")
    for allocated, with_view, without in pool.run(free_with_view, num_ranks=2):
        assert allocated == [2, 2]
        assert with_view == [1, 1]
        assert without == [0, 0]


def get_pid(group):
    return os.getpid()


def kill_rank_1(group, when):
    if group.rank() == 1 and when == "before peers are mapped":
        emulated._map = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        block = symm.allocate(group, NUM_BYTES)
    except OutOfStep as error:
        assert "rank 1 at the meeting 'mapping memory'" in str(error)
        return "refused"
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    names = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not any(name.startswith("/dev/shm") for name in names)
    try:
        dist.barrier(group)
    except RuntimeError:
        block.peer_addresses.tolist()
        ctypes.memset(int(block.peer_addresses[1]), 1, 1)  # a dead peer's block is still mapped
        return "survived"


@pytest.mark.parametrize(
    ("when", "outcome"),
    [
        pytest.param("before peers are mapped", "refused", marks=pytest.mark.slow),
        ("in use", "survived"),
    ],
)
def test_a_killed_rank_leaves_nothing(when, outcome):
    cases.skip_without_interpreter()
    before = cases.shared_files()
    with RankPool(3, env={"MOE_ENGINE_TIMEOUT_S": "5"}) as ranks:
        pids = ranks.run(get_pid)
        assert ranks.run(kill_rank_1, when, expect_death={1}, timeout_s=90) == [
            outcome,
            None,
            outcome,
        ]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not cases.shared_files() - before


# --- Refusals --------------------------------------------------------------------------------


def allocate(group, num_bytes, backend="auto", device=None):
    symm.allocate(group, num_bytes, backend, device)


def test_different_sizes_are_refused_on_every_rank(pool):
    for error in errors_of(pool, allocate, PerRank([64, 128]), num_ranks=2):
        assert type(error) is ShapeError
        assert "64 on rank 0, 128 on rank 1" in str(error)
    for num_bytes in (0, -1, 1.5):
        for error in errors_of(pool, allocate, num_bytes, num_ranks=2):
            assert type(error) is ShapeError
            assert f"num_bytes is {num_bytes}" in str(error)


def test_different_backends_are_refused_on_every_rank(pool):
    for error in errors_of(pool, allocate, 64, PerRank(["auto", "single"]), num_ranks=2):
        assert type(error) is BackendError
        assert "serves one rank" in str(error) and "(rank 1)" in str(error)


@pytest.mark.parametrize(
    ("backend", "text"),
    [("single", "serves one rank"), ("nccl", "'nccl' is not one of"), ("nvshmem", "device 'cpu'")],
)
def test_impossible_backends_are_refused(pool, backend, text):
    if backend == "nvshmem" and pool.device != "cpu":
        pytest.skip("NVSHMEM serves GPUs")
    for error in errors_of(pool, allocate, 64, backend, num_ranks=2):
        assert type(error) is BackendError
        assert text in str(error) and "(ranks 0, 1)" in str(error)


def test_devices_that_do_not_fit_are_refused(pool):
    backend, device = ("torch", "cpu") if pool.device == "cpu" else ("emulated", "cuda")
    for error in errors_of(pool, allocate, 64, backend, device, num_ranks=2):
        assert f"backend '{backend}' cannot serve" in str(error)
    for error in errors_of(pool, allocate, 64, "auto", "meta", num_ranks=2):
        assert "neither a CPU nor a CUDA device" in str(error)


def allocate_on_two_hosts(group):
    host = base.this_host
    base.this_host = lambda: f"host {group.rank()}"
    try:
        allocate(group, 64)
    finally:
        base.this_host = host


def test_several_hosts_are_refused(pool):
    for error in errors_of(pool, allocate_on_two_hosts, num_ranks=2):
        assert type(error) is BackendError
        assert "one host" in str(error) and "'collective'" in str(error)


def allocate_without_memory(group):
    create = os.memfd_create

    def fail(name):
        raise OSError("no memory left")

    if group.rank() == 1:
        os.memfd_create = fail
    try:
        allocate(group, 64)
    finally:
        os.memfd_create = create


def test_a_failure_of_one_rank_is_raised_on_all(pool):
    if pool.device != "cpu":
        pytest.skip("of the emulated backend")
    for error in errors_of(pool, allocate_without_memory, num_ranks=2):
        assert type(error) is BackendError
        assert "OSError: no memory left (rank 1)" in str(error)


def allocate_under_another_pid(group):
    """As in another PID namespace: rank 1's number of itself is another process's here."""
    getpid = os.getpid
    if group.rank() == 1:
        emulated.os.getpid = os.getppid
    try:
        allocate(group, NUM_BYTES)
    finally:
        emulated.os.getpid = getpid


def parent_pid(group):
    return os.getppid()


def test_other_pid_namespaces_are_refused_on_every_rank(pool):
    if pool.device != "cpu":
        pytest.skip("of the emulated backend")
    pids = pool.run(parent_pid, num_ranks=2)
    for error in errors_of(pool, allocate_under_another_pid, num_ranks=2):
        assert type(error) is BackendError
        assert f"memory of rank 1, process {pids[1]}, cannot" in str(error)
        assert "share a PID namespace" in str(error)


def test_only_the_file_that_was_meant_is_mapped(monkeypatch):
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, NUM_BYTES)
    status = os.fstat(descriptor)
    file = File(os.getpid(), descriptor, status.st_dev, status.st_ino, 0)
    assert _map(file, NUM_BYTES).numel() == NUM_BYTES
    read_end, write_end = os.pipe()
    others = [{"inode": file.inode + 1}, {"device": file.device + 1}, {"descriptor": read_end}]
    for other in (*others, {"descriptor": 10**6}, {"pid": 2**22 + 1}):
        with pytest.raises(BackendError, match=r"memory of rank 0, process \d+, cannot be mapped"):
            _map(file._replace(**other), NUM_BYTES)
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)
    with pytest.raises(BackendError, match="it is another file, or one of another user"):
        _map(file, NUM_BYTES)
    for number in (descriptor, read_end, write_end):
        os.close(number)


def test_the_memory_is_for_its_user_alone(monkeypatch):
    modes = []

    def note(group, make, what, timeout_s):
        made = exchange(group, make, what, timeout_s)
        modes.extend(os.fstat(file.descriptor).st_mode & 0o777 for file in made if file)
        return made

    monkeypatch.setattr("moe_engine.symm.emulated.exchange", note)
    EmulatedTensor(None, NUM_BYTES)
    assert modes == [0o600]


def test_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(lang, "INTERPRETED", False)
    with pytest.raises(BackendError, match=r"TRITON_INTERPRET=1 before.*moe_engine.emulation"):
        symm.choose_backend(None, "emulated", "cpu")


@pytest.mark.parametrize(
    ("of_triton", "of_numpy", "works"),
    [
        ("3.6.0", "2.3.9", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0+git0123abcd", "2.5.5", False),
        ("3.7.0", "2.4.0", True),
        ("3.10.1", "2.5.5", True),
    ],
)
def test_the_interpreter_of_an_old_triton_needs_an_older_numpy(
    monkeypatch, of_triton, of_numpy, works
):
    monkeypatch.setattr(lang, "INTERPRETED", True)
    monkeypatch.setattr(triton, "__version__", of_triton)
    monkeypatch.setattr(numpy, "__version__", of_numpy)
    if works:
        assert symm.choose_backend(None, "auto", "cpu") == "single"
    else:
        with pytest.raises(BackendError, match=r"'moe_engine\[emulation\]'.*Triton 3.7"):
            symm.choose_backend(None, "auto", "cpu")


def test_cuda_needs_a_gpu_and_no_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no CUDA device"):
        symm.choose_backend(None, "torch", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lang, "INTERPRETED", True)
    with pytest.raises(BackendError, match="TRITON_INTERPRET is set"):
        symm.choose_backend(None, "auto", "cuda:0")
    monkeypatch.setattr(lang, "INTERPRETED", False)
    with pytest.raises(BackendError, match="init_process_group"):
        symm.choose_backend(None, "torch", "cuda:0")
    assert symm.choose_backend(None, "auto", "cuda:0") == "single"
