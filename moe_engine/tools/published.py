"""What other libraries publish of dispatch and combine between nodes, the model's constants fitted
to it, and how far the model is from each figure.

The figures are published with the libraries, as of these revisions: DeepEP dd758ca (V2 in its
README, V1 in docs/legacy), hybrid-ep 94a9f8f, UCCL da914a20, MORI 624002c8, pplx-garden 2446003,
Triton-distributed 1512a811. Those of MORI on 32 MI300X are stale, and are left out.

Figures of normal mode are GB/s as these libraries count them: the bytes of one row for each token
and node, the own node included, over the time. Those of low-latency mode are microseconds of 128
tokens that go straight to their ranks, one row per expert. All are of hidden 7168, top-8 of 256
experts, on nodes of 8 ranks with 400 Gb/s for each, over ConnectX-7 where a name does not say
otherwise. Where a source does not tell tokens or types of rows, they are as in DeepEP's tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import exp, hypot, log

from ..hardware import H200
from ..node_traffic import (
    COPY_GBS,
    LATENCY_US,
    NIC_GBS,
    Cluster,
    Exchange,
    RowType,
    Shares,
    Way,
    direct_load,
    load_of,
)

FP8, BF16 = RowType.FP8, RowType.BF16
VERBS = "dispatch", "combine"
HIDDEN, EXPERTS, TOPK, PER_NODE, LOW_LATENCY_TOKENS = 7168, 256, 8, 8, 128
H800_LINK_GBS = 126.9
"""GB/s of an H800's NVLink, which is narrower than others: fitted."""
STEPS = 0.1, 0.03, 0.01, 0.003, 0.001
"""Logarithms of the factors by which a fit changes constants."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a published table, and what is needed to predict it.

    figures: (dispatch, combine) by number of ranks, or (dispatch,): GB/s of normal mode, or us of
    low-latency mode, which num_tokens tells. row_type: that of dispatch. num_sms: SMs that copy;
    all, if the source does not say. node_limit: as in `Shares.uniform`. fits: whether constants are
    fitted to it, which they are not where a CPU proxy posts the sends, or on other kinds of GPUs.
    """

    system: str
    figures: Mapping[int, Sequence[float]]
    num_tokens: int = LOW_LATENCY_TOKENS
    row_type: RowType = RowType.FP8
    num_sms: int = H200.num_sms
    node_limit: int | None = None
    is_h800: bool = False
    fits: bool = True

    @property
    def is_normal(self) -> bool:
        """Whether the figures are GB/s of normal mode."""
        return self.num_tokens != LOW_LATENCY_TOKENS


