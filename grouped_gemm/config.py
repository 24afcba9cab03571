"""The choice of a grouped GEMM's tiles, from dimensions and measured constants. Ranks may choose
differently: no protocol depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from ..errors import ShapeError

HBM_GBS = 4300.0
"""GB/s that an H200 reads and writes, as in a large copy."""
SM_GBS = 49.0
"""GB/s that one SM takes in by itself; 88 fill the memory's bandwidth."""
LAUNCH_US = 3.0
REREAD = 0.1
"""What a second tile of an expert adds to the time that its weights take from memory."""
HEIGHTS = (128, 64, 32, 16)
"""Rows of a tile."""
LARGEST = {
    **{"block_m": 256, "block_n": 512, "block_k": 512, "num_warps": 32, "num_stages": 16},
    **{"subtiles": 64, "programs_per_sm": 32, "group_m": 1 << 14, "num_splits": 64},
}
"""Of the numbers of a GemmConfig, beyond what any GPU can run."""
POWERS = "block_m", "block_n", "block_k", "num_warps", "subtiles"
"""Those that are powers of 2."""


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """What a grouped GEMM multiplies: about num_rows rows in all, num_experts weights, each
    num_columns (of the output) by depth; gated weights have twice as many. capability and num_sms
    are the GPU's, capability None in the interpreter."""

    dtype: torch.dtype
    num_rows: int
    num_experts: int
    num_columns: int
    depth: int
    gated: bool = False
    gathered: bool = False
    capability: tuple[int, int] | None = (9, 0)
    num_sms: int = 132

    @property
    def parts(self) -> int:
        """Rows of the weights that make one column of the output."""
        return 2 if self.gated else 1

    @property
    def busy_experts(self) -> int:
        """Experts that have rows, where rows are spread evenly."""
        return max(1, min(self.num_experts, self.num_rows))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds that a tile shape takes for a problem, by what limits it."""

    products_us: float
    memory_us: float
    num_tiles: int
    num_waves: int

    @property
    def us(self) -> float:
        return max(self.products_us, self.memory_us) + LAUNCH_US

    @property
    def limiter(self) -> str:
        return "products" if self.products_us > self.memory_us else "memory"


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile shape of a grouped GEMM.

    A program computes block_m rows times block_n rows of the weights (with a gated activation:
    block_n / 2 of gate and as many of up) in steps of block_k, `num_stages` of which are in flight,
    and stores a tile in `subtiles` parts. `programs_per_sm` run side by side. `group_m` tiles of
    rows are walked together before the next columns. `num_splits` tiles share the depth of one, and
    their sums are added up in order.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    subtiles: int = 1
    programs_per_sm: int = 1
    group_m: int = 8
    num_splits: int = 1

    def check(self) -> None:
        """ShapeError for numbers that no tile has: no ints, not positive, or too large."""
        numbers = asdict(self)
        check_numbers("GemmConfig", numbers, LARGEST)
        uneven = {name: numbers[name] for name in POWERS if numbers[name].bit_count() != 1}
        if uneven:
            raise ShapeError(f"a GemmConfig has {uneven}; these must be powers of 2.")

    def launch_options(self) -> dict[str, int]:
        """What every kernel of such tiles is launched with."""
        return {
            "SUBTILES": self.subtiles,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    @classmethod
    def choose(cls, problem: GemmProblem, block_m: int | None = None) -> GemmConfig:
        """The tiles of `candidates` with the shortest predicted time; of height block_m, where a
        schedule of tiles fixes that."""
        return min(candidates(problem, block_m), key=lambda config: predict(config, problem).us)

    @classmethod
    def for_gradient(cls, problem: GemmProblem, weighted: bool, block_m: int) -> GemmConfig:
        """Tiles of the second GEMM's gradient with that of the activation in its epilogue, which
        takes registers: `weighted` rows take more."""
        if problem.capability is None or problem.dtype == torch.float32:
            return next(candidates(problem, block_m))
        if block_m < 128:
            return cls(block_m, 128, 64, num_warps=8, num_stages=3, subtiles=4)
        if problem.capability[0] not in (9, 10):
            return cls(block_m, 128, 32, num_warps=8, num_stages=3, subtiles=4)
        if weighted:
            return cls(block_m, 128, 64, num_warps=8, num_stages=3, subtiles=4)
        return cls(block_m, 256, 64, num_warps=8, num_stages=3, subtiles=8)

    @classmethod
    def for_weights(cls, problem: GemmProblem, itemsize: int) -> GemmConfig:
        """Tiles of the gradient of the weights [L, num_columns, depth], of `itemsize` bytes each:
        blocks [block_m, block_n] of it, block_k rows at a time."""
        if problem.capability is None:
            return cls(64, 64, 64, num_warps=4, num_stages=1, subtiles=2)
        if problem.dtype == torch.float32:
            return cls(64, 64, 16, num_warps=4, num_stages=2, programs_per_sm=2)
        if problem.capability[0] not in (9, 10):
            return cls(128, 128, 32, num_warps=8, num_stages=3, subtiles=2)
        return cls(128, 256, 64, num_warps=8, num_stages=3, subtiles=itemsize)


def check_numbers(kind: str, numbers: Mapping[str, object], most: Mapping[str, int]) -> None:
    """ShapeError unless each number is an int of 1 to its most."""
    wrong = {
        name: value
        for name, value in numbers.items()
        if not (type(value) is int and 1 <= value <= most[name])
    }
    if wrong:
        limits = ", ".join(f"{name} up to {most[name]}" for name in wrong)
        raise ShapeError(f"a {kind} has {wrong}; these must be ints of 1 or more, {limits}.")


def candidates(problem: GemmProblem, block_m: int | None = None) -> Iterator[GemmConfig]:
    """Tile shapes that do not spill registers, best first; `tests/test_compile.py` holds them to
    it. All of height block_m, where that is given."""
    capability = problem.capability
    if capability is None:
        depth = 128 if _is_fp8(problem) else 64
        yield GemmConfig(block_m or 64, 64, depth, num_warps=4, num_stages=1, subtiles=2)
        return
    if problem.dtype == torch.float32:  # no tensor cores: IEEE products
        yield GemmConfig(block_m or 64, 64, 16, 4, 2, programs_per_sm=2)
        return
    if _is_fp8(problem):  # scaled sums beside the product take the registers of half a tile
        for height in (64, 32, 16) if block_m is None else (block_m,):
            if height == 128 and problem.gated:
                yield GemmConfig(128, 64, 128, 8, 4)
            elif height == 128:
                yield GemmConfig(128, 128, 128, 8, 4)
            else:
                yield GemmConfig(height, 128, 128, 4, 3, programs_per_sm=2, group_m=16)
        return
    for height in HEIGHTS if block_m is None else (block_m,):
        if capability[0] not in (9, 10):
            yield GemmConfig(height, 128, 32, 8 if height == 128 else 4, 3)
        elif height == 128:
            stages = 3 if problem.gathered else 4
            yield GemmConfig(128, 256, 64, 8, stages, subtiles=2)
        else:
            narrow = GemmConfig(height, 64, 128 if height == 64 else 256, 4, 3, programs_per_sm=2)
            for config in (GemmConfig(height, 128, 128, 4, 4), narrow):
                yield config
                for num_splits in (2, 4, 8):
                    if _num_tiles(config, problem) * num_splits < 2 * problem.num_sms:
                        yield replace(config, num_splits=num_splits)


def _tiles_per_expert(config: GemmConfig, problem: GemmProblem) -> float:
    """Half of an expert's last tile is empty, unless one takes all its rows."""
    return max(1.0, problem.num_rows / problem.busy_experts / config.block_m + 0.5)


