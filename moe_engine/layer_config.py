"""How a layer runs: fused or not, in how many stages, with how many programs that communicate."""

from __future__ import annotations

from dataclasses import dataclass

HBM_GBS = 4300.0
LINK_GBS = 300.0
"""What programs beside a GEMM move to other GPUs."""
GEMM_TFLOPS = 620.0
REREAD = 0.45
"""Share of the time for reading weights again that is not hidden behind products."""


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

    fused: communicate within the launches of the GEMMs. num_stages: in how many groups of ranks
    rows are waited for, this rank first; 1 waits for all rows at once. num_return_stages: the same
    on the way back, where this rank's rows come last. mixed: let tiles hold rows of several stages,
    else they end where a stage does. num_push_programs, num_return_programs: how many communicate
    on the way there and back. group_m: tiles of rows that are walked together before the next
    columns, so that they share weights in L2; 1 walks them one by one.
    """

    fused: bool = True
    num_stages: int = 2
    num_return_stages: int = 4
    mixed: bool = True
    num_push_programs: int = 16
    num_return_programs: int = 24
    group_m: int = 8

    @classmethod
    def choose(cls, problem: LayerProblem) -> LayerConfig:
        """The predicted best."""
        stages = range(min(2, problem.num_ranks), min(problem.num_ranks, 4) + 1)
        num_stages = min(stages, key=lambda count: exposed_us(problem, count))
        return cls(num_stages=num_stages, num_return_stages=min(problem.num_ranks, 4))


def exposed_us(problem: LayerProblem, num_stages: int) -> float:
    """Time that a number of stages costs: waiting for rows, and reading weights once more for each
    stage."""
    num_ranks = problem.num_ranks
    columns = 3 * problem.num_columns  # gate, up and down
    again = (num_stages - 1) * problem.read_us(columns) * REREAD
    push, compute = problem.push_us, problem.gemm_us(2 * problem.num_columns)
    now = compute / num_ranks
    for stage in range(1, num_stages):
        ranks_before, ranks = (
            1 + (part - 1) * (num_ranks - 1) // (num_stages - 1) for part in (stage, stage + 1)
        )
        arrived = push * (ranks - 1) / (num_ranks - 1)
        now = max(now, arrived) + compute * (ranks - ranks_before) / num_ranks
    return now - compute + again
