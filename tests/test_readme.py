"""The Python blocks of the pages run as printed, each page's on two ranks with small inputs. The
README's table has lines of these pages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from low_latency_cases import cast_back
from torch.distributed.device_mesh import DeviceMesh
from transformers_cases import build, difference

from moe_engine import Buffer
from moe_engine.emulation import RankPool
from moe_engine.tools.models import Kind

ROOT = Path(__file__).parents[1]
T = 6
Names = dict[str, Any]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


# --- What the blocks of a page take as given, and what must have come of them --------------------


def routing(num_experts: int, num_topk: int) -> Names:
    """Tokens with experts in turn, and equal weights that sum to 1."""
    first = torch.arange(T)[:, None] + torch.arange(num_topk)
    weights = torch.full(first.shape, 1 / num_topk)
    names = {"topk_idx": first % num_experts, "topk_weights": weights}
    return {name: tensor.to(cases.device()) for name, tensor in names.items()}


def in_transformers(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    from transformers import AutoModelForCausalLM

    model = build(Kind.MIXTRAL)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    input_ids = torch.tensor([[7, 8]], device=model.device) + group.rank()
    with torch.no_grad():
        want = model(input_ids).logits
    names = {"group": group, "model": model, "input_ids": input_ids, "folder": folder}
    yield names
    assert difference(names["logits"], want) <= 1e-5
    dist.barrier(group)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in whole.items())


def as_a_layer(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    """Experts whose gate is large, so that SiLU changes nothing: y = 64 * sum of 16 ones. A token
    has two of its top 8, one on each rank, as interpreted tiles take long."""
    new: Any = {"device": cases.device(), "dtype": torch.bfloat16}
    x = torch.zeros(T, 2048, **new)
    x[:, 0] = 1
    w_gate_up, w_down = torch.zeros(64, 32, 2048, **new), torch.ones(64, 2048, 16, **new)
    w_gate_up[:, :16, 0], w_gate_up[:, 16:, 0] = 64, 1
    topk_idx = torch.tensor([[0, 64, -1, -1, -1, -1, -1, -1]], device=x.device).repeat(T, 1)
    names = {
        "topk_idx": topk_idx,
        "topk_weights": torch.full_like(topk_idx, 0.5, dtype=torch.float),
    }
    names |= {"group": group, "x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    names |= {"num_local_experts": 64, "hidden": 2048, "intermediate": 16}
    names |= {"num_experts": 128, "num_topk": 8}
    names |= {"b_gate_up": torch.zeros(64, 32, **new), "b_down": torch.zeros(64, 2048, **new)}
    names |= {"shared_expert": torch.zeros_like}
    yield names
    assert torch.equal(names["y"], torch.full_like(x, 1024))


def meshes_of(group: dist.ProcessGroup) -> Names:
    """Those of experts that are on one rank alone; the pool has more ranks than the group."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    device, ranks = cases.device().type, [dist.get_process_group_ranks(group)]
    names = ("efsdp", "ep")
    mesh = DeviceMesh.from_group([alone, group], device, ranks, mesh_dim_names=names)
    return {"mesh": mesh, "world_mesh": DeviceMesh.from_group(group, device)}


