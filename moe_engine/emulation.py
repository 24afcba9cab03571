"""A pool of rank processes on this machine: CPU ranks that interpret kernels, or ranks on GPUs.

    with RankPool(4) as pool:
        pool.run(function, x, PerRank([a, b, c, d]))  # [function(group, x, a) of rank 0, ...]

The script that makes a pool needs the `if __name__ == "__main__":` of all multiprocessing. Ranks
find each other through a file that no other user can open, and talk over the loopback device.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from .checks import check_at_least
from .errors import BackendError, MoeEngineError, ShapeError
from .host_collectives import stage_collectives
from .symm.base import environment
from .torch_privates import set_group_count

START_TIMEOUT_S = 120.0
"""How long the processes may take to import torch and find each other."""
GRACE_S = 10.0
"""How long the other ranks may still take after one has raised: they often wait for it in vain."""
MAX_GROUPS = 1000
"""How many torch.distributed groups a job may make."""
STACK_S = 1.0
"""How long silent ranks may take to write their stacks."""
END_S = 1.0
"""How long ranks without a job may take to end."""

READ_AT_IMPORT = "MOE_ENGINE_TRACE", "TRITON_", "TORCH_", "OMP_", "CUDA_", "PYTHON"
"""The beginnings of the names of variables that imports read."""

_forks_in: dict[str, str] | None = None  # those of the process from which CPU ranks fork
_parent: Connection | None = None  # in a rank: the connection to the pool


class PerRank(list):
    """An argument of `RankPool.run` of which rank r gets item r."""


class RankError(MoeEngineError, RuntimeError):
    """Ranks failed. `errors` has the exception of each, ChildProcessError for one that died and
    TimeoutError for a silent one; `rank` and `cause_type` belong to the first, which the text
    gives with its traceback."""

    def __init__(self, errors: dict[int, BaseException]):
        self.errors = errors
        self.rank = next(iter(errors))
        self.cause_type = type(errors[self.rank])
        lines = [f"rank {rank}: {type(e).__name__}: {e}" for rank, e in errors.items()]
        super().__init__("\n".join(lines + getattr(errors[self.rank], "__notes__", [])))


def send_message(obj: object) -> None:
    """In a rank: call the `on_message(rank, obj)` given to `RankPool.run`."""
    if _parent is None:
        raise BackendError("send_message was called outside the ranks of a RankPool")
    _parent.send_bytes(pickle.dumps(("message", obj)))


class RankPool:
    """`num_ranks` processes in one torch.distributed group, for any number of runs.

    `device` is "cpu" (gloo, interpreted kernels) or "cuda": rank r on GPU r modulo their number,
    with NCCL and gloo, or with gloo alone where ranks share a GPU (`shares_gpus`), which copies the
    tensors of collectives to the host and back. The driver then gives each process the GPU for a
    while, so kernels that wait for peers do end; what they compute is right, and their times mean
    nothing. `env` is added to the environment of the ranks. The processes start at the first run,
    and again at the run after one was lost; they end with the pool or with this process.

    `nodes` makes nodes of num_ranks / nodes ranks each: those of a node map one another's memory,
    and others are reached through NVSHMEM on GPUs, on a CPU through an emulated network, which
    delivers late and out of order (`moe_engine/symm/nic_process.py`). A run on fewer ranks has
    whole nodes, or is refused when memory is allocated. ShapeError where `nodes` does not divide
    `num_ranks`.
    """

    def __init__(
        self,
        num_ranks: int,
        device: str = "cpu",
        timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        nodes: int = 1,
    ):
        if device not in ("cpu", "cuda"):
            raise BackendError(f"device is {device!r}; a RankPool runs on 'cpu' or 'cuda'")
        if device == "cuda" and not torch.cuda.device_count():
            raise BackendError("device is 'cuda', and there is no GPU here; choose 'cpu'")
        check_at_least(1, num_ranks=num_ranks, nodes=nodes)
        if num_ranks % nodes:
            raise ShapeError(
                f"{num_ranks} ranks are no whole number on each of {nodes} nodes; nodes must be a "
                "divisor of num_ranks"
            )
        self.shares_gpus = device == "cuda" and torch.cuda.device_count() < num_ranks
        self.num_ranks, self.device, self.timeout_s = num_ranks, device, timeout_s
        self._env = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
        self._env["GLOO_SOCKET_IFNAME"] = "lo"  # needs no network and no resolvable host name
        if self.shares_gpus:
            self._env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        if nodes > 1:
            self._env["MOE_ENGINE_NODE_SIZE"] = str(num_ranks // nodes)
        self._env |= env or {}
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folders: list[str] = []  # the store's, while there are processes
        self._num_jobs = 1
        weakref.finalize(self, _end, self._ranks, self._folders)  # runs at exit, too

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; a later run starts new ones."""
        _end(self._ranks, self._folders)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        expect_death: Collection[int] = (),
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Call `function(group, *args)` on the first `num_ranks` ranks and return their results.

        `function` must be importable by its name. Arguments and results travel by pickle, tensors
        as copies; `PerRank` arguments are split. A rank in `expect_death` may die: its result is
        None. None stands for all ranks and for the pool's own timeout. `on_message(rank, obj)` is
        called for each `send_message(obj)`. RankError is raised when a rank raises, dies or stays
        silent; the processes live on if all answered.
        """
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        if not 1 <= num_ranks <= self.num_ranks:
            raise ShapeError(f"num_ranks is {num_ranks}; this pool has 1 to {self.num_ranks}")
        for arg in args:
            if isinstance(arg, PerRank) and len(arg) != num_ranks:
                raise ShapeError(f"a PerRank has {len(arg)} items, and {num_ranks} ranks run")
        jobs = []
        for rank in range(num_ranks):
            own = [arg[rank] if isinstance(arg, PerRank) else arg for arg in args]
            data = pickle.dumps((self._num_jobs, num_ranks, function, own))
            jobs.append(pickle.dumps((sys.path, data)))
        self._num_jobs += 1
        if not self._ranks or any(not process.is_alive() for process, _ in self._ranks):
            self._start()
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self._collect(num_ranks, limit, jobs, expect_death, on_message)

    def _start(self) -> None:
        self.close()
        folder = mkdtemp(prefix="moe_engine-")  # for this user alone
        self._folders.append(folder)
        with environment(self._env):
            variables, context = dict(os.environ), _context(self.device)
        try:
            for rank in range(self.num_ranks):
                own_end, rank_end = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank_end, rank, self.num_ranks, self.device, folder, variables),
                    name=f"moe_engine rank {rank}",
                    daemon=True,
                )
                with environment(self._env):
                    process.start()
                rank_end.close()
                self._ranks.append((process, own_end))
            self._collect(self.num_ranks, START_TIMEOUT_S)
        except BaseException:  # a later run must not meet those that have started
            self.close()
            raise

    def _collect(
        self,
        num_ranks: int,
        timeout_s: float,
        jobs: Collection[bytes] = (),
        expect_death: Collection[int] = (),
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Send each rank its job and wait for the answers."""
        results: list[Any] = [None] * num_ranks
        errors: dict[int, BaseException] = {}
        lost = False
        waiting = {self._ranks[rank][1]: rank for rank in range(num_ranks)}
        start = time.monotonic()
        deadline = start + timeout_s
        try:
            for connection, job in zip(waiting, jobs, strict=False):
                with suppress(OSError):  # it died just now; the loop below finds that
                    connection.send_bytes(job)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for connection in cast(list[Connection], wait(list(waiting), left)):
                    rank = waiting[connection]
                    try:
                        kind, value = pickle.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        kind, value = "death", None
                    if kind == "message":
                        if on_message is not None:
                            on_message(rank, value)
                        continue
                    del waiting[connection]
                    if kind == "result":
                        results[rank] = value
                    elif kind == "error":
                        errors[rank] = _rebuild(*value)
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    else:
                        lost = True
                        if rank not in expect_death:
                            self._ranks[rank][0].join(GRACE_S)
                            text = f"died, exit code {self._ranks[rank][0].exitcode}\n"
                            text += self._stack(rank)
                            # First, as what the other ranks raise usually follows from it.
                            errors = {rank: ChildProcessError(text.strip())} | errors
                            deadline = start
            waited = time.monotonic() - start
            for rank in waiting.values():
                with suppress(OSError):  # it has just died
                    os.kill(cast(int, self._ranks[rank][0].pid), signal.SIGUSR1)
            time.sleep(STACK_S if waiting else 0)
            for rank in waiting.values():
                text = f"no answer within {waited:.1f} s\n{self._stack(rank)}"
                errors[rank] = TimeoutError(text.strip())
        finally:
            # Also after an interrupt: a rank that has not answered must not meet the next run.
            for rank in waiting.values():
                self._ranks[rank][0].kill()
            if waiting or lost:
                self.close()
        if errors:
            raise RankError(errors)
        return results

    def _stack(self, rank: int) -> str:
        """What a rank did when it crashed, or was asked."""
        with suppress(OSError):  # it had not come so far
            return Path(_stack_file(self._folders[0], rank)).read_text()
        return ""


