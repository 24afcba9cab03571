"""The transport verbs of NVSHMEM compiled for sm_90 without a GPU: which threads call, what lies
between barriers; and which kernels are linked with it."""

from __future__ import annotations

import re
from functools import cache

import launches
import nvshmem_cases
import pytest
import torch
import triton
import triton.language as tl
from compile_helper import compile_kernel

from moe_engine import cuda_driver, errors, kernel_bundle, launch, nvshmem_library
from moe_engine.device import nvshmem
from moe_engine.device.lang import as_pointer
from moe_engine.symm.device_context import notices_offset
from moe_engine.symm.notices import TOLD_BYTE, Notices
from moe_engine.symm.slots import SlotLayout
from moe_engine.tools.lone_rank import LoneBlock

has_bitcode = pytest.mark.skipif(
    nvshmem_cases.NO_BITCODE is not None, reason=str(nvshmem_cases.NO_BITCODE)
)


@nvshmem.uses_nvshmem
@triton.jit
def send_kernel(context, to, source, num_bytes, flag, value, rank):
    rows = as_pointer(source, tl.int32) + tl.arange(0, 128)
    tl.store(rows, tl.arange(0, 128))
    nvshmem.send(to, source, num_bytes, flag, value, rank, context)


@nvshmem.uses_nvshmem
@triton.jit
def words_kernel(context, to, source, num_bytes, flag, value, rank):
    nvshmem.send_bytes(to, source, num_bytes, rank, context)
    tl.store(as_pointer(source, tl.int32) + tl.arange(0, 128), tl.arange(0, 128))
    nvshmem.fence(rank, context)
    nvshmem.send_word(flag, value, rank, context)
    nvshmem.quiet(context)


@triton.jit
def plain_kernel(context):
    tl.store(context, 1)


TYPES = {name: "i64" for name in ("to", "source", "num_bytes", "flag", "value")}
GUARD = re.compile(
    r"mov\.u32\s+(%r\d+), %tid\.x;\s*// end inline asm\s*"
    r"setp\.ne\.b32\s+(%p\d+), \1, 0;\s*@\2 bra"
)


@cache
def compiled(kernel):
    """The code, and the PTX of the kernel itself, in which NVSHMEM's transports are called."""
    types = {"context": "*i64", **TYPES, "rank": "i32"}
    built = compile_kernel(kernel, types, {}, **nvshmem_library.linked(kernel))
    return built, entry_of(built)


def entry_of(built):
    """The PTX of the kernel itself."""
    entry = built.ptx[built.ptx.index(".visible .entry") :]
    lines = entry[: entry.index("\n}")].splitlines()
    lines = [one for one in lines if not one.lstrip().startswith((".loc", "$L__tmp"))]
    return "\n".join(lines)


def calls(entry):
    """The transport functions that are called, and where."""
    found = re.finditer(r"call\.uni _Z\d+nvshmemi_transfer_(\w+?)I", entry)
    return [(one[1], one.start()) for one in found]


@has_bitcode
def test_send():
    """The rows that a program has written come before a barrier, and that before the copy; all
    threads call, once. Where the rank is mapped, the threads' copies come before a barrier, and the
    flag is stored by one of them after a fence of the system."""
    _, entry = compiled(send_kernel)
    [(name, place)] = calls(entry)
    assert name == "put_signal"
    stored = entry.index("st.global")
    begin = entry.index("bar.sync", stored)
    assert stored < begin < place
    assert "nvshmemi_device_state_d" not in entry[:begin]
    assert not GUARD.search(entry)
    flag = re.search(r"bar\.sync\s+0;\s*setp\.ne\.b32.*\s+@%p\d+ bra[^@]*membar\.sys;", entry)
    assert flag and "st.volatile.b64" in entry[flag.end() :]
    assert "bar.sync" in entry[place:]


@has_bitcode
def test_words_are_sent_by_one_thread():
    """All that follows `send_bytes`: each call stands behind a guard of its own, fences and waits
    between two barriers."""
    _, entry = compiled(words_kernel)
    names = [name for name, _ in calls(entry)]
    assert sorted(names) == sorted(("rma_nbi", "fence", "amo_nonfetch", "quiet"))
    guards = [one.end() for one in GUARD.finditer(entry)]
    assert len(guards) == 3
    assert dict(calls(entry))["rma_nbi"] < guards[0]
    in_order = sorted((place, name) for name, place in calls(entry) if name != "rma_nbi")
    ends = [place for place, _ in in_order[1:]] + [len(entry)]
    for (place, name), guard, end in zip(in_order, guards, ends, strict=True):
        assert guard < place and "bar.sync" not in entry[guard:place]
        if name != "amo_nonfetch":
            before = entry[:guard]
            assert "st." not in before[before.rindex("bar.sync") :]
            assert "bar.sync" in entry[place:end]


