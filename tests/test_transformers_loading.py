"""Checkpoints of transformers that each rank reads its part of, written again, and broken ones."""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers_cases import NUM_EXPERTS, difference

from moe_engine import BackendError, ShapeError
from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import CheckpointError
from moe_engine.integrations.transformers import unshard_experts
from moe_engine.integrations.transformers_checkpoints import (
    INDEX,
    check_files,
    load_sharded,
    save_whole,
)
from moe_engine.sharded_weights import local
from moe_engine.tools.models import Kind, build_config, build_model


def save(folder: Path, kind: Kind, dtype: torch.dtype = torch.float32, **how: Any) -> None:
    """A checkpoint of 12 experts in several files."""
    model = build_model(build_config(kind, **NUM_EXPERTS[kind]), "cpu", dtype)
    model.save_pretrained(folder, max_shard_size="100KB", **how)
    assert len(list(folder.glob("*.safetensors"))) > 3


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    held: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
    return held


def load_whole(folder: Path) -> Any:
    """The model of a checkpoint, on this rank's device."""
    return AutoModelForCausalLM.from_pretrained(folder).to("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(folder := tmp_path / "mixtral", Kind.MIXTRAL)
    return folder


@torch.inference_mode()
def load_and_save(
    group: dist.ProcessGroup, folder: Path
) -> tuple[float, list[list[int]], bool, bool]:
    """The error of the logits; shapes of the experts; whether the weights, made whole, and the
    checkpoint that is saved, are those of the first one."""
    whole = load_whole(folder / "first")
    model, buffer = load_sharded(folder / "first", group, max_tokens=12)
    ids = torch.full((1, 3 + group.rank()), 40 + group.rank(), device=whole.device)
    error = difference(model(ids).logits.float(), whole(ids).logits.float())
    shapes = [list(one.shape) for name, one in model.named_parameters() if ".experts." in name]
    save_whole(model, folder / "again", max_shard_size="100KB")
    saved, first = tensors(folder / "again"), tensors(folder / "first")
    written = saved.keys() == first.keys() and all(torch.equal(saved[n], first[n]) for n in first)
    unshard_experts(model)
    state, want = model.state_dict(), whole.state_dict()
    same = state.keys() == want.keys() and all(torch.equal(state[n], want[n]) for n in want)
    assert type(model) is type(whole)
    buffer.destroy()
    return error, shapes, same, written


@pytest.mark.parametrize(
    ("kind", "dtype"),
    cases.slow_unless(
        [(Kind.MIXTRAL, torch.float32), (Kind.DEEPSEEK_V3, torch.bfloat16)],
        Kind,
        [torch.float32, torch.bfloat16],
    ),
)
@pytest.mark.parametrize("num_ranks", cases.slow_unless([(2,)], [1, 2, 3, 4]))
def test_a_checkpoint_of_single_experts(
    pool: RankPool, kind: Kind, dtype: torch.dtype, num_ranks: int, tmp_path: Path
) -> None:
    save(tmp_path / "first", kind, dtype)
    names = tensors(tmp_path / "first")
    assert any(".experts.11." in name for name in names)
    found = pool.run(load_and_save, tmp_path, num_ranks=num_ranks)
    for error, shapes, same, written in found:
        assert error <= (1e-5 if dtype == torch.float32 else 5e-2)
        assert {shape[0] for shape in shapes} == {12 // num_ranks}
        assert same and written


@torch.inference_mode()
def load_on_mesh(group: dist.ProcessGroup, folder: Path) -> tuple[list[list[int]], float]:
    """The whole and the local shapes of experts that are DTensors, and the error of the logits."""
    from torch.distributed.device_mesh import DeviceMesh

    whole = load_whole(folder)
    mesh = DeviceMesh.from_group(group, whole.device.type, mesh_dim_names=("ep",))
    model, buffer = load_sharded(folder, mesh=mesh, max_tokens=12)
    ids = torch.full((1, 5), 40 + group.rank(), device=whole.device)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    error = difference(model(ids).logits, whole(ids).logits)
    buffer.destroy()
    return [list(weight.shape), list(local(weight).shape)], error


def test_stacked_experts_on_a_mesh(pool: RankPool, tmp_path: Path) -> None:
    save(tmp_path, Kind.QWEN3_MOE, save_original_format=False)  # one tensor for all experts
    assert any(name.endswith("experts.gate_up_proj") for name in tensors(tmp_path))
    for shapes, error in pool.run(load_on_mesh, tmp_path, num_ranks=2):
        assert [shape[0] for shape in shapes] == [12, 6]
        assert error <= 1e-5


# --- Broken checkpoints --------------------------------------------------------------------------


def rewrite(folder: Path, change: Any) -> str:
    """Let `change` work on the tensors of the file with expert 3's w1 in layer 1; its name."""
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    held = load_file(folder / file)
    change(held, name)
    save_file(held, folder / file, {"format": "pt"})
    return file


def drop(held: dict[str, torch.Tensor], name: str) -> None:
    del held[name]


def narrow(held: dict[str, torch.Tensor], name: str) -> None:
    held[name] = held[name][:, 1:].contiguous()


def test_a_tensor_that_a_file_lacks(checkpoint: Path) -> None:
    file = rewrite(checkpoint, drop)
    with pytest.raises(CheckpointError, match=rf"{file} lacks the tensor .*experts\.3\.w1"):
        check_files(checkpoint)


def test_an_expert_that_is_nowhere(checkpoint: Path) -> None:
    rewrite(checkpoint, drop)
    (checkpoint / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"layers\.1\..*experts\.3\.w1\.weight is in no file"):
        check_files(checkpoint)


def test_an_expert_of_another_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, narrow)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight in .* has the shape"):
        check_files(checkpoint)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_a_file_that_is_cut_off(checkpoint: Path, size: int) -> None:
    file = sorted(checkpoint.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{file.name} is cut off"):
        check_files(checkpoint)


def test_a_file_that_is_missing(checkpoint: Path) -> None:
    file = sorted(checkpoint.glob("*.safetensors"))[2]
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        check_files(checkpoint)
    for other in checkpoint.glob("*.safetensors"):
        other.unlink()
    (checkpoint / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"has no \.safetensors files"):
        check_files(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_cut_off(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} cannot be read"):
        check_files(checkpoint)


def test_a_class_that_loads_any_model(pool: RankPool, checkpoint: Path) -> None:
    auto = AutoModelForCausalLM
    with pytest.raises(RankError, match="model_class is AutoModelForCausalLM; it must be"):
        pool.run(partial(load, model_class=auto), str(checkpoint), num_ranks=2)


def load(group: dist.ProcessGroup, folder: str, **how: Any) -> None:
    load_sharded(folder, group, max_tokens=12, **how)


def load_other_folders(group: dist.ProcessGroup, folders: list[Path]) -> str:
    """The error of each rank, where ranks read other disks."""
    try:
        load_sharded(folders[group.rank()], group, max_tokens=12)
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_learn_what_one_cannot_read(
    pool: RankPool, checkpoint: Path, tmp_path: Path
) -> None:
    for one in pool.run(load_other_folders, [checkpoint, tmp_path / "none"], num_ranks=2):
        assert "none" in one and "no folder here" in one


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_hidden_layers": 3}, CheckpointError, "lacks .* tensors of MixtralForCausalLM"),
        ({"hidden_size": 128}, CheckpointError, "could not be loaded"),
        ({"architectures": ["NoSuchModel"]}, CheckpointError, "names the class NoSuchModel"),
        ({"num_local_experts": 7}, ShapeError, "7 experts, which 2 ranks cannot share"),
        ({"hidden_act": "relu"}, BackendError, "the activation"),
    ],
)
def test_configs_that_do_not_fit(
    pool: RankPool, checkpoint: Path, change: dict[str, Any], error: type, words: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RankError, match=words) as info:
        pool.run(load, str(checkpoint), num_ranks=2)
    assert error.__name__ in str(info.value)


# --- Memory --------------------------------------------------------------------------------------


def used() -> int:
    """Bytes of memory that this process has written; pages of files that it read do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def load_watched(group: dist.ProcessGroup, folder: Path) -> int:
    """The most bytes by which this process grows while it loads."""
    begin, most, ended = used(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            most.append(used() - begin)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _, buffer = load_sharded(folder, group, max_tokens=12)
    finally:
        ended.set()
        watcher.join()
    buffer.destroy()
    return max(most)


@pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux", reason="measures a Linux host's memory"
)
@pytest.mark.slow
def test_no_rank_has_all_experts_in_memory(pool: RankPool, tmp_path: Path) -> None:
    changes = {"num_local_experts": 12, "hidden_size": 512, "intermediate_size": 2048}
    model = build_model(build_config(Kind.MIXTRAL, **changes), "cpu", torch.float32)
    whole = sum(one.nbytes for one in model.parameters())
    experts = sum(one.nbytes for name, one in model.named_parameters() if ".experts." in name)
    largest = max(one.nbytes for name, one in model.named_parameters())
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    del model
    save(tmp_path / "small", Kind.MIXTRAL)
    pool.run(load, str(tmp_path / "small"), num_ranks=4)  # what any first load takes
    stays = whole - experts * 3 // 4
    for most in pool.run(load_watched, tmp_path, num_ranks=4):
        assert most < stays + largest
