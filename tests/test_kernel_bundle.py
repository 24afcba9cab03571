"""Kernels that were compiled before they are needed: all of them, and none of another version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from bundle_calls import layouts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine import (
    Activation,
    BackendError,
    Buffer,
    Options,
    ShapeError,
    hardware,
    kernel_bundle,
    moe_ffn,
)
from moe_engine import passes as layer_passes
from moe_engine.cuda_driver import Binary
from moe_engine.emulation import RankPool
from moe_engine.engines.base import WeightGradients
from moe_engine.expert_major import sum_rows, take_rows
from moe_engine.kernel_bundle import MANIFEST, PACKAGE, Bundle, Variant, entry, from_entry
from moe_engine.options import DEFAULT_OPTIONS
from moe_engine.passes import PassGradients, backward_in_passes, forward_in_passes
from moe_engine.streams import EventOverlap
from moe_engine.symm.ring import region_bytes
from moe_engine.tools import cli, compile, model_calls
from moe_engine.tools.lone_rank import kernel_engine, low_latency_engine
from moe_engine.tools.model_shape import ModelShape, shape_of_checkpoint
from moe_engine.training import LayerOptions, LayerTensors
from moe_engine.weight_gradients import LayerWeights
from moe_engine.weight_layouts import GateUp

SHAPE = ModelShape(16, 256, 128, 4, 4, max_tokens=512)
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")


@cache
def needed(shape=SHAPE, arch=90):
    return compile.variants(shape, arch)


def first_layouts():
    return mock.patch.dict(compile.CALLS, {"layout": layouts}, clear=True)


@pytest.mark.slow
@settings(phases=[Phase.generate], max_examples=2, suppress_health_check=list(HealthCheck))
@given(most=st.integers(1, SHAPE.max_tokens))
def test_buffers_of_any_size_find_their_kernels(most):
    names = "dispatch and combine", "expert rows", "layer", "grouped GEMM"
    calls = {name: compile.CALLS[name] for name in names}
    with (
        mock.patch.dict(compile.CALLS, calls, clear=True),
        mock.patch.object(model_calls, "sizes", lambda shape, choice: [most]),
    ):
        found = compile.variants(SHAPE, 90)
    assert not {variant.name for key, variant in found.items() if key not in needed()}


def call_in_passes(count, shape):
    """A layer of `count` tokens as in a graph, where its slices follow, and its backward."""
    options = Options(capacity_factor=1)
    buffer = SimpleNamespace(options=options, group_size=shape.num_ranks, takes_sub_batches=False)
    engine = kernel_engine(shape.num_ranks, count, shape.region_bytes(count), capacity=1.0)
    x, idx, weights, up, down, *_ = shape.inputs(count, *shape.weights())
    layer = LayerTensors(x, idx, weights, LayerWeights(GateUp.of(up, "concatenated"), down))

    def forward(_, tensors, options):
        made = engine.moe_ffn_forward(tensors.inputs, options.save, is_captured=True)
        return *made, EventOverlap()

    def backward(dy, tensors, saved, earlier):
        into = WeightGradients(up.clone(), down.clone(), earlier is not None)
        return PassGradients(engine.moe_ffn_backward(dy, tensors.inputs, saved, into), ())

    batches, _ = forward_in_passes(buffer, layer, LayerOptions(save="none"), forward)
    assert [len(passes) for passes in batches] == [1 + shape.num_ranks]
    backward_in_passes(x.clone(), layer, batches, backward)


@settings(phases=[Phase.generate], max_examples=2)
@given(count=st.integers(1, SHAPE.max_tokens))
def test_layers_in_passes_find_their_kernels(count):
    """For each slice, wherever it begins: 3 ids of a token take no multiple of 16 bytes."""
    shape = replace(SHAPE, num_topk=3)
    with mock.patch.dict(compile.CALLS, {"in passes": partial(call_in_passes, count)}, clear=True):
        found = compile.variants(shape, 90)
    exchange = [one.name for one in found.values() if "exchange_fused" in one.name]
    assert len(exchange) == 1
    assert not {variant.name for key, variant in found.items() if key not in needed(shape)}


@settings(phases=[Phase.generate], max_examples=2)
@given(num_rows=st.integers(1, 4 * SHAPE.max_tokens), num_received=st.integers(1, SHAPE.max_tokens))
def test_expert_rows_of_any_number_find_their_kernels(num_rows, num_received):
    def call(shape):
        x = torch.empty(num_received, shape.hidden, dtype=shape.dtype)
        rows = take_rows(x, torch.zeros(num_rows, dtype=torch.int32), shape.num_topk)
        sum_rows(rows, torch.zeros(num_received, shape.num_topk, dtype=torch.int32))

    with mock.patch.dict(compile.CALLS, {"expert rows": call}, clear=True):
        found = compile.variants(SHAPE, 90)
    assert len(found) == 2 and found.keys() <= needed().keys()


def test_the_number_of_variants_is_bounded():
    """By number: more are compiled for each model, so raise it only on purpose."""
    counts = {}
    for variant in needed().values():
        counts[variant.kernel.__name__] = counts.get(variant.kernel.__name__, 0) + 1
    assert sum(counts.values()) <= 262, counts
    assert counts["low_latency_dispatch_kernel"] == 3 * 3 * 2 + 2  # layers: by block_m


def test_nothing_is_left_of_the_stand_in():
    """What was listed made no call that could be taken for one that ran."""
    from moe_engine import prepared

    needed()
    assert not len(prepared._without_memory)
    assert hardware._stand_in is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bundle of two kernels."""
    path = tmp_path_factory.mktemp("bundle")
    with first_layouts():
        written = list(compile.write(path, compile.variants(SHAPE, 90), 90, jobs=2))
    assert [variant.kernel.__name__ for variant, _ in written] == [
        "layout_kernel",
        "layout_sum_kernel",
    ]
    return path


