"""torch's distributed checkpoint of models with sharded experts, and of their optimizers: saved on
some ranks, loaded on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_cases import (
    batches,
    end,
    loss_of,
    meshes,
    sharded_model,
    take_weights,
    whole_model,
)
from test_data_parallel import with_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from moe_engine.emulation import RankPool
from moe_engine.integrations.data_parallel import param_groups

NUM_EXPERTS = 8
Flat = dict[str, Tensor]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def flat(state: Any, name: str = "") -> Flat:
    """The tensors of a state, whole, by their paths."""
    if isinstance(state, dict):
        return {
            path: one
            for key, part in state.items()
            for path, one in flat(part, f"{name}/{key}").items()
        }
    if not isinstance(state, Tensor):
        return {}
    return {name: getattr(state, "full_tensor", lambda: state)().cpu().clone()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Two steps with the batches of 4 ranks; gradients of the dense part are left apart."""
    for step in range(2):
        loss_of(model, *batches(4, step)[group.rank()]).backward()
        for one in model.parameters():
            if not hasattr(one, "device_mesh"):
                dist.all_reduce(one.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()


def run(
    group: dist.ProcessGroup, folder: str, source: str | None, target: str, use_fsdp: bool
) -> Flat:
    """Load `source`, or train, and save `target`; all that was saved, whole. EP x FSDP with 2
    ranks for each expert, or all ranks of the group by experts alone."""
    mesh = DeviceMesh.from_group(group, cases.device().type)
    mesh = meshes(2)[0]["ep"] if use_fsdp else mesh
    model, buffer = sharded_model(NUM_EXPERTS, mesh)
    take_weights(model, whole_model(NUM_EXPERTS, seed=1 if source else 0))
    if use_fsdp:
        model = with_fsdp(model, 2)
    optimizer = torch.optim.AdamW(param_groups(model.parameters()), lr=0.01, foreach=True)
    if source is None:
        train(model, optimizer, group)
    state = state_of(model, optimizer)
    if source is not None:
        dcp.load(state, checkpoint_id=str(Path(folder) / source), process_group=group)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=str(Path(folder) / target), process_group=group)
    end(buffer)
    return flat(state)


def check_chain(pool: RankPool, folder: Path, *stages: tuple[int, bool]) -> None:
    """What the first stage saves, each later one loads from the one before, bit for bit."""
    source, first = None, {}
    for number, (num_ranks, use_fsdp) in enumerate(stages):
        target = f"stage{number}"
        found = pool.run(run, str(folder), source, target, use_fsdp, num_ranks=num_ranks)
        first = first or found[0]
        assert len(first) == 2 * 6 * 4  # of 6 weights a layer, each with 2 moments and a step
        for have in found:
            assert have.keys() == first.keys()
            assert [name for name in first if not torch.equal(have[name], first[name])] == []
        source = target
    shapes = {
        tuple(one.shape) for name, one in first.items() if "gate_up_proj" in name and one.ndim
    }
    assert shapes == {(NUM_EXPERTS, 16, 16)}


def test_a_checkpoint_is_loaded_on_other_numbers_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    check_chain(pool, tmp_path, (4, False), (2, False), (1, False), (4, False))


def test_a_checkpoint_of_fsdp_is_loaded_without_and_back(pool: RankPool, tmp_path: Path) -> None:
    check_chain(pool, tmp_path, (4, True), (4, False), (2, False), (4, True))
