"""Ranks that show how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..emulation import RankPool

TIMEOUT_S = 3600.0


@contextmanager
def ranks_with_progress(
    num_ranks: int, device: str, console: Console
) -> Iterator[tuple[RankPool, Progress]]:
    """A pool of ranks for long jobs, and a progress bar that is gone afterwards."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        RankPool(num_ranks, device, timeout_s=TIMEOUT_S) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        yield pool, progress