def read(folder, arch=90, driver=13000):
    with mock.patch.object(kernel_bundle, "_driver_version", lambda: driver):
        return Bundle.read(folder / PACKAGE, arch)


def test_a_kernel_is_found_by_its_launch(folder):
    with first_layouts():
        variants = compile.variants(SHAPE, 90)
    bundle, loaded = read(folder), []
    with (
        mock.patch.object(
            kernel_bundle, "Function", lambda binary: loaded.append(binary) or binary
        ),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        for _ in range(2):
            for variant in variants.values():
                arguments = list(variant.values.values())
                binary = bundle.find(variant.kernel, arguments, variant.options)
                assert binary == compile.compile_variant(variant)
    assert len(loaded) == 2  # each once


@pytest.mark.parametrize("name", ["release_kernel", "layout_kernel"])
def test_a_kernel_that_is_missing_is_told(folder, tmp_path, name):
    variant = next(v for v in needed().values() if v.kernel.__name__ == name)
    missing = "variant" if name == "release_kernel" else "readable file"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / PACKAGE / f"{variant.key}.cubin").unlink(missing_ok=True)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        pytest.warns(RuntimeWarning, match=f"{name} is compiled at this launch: .* no {missing}"),
    ):
        arguments = list(variant.values.values())
        assert read(tmp_path).find(variant.kernel, arguments, variant.options) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("moe_engine", "0.0.9 (abc)", r"made with moe_engine 0\.0\.9"),
        ("triton", "3.5.0", r"made with triton 3\.5\.0"),
        ("arch", "sm_80", "made with arch sm_80; this is sm_90"),
        ("tracing", True, "made with tracing True; this is False"),
    ],
)
def test_a_bundle_of_something_else_is_refused(folder, tmp_path, name, value, text):
    manifest = json.loads((folder / PACKAGE / MANIFEST).read_text())
    manifest["made_with"][name] = value
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=text):
        read(tmp_path)


def test_an_old_driver_and_what_is_no_bundle_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="the driver is of CUDA 11080"):
        read(folder, driver=11080)
    with pytest.raises(ValueError, match=r"cannot be read \(FileNotFoundError"):
        read(tmp_path)
    (tmp_path / PACKAGE).mkdir()
    made = json.loads((folder / PACKAGE / MANIFEST).read_text())
    for text, found in {
        "{}": "KeyError",
        "[" * 100_000: "RecursionError",
        json.dumps(made | {"made_with": []}): "TypeError",
        json.dumps(made | {"cuda": 12.8}): "TypeError",
        json.dumps(made | {"kernels": None}): "TypeError",
    }.items():
        (tmp_path / PACKAGE / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=found):
            read(tmp_path)


