"""How a layer runs: fused or not, in how many stages, with how many programs that communicate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from .errors import ShapeError

FLAGS = ("fused", "mixed")
HBM_GBS = 4300.0
LINK_GBS = 300.0
"""What programs beside a GEMM move to other GPUs."""
GEMM_TFLOPS = 620.0
REREAD = 0.35
"""Share of the time for reading weights again that is not hidden behind products."""
RETURN_GBS = 5.5
"""What one program sums and returns beside a GEMM."""
MOST_RETURN_PROGRAMS = 40
SM_SHARE = 0.6
"""How much slower a GEMM is without a share of the SMs, in parts of that share: power limits it."""
START_US = 40.0
SLOWER = 0.05
"""What fused launches cost by themselves, and how much slower a GEMM is whose tiles are sorted by
stage."""
NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """The shape of a layer, as far as all ranks know it alike.

    max_tokens: most tokens of a rank; num_columns: columns of the down-projection's input (I).
    """

    num_ranks: int
    max_tokens: int
    num_experts: int
    num_topk: int
    hidden: int
    num_columns: int
    itemsize: int = 2

    @property
    def push_us(self) -> float:
        """Time of this rank's rows to all others, one for each token and rank, evenly routed."""
        share = 1 - (1 - 1 / self.num_ranks) ** self.num_topk
        rows = self.max_tokens * share * (self.num_ranks - 1)
        return rows * self.hidden * self.itemsize / LINK_GBS / 1e3

    def gemm_us(self, columns: int) -> float:
        """Time of a GEMM of `hidden` by `columns` for each expert row."""
        rows = self.max_tokens * self.num_topk
        return 2e-6 * rows * self.hidden * columns / GEMM_TFLOPS

    def read_us(self, columns: int) -> float:
        """Time to read a rank's weights, of `hidden` by `columns` for each expert."""
        experts = self.num_experts / self.num_ranks
        return experts * self.hidden * columns * self.itemsize / HBM_GBS / 1e3


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Choices of a layer, equal on all ranks but for the numbers of programs.

    The constants above are those of an H200 (bench/NOTES.md).

    fused: communicate within the launches of the GEMMs. num_stages: in how many groups of ranks
    rows are waited for, this rank first; 1 waits for all rows at once. num_return_stages: the same
    on the way back, where this rank's rows come last. mixed: let tiles hold rows of several stages,
    else they end where a stage does. num_push_programs, num_return_programs: how many communicate
    on the way there and back. group_m: tiles of rows that are walked together before the next
    columns, so that they share weights in L2; 1 walks them one by one.
    """

    fused: bool = True
    num_stages: int = 2
    num_return_stages: int = 2
    mixed: bool = True
    num_push_programs: int = 12
    num_return_programs: int = 16
    group_m: int = 8

    def check(self) -> None:
        """ShapeError unless all numbers are positive."""
        numbers = {name: value for name, value in asdict(self).items() if name not in FLAGS}
        wrong = {name: value for name, value in numbers.items() if value < 1}
        if wrong:
            raise ShapeError(f"a LayerConfig has {wrong}; these must be 1 or more.")

    def shared(self) -> LayerConfig:
        """What must be equal on all ranks: all but the numbers of programs."""
        return replace(self, num_push_programs=1, num_return_programs=1)

    @classmethod
    def choose(cls, problem: LayerProblem) -> LayerConfig:
        """The predicted best."""
        fused = cls.choose_fused(problem)
        if problem.num_ranks > 1 and fused_us(problem, fused) < 2 * problem.push_us:
            return fused
        return cls(fused=False, num_push_programs=24)

    @classmethod
    def choose_fused(cls, problem: LayerProblem) -> LayerConfig:
        """The predicted best of those that communicate beside the GEMMs."""
        if problem.num_ranks == 1:
            return cls(num_stages=1, num_return_stages=1)
        counts = range(2, min(problem.num_ranks, 4) + 1)
        return cls(
            num_stages=min(counts, key=lambda count: there_us(problem, count)),
            num_return_stages=min(counts, key=lambda count: back_us(problem, count)),
            num_return_programs=return_programs(problem),
        )


def fused_us(problem: LayerProblem, config: LayerConfig) -> float:
    """Time over the GEMMs alone, where communication goes on beside them."""
    waits = there_us(problem, config.num_stages) + back_us(problem, config.num_return_stages)
    sms = SM_SHARE * config.num_return_programs / NUM_SMS * problem.gemm_us(problem.num_columns)
    return START_US + waits + sms + SLOWER * problem.gemm_us(3 * problem.num_columns)


def there_us(problem: LayerProblem, num_stages: int) -> float:
    """Time that the way there costs with a number of stages, over the GEMM alone: waiting for rows,
    and reading weights once more for each stage."""
    num_ranks = problem.num_ranks
    push, compute = problem.push_us, problem.gemm_us(2 * problem.num_columns)
    now = compute / num_ranks
    for stage in range(1, num_stages):
        begin, end = (
            1 + (part - 1) * (num_ranks - 1) // (num_stages - 1) for part in (stage, stage + 1)
        )
        arrived = push * (end - 1) / (num_ranks - 1)
        now = max(now, arrived) + compute * (end - begin) / num_ranks
    again = (num_stages - 1) * problem.read_us(2 * problem.num_columns) * REREAD
    return now - compute + again


def back_us(problem: LayerProblem, num_stages: int) -> float:
    """The same of the way back: rows of the last remote stage travel while this rank's own are
    computed."""
    own = problem.gemm_us(problem.num_columns) / problem.num_ranks
    exposed = max(0.0, problem.push_us / (num_stages - 1) - own)
    return exposed + (num_stages - 1) * problem.read_us(problem.num_columns) * REREAD


def return_programs(problem: LayerProblem) -> int:
    """How many programs return about all rows while the down-projection computes."""
    kilobytes = problem.push_us * LINK_GBS
    window_us = max(1.0, 0.7 * problem.gemm_us(problem.num_columns))
    return min(MOST_RETURN_PROGRAMS, 1 + int(kilobytes / window_us / RETURN_GBS))


def explain(problem: LayerProblem) -> str:
    """The predicted times of a layer for evenly routed tokens, and what is chosen."""
    gemm_us = problem.gemm_us(3 * problem.num_columns)
    lines = [
        f"{problem.max_tokens} tokens on each of {problem.num_ranks} ranks, {problem.num_experts} "
        f"experts, top-{problem.num_topk}, hidden {problem.hidden}, {problem.num_columns} columns",
        f"GEMMs {gemm_us:.0f} us, rows there {problem.push_us:.0f}, back as much",
    ]
    if problem.num_ranks > 1:
        for count in range(2, min(problem.num_ranks, 4) + 1):
            there, back = there_us(problem, count), back_us(problem, count)
            lines.append(f"{count} stages: there {there:.0f} us over the GEMM, back {back:.0f}")
        fused = fused_us(problem, LayerConfig.choose_fused(problem))
        lines.append(f"over the GEMMs: fused {fused:.0f} us, in turn {2 * problem.push_us:.0f}")
    return "\n".join([*lines, f"-> {LayerConfig.choose(problem)}"])
