"""The command line: `moe-engine`, or `python -m moe_engine`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from ..emulation import RankError
from ..errors import BackendError, MoeEngineError, ShapeError
from ..grouped_gemm.activations import ACTIVATIONS
from ..hardware import H200
from ..layer_config import LayerProblem
from ..node_traffic import LATENCY_US, NIC_GBS, Cluster, RowType
from ..options import Options
from .drawn_routing import Routing
from .models import Kind
from .option_checks import (
    Backend,
    ChosenBackend,
    DType,
    Ranks,
    check_cache,
    check_cluster,
    check_columns,
    check_device,
    check_file,
    check_graphs,
    check_installed,
    check_layer,
    check_nodes,
    check_picture,
    check_saving,
    choose_ranks,
    chosen_sizes,
    known_model,
    model_sizes,
    where,
)

EXPECTED = (MoeEngineError, ChildProcessError, TimeoutError, torch.OutOfMemoryError)
"""Errors that need no mistake in this package, on a rank or in this process."""


class Plain(TyperGroup):
    """Prints EXPECTED errors as one line, and others with their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EXPECTED as error:
            cause = error.errors[error.rank] if isinstance(error, RankError) else error
            if not isinstance(cause, EXPECTED):
                raise
            typer.secho(f"{type(cause).__name__}: {cause}", fg="red", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=Plain, no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """A communication engine for mixture-of-experts layers."""


@app.command()
def demo(
    model: Annotated[
        Kind | None,
        typer.Option(help="One model only.  \\[default: qwen3-moe, then mixtral]"),
    ] = None,
    ranks: Ranks = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes a rank reads.  \\[default: 1024 on GPUs, 16 on the CPU]"),
    ] = None,
    backend: ChosenBackend = Backend.AUTO,
    picture: Annotated[Path, typer.Option(help="Where to draw the routing.")] = Path("routing.png"),
) -> None:
    """Spread the experts of transformers models over ranks, and check them on a real text."""
    check_installed("the demo", "hf,bench", "transformers", "matplotlib")
    from .demo import Job, run_jobs
    from .demo_report import draw, report

    check_picture(picture)
    ranks, device = choose_ranks(ranks, backend)
    length, new = (1024, 16) if device == "cuda" else (16, 2)
    check_device(device)
    console = Console()
    kinds = [model] if model else [Kind.QWEN3_MOE, Kind.MIXTRAL]
    jobs = [Job(kind, device, tokens or length, new, backend.value) for kind in kinds]
    console.print(f"{ranks} ranks on {where(ranks, device)}, read {tokens or length} bytes each.")
    results = run_jobs(jobs, ranks, console)
    passed = [report(job, outcomes, console) for job, outcomes in zip(jobs, results, strict=True)]
    draw(jobs, results, picture)
    console.print(f"The routing is drawn in {picture.resolve()}", soft_wrap=True)
    if not all(passed):
        raise typer.Exit(1)