def _context(device: str) -> Any:
    """The multiprocessing context that starts ranks in this environment. CPU ranks fork from the
    forkserver, which has imported what they need; without it that takes 3 s for each. They are
    spawned if the forkserver was started in another environment, or if "forkserver" is the default
    start method of this process, as in Python 3.14: its own processes would then fork from a server
    that was started in the environment of ranks, or ranks from one that was not."""
    global _forks_in
    # Not get_context(), which would fix the default for good.
    default = multiprocessing.get_start_method(allow_none=True)
    default = default or multiprocessing.get_all_start_methods()[0]
    read = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}
    if device == "cpu" and default != "forkserver" and _forks_in in (None, read):
        _forks_in = read
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["moe_engine", "numpy"])
        forkserver.ensure_running()
        return context
    return multiprocessing.get_context("spawn")


def _stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack.{rank}")


def _end(ranks: list[tuple[BaseProcess, Connection]], folders: list[str]) -> None:
    """End ranks: those that wait for a job do so by themselves, the others are killed."""
    for _, connection in ranks:
        connection.close()
    deadline = time.monotonic() + END_S
    for process, _ in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join(GRACE_S)
    ranks.clear()
    while folders:
        shutil.rmtree(folders.pop(), ignore_errors=True)


# --- In a rank -------------------------------------------------------------------------------


