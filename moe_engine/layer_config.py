"""How a layer runs: fused or not, in how many stages, with how many programs that communicate."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Choices of a layer, equal on all ranks but for the numbers of programs.

    fused: communicate within the launches of the GEMMs. num_stages: how many groups of ranks rows
    are waited for in, this rank first; 1 waits for all rows at once. mixed: let tiles hold rows of
    several stages, else they end where a stage does. num_push_programs, num_return_programs: how
    many communicate on the way there and back. group_m: tiles of rows that are walked together
    before the next columns, so that they share weights in L2; 1 walks all rows of the first columns
    one by one.
    """

    fused: bool = True
    num_stages: int = 2
    mixed: bool = True
    num_push_programs: int = 8
    num_return_programs: int = 16
    group_m: int = 8

    @classmethod
    def choose(cls, problem: LayerProblem) -> LayerConfig:
        """The predicted best."""
        return cls(num_stages=min(problem.num_ranks, 4))
