"""Options that commands share, and what options may be, checked before any work."""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import nvshmem_library
from ..errors import BackendError, ShapeError
from ..layer_config import LayerProblem
from ..node_traffic import Cluster, check_experts


class Backend(StrEnum):
    """A `backend` of Buffers."""

    AUTO = "auto"
    TORCH = "torch"
    NVSHMEM = "nvshmem"
    EMULATED = "emulated"
    SINGLE = "single"
    COLLECTIVE = "collective"


class DType(StrEnum):
    """The dtype of a model's weights; auto is that of the checkpoint."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


Ranks = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes.  \\[default: 4; on 2 or 3 GPUs, as many]", show_default=False
    ),
]
ChosenBackend = Annotated[Backend, typer.Option(help="torch is for GPUs, emulated for the CPU.")]


def check_file(path: Path, option: str) -> None:
    """Refuse a file that cannot be written."""
    problem = None
    if path.is_dir():
        problem = f"{path} is a folder; name a file in it"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}; make it, or name another"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = f"{path} cannot be written; name another file"
    if problem:
        raise typer.BadParameter(problem, param_hint=option)


def check_picture(path: Path, option: str = "--picture") -> None:
    """Refuse a picture that cannot be drawn or written."""
    check_installed(option, "bench", "matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    check_file(path, option)
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise typer.BadParameter(
            f"{path} does not say its kind; let it end in one of .{', .'.join(sorted(kinds))}",
            param_hint=option,
        )


def check_cache() -> None:
    """Refuse to measure what cannot be kept."""
    from ..choice_cache import cache_path

    folder = cache_path("").absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise BackendError(
            f"what is measured is kept in {folder}, and {nearest} is no folder that can be "
            "written. Set MOE_ENGINE_CACHE to a folder that can be written."
        )


def check_installed(what: str, extras: str, *packages: str) -> None:
    """Refuse a command whose packages are not installed."""
    if missing := [name for name in packages if not find_spec(name)]:
        names = " and ".join(missing)
        raise BackendError(f"{what} needs {names}: pip install 'moe_engine[{extras}]'")


def check_device(device: str) -> None:
    """Refuse a device on which ranks cannot start."""
    if device == "cpu":
        check_installed("Triton's interpreter, for the CPU,", "emulation", "numpy")


def check_graphs(device: str, backend: Backend) -> None:
    """Refuse CUDA graphs where there are none."""
    problem = None
    if device == "cpu":
        problem = "ranks run on the CPU, which has no CUDA graphs; leave it out"
    elif backend is Backend.COLLECTIVE:
        problem = "hosts wait in each layer of collective; choose another --backend"
    if problem:
        raise typer.BadParameter(problem, param_hint="--cuda-graphs")


def model_sizes(model: str) -> tuple[int, int, int, int]:
    """See `sizes_of_model`."""
    from .model_shape import SHAPES, sizes_of_model

    if model not in SHAPES and Path(model).is_dir():
        check_installed("the config of a checkpoint", "hf", "transformers")
    try:
        return sizes_of_model(model)
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from None


def known_model(
    model: str | None, ranks: int, num_gpus: int
) -> tuple[str, tuple[int, int, int, int]]:
    """The model, or the default one, and its sizes. It must have GPUs unless it is tiny."""
    on_gpus = num_gpus >= ranks
    model = model or ("qwen3-30b" if on_gpus else "tiny")
    sizes = model_sizes(model)
    if model != "tiny" and not on_gpus:
        fewer = "--ranks, or " if num_gpus else ""
        raise typer.BadParameter(
            f"{model} on {ranks} ranks needs as many GPUs, and there are {num_gpus}; choose "
            f"{fewer}--model tiny, which the CPU can run"
        )
    return model, sizes


def check_saving(save: str | None, backward: bool) -> None:
    """Refuse what is no policy, or a policy without a backward."""
    from ..training import check_save

    if save is not None:
        check_save(save)
        if not backward:
            message = "a forward alone saves nothing; add --backward"
            raise typer.BadParameter(message, param_hint="--save")


def check_layer(problem: LayerProblem) -> None:
    """Refuse a layer whose shape cannot run."""
    experts, ranks = problem.num_experts, problem.num_ranks
    if experts % ranks:
        raise typer.BadParameter(f"{experts} experts do not divide among {ranks} ranks")
    if problem.num_topk > experts:
        raise typer.BadParameter(f"top-{problem.num_topk} of {experts} experts")
    check_columns(hidden=problem.hidden, intermediate=problem.num_columns)


def check_columns(**columns: int) -> None:
    """Refuse widths that are no multiple of 16 bytes, 8 values of bf16."""
    for name, value in columns.items():
        if value % 8:
            raise typer.BadParameter(f"{name} is {value}; it must be a multiple of 8")


def check_cluster(
    cluster: Cluster, num_experts: int, num_topk: int, node_limit: int | None
) -> None:
    """Refuse nodes that are not full, links without speed, and experts that do not fit."""
    try:
        cluster.check()
        check_experts(cluster, num_experts, num_topk, node_limit)
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from None


def check_nodes(ranks: int, ranks_per_node: int) -> int:
    """How many nodes there are. Refuse nodes that are not full, and several where no NVSHMEM is
    installed that kernels can be linked with."""
    if ranks % ranks_per_node:
        raise typer.BadParameter(
            f"{ranks} ranks do not fill nodes of {ranks_per_node} ranks each",
            param_hint="--ranks-per-node",
        )
    if ranks > ranks_per_node:
        try:
            nvshmem_library.installed()
        except BackendError as error:
            raise BackendError(
                f"kernels of several nodes are linked with NVSHMEM. {error}"
            ) from None
    return ranks // ranks_per_node


def choose_ranks(ranks: int | None, backend: Backend) -> tuple[int, str]:
    """(how many ranks run by default or were asked for, their device)."""
    num_gpus, single = torch.cuda.device_count(), backend is Backend.SINGLE
    on_gpus = backend is not Backend.EMULATED and num_gpus > 0
    if backend in (Backend.TORCH, Backend.NVSHMEM) and not on_gpus:
        raise typer.BadParameter(
            f"{backend} needs a GPU, and there is none; choose auto, which takes the CPU",
            param_hint="--backend",
        )
    ranks = ranks or (1 if single else min(4, num_gpus) if num_gpus > 1 else 4)
    if single and ranks > 1:
        raise typer.BadParameter(f"single serves one rank, not {ranks}", param_hint="--backend")
    return ranks, "cuda" if on_gpus else "cpu"


def where(ranks: int, device: str) -> str:
    """The device of ranks, in words."""
    if device == "cpu":
        return "the CPU, where Triton interprets the kernels"
    num_gpus = torch.cuda.device_count()
    return (
        "GPUs" if num_gpus >= ranks else f"{num_gpus} GPU{'s' * (num_gpus > 1)}, which they share"
    )


def chosen_sizes(model: str | None, *given: int | None) -> list[int]:
    """(experts, top-k, hidden, columns) of a model, or as given."""
    sizes = [size for size in given if size]
    if len(sizes) not in (0, 4) or (bool(sizes) == bool(model)):
        raise typer.BadParameter("give a model, or all of experts, topk, hidden and intermediate")
    if model is None:
        return sizes
    if Path(model).is_dir():
        raise typer.BadParameter(
            f"{model} is a folder: give it as --checkpoint, as kernels depend on more than sizes"
        )
    num_experts, *widths, num_topk = model_sizes(model)
    return [num_experts, num_topk, *widths]