def test_a_bundle_is_found_by_the_environment_and_as_a_package(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_bundle, "_driver_version", lambda: 13000)
    find = kernel_bundle._bundle.__wrapped__
    monkeypatch.delenv("MOE_ENGINE_KERNELS", raising=False)
    assert find(90) is None
    monkeypatch.setenv("MOE_ENGINE_KERNELS", str(folder))
    assert find(90).folder == folder / PACKAGE
    monkeypatch.setenv("MOE_ENGINE_KERNELS", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="are not used: kernels.json cannot be read"):
        assert find(90) is None
    monkeypatch.delenv("MOE_ENGINE_KERNELS")
    monkeypatch.syspath_prepend(str(folder))
    assert find(90).folder == folder / PACKAGE


def test_what_is_written_is_what_is_read():
    signature = ("*bf16", ("i32", ("*i64",)), "constexpr")
    binary = Binary("kernel", b"code", 4, 99, True, signature, ({"swizzle": 3},))
    assert from_entry(json.loads(json.dumps(entry(binary))), b"code") == binary


def test_keys_tell_variants_apart():
    some = [v for v in needed().values() if v.kernel.__name__ == "copy_rows_kernel"]
    one = some[0]
    again = Variant.of(one.kernel, one.arch, list(one.values.values()), dict(one.options))
    assert again.key == one.key
    assert one._replace(options={**one.options, "num_warps": 2}).key != one.key
    assert len({v.key for v in needed().values()}) == len(needed())


SIZES = "--experts 16 --topk 4 --hidden 256 --intermediate 128"


def call(command):
    return CliRunner().invoke(cli.app, ["compile", *command.split()], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("--ranks 2", "give a checkpoint, a model, or the sizes"),
        (f"--ranks 2 --model mixtral-8x7b {SIZES}", "give a model, or all of"),
        (f"--ranks 3 {SIZES}", "16 experts do not divide among 3 ranks"),
        (f"--ranks 2 {SIZES} --arch sm_75", "'sm_75' is no GPU from sm_80 on"),
        (f"--ranks 2 {SIZES} --arch hopper", "'hopper' is no GPU from sm_80 on"),
        (f"--ranks 2 {SIZES} --out pyproject.toml", "pyproject.toml is no folder"),
        ("--ranks 2 --model gpt", "the model is 'gpt'; there are"),
    ],
)
def test_the_command_refuses(command, text):
    result = call(command)
    assert result.exit_code
    assert text in " ".join(result.output.replace("│", " ").split())


def test_the_command(tmp_path):
    with first_layouts():
        result = call(f"--ranks 2 {SIZES} --out {tmp_path / 'kernels'} --jobs 1")
    assert result.exit_code == 0, result.output
    assert "routing.layout_kernel" in result.output
    assert f"MOE_ENGINE_KERNELS={tmp_path / 'kernels'}" in result.output.replace("\n", "")
    assert read(tmp_path / "kernels") is not None


# --- On a GPU --------------------------------------------------------------------------------

FIRST_CALLS = """
import time, warnings, torch, triton
from moe_engine import Buffer, Options, moe_ffn
from moe_engine.grouped_gemm import grouped_mlp
from moe_engine.ops import combine, dispatch

def refuse(*args, **kwargs):
    raise AssertionError("a compiler was started")

triton.compile = triton.compiler.compiler.compile = refuse
warnings.simplefilter("error")
torch.cuda.init()
x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
idx, w = torch.rand(64, 16, device="cuda").topk(4).indices, torch.rand(64, 4, device="cuda")
up = torch.randn(16, 256, 256, dtype=torch.bfloat16, device="cuda")
down = torch.randn(16, 256, 128, dtype=torch.bfloat16, device="cuda")
for options in (Options(), Options(decode_tokens=0)):
    buffer = Buffer.for_tokens(None, 64, 256, 16, 4, options=options)
    begin = time.perf_counter()
    moe_ffn(x, idx, w, up, down, buffer)
    torch.cuda.synchronize()
    print("first layer", round(time.perf_counter() - begin, 3), "s")
    begin = time.perf_counter()
    buffer.warmup(256, 16, 4, weights=(up, down))
    print("warmup", round(time.perf_counter() - begin, 3), "s")
offsets = torch.tensor([0] + [4] * 16, device="cuda").cumsum(0).int()
leaves = [one.requires_grad_() for one in (x, up, down)]
for max_rows in (None, 256):
    got = dispatch(x, idx, w, 16, buffer, max_rows=max_rows)
    combine(got.rows, got.plan, buffer).sum().backward()
grouped_mlp(*leaves, offsets).sum().backward()
buffer.check()
"""


