"""The command line: `moe-engine`, or `python -m moe_engine`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .emulation import RankError
from .errors import MoeEngineError, ShapeError
from .models import Kind

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """A communication engine for mixture-of-experts layers."""


@contextmanager
def explained(console: Console) -> Iterator[None]:
    """Say plainly what went wrong on a rank, where the engine knows."""
    try:
        yield
    except RankError as error:
        cause = error.errors[error.rank]
        if not isinstance(cause, MoeEngineError):
            raise
        console.print(f"{type(cause).__name__}: {cause}", style="red", markup=False)
        raise typer.Exit(1) from None


def known_model(model: str | None, on_gpus: bool) -> str:
    """The model, or the default one; it has a shape."""
    from .timeline import SHAPES

    model = model or ("qwen3-30b" if on_gpus else "tiny")
    if model not in SHAPES:
        raise typer.BadParameter(f"the model is {model!r}; there are {', '.join(SHAPES)}")
    return model


def check_experts(num_experts: int, ranks: int) -> None:
    """Every rank has as many."""
    if num_experts % ranks:
        raise typer.BadParameter(f"{num_experts} experts do not divide among {ranks} ranks")


@app.command()
def demo(
    model: Annotated[
        Kind | None,
        typer.Option(help="One model only.  [default: qwen3-moe, then mixtral]"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes.  [default: 4; on 2 or 3 GPUs, as many]", show_default=False
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes each rank reads.  [default: 1024 on GPUs, 64 on the CPU]"),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, torch (GPUs), emulated (CPU), single or collective.")
    ] = "auto",
    picture: Annotated[Path, typer.Option(help="Where to draw the routing.")] = Path("routing.png"),
) -> None:
    """Spread the experts of transformers models over ranks, and check them on a real text."""
    import torch

    console = Console()
    if missing := [name for name in ("transformers", "matplotlib") if not find_spec(name)]:
        console.print(f"The demo needs {' and '.join(missing)}: pip install 'moe_engine[hf,bench]'")
        raise typer.Exit(1)
    from .demo import Job, run_jobs
    from .report import draw, report

    num_gpus = torch.cuda.device_count()
    ranks = ranks or (min(4, num_gpus) if num_gpus > 1 else 4)
    on_gpus = backend != "emulated" and num_gpus >= ranks
    device, length, new = ("cuda", 1024, 16) if on_gpus else ("cpu", 64, 3)
    kinds = [model] if model else [Kind.QWEN3_MOE, Kind.MIXTRAL]
    jobs = [Job(kind, device, tokens or length, new, backend) for kind in kinds]
    console.print(f"{ranks} ranks ({device}) read {tokens or length} bytes each.")
    with explained(console):
        results = run_jobs(jobs, ranks, console)
    passed = [report(job, outcomes, console) for job, outcomes in zip(jobs, results, strict=True)]
    draw(jobs, results, picture)
    console.print(f"The routing is drawn in {picture}.")
    if not all(passed):
        raise typer.Exit(1)


@app.command()
def gemm(
    rows: Annotated[int, typer.Option(min=1, help="Rows in all.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of one GPU.")],
    columns: Annotated[int, typer.Option(min=8, help="Columns of the output.")],
    depth: Annotated[int, typer.Option(min=8, help="Columns of the rows.")],
    activation: Annotated[str, typer.Option(help="none, silu, gelu, swiglu or geglu.")] = "none",
    gathered: Annotated[bool, typer.Option(help="Rows by index.")] = False,
    tune: Annotated[bool, typer.Option(help="Measure, and keep the best for this GPU.")] = False,
) -> None:
    """Explain which tiles a grouped GEMM in bf16 takes on an H200; with --tune, measure them on
    this GPU."""
    import torch

    from .config import GemmProblem, explain
    from .grouped_gemm import tune_gemm
    from .grouped_gemm.operands import num_parts
    from .tune import tuned

    sizes = rows, experts, columns, depth
    try:
        gated = num_parts(activation) == 2
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from None
    problem = GemmProblem(torch.bfloat16, *sizes, gated=gated, gathered=gathered)
    typer.echo(explain(problem))
    if found := tuned(problem):
        typer.echo(f"measured before on this GPU, and taken: {found}")
    if tune:
        config, us = tune_gemm(*sizes, activation=activation, gathered=gathered)
        typer.echo(f"best of those measured: {config}, {us:.0f} us; kept for this GPU")


@app.command()
def layer(
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a rank.")],
    ranks: Annotated[int, typer.Option(min=1, help="GPUs.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of all ranks.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")],
    hidden: Annotated[int, typer.Option(min=8, help="H, columns of a token.")],
    intermediate: Annotated[int, typer.Option(min=8, help="I, columns inside an expert.")],
) -> None:
    """Explain how `moe_ffn` runs a layer in bf16 on H200s: stages, programs, predicted times."""
    from .layer_config import LayerProblem, explain
    from .tune import LayerChoices, device_name, measured_layers

    problem = LayerProblem(ranks, tokens, experts, topk, hidden, intermediate)
    typer.echo(explain(problem))
    if found := LayerChoices(measured=measured_layers()).found(problem):
        typer.echo(f"measured before on this device ({device_name()}), and taken: {found}")


@app.command()
def tune(
    model: Annotated[
        str | None,
        typer.Option(
            help="Its shape.  [default: the sizes; without them qwen3-30b on GPUs, tiny on the CPU]"
        ),
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of all ranks.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    hidden: Annotated[int | None, typer.Option(min=8, help="H, columns of a token.")] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=8, help="I, columns inside an expert.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each rank.  [default: 4096, or 64 on the CPU]")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs, or processes without them.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="A time is the median of so many.")] = 7,
) -> None:
    """Measure how `moe_ffn` runs best in bf16 on these GPUs, and keep it for later Buffers. Without
    GPUs it only shows how: emulated ranks say nothing about times."""
    import torch

    from .layer_config import LayerProblem
    from .timeline import SHAPES
    from .tune import keep_layer
    from .tune_layer import Job, fastest, report, run_job

    on_gpus = torch.cuda.device_count() >= ranks
    device, length = ("cuda", 4096) if on_gpus else ("cpu", 64)
    sizes = [size for size in (experts, topk, hidden, intermediate) if size]
    if len(sizes) not in (0, 4) or (sizes and model):
        raise typer.BadParameter("give a model, or all of experts, topk, hidden and intermediate")
    if not sizes:
        num_experts, *widths, num_topk = SHAPES[known_model(model, on_gpus)]
        sizes = [num_experts, num_topk, *widths]
    problem = LayerProblem(ranks, tokens or length, *sizes)
    check_experts(problem.num_experts, ranks)
    if problem.num_topk > problem.num_experts:
        raise typer.BadParameter(f"top-{problem.num_topk} of {problem.num_experts} experts")
    console = Console()
    with explained(console), console.status("measuring"):
        times = run_job(Job(problem, rounds, device))
    report(times, console)
    with explained(console):
        keep_layer(problem, fastest(times))
    typer.echo(f"kept for this kind of device: {fastest(times)}")


@app.command()
def trace(
    model: Annotated[
        str | None,
        typer.Option(help="Its shape.  [default: qwen3-30b on GPUs, tiny on the CPU]"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each rank.  [default: 4096, or 64 on the CPU]")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs, or processes without them.")] = 4,
    calls: Annotated[int, typer.Option(min=1, help="The last one is traced.")] = 10,
    path: Annotated[Path, typer.Option(help="The trace, for Perfetto.")] = Path("trace.json"),
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Record what each program of a layer does when, on all ranks."""
    import torch

    from .timeline import SHAPES, Job, draw, report, run_job
    from .trace import save

    on_gpus = torch.cuda.device_count() >= ranks
    model = known_model(model, on_gpus)
    check_experts(SHAPES[model][0], ranks)
    device, length = ("cuda", 4096) if on_gpus else ("cpu", 64)
    job = Job(model, tokens or length, calls, device)
    console = Console()
    with explained(console):
        spans, clocks = run_job(job, ranks)
    report(spans, clocks, console)
    save(spans, path)
    typer.echo(f"{len(spans)} spans are in {path}; https://ui.perfetto.dev shows them.")
    if picture:
        draw(spans, f"{model}, {job.tokens} tokens on each of {ranks} ranks ({device})", picture)
        typer.echo(f"They are drawn in {picture}.")


@app.command()
def deep_ep_path() -> None:
    """Print the folder that makes `import deep_ep` mean moe_engine, for PYTHONPATH."""
    typer.echo(Path(__file__).parent / "integrations" / "deep_ep_path")