_V1 = "DeepEP V1, H800"
NORMAL = [  # in GB/s
    Line(_V1, {16: (43, 43), 32: (58, 57), 64: (51, 50)}, 4096, FP8, 24, 4, is_h800=True),
    Line("DeepEP V2, H100, 12 SMs", {16: (90, 81)}, 8192, FP8, 12),
    Line("DeepEP V2, H100, 6 SMs", {32: (61, 61)}, 8192, FP8, 6),
    Line("HybridEP, H100, 4 SMs", {16: (44, 52), 32: (53, 51), 64: (48, 46)}, 4096, BF16, 4),
    Line("HybridEP, H100, 8 SMs", {16: (77, 68), 32: (55, 56), 64: (51, 51)}, 4096, BF16, 8),
    Line("HybridEP, H100, 16 SMs", {16: (72, 63), 32: (58, 57), 64: (50, 50)}, 4096, BF16, 16),
    Line("UCCL, H200, EFA", {16: (50, 18), 32: (54, 43)}, 4096, fits=False),
    Line("UCCL, B200, EFA", {16: (53, 60), 32: (53, 57)}, 4096, fits=False),
    Line("UCCL, MI300X", {16: (74, 78), 32: (60, 60), 64: (52, 51)}, 4096, fits=False),
    Line("MORI, MI300X", {16: (52, 67)}, 4096, fits=False),
    Line("MORI, MI355X", {16: (54, 71), 32: (46, 61)}, 4096, fits=False),
]
LOW_LATENCY = [  # in us
    Line(
        _V1,
        {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369)}
        | {256: (194, 360)},
        is_h800=True,
    ),
    Line("pplx-garden, H100", {8: (50.5, 65), 16: (110, 186), 64: (187.5, 309)}),
    Line("Triton-distributed", {32: (137,)}, is_h800=True),
    Line("DeepEP V1, same source", {32: (182,)}, is_h800=True),
    Line("UCCL, MI300X", {8: (65, 92), 16: (136, 207), 32: (224, 341)}, fits=False),
    Line("MORI, MI300X", {8: (35, 47), 16: (76, 122)}, fits=False),
    Line("MORI, MI355X", {8: (31, 36), 16: (84, 108), 32: (152, 187)}, fits=False),
]


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted: `node_traffic.NIC_GBS`, LATENCY_US and COPY_GBS, and H800_LINK_GBS."""

    nic_gbs: float = NIC_GBS
    latency_us: float = LATENCY_US
    copy_gbs: float = COPY_GBS
    h800_link_gbs: float = H800_LINK_GBS


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure, and the exchange that stands for it in the model."""

    line: Line
    verb: str
    num_ranks: int
    published: float
    exchange: Exchange
    counted_bytes: float

    @classmethod
    def all_of(cls, line: Line) -> Iterator[Figure]:
        """Those of a line."""
        for num_ranks, published in line.figures.items():
            cluster = Cluster(num_ranks, PER_NODE, num_sms=line.num_sms)
            shares = Shares.uniform(cluster, EXPERTS, TOPK, line.node_limit)
            for verb, row_type, one in zip(VERBS, (line.row_type, BF16), published, strict=False):
                num_bytes = line.num_tokens * row_type.num_bytes(HIDDEN)
                load = direct_load(cluster, shares.rows)
                if line.is_normal:
                    load = load_of(Way.TWO_LEVEL, cluster, shares)
                sent = Exchange(cluster, load, num_bytes, int(line.is_normal))
                yield cls(line, verb, num_ranks, one, sent, num_bytes * sum(shares.nodes))

    def predicted(self, constants: Constants) -> float:
        """What the model says in place of what is published, in the same unit."""
        cluster = replace(
            self.exchange.cluster,
            nic_gbs=constants.nic_gbs,
            latency_us=constants.latency_us,
            copy_gbs=constants.copy_gbs,
        )
        if self.line.is_h800:
            cluster = replace(cluster, link_gbs=constants.h800_link_gbs)
        us = replace(self.exchange, cluster=cluster).us
        return self.counted_bytes / us / 1e3 if self.line.is_normal else us

    def error(self, constants: Constants) -> float:
        """What the model says over what is published, less 1."""
        return self.predicted(constants) / self.published - 1


def published_figures() -> list[Figure]:
    """Every figure of NORMAL and LOW_LATENCY."""
    return [figure for line in NORMAL + LOW_LATENCY for figure in Figure.all_of(line)]


def mean_error(figures: Iterable[Figure], constants: Constants) -> float:
    """The mean of the errors, without their signs."""
    found = [abs(one.error(constants)) for one in figures]
    return sum(found) / len(found)


def fit(figures: Iterable[Figure]) -> Constants:
    """The constants with the least sum of the logarithms of errors, which a few figures that are
    far off bend less than a sum of squares. All constants move by a step, up, down or not at all,
    as long as that helps."""
    figures = list(figures)

    def cost(constants: Constants) -> float:
        return sum(hypot(log(1 + one.error(constants)), 0.02) for one in figures)

    def moved(constants: Constants, step: float, signs: Iterable[int]) -> Constants:
        parts = zip(asdict(constants).items(), signs, strict=True)
        return Constants(**{name: value * exp(sign * step) for (name, value), sign in parts})

    best, least = Constants(45.0, 30.0, 36.0, 130.0), float("inf")
    while (found := cost(best)) < least:
        least = found
        moves = product(STEPS, product((-1, 0, 1), repeat=4))
        best = min((moved(best, step, signs) for step, signs in moves), key=cost)
    return best