# --- Checkpoints ---------------------------------------------------------------------------------


def save_config(folder, kind, **sizes):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def gpt_oss(folder, **more):
    sizes = dict(hidden_size=256, intermediate_size=128, num_local_experts=8, num_hidden_layers=2)
    return save_config(folder, "gpt_oss", **sizes, num_experts_per_tok=4, **more)


def test_a_config_tells_what_a_model_needs(tmp_path):
    shape = shape_of_checkpoint(gpt_oss(tmp_path / "gpt-oss", dtype="bfloat16"), 4, 64)
    activation = Activation("swiglu", limit=7.0, alpha=1.702, shift=1.0)
    sizes = 8, 256, 128, 4, 4, 64
    assert shape == ModelShape(*sizes, torch.bfloat16, activation, has_bias=True)
    sizes = dict(hidden_size=64, intermediate_size=32, num_local_experts=4, num_hidden_layers=1)
    mixtral = save_config(tmp_path / "mixtral", "mixtral", **sizes, dtype="float32")
    shape = shape_of_checkpoint(mixtral, 2, 64)
    assert shape == ModelShape(4, 64, 32, 2, 2, 64, torch.float32)
    mixtral = save_config(tmp_path / "relu", "mixtral", **sizes, hidden_act="relu")
    with pytest.raises(BackendError, match="the activation"):
        shape_of_checkpoint(mixtral, 2, 64)


def test_layers_that_differ_are_refused(monkeypatch):
    pytest.importorskip("transformers")
    from families import Layers, families

    from moe_engine.integrations import transformers_checkpoints

    [mixtral] = [one for one in families() if one.model == "mixtral"]
    model = Layers(mixtral.build(), mixtral.build(hidden_size=64))
    monkeypatch.setattr(transformers_checkpoints, "empty_model", lambda _: model)
    with pytest.raises(ShapeError, match=r"the layers of some model differ: .*hidden=64"):
        shape_of_checkpoint("some model", 2, 64)


def test_quantized_weights_are_dequantized_to_bf16(tmp_path):
    folder = gpt_oss(tmp_path, dtype="float32", quantization_config={"quant_method": "mxfp4"})
    assert shape_of_checkpoint(folder, 2, 64).dtype == torch.bfloat16


def test_experts_with_biases_have_kernels_of_their_own(tmp_path):
    shape = shape_of_checkpoint(gpt_oss(tmp_path, dtype="bfloat16"), 4, 16)
    calls = {name: compile.CALLS[name] for name in ("layer", "decode layer", "grouped GEMM")}
    with mock.patch.dict(compile.CALLS, calls, clear=True):
        found = needed(shape)
        plain = needed(replace(shape, activation=Activation("swiglu"), has_bias=False))
    names = {one.name.rpartition(".")[2] for one in found.values()}
    assert {"_bias_gradient_kernel", "_bias_weight_gradient_kernel"} <= names
    changed = {one.name.rpartition(".")[2] for key, one in found.items() if key not in plain}
    assert {"dispatch_gemm_kernel", "staged_gemm_kernel", "_grouped_gemm_kernel"} <= changed
    assert not {"push_fused_kernel", "copy_rows_kernel", "return_sums_kernel"} & changed