def in_training(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    x = torch.randn(T, 16, device=cases.device(), dtype=torch.bfloat16)
    names: Names = {"group": group, "x": x, "target": torch.ones_like(x), "num_steps": 2}
    names |= {"hidden": 16, "intermediate": 8, "num_experts": 4, "num_topk": 2, "max_tokens": T}
    names |= {"folder": folder} | meshes_of(group)
    yield names
    assert bool(names["loss"].isfinite())
    assert all(one.grad is None for one in names["experts"].parameters())


def on_one_gpu(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    new: Any = {"device": cases.device()}
    names: Names = {"w": torch.randn(2, 8, 16, **new), "x": torch.randn(T, 16, **new)}
    names |= {"w_gate_up": torch.randn(2, 16, 16, **new), "w_down": torch.randn(2, 16, 8, **new)}
    names |= {"b_gate_up": torch.randn(2, 16, **new), "b_down": torch.randn(2, 16, **new)}
    names |= {"offsets": torch.tensor([0, 4, T], **new), "weights": torch.ones(T, **new)}
    names["row_index"] = torch.arange(T, **new).flip(0)
    names["x"].requires_grad_()
    yield names
    assert names["y"].shape == names["x"].shape
    assert bool(names["x"].grad.abs().sum() > 0)


def as_deep_ep(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    def run_experts(rows: torch.Tensor, _: Any, weights: torch.Tensor) -> torch.Tensor:
        return rows * weights.sum(1, keepdim=True)

    x = torch.randn(T, 16, device=cases.device())
    names = {"group": group, "x": x, "num_experts": 4, "run_experts": run_experts} | routing(4, 2)
    yield names
    assert torch.equal(names["out"], x)
    torch.testing.assert_close(names["combined_x"], x.bfloat16(), rtol=0.02, atol=0.02)


def low_latency(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    def run_experts(rows: torch.Tensor, scales: torch.Tensor, _: Any) -> torch.Tensor:
        return cast_back(rows, scales)

    x = torch.ones(T, 128, device=cases.device(), dtype=torch.bfloat16)
    names = {"group": group, "Buffer": Buffer, "x": x, "run_experts": run_experts}
    names |= {"num_experts": 4, "max_tokens": T} | routing(4, 2)
    yield names
    assert torch.equal(names["out"], x)


def of_many_nodes(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    names: Names = {}
    yield names
    assert names["way"] == "two-level"
    assert names["us"] == pytest.approx(2137, rel=0.02)


STAND_INS: dict[str, Callable[[dist.ProcessGroup, str], Iterator[Names]]] = {
    "transformers.md": in_transformers,
    "layer.md": as_a_layer,
    "training.md": in_training,
    "grouped_gemm.md": on_one_gpu,
    "deep_ep.md": as_deep_ep,
    "low_latency.md": low_latency,
    "tools.md": of_many_nodes,
}
SCRIPT = "one_gpu.md"
"""A page whose block is a script of its own."""


def run_page(group: dist.ProcessGroup, page: str, folder: str) -> None:
    """The blocks of a page, one after the other; those with graphs on GPUs alone."""
    steps = STAND_INS[page](group, folder)
    names = next(steps)
    for code in blocks(page):
        if "torch.cuda." not in code or cases.device().type == "cuda":
            exec(compile(code, page, "exec"), names)
    assert next(steps, None) is None
    if "buffer" in names:
        dist.barrier(group)
        names["buffer"].destroy()


def test_every_page_with_blocks_has_stand_ins() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if blocks(path.name)}
    assert pages == {*STAND_INS, SCRIPT}


@pytest.mark.parametrize("page", STAND_INS)
def test_a_page_runs_as_printed(pool: RankPool, tmp_path: Path, page: str) -> None:
    if page == "transformers.md":
        pytest.importorskip("transformers")
    pool.run(run_page, page, str(tmp_path), num_ranks=2)


def test_the_script_runs_as_printed(pool: RankPool, tmp_path: Path) -> None:
    [code] = blocks(SCRIPT)
    if pool.device == "cpu":
        code = code.replace('RankPool(8, "cuda")', 'RankPool(2, "cpu")')
    path = tmp_path / "script.py"
    path.write_text(code)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = [float(number) for number in done.stdout.strip("[]\n").split(",")]
    assert numbers == pytest.approx([16 * 16 * 16] * len(numbers), rel=1e-3)


def rows_of_the_tables() -> list[tuple[list[str], str]]:
    """(the lines that a row of the README or of docs/index.md says to write, the page to read)."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/index.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \| \[.*?\]\((?:docs/)?(\w+\.md)", text, re.M)
    return [(re.findall(r"`([^`]+)`", cell), page) for _, cell, page in rows]


@pytest.mark.parametrize(("lines", "page"), rows_of_the_tables())
def test_the_readme_says_what_its_pages_say(lines: list[str], page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert lines
    assert [line for line in lines if line not in text] == []


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    cases.skip_without_interpreter()
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^```python\n(.*?)^```\n```text\n(.*?)^```", text, re.M | re.DOTALL)
    assert found is not None
    program, output = found.groups()
    (tmp_path / "layer.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "layer.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