@cache
def telling():
    """The launch that tells ranks of other nodes, as ranks 0 and 1 of 4 make it, compiled before
    any of them fails."""
    layout = SlotLayout(4, 1024, num_nodes=2)
    block, offset = LoneBlock(layout.num_bytes, 4), notices_offset(4, layout.num_slots)
    with launches.recorded() as found:
        Notices(block, offset, 0, 4, [0, 1]).load()
        Notices(block, offset, 1, 4, [0, 1]).load()
        Notices(block, offset, 1, 2, [0, 1]).load()  # which has no ranks of other nodes
    first, refusal, *others = (one.compile() for one in found)
    assert others == [first, refusal]
    return first


@has_bitcode
def test_a_notice_is_sent_before_its_byte():
    """The program sends its notice, then one thread fences between two barriers, and then the byte
    is sent; or stored where the rank is mapped. Nothing waits until it is delivered."""
    entry = entry_of(telling())
    assert sorted(name for name, _ in calls(entry)) == ["fence", "rma_nbi", "rma_nbi"]
    sent = {size: entry.index(f"[param2], {size};") for size in (1024, 1)}
    fence = dict(calls(entry))["fence"]
    [guard] = GUARD.finditer(entry)
    assert sent[1024] < guard.start() < fence
    assert "bar.sync" in entry[sent[1024] : guard.start()]
    label = re.findall(r"^(\$L\w+):", entry[: sent[1]], re.MULTILINE)[-1]
    branches = [one.start() for one in re.finditer(rf"bra(?:\.uni)?\s+{re.escape(label)};", entry)]
    stored = entry.index(f"+{TOLD_BYTE}], ", fence)
    assert "st.b8" in entry[entry.rindex("\n", 0, stored) : stored]
    for place in (stored, *branches):
        assert "bar.sync" in entry[fence:place]


@has_bitcode
def test_small_kernels_spill_nothing():
    """The functions that hand requests to the adapter (IBGDA) keep a few words on the stack."""
    most = 256 if nvshmem_library.installed().has_ibgda() else 0
    for built in (compiled(send_kernel)[0], compiled(words_kernel)[0], telling()):
        assert built.spill_bytes <= most
        assert nvshmem_library.STATE in built.cubin  # by which its module is initialised


def test_only_marked_kernels_are_linked(tmp_path, monkeypatch):
    nvshmem_cases.install(tmp_path, monkeypatch, "3.6.5")
    assert nvshmem_library.linked(plain_kernel) == {}
    [path] = nvshmem_library.linked(send_kernel)["extern_libs"].values()
    assert path == str(tmp_path / "lib/libnvshmem_device.bc")
    options = []
    for kernel in (plain_kernel, send_kernel):
        monkeypatch.setattr(kernel, "warmup", lambda *args, **more: options.append(more))
        monkeypatch.setattr(launch, "_loaded", lambda compiled: None)
        monkeypatch.setattr(launch, "bundle", lambda: None)
        launch._function(kernel, (1,), (), {"num_warps": 8})
    assert [sorted(one) for one in options] == [
        ["grid", "num_warps"],
        ["extern_libs", "grid", "num_warps"],
    ]


def test_bundles_know_the_version_that_was_linked(tmp_path, monkeypatch):
    """A kernel in a bundle is found wherever NVSHMEM lies, and not with another version of it."""
    keys = []
    for folder, version in (("here", "3.6.5"), ("there", "3.6.5"), ("older", "3.4.5")):
        nvshmem_cases.install(tmp_path / folder, monkeypatch, version)
        context = torch.zeros(1, dtype=torch.int64)
        variant = kernel_bundle.Variant.of(send_kernel, 90, (context, *[16] * 6), {})
        keys.append(variant.key)
        _, options = variant.source()
        assert str(tmp_path / folder) in str(options.extern_libs)
    assert keys[0] == keys[1] != keys[2]
    nvshmem_cases.uninstall(monkeypatch)
    with pytest.raises(errors.BackendError, match="NVSHMEM is not installed"):
        _ = variant.key


def test_modules_with_nvshmem_are_initialised(monkeypatch):
    """Before their first launch, and no others."""
    initialised = []
    monkeypatch.setattr(
        nvshmem_library, "initialize_module", lambda module, name: initialised.append(name)
    )

    success = cuda_driver.driver.CUresult(0)
    for name in ("cuModuleLoadData", "cuModuleGetFunction"):
        monkeypatch.setattr(cuda_driver.driver, name, lambda *_: (success, object()))
    for name, cubin in (("plain", b"code"), ("sends", b".nvshmemi_device_state_d.")):
        cuda_driver._load(cuda_driver.Binary(name, cubin, 4, 0, False, (), ()))
    assert initialised == ["sends"]
