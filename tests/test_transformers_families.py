"""Every class of experts of the installed transformers, as it runs by itself and on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers
from families import Family, Layers, families, others, row, table

from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankPool
from moe_engine.integrations.transformers import shard_experts, unshard_experts

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
EVERY = families()
FEW = {"mixtral", "gpt_oss", "gemma4", "deepseek_v4", "aria", "nemotron_h"}
CHOSEN = [family for family in EVERY if family.model in FEW]


def version_of_page() -> str:
    found = re.search(r"transformers (\d+\.\d+)", PAGE.read_text())
    assert found
    return found[1]


@pytest.mark.skipif(
    not transformers.__version__.startswith(f"{version_of_page()}."),
    reason=f"the table is of transformers {version_of_page()}",
)
def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "python tests/families.py prints what the page lacks"


def test_most_classes_run() -> None:
    """So that a change of transformers that hides them all is seen."""
    assert len(EVERY) > 40
    assert {"llama4", "jetmoe"} <= set(others())
    refused = [one.model for one in EVERY if row(one)[0].startswith("refused")]
    assert len(refused) < 6, refused


def compare(group: dist.ProcessGroup, model: Layers, num_tokens: int) -> float:
    """How far the experts on ranks are from themselves on one; the weights are restored."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(1, num_tokens, sum(model.widths), generator=generator).to(device)
    weights, idx = torch.rand(num_tokens, 4, generator=generator).topk(2)
    args = x, idx.to(device), weights.to(device)
    with torch.no_grad():
        want = model(*args)
        buffer = shard_experts(model, group, max_tokens=9)
        got = model(*args)
    unshard_experts(model)
    buffer.destroy()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    return cases.relative_error(got, want) if num_tokens else 0.0


def run(group: dist.ProcessGroup, family: Family) -> float:
    model = Layers(family.build()).to("cpu" if INTERPRETED else "cuda")
    return compare(group, model, 7 + group.rank())


def check(pool: RankPool, family: Family) -> None:
    if row(family)[0].startswith("refused"):
        pytest.skip(row(family)[0])
    for error in pool.run(run, family, num_ranks=2):
        assert error < 1e-5


def named(members: list[Family]) -> Any:
    return [pytest.param(one, id=f"{one.model}-{one.name}") for one in members]


@pytest.mark.parametrize("family", named(CHOSEN))
def test_experts(pool: RankPool, family: Family) -> None:
    check(pool, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", named([one for one in EVERY if one not in CHOSEN]))
def test_all_experts(pool: RankPool, family: Family) -> None:
    check(pool, family)


# --- Layers of several shapes --------------------------------------------------------------------


def run_two(group: dist.ProcessGroup) -> list[float]:
    """How far two layers are from themselves, of which the second has other sizes and another form;
    also where one rank has no tokens."""
    first, second = (one for model in ("mixtral", "gpt_oss") for one in EVERY if one.model == model)
    model = Layers(first.build(), second.build(hidden_size=64, num_local_experts=6))
    model.to("cpu" if INTERPRETED else "cuda")
    return [compare(group, model, num_tokens) for num_tokens in (9, 2 * group.rank())]


def test_layers_may_differ(pool: RankPool) -> None:
    for errors in pool.run(run_two, num_ranks=2):
        assert max(errors) < 1e-5
