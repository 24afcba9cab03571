"""The tile shape of a grouped GEMM: `choose` takes what was measured on this kind of GPU, else what
is predicted from dimensions and measured constants. Ranks may choose differently: no protocol
depends on it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ..choice_cache import (
    cache_path,
    device_name,
    keep_choice,
    problem_key,
    read_choices,
    warn,
)
from ..device.constants import constants
from ..errors import ShapeError
from ..hardware import H200
from ..utils import next_power_of_2
from .activations import Activation, AnyActivation

GEMMS = "gemm.json"
LAUNCH_US = 3.0
REREAD = 0.1
"""What a second tile of an expert adds to the time that its weights take from memory."""
BLOCK_MS = (128, 64, 32, 16)
"""Rows that a tile can have."""
MAXIMA = {
    **{"block_m": 256, "block_n": 512, "block_k": 512, "num_warps": 32, "num_stages": 16},
    **{"subtiles": 64, "programs_per_sm": 32, "group_m": 1 << 14, "num_splits": 64},
    "num_registers": 255,
}
"""The largest numbers that a GemmConfig may have; no GPU can run more."""
POWERS_OF_2 = "block_m", "block_n", "block_k", "num_warps", "subtiles"
"""The fields of a GemmConfig that must be powers of 2."""


OFFERS_SPECIALIZED = triton.__version__.startswith(("3.6.", "3.7."))
"""Gluon changes with each Triton: with these, specialised tiles compile without spilling."""
SPECIALIZED_BLOCK = 128, 256, 128
SPECIALIZED: dict[str, Any] = dict(num_warps=8, num_stages=4, group_m=16, specialized=True)
"""Tiles of e4m3 whose warps each have one task."""
WIDE_E4M3: dict[int, dict[str, Any]] = {
    128: dict(num_warps=8, num_stages=3, num_registers=216),
    64: dict(num_warps=4, num_stages=2, programs_per_sm=2, group_m=16, num_registers=224),
}
"""Tiles of e4m3 with 256 columns, by their rows. With more registers allowed, the compiler spills
some of them."""
FEW_ROWS = 256
"""Experts with fewer rows have gradients of their weights from shorter steps: of a block's few
steps the last one is half empty."""
ROOMY_REGISTERS = 176
"""The registers of a thread of a GEMM of 8 warps with which others run. Each quarter of an SM has
16,384 registers, in units of 8 for a thread: with two warps of 176 there is room for one of 160,
and with two of 177 for none of more than 144."""


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """What a grouped GEMM multiplies: about num_rows rows in all times num_experts weights, each
    num_columns (of the output) by depth; gated weights have twice as many rows. capability and
    num_sms are those of the GPU; capability is None in the interpreter."""

    dtype: torch.dtype
    num_rows: int
    num_experts: int
    num_columns: int
    depth: int
    gated: bool = False
    gathered: bool = False
    capability: tuple[int, int] | None = (9, 0)
    num_sms: int = H200.num_sms

    @property
    def parts(self) -> int:
        """Rows of the weights that make one column of the output."""
        return 2 if self.gated else 1

    @property
    def busy_experts(self) -> int:
        """The number of experts that have rows, where rows are spread evenly."""
        return max(1, min(self.num_experts, self.num_rows))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The microseconds that a tile shape takes for a problem, by what limits it."""

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


