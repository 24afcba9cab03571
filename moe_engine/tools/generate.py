"""Generation: the model of a checkpoint answers prompts, with its experts spread over ranks.

Prompt i is answered by rank i % R, which answers all of its prompts as one batch.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ..emulation import send_message
from ..errors import CheckpointError
from ..integrations.balancing import record_counts
from ..integrations.quantized_experts import quantize_experts
from ..integrations.transformers import experts_layers, join
from ..integrations.transformers_checkpoints import dequantize_options, load_sharded, local_folder
from ..timing import now_s
from .progress import ranks_with_progress

PAD = 0
"""The token before shorter prompts of a batch, which no other attends to; any would do."""
Prompt = list[int]
"""The tokens of a prompt."""


@dataclass(frozen=True)
class Job:
    """What each rank does: up to `max_new_tokens` tokens for each prompt, greedily where the
    temperature is 0; `cuda_graphs` as of `shard_experts`; with `fp8` experts are made e4m3."""

    folder: Path
    prompts: list[Prompt]
    max_new_tokens: int
    temperature: float
    seed: int
    device: str
    dtype: torch.dtype | str
    backend: str
    cuda_graphs: bool = False
    fp8: bool = False


@dataclass
class Answers:
    """What one rank did: the new tokens of its prompts; seconds until all had their first token,
    and from then on; the most bytes that torch had allocated on a GPU, or else that the process
    had; int64 [layers, E], how many (token, k) of all ranks each expert got."""

    tokens: list[list[int]] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_bytes: int = 0
    load: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


def load_tokenizer(checkpoint: str) -> tuple[Path, Any]:
    """The folder of a checkpoint, which is downloaded if need be, and its tokenizer."""
    from transformers import AutoTokenizer

    folder = local_folder(checkpoint)
    try:
        return folder, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no tokenizer that can be loaded: {error}") from error


def encode(tokenizer: Any, prompts: Sequence[str], chat: bool) -> list[Prompt]:
    """The tokens of each prompt, as a user's message if `chat`. CheckpointError for a tokenizer
    without a chat template, or that makes no token of a prompt."""
    if chat and not tokenizer.chat_template:
        raise CheckpointError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template. Leave --chat out."
        )
    texts = list(prompts)
    if chat:
        messages = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = [tokenizer.encode(text, add_special_tokens=not chat) for text in texts]
    if not all(found):
        empty = prompts[found.index([])]
        raise CheckpointError(f"the tokenizer makes no token of the prompt {empty!r}: write more.")
    return found


def run_job(job: Job, num_ranks: int, console: Console) -> list[Answers]:
    """Answer all prompts on a pool of ranks, with a progress bar: what each rank did."""
    with ranks_with_progress(num_ranks, job.device, console) as (pool, progress):
        bar = progress.add_task("the ranks load the model", total=job.max_new_tokens)

        def advance(rank: int, num_new: int) -> None:
            at = progress.tasks[bar].completed
            progress.update(bar, completed=max(at, num_new), description="tokens")

        return pool.run(run_rank, job, on_message=advance)


def run_rank(group: dist.ProcessGroup, job: Job) -> Answers:
    """One rank's part; collective over `group`."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # run_job shows one
    batches = [job.prompts[rank :: group.size()] for rank in range(group.size())]
    max_tokens = max(len(batch) * max(map(len, batch)) for batch in batches if batch)
    how: dict[str, Any] = dict(dtype=job.dtype, max_tokens=max_tokens, backend=job.backend)
    how |= dict(cuda_graphs=job.cuda_graphs)
    model, buffer = load_sharded(job.folder, group, **how, **dequantize_options(job.folder))
    model.eval()
    if job.fp8:
        quantize_experts(model)
    mine = batches[group.rank()]
    if job.device == "cuda":
        generate(model, mine, job, 2, group)  # compiles the kernels of both phases
    answers = generate(model, mine, job, job.max_new_tokens, group)
    answers.num_bytes = _peak_bytes(job.device)
    buffer.destroy()
    return answers


def generate(
    model: Any, prompts: list[Prompt], job: Job, max_new_tokens: int, group: dist.ProcessGroup
) -> Answers:
    """Answer a rank's prompts, which may be none; collective over `group`."""
    torch.manual_seed(job.seed + group.rank())
    times: list[float] = []

    def note_time(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Called after each step, as what would stop it."""
        times.append(now_s(torch.device(job.device)))
        send_message(len(times))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    answers = Answers()
    dist.barrier(group)
    start = now_s(torch.device(job.device))
    with record_counts(model) as counts, join(model):
        if prompts:
            sampling: Any = {"do_sample": False}
            if job.temperature:
                sampling = {"do_sample": True, "temperature": job.temperature}
            rows = model.generate(
                **pad_left(prompts, job.device),
                max_new_tokens=max_new_tokens,
                pad_token_id=PAD,
                stopping_criteria=[note_time],
                **sampling,
            )
            ends = _end_tokens(model)
            answers.tokens = [
                list(itertools.takewhile(lambda token: token not in ends, row))
                for row in rows[:, -len(times) :].tolist()
            ]
    if times:
        answers.prefill_s, answers.decode_s = times[0] - start, times[-1] - times[0]
    layers = len(experts_layers(model))
    answers.load = torch.stack([torch.stack(counts[at::layers]).sum(0) for at in range(layers)])
    answers.load = answers.load.cpu()
    return answers


def pad_left(prompts: list[Prompt], device: str) -> dict[str, Tensor]:
    """A batch of prompts that end together.

    The prompts [5, 6, 7, 8] and [9] give input_ids [[5, 6, 7, 8], [0, 0, 0, 9]] and
    attention_mask [[1, 1, 1, 1], [0, 0, 0, 1]].
    """
    length = max(map(len, prompts))
    ids = [[PAD] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    named = {"input_ids": ids, "attention_mask": mask}
    return {name: torch.tensor(rows, device=device) for name, rows in named.items()}


def _end_tokens(model: Any) -> set[int]:
    """The tokens that end an answer."""
    found = model.generation_config.eos_token_id
    return set(found if isinstance(found, list) else [] if found is None else [found])


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
