"""Bundles for ranks on several nodes: they have all kernels that such ranks launch, whichever rank
of how many, and none that another NVSHMEM was linked into."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import product
from unittest import mock

import nvshmem_cases
import pytest
import torch
import triton
from bundle_calls import (
    decode_layers,
    elastic_calls,
    launched,
    layers,
    layers_in_e4m3,
    layers_in_parts,
    low_latency_calls,
    normal_calls,
)
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from node_cases import NodePool
from typer.testing import CliRunner

from moe_engine import (
    BackendError,
    kernel_bundle,
)
from moe_engine.cuda_driver import Binary
from moe_engine.device.context import Kind
from moe_engine.dispatch import Tokens
from moe_engine.dispatch.internode import open_call
from moe_engine.emulation import RankPool
from moe_engine.grouped_gemm.config import FEW_ROWS
from moe_engine.kernel_bundle import MANIFEST, PACKAGE, Bundle
from moe_engine.nvshmem_library import STATE, linked
from moe_engine.symm.ring import region_bytes
from moe_engine.tools import cli, compile, model_calls
from moe_engine.tools.lone_rank import internode_low_latency_engine, kernel_engine
from moe_engine.tools.model_shape import ModelShape

SHAPE = ModelShape(16, 256, 128, 4, 4, max_tokens=512, num_nodes=2)
THREE = replace(SHAPE, num_experts=24, num_ranks=6, num_nodes=3)
LONE = replace(SHAPE, num_nodes=4)
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
SOME = dict(phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def nvshmem():
    """An NVSHMEM is installed: what is listed depends on its version alone."""
    with nvshmem_cases.version_installed(3, 6, 5):
        yield


@cache
def needed(shape):
    return compile.variants(shape, 90)


def found_by(calls, shape=SHAPE):
    """The variants that these calls need, which get the shape."""
    listed = compile.CALLS if shape.num_nodes == 1 else compile.CALLS_OF_NODES
    with mock.patch.dict(listed, {"calls": calls}, clear=True):
        return compile.variants(shape, 90)


def missing(found, listed):
    """The names of kernels with a variant that is not listed."""
    return {variant.name for key, variant in found.items() if key not in listed}


# --- Calls of real Buffers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    """Ranks of nodes of two, whose kernels are not interpreted."""
    with RankPool(6, nodes=3, timeout_s=240, env={"TRITON_INTERPRET": "0"}) as pool:
        yield pool


@CPU_ONLY
@pytest.mark.parametrize(
    "calls",
    [
        *(normal_calls, elastic_calls, low_latency_calls),
        *(layers, layers_in_parts, layers_in_e4m3, decode_layers),
    ],
)
@pytest.mark.parametrize("shape", [SHAPE, THREE, LONE], ids=["2x2", "3x2", "4x1"])
def test_ranks_of_nodes_find_their_kernels(ranks, calls, shape):
    """All ranks: the calls of some differ."""
    shape = replace(shape, is_quantized=calls is layers_in_e4m3)
    on = NodePool(ranks, shape.num_nodes, shape.num_ranks // shape.num_nodes)
    for keys in on.run(launched, calls):
        names = {name for name, key in keys}
        assert any("internode" in name for name in names)
        assert not {name for name, key in keys if key not in needed(shape)}


@CPU_ONLY
def test_elastic_buffers_of_one_node_find_their_kernels(ranks):
    shape = replace(SHAPE, num_nodes=1)
    listed = found_by(compile.CALLS["ElasticBuffer"], shape)
    for keys in NodePool(ranks, 1, shape.num_ranks).run(launched, elastic_calls):
        assert any(name.endswith("expand_rows_kernel") for name, _ in keys)
        assert not any("internode" in name for name, _ in keys)
        assert not {name for name, key in keys if key not in listed}


# --- Any sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(2, 1), (3, 1), (6, 1), (3, 3), (6, 2)])
@settings(**SOME, max_examples=1)
@given(most=st.integers(1, SHAPE.max_tokens), data=st.data())
def test_buffers_of_any_size_find_their_kernels(most, num_ranks, num_nodes, data):
    """On all ranks: rank 0 has none before it, and parts of handles begin at multiples of 16 bytes
    on some of them."""
    shape = replace(SHAPE, num_experts=12, num_ranks=num_ranks, num_nodes=num_nodes)
    count = data.draw(st.integers(1, most))

    def calls(shape):
        ranks, sizes = range(num_ranks), (most, None)
        for rank, max_tokens, form in product(ranks, sizes, model_calls.forms_of_rows(shape)):
            memory = max_tokens, shape.region_bytes(most), None, num_nodes, rank
            engine = kernel_engine(num_ranks, *memory)
            model_calls.send_and_return(shape, engine, count, *form)

    assert not missing(found_by(calls, shape), found_by(model_calls.call_normal, shape))


@settings(**SOME, max_examples=3)
@given(most=st.integers(1, SHAPE.max_tokens), more=st.integers(0, 64), data=st.data())
def test_low_latency_calls_of_any_size_find_their_kernels(most, more, data):
    """Of memory for `more` tokens than they have."""
    region = region_bytes(min(most + more, SHAPE.max_tokens), SHAPE.num_topk, SHAPE.row_bytes)
    count = data.draw(st.integers(0, most))

    def calls(shape):
        engine = internode_low_latency_engine(shape.num_ranks, region, shape.num_nodes)
        with mock.patch.object(model_calls, "batches_of", lambda most: [count]):
            model_calls.send_and_return_at_once(shape, engine, most)

    found = found_by(calls)
    assert not missing(found, needed(SHAPE))
    kernels = [one.name.rpartition(".")[2] for one in found.values()]
    assert kernels.count("open_internode_kernel") == 2  # with statistics, and without


FEWER = replace(SHAPE, max_tokens=256)


@settings(**SOME, max_examples=3)
@given(
    num_rows=st.integers(1, 4 * 4 * FEWER.max_tokens),
    has_bias=st.booleans(),
    is_quantized=st.booleans(),
)
# Gradients of weights have other tiles from here on.
@example(num_rows=FEW_ROWS * FEWER.num_local - 1, has_bias=False, is_quantized=False)
@example(num_rows=FEW_ROWS * FEWER.num_local, has_bias=False, is_quantized=False)
def test_experts_of_any_number_of_rows_find_their_kernels(num_rows, has_bias, is_quantized):
    shape = replace(FEWER, has_bias=has_bias, is_quantized=is_quantized)
    found = found_by(partial(model_calls.run_experts, count=num_rows), shape)
    assert not missing(found, found_by(compile.CALLS_OF_NODES["layer by verbs"], shape))


def test_sums_may_be_rounded_once():
    sums = [one for one in needed(SHAPE).values() if one.name.endswith("internode_sum_kernel")]
    assert {str(one.values["SENT"].DTYPE) for one in sums} == {"constexpr[bf16]", "constexpr[fp32]"}


def test_the_number_of_linked_variants_is_bounded():
    """By number: each takes seconds to compile, so raise it only on purpose."""
    counts = Counter(one.name for one in needed(SHAPE).values() if linked(one.kernel))
    assert sum(counts.values()) <= 76, counts
    assert sum(one.name not in counts for one in needed(SHAPE).values()) <= 170


# --- The version of NVSHMEM -----------------------------------------------------------------------


def headers(shape):
    """What opens a cached dispatch: one linked kernel, and one that is not."""
    engine = kernel_engine(shape.num_ranks, 8, shape.region_bytes(8), None, shape.num_nodes)
    layout = engine.layout(shape.tokens(8)[1], shape.num_experts)
    engine.tokens_per_node(layout)
    shape_of_rows = Tokens(*shape.tokens(8)).shape
    signature = torch.zeros(16, dtype=torch.int32)
    open_call(Kind.CACHED_DISPATCH, signature, shape_of_rows, engine.slots)


def write(folder, calls):
    """A bundle of what these calls need, without code."""
    made = Binary("kernel", b"code", 4, 0, False, (), ())
    with mock.patch.object(compile, "compile_variant", lambda variant: made):
        return list(compile.write(folder, found_by(calls), 90, jobs=1))


def read(folder):
    with mock.patch.object(kernel_bundle, "_driver_version", lambda: 13000):
        return Bundle.read(folder / PACKAGE, 90)


def test_a_bundle_of_another_nvshmem_is_refused(tmp_path, monkeypatch):
    """And none without linked kernels, whatever is installed."""
    written = write(tmp_path / "linked", headers)
    assert [bool(linked(one.kernel)) for one, _ in written].count(True) == 1
    write(tmp_path / "plain", model_calls.call_expert_rows)
    manifest = json.loads((tmp_path / "linked" / PACKAGE / MANIFEST).read_text())
    assert manifest["made_with"]["nvshmem"] == "3.6.5"
    assert "nvshmem" not in (tmp_path / "plain" / PACKAGE / MANIFEST).read_text()
    read(tmp_path / "linked")
    nvshmem_cases.install(tmp_path / "older", monkeypatch, "3.4.5")
    read(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"made with nvshmem 3\.6\.5; this is 3\.4\.5"):
        read(tmp_path / "linked")
    nvshmem_cases.uninstall(monkeypatch)
    read(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"made with nvshmem 3\.6\.5; this is None"):
        read(tmp_path / "linked")


def test_a_linked_kernel_is_found_by_its_launch(tmp_path):
    written = write(tmp_path, headers)
    bundle, loaded = read(tmp_path), []
    with (
        mock.patch.object(kernel_bundle, "Function", loaded.append),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        for variant, _ in written:
            bundle.find(variant.kernel, list(variant.values.values()), variant.options)
    assert len(loaded) == len(written)


@pytest.mark.skipif(nvshmem_cases.MISSING is not None, reason=str(nvshmem_cases.MISSING))
def test_linked_kernels_are_compiled(monkeypatch):
    """By the NVSHMEM that is really installed: so that what loads them initialises it."""
    nvshmem_cases.find_installed(monkeypatch)
    for variant in found_by(headers).values():
        is_linked = STATE in compile.compile_variant(variant).cubin
        assert is_linked == bool(linked(variant.kernel))


# --- The command ----------------------------------------------------------------------------------

MODEL = "--ranks 4 --experts 16 --topk 4 --hidden 256 --intermediate 128"


def call(command):
    result = CliRunner().invoke(cli.app, ["compile", *command.split()], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_the_command(tmp_path):
    shapes = []

    def run(shape, arch, out, jobs, console):
        shapes.append(shape)
        return []

    with mock.patch.object(compile, "run", run):
        for more in ("--ranks-per-node 2", "--ranks-per-node 4", ""):
            code, output = call(f"{MODEL} {more} --out {tmp_path} --max-tokens 512")
            assert code == 0, output
    assert shapes == [SHAPE, replace(SHAPE, num_nodes=1), replace(SHAPE, num_nodes=1)]


def test_nodes_that_are_not_full_are_refused():
    code, output = call(f"{MODEL} --ranks-per-node 3")
    assert code == 2
    assert "4 ranks do not fill nodes of 3 ranks each" in output
    assert "--ranks-per-node" in output


def test_nodes_need_nvshmem(tmp_path, monkeypatch):
    """One node does not."""
    nvshmem_cases.uninstall(monkeypatch)
    code, output = call(f"{MODEL} --ranks-per-node 2 --out {tmp_path / 'kernels'}")
    assert code == 1
    assert "BackendError: kernels of several nodes are linked with NVSHMEM" in output
    assert "pip install 'moe_engine[nvshmem]'" in output
    assert not (tmp_path / "kernels").exists()
    with pytest.raises(BackendError, match="NVSHMEM is not installed"):
        compile.variants(SHAPE, 90)
    assert compile.variants(replace(SHAPE, num_nodes=1, max_tokens=16), 90)


# --- On a GPU -------------------------------------------------------------------------------------


def call_without_a_compiler(group):
    """All kinds of calls on ranks of a GPU."""

    def refuse(*args, **kwargs):
        raise AssertionError("a compiler was started")

    with (
        mock.patch.object(triton, "compile", refuse),
        mock.patch.object(triton.compiler.compiler, "compile", refuse),
        warnings.catch_warnings(),
        torch.device("cuda"),
    ):
        warnings.simplefilter("error", RuntimeWarning)
        for calls in (normal_calls, elastic_calls, low_latency_calls, decode_layers, layers):
            calls(group)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(nvshmem_cases.MISSING is not None, reason=str(nvshmem_cases.MISSING))
def test_no_compiler_is_started_on_two_nodes(tmp_path, monkeypatch):
    """On ranks that share a GPU, too."""
    nvshmem_cases.find_installed(monkeypatch)
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    needed_here = compile.variants(replace(SHAPE, max_tokens=64), arch)
    list(compile.write(tmp_path, needed_here, arch, compile.default_jobs()))
    env = {
        "MOE_ENGINE_KERNELS": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "empty"),
        "PATH": "/nowhere",
        "CC": "/nowhere/cc",
    }
    with RankPool(4, "cuda", nodes=2, timeout_s=240, env=env) as pool:
        pool.run(call_without_a_compiler)