def _serve(
    connection: Connection,
    rank: int,
    num_ranks: int,
    device: str,
    folder: str,
    variables: Mapping[str, str],
) -> NoReturn:
    """Answer the pool's jobs until it goes away."""
    global _parent
    os.environ.clear()  # it may be that of the forkserver
    os.environ.update(variables)
    threading.Thread(target=_exit_with_pool, args=(folder,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    stacks = open(_stack_file(folder, rank), "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    groups: list[Any] = []  # of 1, 2 .. num_ranks ranks

    def join() -> None:
        torch.set_num_threads(1)
        num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        if num_gpus:
            torch.cuda.set_device(rank % num_gpus)
        backend = "cpu:gloo,cuda:nccl"
        if num_gpus < num_ranks:  # NCCL refuses two ranks on a GPU
            backend = "gloo"
            if num_gpus:
                stage_collectives()
        store = dist.FileStore(os.path.join(folder, "store"))
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        groups.extend(dist.new_group(list(range(size))) for size in range(1, num_ranks))
        groups.append(dist.group.WORLD)

    def work() -> Any:
        paths, data = pickle.loads(job)
        sys.path.extend(path for path in paths if path not in sys.path)
        number, size, function, args = pickle.loads(data)
        # torch numbers the groups of each process. A job on some of the ranks may have made more
        # than the others have, and the next group of all would have several names: a hang.
        set_group_count(number * MAX_GROUPS)
        return function(groups[size - 1], *args)

    with suppress(EOFError, OSError):
        connection.send_bytes(_answer(join))
        _parent = connection
        while True:
            job = connection.recv_bytes()
            connection.send_bytes(_answer(work))
    _exit(folder)


def _exit_with_pool(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _exit(folder)


def _exit(folder: str) -> NoReturn:
    with suppress(Exception):  # what libraries have made, such as the semaphore of progress bars
        util._exit_function()  # type: ignore[attr-defined]
    shutil.rmtree(folder, ignore_errors=True)  # the pool may have been killed
    os._exit(0)


def _answer(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(("result", call()))
    except BaseException as error:
        notes = {"__notes__": [traceback.format_exc()]}
        with suppress(Exception):
            answer = pickle.dumps(("error", (type(error), error.args, error.__dict__ | notes)))
            _rebuild(*pickle.loads(answer)[1])
            return answer
        plain = RuntimeError, (f"{type(error).__name__}: {error}",), notes
        return pickle.dumps(("error", plain))


def _rebuild(kind: type[BaseException], args: tuple, attributes: dict) -> BaseException:
    """Rebuild a rank's exception without pickle's `__init__(*args)`, which some cannot take."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
