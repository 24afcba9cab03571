"""How a layer runs: in how many stages rows arrive and sums return, and how many programs
communicate. `LayerChoices.choose` takes what the user says, else what was measured on this kind of
GPU, else what is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .checks import check_flag, check_int
from .choice_cache import cache_path, keep_choice, problem_key, read_choices
from .device.context import MAX_STAGES
from .hardware import H200
from .utils import next_power_of_2

LAYERS = "layer.json"

MODELS = {  # experts, hidden, expert intermediate, top-k
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen2-57b": (64, 3584, 2560, 8),
    "qwen3-30b": (128, 2048, 768, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "qwen2-moe": (64, 2048, 1408, 4),  # this and the next as in the paper of COMET
    "phi-3.5-moe": (16, 4096, 6400, 2),
}
STAGE_US = 4.0
"""The cost of the end of a stage: programs wait until their rows have arrived."""
STAGE_ROWS = 2048
"""The fewest rows of a stage, about a tile for each SM."""
BUSY_LINKS = 0.6
"""Links are busy if they are used for more than this share of the GEMMs' time: much is to hide."""
CALM_STAGES = 8
"""The most stages on links that are not busy: another one would cost more than it hides."""
OWN_ROWS, BUSY_OWN_ROWS = 1024, 256
"""Own tiles go apart where experts have so many rows from their own rank, on calm and on busy
links: then it costs little that the weights are read again."""
EARLY_OWN_ROWS = 512
"""Between two GPUs with calm links, products could begin long before the first rows of the other
arrive. So where experts have so many own rows, the first own tiles come before all others."""
EARLY_CHOICES: dict[str, Any] = {
    "num_stages": 5,
    "num_own_stages": 2,
    "num_copy_programs": 2 * H200.num_sms,
}
"""The choices for that. More programs copy, so that the first own rows arrive early."""
LONG_DEPTH, TILE_ROWS, TILE_COLUMNS, MANY_TILES = 4096, 128, 256, 8
"""Where memory is slower than an H200's: products of this depth take so long that tiles of an
expert which begin at different times no longer find its weights in L2, unless they are many."""
CLAIM_ROWS, CLAIM_TILES = 192, 5
"""Tiles are claimed where experts have fewer rows than this, and programs as many tiles, if memory
is slower than an H200's or rows are long: then most of the time goes to weights, and programs have
time to fall apart. Elsewhere layers are 2 to 8% slower with it."""
FORWARD_ALONE: dict[str, Any] = {"num_stages": 1, "num_copy_programs": 4 * H200.num_sms}
"""Choices of a forward on one rank: no link bounds programs that copy rows, and nothing hides them.
"""
BACKWARD_ALONE: dict[str, Any] = {"num_stages": 2, "num_copy_programs": 2 * H200.num_sms}
"""Choices of a backward on one rank, where products run concurrently with copies that are fewer."""
E4M3_CHOICES: dict[str, Any] = {
    "num_stages": 1,
    "num_own_stages": 0,
    "claims_tiles": False,
    "num_push_programs": 2 * H200.num_sms,
    "num_copy_programs": 8 * H200.num_sms,
    "num_return_programs": 4 * H200.num_sms,
}
"""Where ranks exchange rows for e4m3 weights. Specialised tiles leave too few registers for others
on an SM, so all rows come before these products and all sums return after them: neither stages of
arrival nor own tiles that go apart would hide anything. And they are claimed in any case."""
E4M3_RETURN_STAGES = 4
"""The most stages of such sums, of which some are added up while others return."""
COPY_GBS = 525.0
"""What one program of each SM copies, counting what it writes (Qwen3-30B's backward)."""
START_US = 30.0
"""The time from the layer's first launch to the first rows that are pushed."""
MAX_PROGRAMS = 65_536


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """The shape of a layer, as far as it is the same on all ranks.

    max_tokens: the most tokens of a rank; num_columns: columns of the down-projection's input (I).
    """

    num_ranks: int
    max_tokens: int
    num_experts: int
    num_topk: int
    hidden: int
    num_columns: int
    itemsize: int = 2

    @property
    def share(self) -> float:
        """The share of the tokens that are routed to a rank, if they are evenly routed."""
        return 1 - (1 - 1 / self.num_ranks) ** self.num_topk

    @property
    def rows_per_token(self) -> float:
        """The number of expert rows that a token has on a rank to which it is routed."""
        return self.num_topk / self.num_ranks / self.share

    def rereads_weights(self, hbm_gbs: float) -> bool:
        """Whether tiles that begin when their rows arrive, at different times, each read their
        expert's weights from memory of this speed: an up-projection that is bound by products
        otherwise is then bound by memory (bench/notes/layer.md)."""
        rows = self.max_tokens * self.num_topk * self.num_ranks / self.num_experts
        is_shared_by_few = TILE_ROWS < rows < MANY_TILES * TILE_ROWS
        return hbm_gbs < H200.hbm_gbs and self.hidden >= LONG_DEPTH and is_shared_by_few

    def claims_tiles(self, hbm_gbs: float) -> bool:
        """Whether tiles are claimed on GPUs with memory of this speed, see `LayerConfig`. Tiles are
        counted as those of a gated activation on an H200's SMs."""
        rows = self.max_tokens * self.num_topk * self.num_ranks / self.num_experts
        per_expert = (rows / TILE_ROWS + 0.5) * 2 * self.num_columns / TILE_COLUMNS
        tiles = per_expert * self.num_experts / self.num_ranks / H200.num_sms
        is_bound = hbm_gbs < H200.hbm_gbs or self.hidden >= LONG_DEPTH
        return is_bound and rows < CLAIM_ROWS and tiles >= CLAIM_TILES

    def begins_early(self, hbm_gbs: float) -> bool:
        """Whether products on calm links, with memory of this speed, begin with own tiles, before
        rows of the other rank arrive."""
        has_rows = self.max_tokens * self.num_topk >= EARLY_OWN_ROWS * self.num_experts
        is_fast = hbm_gbs >= H200.hbm_gbs and self.hidden < LONG_DEPTH
        return self.num_ranks == 2 and self.itemsize != 1 and has_rows and is_fast

    @property
    def link_us(self) -> float:
        """The time of this rank's rows to the other ranks, one for each token and rank; the sums
        that return take as long."""
        rows = self.max_tokens * self.share * (self.num_ranks - 1)
        return rows * self.hidden * self.itemsize / H200.shared_link_gbs / 1e3

    def gemm_us(self, columns: int) -> float:
        """The time of a GEMM of `hidden` by `columns` for each expert row."""
        rows = self.max_tokens * self.num_topk
        return 2e-6 * rows * self.hidden * columns / H200.gemm_tflops


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Choices of a layer, of which the stages must be equal on all ranks. The defaults, and the
    constants above, are those of an H200 (bench/notes/layer.md).

    num_stages: in how many parts a rank's expert rows arrive, in their order; a tile waits for the
    part of its last row; with 1 it waits for all rows. num_return_stages: in how many parts sums
    return, each when the last expert row of its tokens is computed. num_own_stages: tiles of this
    rank's own rows that arrive in so many first stages are computed first in dispatch and last in
    combine, all if there are no more stages; this reads their weights once more. num_push_programs,
    num_copy_programs, num_return_programs: how many programs push rows, copy own rows and others to
    further experts of their tokens, and return sums; they have one, one and two warps, and run
    concurrently with those that multiply. group_m: how many tiles of rows programs walk together
    before the next columns, so that they share weights in L2; 1 walks them one by one.
    claims_tiles: a program takes the next tile that none has begun, and not every n-th one, so that
    those which share weights run at the same time; see `schedule_kernels.claim_tile`. Specialised
    tiles of e4m3 weights are always claimed, other tiles of e4m3 never.
    """

    num_stages: int = 16
    num_return_stages: int = 8
    num_push_programs: int = H200.num_sms
    num_copy_programs: int = H200.num_sms
    num_return_programs: int = 2 * H200.num_sms
    num_own_stages: int = 0
    group_m: int = 8
    claims_tiles: bool = False

    def check(self) -> None:
        """Raise ShapeError for numbers that are not positive or larger than any GPU needs, and for
        more stages than there are flags; DtypeError for what is no number."""
        for one in fields(self):
            name, value = f"LayerConfig.{one.name}", getattr(self, one.name)
            if one.name == "claims_tiles":
                check_flag(name, value)
                continue
            least = 0 if one.name == "num_own_stages" else 1
            check_int(name, value, least, MAX_STAGES.value if "stages" in name else MAX_PROGRAMS)

    @property
    def own_first(self) -> int:
        """How many stages of own rows come before all rows of others."""
        return min(self.num_own_stages, self.num_stages)

    def for_dy(self, columns: int, itemsize: int) -> LayerConfig:
        """These choices where a backward sends dy, whose product gives `columns` for each row: two
        programs of each SM copy rows, where it was one and would take longer than that product."""
        copy_ns, product_ns = itemsize / COPY_GBS, 2e-3 * columns / H200.gemm_tflops
        if self.num_copy_programs != H200.num_sms or copy_ns <= product_ns:  # of a column of dy
            return self
        return replace(self, num_copy_programs=2 * H200.num_sms)

    def shared(self) -> LayerConfig:
        """The stages alone, which must be equal on all ranks; other fields have their defaults."""
        return LayerConfig(self.num_stages, self.num_return_stages)

    @classmethod
    def predicted(
        cls, problem: LayerProblem, hbm_gbs: float = H200.hbm_gbs, is_backward: bool = False
    ) -> LayerConfig:
        """The choices that are predicted to be the fastest, with memory of this speed, see
        `hardware.Gpu`."""
        if problem.num_ranks == 1:
            alone = BACKWARD_ALONE if is_backward else FORWARD_ALONE
            claims = problem.itemsize != 1 and problem.claims_tiles(hbm_gbs)
            return cls(num_return_stages=1, claims_tiles=claims, **alone)
        rows = problem.max_tokens * problem.num_topk
        gemm_us = problem.gemm_us(3 * problem.num_columns)
        are_busy = 2 * problem.link_us > BUSY_LINKS * gemm_us
        most = MAX_STAGES.value if are_busy else CALM_STAGES
        counts = range(1, 1 + max(2, min(most, rows // STAGE_ROWS)))
        arrivals = range(1, 2) if problem.rereads_weights(hbm_gbs) else counts
        own_rows = rows / problem.num_experts  # of an expert, from its own rank
        config = cls(
            num_stages=min(arrivals, key=lambda n: dispatch_us(problem, n)),
            num_return_stages=min(counts, key=lambda n: combine_us(problem, n)),
            num_own_stages=most if own_rows >= (BUSY_OWN_ROWS if are_busy else OWN_ROWS) else 0,
            claims_tiles=problem.claims_tiles(hbm_gbs),
        )
        if not (are_busy or is_backward) and problem.begins_early(hbm_gbs):
            return replace(config, **EARLY_CHOICES)
        if problem.itemsize != 1:
            return config
        returns = min(config.num_return_stages, E4M3_RETURN_STAGES)
        return replace(config, num_return_stages=returns, **E4M3_CHOICES)


def dispatch_us(problem: LayerProblem, num_stages: int) -> float:
    """The time of dispatch and up-projection: rows arrive stage by stage, and each stage is
    multiplied when it has arrived. Most rows of early stages cross the links, those of later ones
    are copies."""
    gemm = problem.gemm_us(2 * problem.num_columns)
    now = begin = 0.0
    for stage in range(1, num_stages + 1):
        end = stage * (stage + num_stages) / (2 * num_stages**2)  # as `tiles.stage_begin`
        pushed = 1 - (1 - end) ** problem.rows_per_token
        now = max(now, problem.link_us * pushed + STAGE_US * stage) + gemm * (end - begin)
        begin = end
    return now


def combine_us(problem: LayerProblem, num_stages: int) -> float:
    """The time of down-projection and combine: the rows of each stage are multiplied, then its sums
    return while the next stage is multiplied."""
    gemm = problem.gemm_us(problem.num_columns)
    now, sent = 0.0, 0.0
    for stage in range(1, num_stages + 1):
        computed = 1 - (1 - stage / num_stages) ** 2
        now = max(now, gemm * computed)
        now += problem.link_us * (computed**problem.rows_per_token - sent) + STAGE_US
        sent = computed**problem.rows_per_token
    return now


def explain(problem: LayerProblem, hbm_gbs: float = H200.hbm_gbs) -> str:
    """The predicted times of a layer for evenly routed tokens, and the predicted choices."""
    best = LayerConfig.predicted(problem, hbm_gbs)
    gemm_us = problem.gemm_us(3 * problem.num_columns)
    dispatch = dispatch_us(problem, best.num_stages)
    combine = combine_us(problem, best.num_return_stages)
    lines = [
        f"{problem.max_tokens} tokens on each of {problem.num_ranks} ranks, {problem.num_experts} "
        f"experts, top-{problem.num_topk}, hidden {problem.hidden}, {problem.num_columns} columns",
        f"GEMMs {gemm_us:.0f} us, rows to other ranks {problem.link_us:.0f} us, sums as long",
        f"start {START_US:.0f} us, dispatch {dispatch:.0f} us in {best.num_stages} stages, combine "
        f"{combine:.0f} us in {best.num_return_stages}",
        f"-> {best}",
    ]
    return "\n".join(lines)


# --- Choices that were measured ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """How layers run: `choose` takes the user's config, else the measured one, else the predicted
    one.

    Ranks that differ in their stages would wait for one another in vain, and a file may change
    between the reads of two ranks. So all ranks of a Buffer take `kept` from rank 0, which reads
    the file when the Buffer is made: a choice that is kept later is for later Buffers. Likewise
    `hbm_gbs` is that of rank 0's GPU, and the prediction uses it on all ranks.
    """

    user: LayerConfig | None = None
    kept: Mapping[str, LayerConfig] = field(default_factory=dict)
    hbm_gbs: float = H200.hbm_gbs

    def choose(self, problem: LayerProblem, is_backward: bool = False) -> LayerConfig:
        """The config for a layer. Only a predicted one is another one for its backward."""
        if config := self.user or self.measured(problem):
            return config
        return LayerConfig.predicted(problem, self.hbm_gbs, is_backward)

    def measured(self, problem: LayerProblem) -> LayerConfig | None:
        """The kept choice for a layer, None without one."""
        return self.kept.get(_key(problem)) if self.kept else None


def kept_layers() -> dict[str, LayerConfig]:
    """The choices of `keep_layer` for this kind of device, without those of other versions."""
    return read_choices(cache_path(LAYERS), LayerConfig)


def keep_layer(problem: LayerProblem, config: LayerConfig) -> None:
    """Let Buffers that are made from now on take a measured config for such layers."""
    keep_choice(cache_path(LAYERS), _key(problem), asdict(config))


def _key(problem: LayerProblem) -> str:
    """The key of a layer; layers whose tokens round up to the same power of two share it."""
    return problem_key(asdict(replace(problem, max_tokens=next_power_of_2(problem.max_tokens))))
