"""`moe-engine run`: prompts answered by the model of a checkpoint, token for token as unsharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import graph_cases
import pytest
import torch
import torch.distributed as dist
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from moe_engine.emulation import RankPool
from moe_engine.errors import CheckpointError
from moe_engine.tools.cli import app

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from transformers import AutoModelForCausalLM, ByT5Tokenizer
from transformers_cases import NUM_EXPERTS

from moe_engine.integrations.balancing import imbalance
from moe_engine.tools.generate import Answers, Job, encode, load_tokenizer, pad_left, run_rank
from moe_engine.tools.generate_report import table_of
from moe_engine.tools.models import Kind, build_config, build_model

PROMPTS = ["Alice was", "beginning to get very", "tired of", "sitting by her sister"]
NEW = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of bytes, whose tokenizer needs no training."""
    folder = tmp_path_factory.mktemp("qwen3-moe")
    config = build_config(Kind.QWEN3_MOE, **NUM_EXPERTS[Kind.QWEN3_MOE] | {"vocab_size": 384})
    build_model(config).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


def job_of(checkpoint: Path, device: str, num_prompts: int, temperature: float = 0.0) -> Job:
    folder, tokenizer = load_tokenizer(str(checkpoint))
    prompts = encode(tokenizer, PROMPTS[:num_prompts], chat=False)
    return Job(folder, prompts, NEW, temperature, 7, device, "auto", "auto")


@torch.inference_mode()
def unsharded(checkpoint: Path, job: Job, ends: list[int]) -> list[list[int]]:
    """The answer to each prompt, alone, up to a token that ends it."""
    model, found = AutoModelForCausalLM.from_pretrained(checkpoint), []
    for prompt in job.prompts:
        ids = torch.tensor([prompt])
        row = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        found.append(row[: next((at for at, token in enumerate(row) if token in ends), NEW)])
    return found


# --- What ranks answer -----------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "num_prompts"), [(2, 1), (3, 4)])
def test_answers_are_those_of_the_unsharded_model(
    pool: RankPool, checkpoint: Path, num_ranks: int, num_prompts: int
) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    job = job_of(checkpoint, pool.device, num_prompts)
    answers = pool.run(run_rank, job, num_ranks=num_ranks)
    got = [answers[at % num_ranks].tokens[at // num_ranks] for at in range(num_prompts)]
    assert got == unsharded(checkpoint, job, [])
    for one in answers:
        assert torch.equal(one.load, answers[0].load)
        assert bool(one.prefill_s) == bool(one.decode_s) == bool(one.tokens)
        assert one.num_bytes > 2**20
    # Each pass routes each row of each batch to 4 experts, padding included.
    widths = [[len(prompt) for prompt in job.prompts[rank::num_ranks]] for rank in range(num_ranks)]
    rows = sum(len(batch) * (max(batch) + NEW - 1) for batch in widths if batch)
    assert answers[0].load.sum(1).tolist() == [4 * rows] * 2


def run_by_graphs(group: dist.ProcessGroup, job: Job) -> Answers:
    with graph_cases.graphs():
        return run_rank(group, job)


def test_answers_by_graphs_are_the_same(pool: RankPool, checkpoint: Path) -> None:
    job = job_of(checkpoint, pool.device, 3)
    plain = pool.run(run_rank, job, num_ranks=2)
    replayed = pool.run(run_by_graphs, replace(job, cuda_graphs=True), num_ranks=2)
    for one, other in zip(plain, replayed, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.load, other.load)


def test_an_answer_ends_at_its_end_token(pool: RankPool, checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, pool.device, 2)
    first = unsharded(checkpoint, job, [])[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.eos_token_id = [first[1], 383]
    model.save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    answers = pool.run(run_rank, job_of(tmp_path, pool.device, 2), num_ranks=1)
    assert answers[0].tokens == unsharded(checkpoint, job, [first[1]])


def test_samples_depend_on_the_seed_alone(pool: RankPool, checkpoint: Path) -> None:
    job = job_of(checkpoint, pool.device, 2, temperature=2.0)
    first, again = (pool.run(run_rank, job, num_ranks=2) for _ in range(2))
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert [one.tokens[0] for one in first] != unsharded(checkpoint, job, [])


# --- The command -----------------------------------------------------------------------------


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.mark.slow
def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    prompts = [f"--prompt={text}" for text in PROMPTS]
    done = call(checkpoint, *prompts, "--ranks=2", "--max-new-tokens=2", f"--plot={picture}")
    assert done.exit_code == 0, done.output
    for text in (*PROMPTS, "memory of a rank", "over the mean", picture.name):
        assert text in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_answered_is_refused_before_ranks_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(RankPool, "run", start)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for arguments, text in (
        ((tmp_path / "none", "--prompt=a"), "which is no folder here"),
        ((tmp_path, "--prompt=a"), "has no tokenizer that can be loaded"),
        ((checkpoint, "--prompt=a", "--chat"), "has no chat template. Leave --chat out."),
        ((checkpoint,), "Missing option '--prompt'"),
        ((checkpoint, "--prompt=a", "--plot=/no/such/x.png"), "there is no folder /no/such"),
        ((checkpoint, "--prompt=a", "--max-new-tokens=0"), "--max-new-tokens"),
        (
            (checkpoint, "--prompt=a", "--cuda-graphs", "--backend=emulated"),
            "CPU, which has no CUDA graphs",
        ),
    ):
        done = call(*arguments)
        assert done.exit_code, arguments
        assert text in " ".join(done.output.replace("│", " ").split())
        assert "Traceback" not in done.output


def test_a_prompt_without_tokens_is_refused() -> None:
    class Mute:
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(one) for one in text]

    with pytest.raises(CheckpointError, match="no token of the prompt ''"):
        encode(Mute(), ["a", ""], chat=False)


def test_messages_are_encoded_by_the_chat_template() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    [ids] = encode(tokenizer, ["Hello"], chat=True)
    assert ids == [3 + byte for byte in b"<user>Hello<assistant>"]


# --- The figures -----------------------------------------------------------------------------


def test_prompts_of_a_batch_end_together() -> None:
    batch = pad_left([[5, 6, 7, 8], [9]], "cpu")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [0, 0, 0, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(("num_gpus", "has_times"), [(2, True), (1, False)])
def test_times_are_told_where_each_rank_has_a_gpu(
    num_gpus: int, has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    job = Job(Path(), [[1] * 30, [2] * 10], NEW, 0.0, 0, "cuda", "auto", "auto")
    load = torch.tensor([[1, 1], [3, 1]])
    answers = [
        Answers([[1, 2, 3]], 0.1, 0.2, 2**30, load),
        Answers([[4, 5]], 0.05, 0.3, 2**31, load),
    ]
    console = Console(width=200, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(table_of(job, answers))
    text = " ".join(captured.get().replace("│", " ").split())
    assert "tokens 40 5" in text
    assert ("tokens per second 400 10" in text) is has_times
    assert "memory of a rank, at most 2.0 GiB" in text
    assert "over the mean 1.25" in text
    assert "layer 1 of experts 1.50" in text


def test_imbalance() -> None:
    assert imbalance(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])).tolist() == [3.0, 1.0]
