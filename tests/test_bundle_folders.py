"""Kernels for each kind of GPU, and what a folder has when kernels are compiled into it again."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path
from unittest import mock

import pytest
from bundle_calls import layouts

from moe_engine import hardware
from moe_engine.cuda_driver import Binary
from moe_engine.kernel_bundle import MANIFEST, PACKAGE, from_entry
from moe_engine.tools import compile, model_calls
from moe_engine.tools.lone_rank import kernel_engine, layer_choices
from moe_engine.tools.model_shape import ModelShape

SHAPE = ModelShape(16, 256, 128, 4, 4, max_tokens=64)


def test_kernels_of_each_kind_of_gpu_are_listed():
    """Rows of this layer come in stages on an H200, and at once on an H100."""
    shape, called = ModelShape(4, 4096, 2048, 2, 2, max_tokens=512), []

    def call_layer(shape):
        config = layer_choices().choose(shape.layer(512))
        called.append((hardware.gpu().name, config.num_stages))
        engine = kernel_engine(2, 512, shape.region_bytes(512))
        engine.moe_ffn(shape.inputs(512, *shape.weights()))

    calls = {"layout": layouts, "layer": call_layer}
    choosing = mock.patch.dict(compile.CHOOSING, {"layer": call_layer}, clear=True)
    with mock.patch.dict(compile.CALLS, calls, clear=True), choosing:
        found = compile.variants(shape, 90)
    assert called == [("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 1)]
    names = [variant.kernel.__name__ for variant in found.values()]
    assert names.count("exchange_fused_kernel") == 2
    assert names.count("copy_rows_kernel") == 1


@pytest.mark.parametrize("max_tokens", [64, 95])
def test_layers_of_e4m3_find_their_kernels(max_tokens):
    """Their tiles are lower than those of a product alone, and change at other numbers of rows."""
    shape = ModelShape(8, 4096, 14336, 2, 4, max_tokens=128, is_quantized=True)

    def call_layer(shape):
        engine = kernel_engine(4, max_tokens, shape.region_bytes(max_tokens))
        engine.moe_ffn(shape.inputs(max_tokens, *shape.weights()))

    def found_by(call):
        calls = {"layer": call}
        choosing = mock.patch.dict(compile.CHOOSING, calls, clear=True)
        with mock.patch.dict(compile.CALLS, calls, clear=True), choosing:
            return compile.variants(shape, 90)

    assert not found_by(call_layer).keys() - found_by(model_calls.call_layers).keys()


def needed(*calls):
    with mock.patch.dict(compile.CALLS, dict(enumerate(calls)), clear=True):
        return compile.variants(SHAPE, 90)


def code(text):
    return Binary("kernel", text.encode(), 4, 0, False, (), ())


def write(folder, variants, text):
    """Compile into `folder`, and into cubins of this text; the variants that were compiled."""
    asked = []

    def compile_all(variants, jobs):
        for variant in variants:
            asked.append(variant)
            yield code(text)

    with mock.patch.object(compile, "compile_all", compile_all):
        written = list(compile.write(folder, variants, 90, jobs=1))
    assert [variant.key for variant, _ in written] == [*variants]
    return asked


def cubins(folder):
    return {path.stem: path.read_text() for path in (folder / PACKAGE).glob("*.cubin")}


def manifest(folder):
    return json.loads((folder / PACKAGE / MANIFEST).read_text())


@pytest.fixture(scope="module")
def variants():
    """Of layouts, and of these and expert rows."""
    few, more = needed(layouts), needed(layouts, model_calls.call_expert_rows)
    assert len(few) == 2 and few.keys() < more.keys()
    return few, more


def other_version(folder, **changes):
    said = manifest(folder)
    said["made_with"] |= changes
    (folder / PACKAGE / MANIFEST).write_text(json.dumps(said))


def test_kernels_of_other_models_stay(variants, tmp_path):
    few, more = variants
    write(tmp_path, few, "first")
    assert {one.key for one in write(tmp_path, more, "second")} == more.keys() - few.keys()
    assert not write(tmp_path, few, "third")
    assert cubins(tmp_path) == {key: "first" if key in few else "second" for key in more}
    assert manifest(tmp_path)["kernels"].keys() == more.keys()
    for said in manifest(tmp_path)["kernels"].values():
        assert from_entry(said, b"") == code("")


@pytest.mark.parametrize("how", ["another version", "another compiler", "no manifest"])
def test_those_of_other_versions_go(variants, tmp_path, how):
    few, more = variants
    write(tmp_path, more, "old")
    if how == "another version":
        other_version(tmp_path, moe_engine="0.0.9 (abc)")
    elif how == "another compiler":
        said = manifest(tmp_path) | {"cuda": "1.0"}
        (tmp_path / PACKAGE / MANIFEST).write_text(json.dumps(said))
    else:
        (tmp_path / PACKAGE / MANIFEST).write_text("[]")
    assert len(write(tmp_path, few, "new")) == 2
    assert cubins(tmp_path) == dict.fromkeys(few, "new")


def test_a_command_that_was_interrupted_leaves_no_old_kernels(variants, tmp_path):
    few, _ = variants
    write(tmp_path, few, "old")
    here = manifest(tmp_path)
    other_version(tmp_path, triton="3.5.0")
    begun = compile.write(tmp_path, few, 90, jobs=1)
    with mock.patch.object(compile, "compile_all", lambda variants, jobs: iter([code("new")] * 2)):
        next(begun)
    begun.close()
    assert not (tmp_path / PACKAGE / MANIFEST).exists()
    assert len(write(tmp_path, few, "again")) == 2
    assert cubins(tmp_path) == dict.fromkeys(few, "again") and manifest(tmp_path) == here


def test_a_kernel_without_its_file_is_compiled_again(variants, tmp_path):
    few, _ = variants
    write(tmp_path, few, "first")
    gone = next(iter(few))
    (tmp_path / PACKAGE / f"{gone}.cubin").unlink()
    assert [one.key for one in write(tmp_path, few, "second")] == [gone]


def test_two_commands_at_once_keep_each_others_kernels(variants, tmp_path):
    few, more = variants
    rest = {key: variant for key, variant in more.items() if key not in few}
    compiled = mock.patch.object(compile, "compile_all", lambda *_: repeat(code("same")))
    with compiled:
        one, other = (compile.write(tmp_path, some, 90, jobs=1) for some in (few, rest))
        next(one), next(other), list(one), list(other)
    assert cubins(tmp_path).keys() == manifest(tmp_path)["kernels"].keys() == more.keys()


@pytest.mark.parametrize(("now", "stay"), [("3.6.5", True), ("3.4.5", False)])
def test_kernels_that_are_linked_stay_with_their_nvshmem(variants, tmp_path, now, stay):
    few, more = variants
    with mock.patch.object(compile, "linked", lambda kernel: {"extern_libs": {}}):
        with mock.patch("moe_engine.kernel_bundle._nvshmem", lambda: "3.6.5"):
            write(tmp_path, few, "linked")
    with mock.patch("moe_engine.kernel_bundle._nvshmem", lambda: now):
        assert len(write(tmp_path, more, "plain")) == len(more) - 2 * stay
    assert manifest(tmp_path)["made_with"].get("nvshmem") == (now if stay else None)


def test_a_kernel_that_is_listed_is_whole(variants, tmp_path):
    """Also where a second command, which began before it was listed, ends while it writes it."""
    kernels, plain = variants[0], Path.write_bytes

    def write_half(self, data):
        with mock.patch.object(Path, "write_bytes", plain):
            write(tmp_path, kernels, "first")
            self.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with mock.patch.object(compile, "compile_all", lambda *_: repeat(code("second"))):
        second = compile.write(tmp_path, kernels, 90, 1)
        with mock.patch.object(Path, "write_bytes", write_half), pytest.raises(OSError, match="28"):
            list(second)
    written = cubins(tmp_path)
    assert {written[key] for key in manifest(tmp_path)["kernels"]} == {"first"}
