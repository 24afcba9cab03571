"""Every Python block of the README runs as printed, on two ranks with small inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from low_latency_cases import cast_back

from moe_engine import Buffer
from moe_engine.emulation import RankPool

README = Path(__file__).parents[1] / "README.md"
T = 6
Names = dict[str, Any]


def blocks() -> dict[str, str]:
    """The Python blocks under each heading, one after the other."""
    found: dict[str, str] = {}
    for section in re.split(r"^#+ ", README.read_text(), flags=re.MULTILINE):
        if code := re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            found[section.splitlines()[0]] = "\n".join(code)
    return found


# --- What the blocks take as given, and what must have come of it -------------------------------


def routing(num_experts: int, num_topk: int) -> Names:
    """Tokens with experts in turn, and equal weights that sum to 1."""
    first = torch.arange(T)[:, None] + torch.arange(num_topk)
    weights = torch.full(first.shape, 1 / num_topk)
    names = {"topk_idx": first % num_experts, "topk_weights": weights}
    return {name: tensor.to(cases.device()) for name, tensor in names.items()}


def in_transformers(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    from test_transformers import build, difference
    from transformers import AutoModelForCausalLM

    from moe_engine.tools.models import Kind

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
    """Experts whose gate is large, so that SiLU changes nothing: y = 64 * sum of 8 ones."""
    new: Any = {"device": cases.device(), "dtype": torch.bfloat16}
    x = torch.zeros(T, 2048, **new)
    x[:, 0] = 1
    w_gate_up, w_down = torch.zeros(64, 16, 2048, **new), torch.ones(64, 2048, 8, **new)
    w_gate_up[:, :8, 0], w_gate_up[:, 8:, 0] = 64, 1
    names = {"group": group, "x": x, "w_gate_up": w_gate_up, "w_down": w_down} | routing(128, 8)
    yield names
    assert torch.equal(names["y"], torch.full_like(x, 512))


def on_one_gpu(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    new: Any = {"device": cases.device()}
    names: Names = {"w": torch.randn(2, 8, 16, **new), "x": torch.randn(T, 16, **new)}
    names |= {"w_gate_up": torch.randn(2, 16, 16, **new), "w_down": torch.randn(2, 16, 8, **new)}
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


def low_latency(group: dist.ProcessGroup, folder: str) -> Iterator[Names]:
    def run_experts(rows: torch.Tensor, scales: torch.Tensor, _: Any) -> torch.Tensor:
        return cast_back(rows, scales)

    x = torch.ones(T, 128, device=cases.device(), dtype=torch.bfloat16)
    names = {"group": group, "Buffer": Buffer, "x": x, "run_experts": run_experts}
    names |= {"num_experts": 4, "max_tokens": T} | routing(4, 2)
    yield names
    assert torch.equal(names["out"], x)


STAND_INS: dict[str, Callable[[dist.ProcessGroup, str], Iterator[Names]]] = {
    "Use it in transformers": in_transformers,
    "Use it as a layer": as_a_layer,
    "Use its grouped GEMM": on_one_gpu,
    "Use it as DeepEP's Buffer": as_deep_ep,
    "Low latency": low_latency,
}


def run_block(group: dist.ProcessGroup, heading: str, code: str, folder: str) -> None:
    steps = STAND_INS[heading](group, folder)
    names = next(steps)
    exec(compile(code, f"README.md, {heading}", "exec"), names)
    assert next(steps, None) is None
    if "buffer" in names:
        dist.barrier(group)
        names["buffer"].destroy()


def test_every_block_has_stand_ins() -> None:
    assert blocks().keys() == STAND_INS.keys()


@pytest.mark.parametrize("heading", STAND_INS)
def test_a_block_runs_as_printed(pool: RankPool, tmp_path: Path, heading: str) -> None:
    if heading == "Use it in transformers":
        pytest.importorskip("transformers")
    pool.run(run_block, heading, blocks()[heading], str(tmp_path), num_ranks=2)