@app.command()
def train(
    model: Annotated[
        Kind | None,
        typer.Option(help="One model only.  \\[default: qwen3-moe, then mixtral]"),
    ] = None,
    ranks: Ranks = None,
    steps: Annotated[
        int | None,
        typer.Option(min=2, help="Of the optimizer.  \\[default: 200 on GPUs, 20 on the CPU]"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Bytes of a rank in each step.  \\[default: 512 on GPUs, 32 on the CPU]"
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 1e-3,
    fp32: Annotated[
        bool | None, typer.Option("--fp32/--bf16", help="\\[default: bf16 on GPUs, fp32 on CPUs]")
    ] = None,
    backend: ChosenBackend = Backend.AUTO,
    aux_free: Annotated[
        bool, typer.Option("--aux-free", help="Balance experts by biases, in deepseek-v3 alone.")
    ] = False,
    picture: Annotated[Path, typer.Option(help="Where to draw losses and loads.")] = Path(
        "training.png"
    ),
) -> None:
    """Train small transformers models on a text, with their experts over ranks and unsharded."""
    check_installed("training", "hf,bench", "transformers", "matplotlib")
    from .train import BIAS_SPEED, Job, run_jobs
    from .train_report import draw, report

    check_picture(picture)
    ranks, device = choose_ranks(ranks, backend)
    check_device(device)
    console = Console()
    if aux_free and model not in (None, Kind.DEEPSEEK_V3):
        raise typer.BadParameter(f"the routers of {model} have no biases", param_hint="--aux-free")
    default = [Kind.DEEPSEEK_V3] if aux_free else [Kind.QWEN3_MOE, Kind.MIXTRAL]
    kinds = [model] if model else default
    on_gpus = device == "cuda"
    steps, length = steps or (200 if on_gpus else 20), length or (512 if on_gpus else 32)
    dtype = torch.float32 if (not on_gpus if fp32 is None else fp32) else torch.bfloat16
    how = device, dtype, steps, length, learning_rate, backend.value, BIAS_SPEED * aux_free
    jobs = [Job(kind, *how) for kind in kinds]
    console.print(f"{ranks} ranks on {where(ranks, device)}, train {steps} steps.")
    results = run_jobs(jobs, ranks, console)
    passed = [report(job, outcomes, console) for job, outcomes in zip(jobs, results, strict=True)]
    draw(jobs, results, picture)
    console.print(f"Losses and loads are drawn in {picture.resolve()}", soft_wrap=True)
    if not all(passed):
        raise typer.Exit(1)


@app.command()
def run(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder with safetensors, or a repository to download.")
    ],
    prompt: Annotated[
        list[str], typer.Option(help="A text to go on with; give it again for more of them.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompts are messages to a chat model.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of the sampling; 0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    ranks: Ranks = None,
    dtype: Annotated[DType, typer.Option(help="Of the weights.")] = DType.AUTO,
    backend: ChosenBackend = Backend.AUTO,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Replay decode steps as CUDA graphs.")
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Make the experts' weights e4m3.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw the load of each expert in each layer.")
    ] = None,
) -> None:
    """Answer prompts by the model of a checkpoint, with its experts spread over ranks."""
    check_installed("running a checkpoint", "hf", "transformers")
    from .generate import Job, encode, load_tokenizer, run_job
    from .generate_report import draw, report

    if plot is not None:
        check_picture(plot, "--plot")
    ranks, device = choose_ranks(ranks, backend)
    check_device(device)
    if cuda_graphs:
        check_graphs(device, backend)
    console = Console()
    folder, tokenizer = load_tokenizer(checkpoint)
    job = Job(
        folder,
        encode(tokenizer, prompt, chat),
        max_new_tokens,
        temperature,
        seed,
        device,
        dtype.value,
        backend.value,
        cuda_graphs,
        fp8,
    )
    console.print(f"{ranks} ranks on {where(ranks, device)}, answer {len(prompt)} prompts.")
    answers = run_job(job, ranks, console)
    report(job, prompt, answers, tokenizer, console)
    if plot is not None:
        draw(answers, plot)
        console.print(f"The load of experts is drawn in {plot.resolve()}", soft_wrap=True)


@app.command()
def gemm(
    rows: Annotated[int, typer.Option(min=1, help="Rows in all.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of one GPU.")],
    columns: Annotated[int, typer.Option(min=8, help="Columns of the output.")],
    depth: Annotated[int, typer.Option(min=8, help="Columns of the rows.")],
    activation: Annotated[str, typer.Option(help=f"{', '.join(ACTIVATIONS)}.")] = "none",
    gathered: Annotated[bool, typer.Option(help="Rows by index.")] = False,
    tune: Annotated[bool, typer.Option(help="Measure, and keep the fastest for this GPU.")] = False,
) -> None:
    """Explain which tiles a grouped GEMM in bf16 takes on an H200; with --tune, measure them on
    this GPU."""
    from ..grouped_gemm import tune_gemm
    from ..grouped_gemm.activations import num_parts
    from ..grouped_gemm.config import GemmProblem, explain, measured

    check_columns(columns=columns, depth=depth)
    sizes = rows, experts, columns, depth
    try:
        gated = num_parts(activation) == 2
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from None
    problem = GemmProblem(torch.bfloat16, *sizes, gated=gated, gathered=gathered)
    typer.echo(explain(problem))
    if config := measured(problem):
        typer.echo(f"measured before on this GPU, and taken: {config}")
    if tune:
        check_cache()
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
    """Explain how `moe_ffn` runs a layer in bf16 on the GPU that is here, or an H200: stages,
    programs, predicted times."""
    from ..choice_cache import device_name
    from ..hardware import gpu
    from ..layer_config import LayerChoices, explain, kept_layers

    problem = LayerProblem(ranks, tokens, experts, topk, hidden, intermediate)
    check_layer(problem)
    typer.echo(explain(problem, gpu().hbm_gbs))
    if config := LayerChoices(kept=kept_layers()).measured(problem):
        typer.echo(f"measured before on this device ({device_name()}), and taken: {config}")
    if 1 < ranks and tokens <= Options().decode_tokens:
        typer.echo("so few tokens run by low-latency calls, unless Options(decode_tokens=0)")


@app.command()
def tune(
    model: Annotated[
        str | None,
        typer.Option(
            help="Its name, or a checkpoint's folder.  \\[default: the sizes; without them "
            "qwen3-30b on GPUs, tiny on CPUs]"
        ),
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of all ranks.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    hidden: Annotated[int | None, typer.Option(min=8, help="H, columns of a token.")] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=8, help="I, columns inside an expert.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each rank.  \\[default: 4096, or 64 on the CPU]")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs, or processes without them.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="A time is the median of so many.")] = 7,
) -> None:
    """Measure which configuration of `moe_ffn` is fastest in bf16 on these GPUs, and keep it for
    later Buffers. Without GPUs the command only shows how it works: times of emulated ranks mean
    nothing."""
    from ..layer_config import keep_layer
    from .tune_layer import Job, fastest, report, run_job

    num_gpus = torch.cuda.device_count()
    device, length = ("cuda", 4096) if num_gpus >= ranks else ("cpu", 64)
    sizes = [size for size in (experts, topk, hidden, intermediate) if size]
    if len(sizes) not in (0, 4) or (sizes and model):
        raise typer.BadParameter("give a model, or all of experts, topk, hidden and intermediate")
    if not sizes:
        _, (num_experts, *widths, num_topk) = known_model(model, ranks, num_gpus)
        sizes = [num_experts, num_topk, *widths]
    problem = LayerProblem(ranks, tokens or length, *sizes)
    check_layer(problem)
    check_cache()
    check_device(device)
    console = Console()
    with console.status(f"measuring on {ranks} ranks ({device})"):
        times = run_job(Job(problem, rounds, device))
    report(times, console)
    keep_layer(problem, fastest(times))
    typer.echo(f"kept for this kind of device: {fastest(times)}")