class TileShape(NamedTuple):
    """The fields of a `GemmConfig` that kernels are compiled for, and what finishes a tile."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    SUBTILES: int
    GROUP_M: int
    SPLITS: int
    ACTIVATION: Activation


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile shape of a grouped GEMM.

    A program computes block_m rows times block_n rows of the weights (with a gated activation:
    block_n / 2 of gate and as many of up) in steps of block_k, `num_stages` of which are in flight,
    and stores a tile in `subtiles` parts. `programs_per_sm` run concurrently. The programs walk
    `group_m` tiles of rows together before the next columns. `num_splits` tiles share the depth of
    one, and their sums are added up in order. A thread has at most `num_registers`; all that there
    are, 255, leave their number to the compiler. `specialized`: other warps than the num_warps that
    multiply load their operands, see `specialized_kernels.py`.
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
    num_registers: int = MAXIMA["num_registers"]
    specialized: bool = False

    def check(self) -> None:
        """Raise ShapeError for numbers that no tile can have: not ints, not positive, too large."""
        numbers = asdict(self)
        if type(specialized := numbers.pop("specialized")) is not bool:
            raise ShapeError(f"a GemmConfig has specialized={specialized}; it is True or False.")
        check_numbers("GemmConfig", numbers, MAXIMA)
        block = self.block_m, self.block_n, self.block_k
        if specialized and (block != SPECIALIZED_BLOCK or self.num_splits > 1):
            raise ShapeError(
                f"a GemmConfig of {block} in {self.num_splits} splits has specialized=True; only "
                f"{SPECIALIZED_BLOCK} in one can be."
            )
        uneven = {name: numbers[name] for name in POWERS_OF_2 if numbers[name].bit_count() != 1}
        if uneven:
            raise ShapeError(f"a GemmConfig has {uneven}; these must be powers of 2.")

    def launch_options(self, activation: AnyActivation = "none") -> dict[str, Any]:
        """The options with which every kernel of such tiles is launched; SHAPE is a `TileShape`."""
        limited = self.num_registers < MAXIMA["num_registers"]
        return {
            "SHAPE": _tile_shape(self, activation),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **({"maxnreg": self.num_registers} if limited else {}),
        }

    def unspecialized(self) -> GemmConfig:
        """The same tiles, whose warps all load and multiply: the same bits, any epilogue."""
        if not self.specialized:
            return self
        return GemmConfig(
            *SPECIALIZED_BLOCK,
            **WIDE_E4M3[SPECIALIZED_BLOCK[0]],
            subtiles=4,
            group_m=self.group_m,
        )

    def stored_in_parts(self) -> GemmConfig:
        """These tiles, of which large ones are stored in four parts at least: that leaves shared
        memory to others, and is as fast."""
        return self if self.block_m < 128 else replace(self, subtiles=max(self.subtiles, 4))

    @classmethod
    def predicted(cls, problem: GemmProblem, block_m: int | None = None) -> GemmConfig:
        """The tile shape of `candidates` with the shortest predicted time; with this block_m, where
        a schedule of tiles fixes it."""
        return min(candidates(problem, block_m), key=lambda config: predict(config, problem).us)

    @classmethod
    def for_weights(cls, problem: GemmProblem, itemsize: int, is_alone: bool = False) -> GemmConfig:
        """The tile shape of the gradient of the weights [L, num_columns, depth], whose items have
        `itemsize` bytes: blocks [block_m, block_n] of it, from block_k rows at a time. is_alone: it
        may take all shared memory, as nothing runs concurrently on an SM."""
        if problem.capability is None:
            return cls(64, 64, 64, num_warps=4, num_stages=1, subtiles=2)
        if problem.dtype == torch.float32:
            return cls(64, 64, 16, num_warps=4, num_stages=2, programs_per_sm=2)
        if problem.capability[0] not in (9, 10):
            return cls(128, 128, 32, num_warps=8, num_stages=3, subtiles=2)
        block_k, stages = 64, 4 if is_alone else 3
        if problem.num_rows < FEW_ROWS * problem.busy_experts:
            block_k, stages = 32, 6
        config = cls(128, 256, block_k, num_warps=8, num_stages=stages, subtiles=itemsize)
        # In bf16 it would take more, and leave too few to those that run concurrently.
        is_limited = itemsize == 2 and not (is_alone or problem.gathered)
        return replace(config, num_registers=ROOMY_REGISTERS) if is_limited else config


@functools.cache
def _tile_shape(config: GemmConfig, activation: AnyActivation) -> TileShape:
    blocks = config.block_m, config.block_n, config.block_k
    others = config.subtiles, config.group_m, config.num_splits
    return constants(TileShape(*blocks, *others, Activation.of(activation)))


def check_numbers(kind: str, numbers: Mapping[str, object], maxima: Mapping[str, int]) -> None:
    """Raise ShapeError unless each number is an int from 1 to its maximum."""
    wrong = {
        name: value
        for name, value in numbers.items()
        if not (type(value) is int and 1 <= value <= maxima[name])
    }
    if wrong:
        limits = ", ".join(f"{name} up to {maxima[name]}" for name in wrong)
        raise ShapeError(f"a {kind} has {wrong}; these must be ints of 1 or more, {limits}.")


def candidates(problem: GemmProblem, block_m: int | None = None) -> Iterator[GemmConfig]:
    """The tile shapes that are tried, best first; with this block_m, where it is given. None of
    them spills registers, which `tests/test_compile.py` checks."""
    capability = problem.capability
    if capability is None:
        depth = 128 if _is_fp8(problem) else 64
        yield GemmConfig(block_m or 64, 64, depth, num_warps=4, num_stages=1, subtiles=2)
        return
    if problem.dtype == torch.float32:  # no tensor cores: IEEE products
        yield GemmConfig(block_m or 64, 64, 16, 4, 2, programs_per_sm=2)
        return
    if _is_fp8(problem):  # a product has registers of its own until it is scaled
        one_scale = not problem.gated or problem.num_columns % 128 == 0  # of each half of a tile
        fits = capability[0] == 9 and not problem.gathered and one_scale
        for rows in BLOCK_MS if block_m is None else (block_m,):
            if fits and rows == 128 and OFFERS_SPECIALIZED:
                yield GemmConfig(*SPECIALIZED_BLOCK, **SPECIALIZED)
            if fits and rows in WIDE_E4M3:
                yield GemmConfig(rows, 256, 128, subtiles=4 // problem.parts, **WIDE_E4M3[rows])
            if rows == 128 and block_m is not None:
                # Consumer GPUs have 99 KiB of shared memory for a program.
                stages = 4 if problem.gated or capability[0] in (9, 10) else 2
                yield GemmConfig(128, 64 if problem.gated else 128, 128, 8, stages)
            elif rows < 128:
                programs_per_sm = 4 if rows == 16 and not problem.gathered else 2
                yield GemmConfig(rows, 128, 128, 4, 3, 1, programs_per_sm, group_m=16)
        return
    for rows in BLOCK_MS if block_m is None else (block_m,):
        if capability[0] not in (9, 10):
            yield GemmConfig(rows, 128, 32, 8 if rows == 128 else 4, 3)
        elif rows == 128:
            stages = 3 if problem.gathered else 4
            yield GemmConfig(128, 256, 64, 8, stages, subtiles=2)
        else:
            narrow = GemmConfig(rows, 64, 128 if rows == 64 else 256, 4, 3, programs_per_sm=2)
            for config in (GemmConfig(rows, 128, 128, 4, 4), narrow):
                yield config
                for num_splits in (2, 4, 8):
                    if _num_tiles(config, problem) * num_splits < 2 * problem.num_sms:
                        yield replace(config, num_splits=num_splits)


def _tiles_per_expert(config: GemmConfig, problem: GemmProblem) -> float:
    """The expected tiles of rows of an expert: half of its last one is empty, unless one takes all
    its rows."""
    return max(1.0, problem.num_rows / problem.busy_experts / config.block_m + 0.5)


def _num_tiles(config: GemmConfig, problem: GemmProblem) -> int:
    """The expected number of tiles; each share of the depth counts as one."""
    tiles_m = problem.busy_experts * _tiles_per_expert(config, problem)
    columns = problem.num_columns * problem.parts
    return int(tiles_m) * -(-columns // config.block_n) * config.num_splits


def predict(config: GemmConfig, problem: GemmProblem) -> Prediction:
    """The time of a problem with this tile shape, from bytes, products and constants measured on an
    H200 (bench/notes/grouped_gemm.md). It is right to 10% there for large problems; the choice
    needs ratios only."""
    columns = problem.num_columns * problem.parts
    num_tiles = _num_tiles(config, problem)
    num_waves = -(-num_tiles // (problem.num_sms * config.programs_per_sm))
    neighbours = min(config.programs_per_sm, -(-num_tiles // problem.num_sms))
    # FLOP per us of one SM: tiles of fewer rows or columns feed the tensor cores less well.
    rate = 5.41e6 if config.block_m * config.block_n >= 128 * 128 else 3.5e6
    rows = max(config.block_m, 64)
    if _is_fp8(problem):
        rows, rate = max(config.block_m, 32), 4.75e6 if problem.gated else 5.9e6
        if config.specialized:
            rate = 8.6e6
        elif config.block_n == 256:
            rate = 6.6e6 if config.block_m == 128 else 5.75e6
        elif config.block_m < 64:
            rate = 3.5e6
    flops = 2.0 * rows * config.block_n * problem.depth / config.num_splits
    # Specialised warps store while others load the next tile's operands.
    store_us = (1.0 if config.specialized else 1.4) * rows * config.block_n / (128 * 256)
    if neighbours == 2:
        store_us *= 0.65
    tile_us = flops / (rate / neighbours) + store_us * neighbours
    # Other tiles of an expert read its weights again, mostly from L2.
    rereads = REREAD * min(1.0, _tiles_per_expert(config, problem) - 1.0)
    weights = problem.busy_experts * columns * problem.depth * (1.0 + rereads)
    activations = problem.num_rows * (problem.depth + problem.num_columns)
    kilobytes = (weights + activations) * problem.dtype.itemsize / 1e3
    # Small tiles keep more reads of the weights in flight; those of 16 rows were at times slower,
    # but not where four of them share an SM.
    is_slow = config.block_m == 16 and config.programs_per_sm < 4
    hbm_gbs = H200.hbm_gbs * (0.97 if is_slow else 1.03 - config.block_m / 1000)
    busy_sms = min(problem.num_sms, num_tiles / num_waves)
    memory_us = kilobytes / min(hbm_gbs, H200.sm_gbs * busy_sms)
    if config.num_splits > 1:
        partial = problem.num_rows * columns * 4.0 * config.num_splits
        memory_us += 2 * partial / 1e3 / H200.hbm_gbs + LAUNCH_US
    return Prediction(num_waves * tile_us, memory_us, num_tiles, num_waves)


def explain(problem: GemmProblem) -> str:
    """The predicted time of each tile shape for a problem, what limits it, and the fastest."""
    best = GemmConfig.predicted(problem)
    columns = problem.num_columns * problem.parts
    lines = [
        f"{problem.num_rows} rows, {problem.num_experts} experts, {columns} columns, depth "
        f"{problem.depth}, {str(problem.dtype).removeprefix('torch.')}"
    ]
    for config in candidates(problem):
        prediction = predict(config, problem)
        shape = f"{config.block_m} x {config.block_n} x {config.block_k}"
        lines.append(
            f"{'->' if config == best else '  '} {shape:>15}, {config.programs_per_sm} per SM, "
            f"{config.num_splits} splits: {prediction.us:8.0f} us, {prediction.limiter} "
            f"(products {prediction.products_us:.0f}, memory {prediction.memory_us:.0f}; "
            f"{prediction.num_tiles} tiles in {prediction.num_waves} waves)"
        )
    return "\n".join(lines)


def choose(problem: GemmProblem, block_m: int | None = None) -> GemmConfig:
    """The tile shape for a problem: the measured one, else the predicted one."""
    return _choose(problem, block_m, device_name())


@functools.lru_cache(4096)
def _choose(problem: GemmProblem, block_m: int | None, device: str) -> GemmConfig:
    return measured(problem, block_m) or GemmConfig.predicted(problem, block_m)


def measured(problem: GemmProblem, block_m: int | None = None) -> GemmConfig | None:
    """The kept choice for a problem; None without one, or for one that is no candidate."""
    kept = _read_once(cache_path(GEMMS), device_name())
    if not kept or problem.capability is None:
        return None
    config = kept.get(_key(problem, block_m))
    if config is None or replace(config, num_splits=1) in candidates(problem, block_m):
        return config
    warn(cache_path(GEMMS), f"has {config} for {problem}, which is never tried")
    return None


def keep(problem: GemmProblem, block_m: int | None, config: GemmConfig) -> None:
    """Let `choose` take a measured tile shape, in this process and in later ones."""
    keep_choice(cache_path(GEMMS), _key(problem, block_m), asdict(config))
    _read_once.cache_clear()
    _choose.cache_clear()


@functools.cache
def _read_once(path: Path, device: str) -> dict[str, GemmConfig]:
    return read_choices(path, GemmConfig)


def _key(problem: GemmProblem, block_m: int | None) -> str:
    """The key of a problem; problems whose rows round up to the same power of two share it."""
    rounded = replace(problem, num_rows=next_power_of_2(problem.num_rows))
    return problem_key(asdict(rounded) | {"block_m": block_m})


def _is_fp8(problem: GemmProblem) -> bool:
    return problem.dtype == torch.float8_e4m3fn