def call_quantized(count, shape):
    """Layers with e4m3 weights, of `count` tokens."""
    inputs = shape.inputs(count, *shape.weights())
    kernel_engine(shape.num_ranks, count, shape.region_bytes(count)).moe_ffn(inputs)
    if count <= DEFAULT_OPTIONS.decode_tokens:
        region = region_bytes(count, shape.num_topk, shape.hidden * shape.dtype.itemsize)
        low_latency_engine(shape.num_ranks, region).moe_ffn(inputs, count)


@settings(phases=[Phase.generate], max_examples=3)
@given(count=st.integers(1, SHAPE.max_tokens))
def test_layers_with_e4m3_weights_find_their_kernels(count):
    shape = replace(SHAPE, is_quantized=True)
    with mock.patch.dict(compile.CALLS, {"fp8": partial(call_quantized, count)}, clear=True):
        found = compile.variants(shape, 90)
    assert any(one.name.endswith("quantize_rows_kernel") for one in found.values())
    assert not {variant.name for key, variant in found.items() if key not in needed(shape)}


def test_the_command_takes_a_checkpoint_or_sizes(tmp_path):
    done = CliRunner().invoke(
        cli.app, ["compile", "--ranks=4", f"--checkpoint={gpt_oss(tmp_path)}", "--topk=2"]
    )
    assert done.exit_code == 2
    assert "its sizes are those of the model" in done.output


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_no_compiler_is_started(tmp_path):
    """Neither Triton's nor, for a launcher, that of C."""
    major, minor = torch.cuda.get_device_capability()
    shape = ModelShape(16, 256, 128, 4, 1, max_tokens=64)
    arch = 10 * major + minor
    list(compile.write(tmp_path, compile.variants(shape, arch), arch, compile.default_jobs()))
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS],
        env=os.environ
        | {
            "MOE_ENGINE_KERNELS": str(tmp_path),
            "TRITON_CACHE_DIR": str(tmp_path / "empty"),
            "PATH": "/nowhere",
            "CC": "/nowhere/cc",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def train_in_passes(group):
    """How many calls two layers with gradients made: one that saves, and one in a graph."""

    def refuse(*args, **kwargs):
        raise AssertionError("a compiler was started")

    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    idx = torch.rand(64, 8, device="cuda").topk(4).indices  # all to the experts of rank 0
    weights = torch.rand(64, 4, device="cuda")
    up = torch.randn(8, 256, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    down = torch.randn(8, 256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    leaves, graph = (x, up, down), torch.cuda.CUDAGraph()
    options = Options(capacity_factor=1, decode_tokens=0)
    buffer = Buffer.for_tokens(group, 64, 256, 16, 4, options=options)

    def train(save):
        y = moe_ffn(x, idx, weights, up, down, buffer, save=save)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    calls = mock.Mock(wraps=layer_passes._forward_pass)
    with (
        mock.patch.object(triton, "compile", refuse),
        mock.patch.object(triton.compiler.compiler, "compile", refuse),
        mock.patch.object(layer_passes, "_forward_pass", calls),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", RuntimeWarning)
        for save in ("pre", "rows", "none"):
            train(save)
        torch.cuda.synchronize()
        torch.distributed.barrier(group)
        with torch.cuda.graph(graph):
            train("none")
        graph.replay()
        buffer.check()
    torch.distributed.barrier(group)
    del graph
    buffer.destroy()
    return calls.call_count


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_no_compiler_is_started_for_passes(tmp_path):
    """Forward and backward, eagerly and in a graph, on two ranks."""
    major, minor = torch.cuda.get_device_capability()
    shape, arch = ModelShape(16, 256, 128, 4, 2, max_tokens=64), 10 * major + minor
    with mock.patch.dict(compile.CALLS, {"layer": model_calls.call_layers}, clear=True):
        needed_here = compile.variants(shape, arch)
    list(compile.write(tmp_path, needed_here, arch, compile.default_jobs()))
    env = {
        "MOE_ENGINE_KERNELS": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "empty"),
        "PATH": "/nowhere",
        "CC": "/nowhere/cc",
    }
    with RankPool(2, "cuda", timeout_s=240, env=env) as ranks:
        assert ranks.run(train_in_passes) == [4 * (1 + 2)] * 2