@app.command()
def trace(
    model: Annotated[
        str | None,
        typer.Option(
            help="Its name, or a checkpoint's folder.  \\[default: qwen3-30b on GPUs, tiny on CPUs]"
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each rank.  \\[default: 4096, or 64 on the CPU]")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs, or processes without them.")] = 4,
    calls: Annotated[int, typer.Option(min=1, help="The last one is traced.")] = 10,
    backward: Annotated[bool, typer.Option("--backward", help="Trace the backward.")] = False,
    save: Annotated[
        str | None, typer.Option(help="What the forward saves for it.  \\[default: auto]")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="The experts' weights are e4m3.")] = False,
    path: Annotated[Path, typer.Option(help="The trace, for Perfetto.")] = Path("trace.json"),
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Record what the programs of a layer, or of its backward, do and when, on all ranks."""
    from .timeline import Job, draw, report, run_job
    from .trace import save as save_trace

    check_saving(save, backward)
    if fp8 and backward:
        raise typer.BadParameter("e4m3 weights have no gradients", param_hint="--fp8")
    check_file(path, "--path")
    if picture:
        check_picture(picture)
    num_gpus = torch.cuda.device_count()
    model, (num_experts, *widths, num_topk) = known_model(model, ranks, num_gpus)
    device, length = ("cuda", 4096) if num_gpus >= ranks else ("cpu", 64)
    check_device(device)
    job = Job(model, tokens or length, calls, device, (save or "auto") if backward else None, fp8)
    check_layer(LayerProblem(ranks, job.tokens, num_experts, num_topk, *widths))
    console = Console()
    spans, clocks = run_job(job, ranks)
    report(spans, clocks, console)
    save_trace(spans, path)
    typer.echo(f"{len(spans)} spans are in {path}; https://ui.perfetto.dev shows them.")
    if picture:
        what = f"backward of {model}" if backward else model
        draw(spans, f"{what}, {job.tokens} tokens on each of {ranks} ranks ({device})", picture)
        typer.echo(f"They are drawn in {picture}.")


@app.command(name="compile")
def compile_kernels(
    ranks: Annotated[int, typer.Option(min=1, help="GPUs.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="A checkpoint of transformers, whose config tells all.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its shape.  \\[default: the sizes]")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of all ranks.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    hidden: Annotated[
        int | None, typer.Option(min=8, help="H, columns of a token.", show_default=False)
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=8, help="I, columns inside an expert.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a rank.")] = 8192,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that share NVLink.  \\[default: all]", show_default=False),
    ] = None,
    arch: Annotated[str, typer.Option(help="Of the GPUs: sm_80 or later.")] = "sm_90",
    fp8: Annotated[bool, typer.Option("--fp8", help="The experts' weights are e4m3.")] = False,
    out: Annotated[Path, typer.Option(help="Where to write the bundle.")] = Path("kernels"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at once.  \\[default: 1 a core, up to 16]")
    ] = None,
) -> None:
    """Compile the kernels that a model needs, on any machine, so that none is compiled where it
    runs."""
    from ..device.lang import INTERPRETED
    from .compile import default_jobs, report, run
    from .model_shape import ModelShape, shape_of_checkpoint

    if INTERPRETED:
        raise BackendError("TRITON_INTERPRET is set, and nothing is compiled then; unset it")
    if not (found := re.fullmatch(r"sm_(\d+)", arch)) or int(found[1]) < 80:
        raise typer.BadParameter(f"{arch!r} is no GPU from sm_80 on", param_hint="--arch")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is no folder; name another", param_hint="--out")
    num_nodes = check_nodes(ranks, ranks_per_node or ranks)
    given = model, experts, topk, hidden, intermediate
    if not any((checkpoint, *given)):
        raise typer.BadParameter("give a checkpoint, a model, or the sizes of one")
    if checkpoint is None:
        num_experts, num_topk, hidden, intermediate = chosen_sizes(*given)
        sizes = num_experts, hidden, intermediate, num_topk, ranks, max_tokens
        shape = ModelShape(*sizes, is_quantized=fp8)
    elif any(given):
        raise typer.BadParameter("its sizes are those of the model", param_hint="--checkpoint")
    else:
        check_installed("--checkpoint", "hf", "transformers")
        shape = shape_of_checkpoint(checkpoint, ranks, max_tokens, fp8)
    shape = replace(shape, num_nodes=num_nodes)
    check_layer(shape.layer(max_tokens))
    console = Console()
    report(run(shape, int(found[1]), out, jobs or default_jobs(), console), console)
    typer.echo(f"Set MOE_ENGINE_KERNELS={out.resolve()}, or pip install {out}.")


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help="Its name, or a checkpoint's folder.")] = "deepseek-v3",
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of all ranks.  \\[default: the model's]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 4096,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs.")] = 64,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="GPUs that share NVLink.")] = 8,
    nic_gbs: Annotated[
        float, typer.Option(help="GB/s of payload that the NIC of a rank carries.")
    ] = NIC_GBS,
    link_gbs: Annotated[
        float, typer.Option(help="GB/s that the NVLink of a rank carries.")
    ] = H200.shared_link_gbs,
    latency_us: Annotated[
        float, typer.Option(help="Of each dispatch or combine, besides its rows.")
    ] = LATENCY_US,
    rows: Annotated[RowType, typer.Option(help="Rows of a dispatch.")] = RowType.FP8,
    routing: Annotated[Routing, typer.Option(help="Which experts tokens take.")] = Routing.UNIFORM,
    node_limit: Annotated[
        int | None, typer.Option(min=1, help="Nodes that a token may reach.  \\[default: all]")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw times over the number of ranks.")
    ] = None,
) -> None:
    """Predict a layer on many nodes: time and bytes of dispatch and combine, memory, what limits.
    It is a model, fitted to what other libraries publish, and needs no GPU."""
    from .simulate import Scenario
    from .simulate_report import draw, report

    if plot is not None:
        check_picture(plot, "--plot")
    num_experts, hidden, columns, num_topk = model_sizes(model)
    num_experts = experts or num_experts
    cluster = Cluster(ranks, ranks_per_node, nic_gbs, link_gbs, latency_us=latency_us)
    check_cluster(cluster, num_experts, num_topk, node_limit)
    sizes = num_experts, num_topk, hidden, columns
    scenario = Scenario(cluster, LayerProblem(ranks, tokens, *sizes), rows, routing, node_limit)
    answers = report(scenario, Console())
    if plot is not None:
        draw(answers, plot)
        typer.echo(f"Times over the number of ranks are drawn in {plot.resolve()}")


@app.command()
def doctor(
    require: Annotated[
        list[Backend] | None,
        typer.Option(help="Fail unless this backend can serve several ranks from this host."),
    ] = None,
) -> None:
    """Say what this host has for communication between GPUs and hosts, and which backend a Buffer
    takes."""
    from .doctor import report

    obstacles = report(Console())
    for backend in require or ():
        if obstacle := obstacles.get(backend):
            raise BackendError(f"backend '{backend}' cannot serve ranks from here: {obstacle}")


@app.command()
def deep_ep_path() -> None:
    """Print the folder for PYTHONPATH with which `import deep_ep` imports moe_engine."""
    typer.echo(Path(__file__).parents[1] / "integrations" / "deep_ep_path")