def _num_tiles(config: GemmConfig, problem: GemmProblem) -> int:
    """Expected tiles, shares of the depth counted."""
    tiles_m = problem.busy_experts * _tiles_per_expert(config, problem)
    columns = problem.num_columns * problem.parts
    return int(tiles_m) * -(-columns // config.block_n) * config.num_splits


def predict(config: GemmConfig, problem: GemmProblem) -> Prediction:
    """The time of a problem with this tile shape, from bytes, products and constants measured on an
    H200 (bench/NOTES.md). Good to 10% there for large problems; the choice needs ratios only."""
    columns = problem.num_columns * problem.parts
    num_tiles = _num_tiles(config, problem)
    num_waves = -(-num_tiles // (problem.num_sms * config.programs_per_sm))
    neighbours = min(config.programs_per_sm, -(-num_tiles // problem.num_sms))
    # FLOP per us of one SM: tiles of fewer rows or columns feed the tensor cores less well.
    rate = 5.41e6 if config.block_m * config.block_n >= 128 * 128 else 3.5e6
    height = max(config.block_m, 64)
    flops = 2.0 * height * config.block_n * problem.depth / config.num_splits
    store_us = 1.4 * height * config.block_n / (128 * 256)
    if neighbours == 2:
        store_us *= 0.65
    tile_us = flops / (rate / neighbours) + store_us * neighbours
    # Other tiles of an expert read its weights again, mostly from L2.
    rereads = REREAD * min(1.0, _tiles_per_expert(config, problem) - 1.0)
    weights = problem.busy_experts * columns * problem.depth * (1.0 + rereads)
    rows = problem.num_rows * (problem.depth + problem.num_columns)
    kilobytes = (weights + rows) * problem.dtype.itemsize / 1e3
    # Small tiles keep more reads of the weights in flight; those of 16 rows were at times slower.
    hbm_gbs = HBM_GBS * (0.97 if config.block_m == 16 else 1.03 - config.block_m / 1000)
    busy_sms = min(problem.num_sms, num_tiles / num_waves)
    memory_us = kilobytes / min(hbm_gbs, SM_GBS * busy_sms)
    if config.num_splits > 1:
        partial = problem.num_rows * columns * 4.0 * config.num_splits
        memory_us += 2 * partial / 1e3 / HBM_GBS + LAUNCH_US
    return Prediction(num_waves * tile_us, memory_us, num_tiles, num_waves)


def explain(problem: GemmProblem) -> str:
    """The predicted time of each tile shape for a problem, what limits it, and which is chosen."""
    chosen = GemmConfig.choose(problem)
    columns = problem.num_columns * problem.parts
    lines = [
        f"{problem.num_rows} rows, {problem.num_experts} experts, {columns} columns, depth "
        f"{problem.depth}, {str(problem.dtype).removeprefix('torch.')}"
    ]
    for config in candidates(problem):
        prediction = predict(config, problem)
        shape = f"{config.block_m} x {config.block_n} x {config.block_k}"
        lines.append(
            f"{'->' if config == chosen else '  '} {shape:>15}, {config.programs_per_sm} per SM, "
            f"{config.num_splits} splits: {prediction.us:8.0f} us, {prediction.limiter} "
            f"(products {prediction.products_us:.0f}, memory {prediction.memory_us:.0f}; "
            f"{prediction.num_tiles} tiles in {prediction.num_waves} waves)"
        )
    return "\n".join(lines)


def _is_fp8(problem: GemmProblem) -> bool:
    return problem.dtype == torch.float8_e4m3fn
