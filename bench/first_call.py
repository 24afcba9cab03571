"""Time of the first call in a process: python bench/first_call.py

From the call until the GPU has ended it, of a process in which nothing was launched before: with
nothing compiled earlier ("moe_engine"), with Triton's cache of an earlier process ("triton_cache"),
and with the kernels of `moe-engine compile` ("bundle"). One GPU, one rank.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from _common import draw_topk, save

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.emulation import RankPool
from moe_engine.layer_config import MODELS
from moe_engine.tools.compile import variants, write
from moe_engine.tools.model_shape import ModelShape

VERBS = {"moe_ffn": 1024, "moe_ffn_decode": 128}
"""The tokens of a first call."""


def main(
    model: Annotated[str, typer.Option(help="Whose shape.")] = "qwen3-30b",
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench."""
    major, minor = torch.cuda.get_device_capability()
    arch, jobs = 10 * major + minor, os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        needed = variants(ModelShape(*MODELS[model], 1), arch)
        written = len(list(write(Path(folder, "bundle"), needed, arch, jobs)))
        print(f"{written} kernels in {time.perf_counter() - begin:.0f} s by {jobs} jobs")
        for verb, tokens in VERBS.items():
            cache = {"TRITON_CACHE_DIR": str(Path(folder, verb))}
            bundle = {"MOE_ENGINE_KERNELS": str(Path(folder, "bundle"))}
            for impl, env in {
                "moe_engine": cache,
                "triton_cache": cache,
                "bundle": cache | bundle,
            }.items():
                with RankPool(1, "cuda", timeout_s=200, env=env) as pool:
                    [seconds] = pool.run(first_call, model, tokens)
                line = dict(verb=f"first_{verb}", impl=impl, host_us=seconds * 1e6)
                save("first_call", path, model=model, tokens=tokens, ranks=1, dtype="bf16", **line)
                print(f"{verb:15} {impl:13} {seconds:7.3f} s", flush=True)


def first_call(group: dist.ProcessGroup, model: str, tokens: int) -> float:
    """Seconds of a layer, the first thing that a process launches."""
    num_experts, hidden, columns, num_topk = MODELS[model]
    few = VERBS["moe_ffn_decode"]
    sizes = max(VERBS.values()), hidden, num_experts, num_topk
    buffer = Buffer.for_tokens(group, *sizes, options=Options(decode_tokens=few))
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    idx = draw_topk("uniform", tokens, num_experts, num_topk, 0)
    up = torch.randn(num_experts, 2 * columns, hidden, device="cuda").bfloat16()
    down = torch.randn(num_experts, hidden, columns, device="cuda").bfloat16()
    weights = torch.rand(tokens, num_topk, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    moe_ffn(x, idx, weights, up, down, buffer, tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    typer.run(main)
