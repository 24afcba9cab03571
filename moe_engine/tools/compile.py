"""`moe-engine compile`: the kernels that a model needs, as a bundle; see `kernel_bundle.py`.

One rank of the model makes every call that a rank can make, for the numbers of tokens at which
other kernels are chosen, and those calls in which ranks differ as each that does. Nothing runs:
each launch tells which variant of its kernel it needs, and each variant is compiled once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.nvidia.compiler import get_ptxas

from .. import grouped_gemm
from ..checks import MAX_LOW_LATENCY_TOKENS
from ..cuda_driver import Binary
from ..device.context import SAVE_POLICIES
from ..dispatch import Tokens
from ..dispatch.low_latency import LowLatencyTokens
from ..engines.base import LayerInputs, WeightGradients
from ..engines.hooked_calls import HookedCalls
from ..engines.internode import InternodeEngine
from ..engines.kernel import KernelEngine
from ..errors import ShapeError
from ..expert_major import place, sum_rows, take_rows
from ..grouped_gemm.activations import SWIGLU, Activation
from ..hardware import stand_in
from ..kernel_bundle import MANIFEST, PACKAGE, Variant, backend, entry, made_with
from ..launch import Grid, collecting
from ..layer_config import LayerChoices, LayerProblem, kept_layers
from ..nvshmem_library import linked
from ..options import DEFAULT_OPTIONS, HINT_TOPK_LOW_LATENCY
from ..symm.lanes import LaneLayout
from ..symm.ring import RingLayout, region_bytes
from ..symm.slots import ReturnRowLayout, RowLayout, SlotLayout, header_bytes
from .lone_rank import internode_low_latency_engine, kernel_engine, low_latency_engine

FP8 = torch.float8_e4m3fn
FORMATS = "bf16", "fp8", "rounded", "ue8m0"


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its kernels: a layer of it on `num_ranks` ranks of `num_nodes` nodes,
    each of which brings up to `max_tokens` tokens."""

    num_experts: int
    hidden: int
    num_columns: int
    num_topk: int
    num_ranks: int
    max_tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = SWIGLU
    has_bias: bool = False
    is_quantized: bool = False
    num_nodes: int = 1

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        """Of x."""
        return self.hidden * self.dtype.itemsize

    def region_bytes(self, max_tokens: int) -> int:
        """Of a Buffer for so many tokens, as `Buffer.for_tokens` makes it."""
        row = ReturnRowLayout(self.row_bytes, self.num_topk)
        return header_bytes(self.num_experts, self.num_ranks) + max_tokens * row.num_bytes

    def layer(self, max_tokens: int) -> LayerProblem:
        """A layer of up to so many tokens of each rank."""
        sizes = self.num_experts, self.num_topk, self.hidden, self.num_columns
        return LayerProblem(self.num_ranks, max_tokens, *sizes, self.dtype.itemsize)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H], topk_idx [T, K], topk_weights [T, K]; no kernel reads them."""
        topk_idx = torch.zeros(count, self.num_topk, dtype=torch.int64)
        x = torch.empty(count, self.hidden, dtype=self.dtype)
        return x, topk_idx, torch.empty(count, self.num_topk)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w_gate_up [L, 2I, H], or [L, I, H], and w_down [L, H, I]."""
        new = partial(torch.empty, dtype=FP8 if self.is_quantized else self.dtype)
        up = new(self.num_local, self.activation.parts * self.num_columns, self.hidden)
        return up, new(self.num_local, self.hidden, self.num_columns)

    def inputs(self, count: int, up: torch.Tensor, down: torch.Tensor) -> LayerInputs:
        """A layer of `count` tokens, whose biases require grad if it has any and trains."""
        inputs = LayerInputs(*self.tokens(count), up, down)._replace(activation=self.activation)
        if self.is_quantized:
            scales = (torch.empty(len(w), *(-(-n // 128) for n in w.shape[1:])) for w in (up, down))
            inputs = inputs._replace(s_gate_up=next(scales), s_down=next(scales))
        if not self.has_bias:
            return inputs
        grad = not self.is_quantized
        new = partial(torch.empty, self.num_local, dtype=self.dtype, requires_grad=grad)
        columns = self.activation.parts * self.num_columns
        return inputs._replace(b_gate_up=new(columns), b_down=new(self.hidden))


def shape_of_checkpoint(
    checkpoint: str, num_ranks: int, max_tokens: int, is_quantized: bool = False
) -> ModelShape:
    """That of a checkpoint of transformers, from its config.json alone; the errors of
    `shard_experts` for experts that the engine does not run."""
    from ..integrations.transformers import check_model
    from ..integrations.transformers_checkpoints import empty_model
    from ..integrations.transformers_experts import activation_of, experts_layers, shape_of

    model = empty_model(checkpoint)
    check_model(model, num_ranks, None)
    found = set()
    for experts in experts_layers(model):
        num_experts, hidden, num_topk, dtype = shape_of(experts)
        num_columns = experts.down_proj[0].numel() // hidden
        sizes = num_experts, hidden, num_columns, num_topk, num_ranks, max_tokens
        how = activation_of(experts), experts.has_bias, is_quantized
        found.add(ModelShape(*sizes, dtype, *how))
    if len(found) > 1:
        raise ShapeError(
            f"the layers of {checkpoint} differ: {sorted(found, key=str)}. Compile the sizes of "
            "each into a bundle of its own."
        )
    return found.pop()


# --- Calls -----------------------------------------------------------------------------------


def batches_of(most: int) -> list[int]:
    """Numbers of tokens up to `most` at which a launch can need another variant."""
    return sorted({1, min(most, 7), min(most, 16), most})


def steps(most: int) -> list[int]:
    """Numbers up to `most`, each a little larger than the one before."""
    count = 16 * max(1, most).bit_length()
    return sorted({min(most, round(2 ** (step / 16))) for step in range(count + 1)})


def sizes(shape: ModelShape, choice: Callable[[int], Any]) -> list[int]:
    """Of the numbers of tokens that a Buffer may be made for, one for each result of `choice`."""
    return list({choice(count): count for count in steps(shape.max_tokens)}.values())


def forms_of_rows(shape: ModelShape) -> list[tuple[torch.dtype, int]]:
    """(dtype, scales) of the rows that a dispatch takes."""
    return [(shape.dtype, 0)] + [(FP8, shape.hidden // 128)] * (shape.hidden % 128 == 0)


def chunks(shape: ModelShape, layout: SlotLayout) -> str:
    """How rows of any call are cut into chunks."""
    rows = [
        RowLayout(shape.hidden * one.itemsize, num_scales=num) for one, num in forms_of_rows(shape)
    ]
    rows += [RowLayout(4 * shape.hidden)] * (shape.num_nodes > 1)  # sums that are rounded once
    both = [replace(row, num_topk=num) for row, num in product(rows, (0, shape.num_topk))]
    return str([(layout.chunk_rows(row.num_bytes), layout.span(row.num_bytes)) for row in both])


def unlike_ranks(shape: ModelShape) -> range:
    """Ranks whose cached dispatches differ: that of rank r gets rows r - 1, if there is one, and r
    of an int32 [R, R], and each of them begins at a multiple of 16 bytes, or does not."""
    return range(min(shape.num_ranks, 5))


def call_normal(shape: ModelShape) -> None:
    """Layout, dispatch in all its forms, and combine."""
    num_ranks, forms = shape.num_ranks, forms_of_rows(shape)

    def choice(count: int) -> str:
        return chunks(shape, SlotLayout(num_ranks, shape.region_bytes(count)))

    for most in sizes(shape, choice):
        for max_tokens, form, rank in product((most, None), forms, unlike_ranks(shape)):
            memory = max_tokens, shape.region_bytes(most), None, shape.num_nodes, rank
            engine = kernel_engine(num_ranks, *memory)
            for count in batches_of(min(most, 16)):
                send_and_return(shape, engine, count, *form)


def send_and_return(
    shape: ModelShape, engine: KernelEngine, count: int, dtype: torch.dtype, num_scales: int
) -> None:
    """Dispatch `count` tokens of this dtype, with so many scales each, and combine them."""
    x, topk_idx, topk_weights = shape.tokens(count)
    layout = engine.layout(topk_idx, shape.num_experts)
    scales = torch.empty(count, num_scales) if num_scales else None
    routed = Tokens(x.to(dtype), topk_idx, topk_weights, scales)
    num_rows = shape.num_ranks * count
    for tokens in (routed, routed._replace(topk_idx=None, topk_weights=None)):
        for may_grow in (False, True):
            engine._exchange(tokens, layout, may_grow)
        _, _, handle, _ = engine.dispatch(tokens, layout, num_rows)
        engine.dispatch(tokens, layout, num_rows, owned=False)
        engine.release()
    engine.dispatch_cached(routed.x, scales, handle)
    y = torch.empty(num_rows, shape.hidden, dtype=x.dtype)
    weights = torch.empty(num_rows, shape.num_topk)
    for returned, num_bias, once in product((None, weights), (0, 1, 2), (False, True)):
        engine.combine(y, handle, returned, [x] * num_bias, round_once=once)
    if isinstance(engine, InternodeEngine):
        engine.tokens_per_node(layout.is_token_in_rank)


def call_notices(shape: ModelShape) -> None:
    """What a rank tells those of other nodes when a call breaks off."""
    memory = shape.region_bytes(1), None, shape.num_nodes, 0
    kernel_engine(shape.num_ranks, 1, *memory).context.notices.load()


def call_expert_rows(shape: ModelShape) -> None:
    """What `moe_engine.ops` does to received rows besides: expert rows of them, and sums back."""
    for count in batches_of(shape.max_tokens):
        x, topk_idx, topk_weights = shape.tokens(count)
        for num_rows in (count * shape.num_topk, count):
            places = place(topk_idx, topk_weights, shape.num_local, 1, num_rows)
            rows = take_rows(x, places.slots, shape.num_topk)
            for values in (None, places.row_weights):
                sum_rows(rows, places.dst_rows, values)


def low_latency_engines(shape: ModelShape) -> Iterable[tuple[HookedCalls, int]]:
    """(an engine, the most tokens of its calls), of each kind that needs kernels of its own. On one
    node they do not depend on the memory; on several it has chunks, whose size does."""
    most, num_topk = min(shape.max_tokens, DEFAULT_OPTIONS.decode_tokens), shape.num_topk
    if shape.num_nodes == 1:
        region = region_bytes(most, num_topk, shape.row_bytes)
        return [(low_latency_engine(shape.num_ranks, region), most)]
    found = {}
    counts = steps(min(shape.max_tokens, MAX_LOW_LATENCY_TOKENS))
    for count, topk in product(counts, {num_topk, HINT_TOPK_LOW_LATENCY}):
        region = region_bytes(count, topk, shape.row_bytes)
        ring = RingLayout(shape.num_ranks, region)
        found[chunks(shape, LaneLayout.of_ring(ring, shape.num_nodes))] = region, min(count, most)
    return [
        (internode_low_latency_engine(shape.num_ranks, region, shape.num_nodes), count)
        for region, count in found.values()
    ]


def call_low_latency(shape: ModelShape) -> None:
    """Low-latency dispatch and combine, whole and around a hook."""
    for engine, most in low_latency_engines(shape):
        send_and_return_at_once(shape, engine, most)


def send_and_return_at_once(shape: ModelShape, engine: HookedCalls, most: int) -> None:
    """Low-latency calls of up to so many tokens of a rank."""
    received = torch.zeros(shape.num_local, dtype=torch.int32)
    waited = torch.zeros(shape.num_ranks, dtype=torch.int64)
    for count, row_format, hooked, counts in product(
        batches_of(most), FORMATS, (False, True), (False, True)
    ):
        if row_format != "bf16" and shape.hidden % (512 if row_format == "ue8m0" else 128):
            continue
        x, topk_idx, topk_weights = shape.tokens(count)
        stats = received if counts else None, waited if counts else None
        tokens = LowLatencyTokens(x, topk_idx, None, most, shape.num_experts, row_format)
        got, receive = engine.dispatch(tokens, *stats, hooked)
        y = torch.empty(shape.num_local, shape.num_ranks * most, shape.hidden, dtype=x.dtype)
        handle = engine.new_handle(got, most, shape.hidden, shape.num_experts)
        rows = engine.expert_rows(y, topk_idx, topk_weights, handle, None)
        *_, add_up = engine.combine(rows, shape.num_experts, stats[1], hooked)
        for hook in (receive, add_up):
            if hook is not None:
                hook()


def call_layers(shape: ModelShape) -> None:
    """The fused layer and its backward, for Buffers of any size."""
    up, down = shape.weights()

    def choice(most: int) -> Any:
        config, num_rows = (
            LayerChoices(kept=kept_layers()).choose(shape.layer(most)),
            most * shape.num_topk,
        )
        tiles = grouped_gemm.gemm_config(up, num_rows, shape.activation)
        return config, tiles, grouped_gemm.gemm_config(down, num_rows, block_m=tiles.block_m)

    # With room for all rows, and for those of balanced routing, so that layers run in passes.
    for most, capacity in product(sizes(shape, choice), (None, 1.0)):
        engine = kernel_engine(shape.num_ranks, most, shape.region_bytes(most), capacity)
        for count in batches_of(most):
            inputs = shape.inputs(count, up, down)
            if capacity is None:  # else `passes.py` makes calls that train
                engine.moe_ffn(inputs)
            elif shape.is_quantized:
                engine.moe_ffn_forward(inputs, "none", is_captured=True)
            for save in () if shape.is_quantized else SAVE_POLICIES[1:]:
                _, saved, _ = engine.moe_ffn_forward(inputs, save, is_captured=True)
                *_, later, _ = engine.moe_ffn_backward(inputs.x.clone(), inputs, saved, None)
                assert later is not None
                for into in memory_for_gradients(shape):
                    engine.moe_ffn_backward(inputs.x.clone(), inputs, saved, into)
                    later(into)


def call_decode_layers(shape: ModelShape) -> None:
    """Layers that run by low-latency calls, for each number of tokens."""
    weights = shape.weights()
    for engine, most in low_latency_engines(shape):
        call_decode_layer(shape, engine, most, weights)


def call_decode_layer(
    shape: ModelShape,
    engine: HookedCalls,
    most: int,
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Those of up to so many tokens of a rank."""
    for max_tokens in range(1, most + 1):
        for count in {1, max_tokens // 2, max_tokens}:
            engine.moe_ffn(shape.inputs(count, *weights), max_tokens)


def call_layers_by_verbs(shape: ModelShape) -> None:
    """What layers of several nodes do besides dispatch and combine, forward and backward: for each
    number of expert rows at which other tiles are chosen, the least."""
    (up, down), num_ranks = shape.weights(), shape.num_ranks

    def choice(count: int) -> Any:
        tiles = grouped_gemm.gemm_config(up, count, shape.activation)
        again = grouped_gemm.gemm_config(up, count)  # whose pre-activations a backward needs
        of = partial(grouped_gemm.gemm_config, num_rows=count)
        return (
            *(tiles, of(down, block_m=tiles.block_m), again),
            *(of(one, transposed=True, block_m=again.block_m) for one in (up, down)),
        )

    most = num_ranks * shape.max_tokens * min(shape.num_topk, shape.num_local)
    for count in {choice(count): count for count in reversed(steps(most))}.values():
        run_experts(shape, count)


def run_experts(shape: ModelShape, count: int) -> None:
    """What the experts of a rank of several nodes do with so many rows, each of one expert."""
    engine = kernel_engine(shape.num_ranks, 1, shape.region_bytes(1), num_nodes=shape.num_nodes)
    assert isinstance(engine, InternodeEngine)
    rows = shape.inputs(count, *shape.weights())
    rows.topk_idx[:, 1:] = -1
    engine.expert_sums(rows, count)
    if shape.is_quantized:
        return
    *_, later, _ = engine.expert_gradients(rows, count, rows.x.clone(), None)
    assert later is not None
    for into in memory_for_gradients(shape):
        later(into)


def memory_for_gradients(shape: ModelShape) -> Iterator[WeightGradients]:
    """All that the gradients of weights may go into."""
    for dtype, accumulate in product({shape.dtype, torch.float32}, (False, True)):
        up, down = (torch.empty_like(one, dtype=dtype) for one in shape.weights())
        yield WeightGradients(up, down, accumulate)


def call_gemms(shape: ModelShape) -> None:
    """`grouped_mlp` of the experts' rows, forward and backward; none of e4m3."""
    if shape.is_quantized:
        return
    _, _, _, up, down, b_up, b_down, activation, *_ = shape.inputs(1, *shape.weights())
    offsets = torch.zeros(shape.num_local + 1, dtype=torch.int32)
    for most in sizes(shape, lambda most: most):
        x = torch.empty(most * shape.num_topk, shape.hidden, dtype=shape.dtype)
        for grad in (False, True):
            leaves = [one for one in (x, up, down, b_up, b_down) if one is not None]
            for leaf in leaves:
                leaf.requires_grad_(grad)
            more: dict[str, Any] = dict(b_up=b_up, b_down=b_down, activation=activation)
            y = grouped_gemm.grouped_mlp(x, up, down, offsets, **more)
            if grad:
                torch.autograd.grad(y, leaves, torch.empty_like(y))


CALLS: dict[str, Callable[[ModelShape], None]] = {
    "dispatch and combine": call_normal,
    "expert rows": call_expert_rows,
    "low latency": call_low_latency,
    "layer": call_layers,
    "decode layer": call_decode_layers,
    "grouped GEMM": call_gemms,
}
"""Of ranks on one node."""
CALLS_OF_NODES: dict[str, Callable[[ModelShape], None]] = {
    "dispatch and combine": call_normal,
    "expert rows": call_expert_rows,
    "low latency": call_low_latency,
    "layer by verbs": call_layers_by_verbs,
    "notices": call_notices,
    "decode layer": call_decode_layers,
    "grouped GEMM": call_gemms,
}
"""Of ranks on several nodes."""


def variants(shape: ModelShape, arch: int) -> dict[str, Variant]:
    """The variants of kernels that a model needs on sm_`arch`, by key. BackendError for several
    nodes where no NVSHMEM is installed that can be linked."""
    found: dict[str, Variant] = {}

    def collect(kernel: Any, grid: Grid, arguments: tuple[Any, ...], options: Any) -> None:
        one = Variant.of(kernel, arch, arguments, options)
        found.setdefault(one.key, one)

    with stand_in(divmod(arch, 10)), collecting(collect), torch.device("cpu"):
        for call in (CALLS if shape.num_nodes == 1 else CALLS_OF_NODES).values():
            call(shape)
    return found


# --- Compilation -----------------------------------------------------------------------------


def compile_variant(variant: Variant) -> Binary:
    """Compile a variant, or take it from Triton's cache."""
    source, options = variant.source()
    compiled = triton.compile(source, backend(variant.arch).target, options.__dict__)
    return Binary.of(compiled)


def write(
    folder: Path, needed: dict[str, Variant], arch: int, jobs: int
) -> Iterator[tuple[Variant, Binary]]:
    """Compile variants and write a bundle of them to `folder`, a project that pip can install.
    Yields each when it is compiled."""
    inner = folder / PACKAGE
    inner.mkdir(parents=True, exist_ok=True)
    kernels = {}
    with ThreadPoolExecutor(jobs) as pool:
        for key, binary in zip(needed, pool.map(compile_variant, needed.values()), strict=True):
            (inner / f"{key}.cubin").write_bytes(binary.cubin)
            kernels[key] = entry(binary)
            yield needed[key], binary
    cuda = get_ptxas(arch).version
    is_linked = any(linked(variant.kernel) for variant in needed.values())
    manifest = {"made_with": made_with(arch, is_linked), "cuda": cuda, "kernels": kernels}
    (inner / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (inner / "__init__.py").write_text('"""Compiled kernels of moe_engine."""\n')
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "{PACKAGE}"
version = "0"
description = "Compiled kernels of moe_engine, for sm_{arch}"

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["{PACKAGE}"]
package-data = {{ "{PACKAGE}" = ["*.cubin", "{MANIFEST}"] }}
"""
    )


def run(
    shape: ModelShape, arch: int, folder: Path, jobs: int, console: Console
) -> list[tuple[Variant, Binary]]:
    """Write the bundle of a model to a folder, and show how far it has come."""
    with console.status("listing what the model calls"):
        needed = variants(shape, arch)
    compiled = write(folder, needed, arch, jobs)
    steps = track(compiled, "compiling", total=len(needed), console=console)
    return list(steps)


def report(compiled: list[tuple[Variant, Binary]], console: Console) -> None:
    """How many variants of each kernel there are, and their size."""
    table = Table("kernel", "variants", "KiB")
    for column in table.columns[1:]:
        column.justify = "right"
    by_kernel: dict[str, list[int]] = {}
    for variant, binary in compiled:
        name = variant.name.removeprefix("moe_engine.").replace("_kernels.", ".")
        by_kernel.setdefault(name, []).append(len(binary.cubin))
    for name, sizes in sorted(by_kernel.items()):
        table.add_row(name, str(len(sizes)), f"{sum(sizes) / 1024:.0f}")
    total = sum(len(binary.cubin) for _, binary in compiled)
    table.add_row("all", str(len(compiled)), f"{total / 1024:.0f}")
    console.print(table)
