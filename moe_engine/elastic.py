"""ElasticBuffer: DeepEP V2's calls, on the engine of `Buffer`."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from . import checks
from .agreement import MAX_BYTES, Group
from .elastic_checks import check_flags, check_most_tokens
from .elastic_verbs import ElasticVerbs
from .engines.base import NUM_SMS
from .engines.kernel_verbs import KernelVerbs
from .errors import BackendError, MoeEngineError
from .options import MAX_NUM_SMS, Options, elastic_size_hint
from .streams import EventHandle

DEFAULT_TIMEOUT_S = 100
"""The default of num_gpu_timeout_secs, which stands for MOE_ENGINE_TIMEOUT_S."""


class ElasticBuffer(ElasticVerbs):
    """Expert-parallel dispatch and combine over the ranks of `group`, with DeepEP V2's interface.

    Every rank makes the same calls in the same order, as on a `Buffer`. T may differ per rank and
    be 0. Rows are bf16, or in dispatch e4m3 with scales.

    Its memory is `num_bytes`, or else what num_max_tokens_per_rank tokens of `hidden` columns and
    num_topk experts need (0: 32 experts). With num_max_tokens_per_rank it never grows; with
    num_bytes alone it grows like a `Buffer` in DeepEP's form.

    num_gpu_timeout_secs: the deadline of every wait; 100 stands for MOE_ENGINE_TIMEOUT_S.
    allow_multiple_reduction: the sums of expanded rows that a rank makes are rounded to bf16 before
    they return; without it they return as fp32, in twice the bytes, and a result is rounded once.
    Likewise the sums that nodes make of the rows of their ranks, where there are several.
    allow_hybrid_mode: whether the logical domains are those of nodes; without it all ranks are in
    one. Rows go the same way: once to each node, where they are forwarded.
    deterministic, prefer_overlap_with_compute, sl_idx, num_cpu_timeout_secs and explicitly_destroy
    change nothing: results always have the same bits, and the host waits under the same deadline as
    the GPU.

    Attributes are DeepEP's: rank_idx, num_ranks, num_bytes, num_max_tokens_per_rank,
    num_scaleout_ranks and num_scaleup_ranks (see `get_logical_domain_size`), num_rdma_ranks and
    num_nvlink_ranks (see `get_physical_domain_size`), scaleout_rank_idx and scaleup_rank_idx (this
    rank's place among them), num_allocated_qps (there are no QPs), runtime (the engine, None after
    `destroy`), nccl_comm_handle (None: NCCL is not used).

    Raises ShapeError where neither memory nor tokens are given, CapacityError without room for a
    single row, BackendError for num_cpu_bytes and where GPUs cannot map each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
    ):
        options: Any
        try:
            check_flags(
                use_fp8_dispatch=use_fp8_dispatch,
                deterministic=deterministic,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
                prefer_overlap_with_compute=prefer_overlap_with_compute,
                explicitly_destroy=explicitly_destroy,
            )
            checks.check_at_least(0, sl_idx=sl_idx, num_allocated_qps=num_allocated_qps)
            checks.check_at_least(1, num_cpu_timeout_secs=num_cpu_timeout_secs)
            checks.check_at_least(1, num_gpu_timeout_secs=num_gpu_timeout_secs)
            check_most_tokens(num_max_tokens_per_rank)
            if checks.check_int("num_cpu_bytes", num_cpu_bytes, 0):
                raise BackendError(
                    f"num_cpu_bytes is {num_cpu_bytes}; only DeepEP's engram uses memory of the "
                    "host, and it is not there yet. Pass 0."
                )
            if num_bytes is not None:
                num_bytes = checks.check_int("num_bytes", num_bytes, 0, MAX_BYTES)
            else:
                shape = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
                num_bytes = elastic_size_hint(
                    Group.of(group).size, *shape, allow_multiple_reduction
                )
            self._check_arguments()
            timeout_s = None if num_gpu_timeout_secs == DEFAULT_TIMEOUT_S else num_gpu_timeout_secs
            options = Options(max_tokens=num_max_tokens_per_rank or None, timeout_s=timeout_s)
        except MoeEngineError as problem:  # which all ranks raise, where they meet
            options, num_bytes = problem, 0
        super().__init__(group, num_bytes, explicitly_destroy=explicitly_destroy, options=options)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.rank_idx, self.num_ranks = self.rank, self.group_size
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or (65 if allow_hybrid_mode else 17)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank, self.num_scaleup_ranks)
        self.nccl_comm_handle = None

    def _check_arguments(self) -> None:
        """Refuse further arguments, where a subclass has some; all ranks raise what this raises."""

    @property
    def runtime(self) -> KernelVerbs | None:
        """What makes the calls; None after `destroy`."""
        assert self._engine is None or isinstance(self._engine, KernelVerbs)
        return self._engine

    # --- Configuration -----------------------------------------------------------------------

    @staticmethod
    def capture() -> EventHandle:
        """The end of what the current stream holds by now. (`Buffer.capture` wraps it in an
        EventOverlap, as DeepEP V1 does.)"""
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of memory per rank for so many tokens, by the formula of `Buffer.size_hint`, as a
        multiple of 2 MiB. num_topk 0 stands for 32."""
        check_flags(
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )
        shape = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        return elastic_size_hint(Group.of(group).size, *shape, allow_multiple_reduction)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes that a network connects, ranks of each)."""
        return self.num_nodes, self.group_size // self.num_nodes

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): nodes, ranks of each; (1, R) without hybrid mode."""
        whole = 1, self.group_size
        return self.get_physical_domain_size() if self.allow_hybrid_mode else whole

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many programs communicate in a call unless it says otherwise: 20, as in a `Buffer`.

        DeepEP computes a number from these bandwidths for its own kernels. Here ten programs fill
        the link, whatever the routing, and the others copy or add up meanwhile.
        """
        checks.check_experts(num_experts, self.num_ranks)
        checks.check_at_least(1, num_topk=num_topk)
        most = self.num_scaleout_ranks if self.num_scaleout_ranks > 1 else 0
        checks.check_int("num_scaleout_topk", num_scaleout_topk, 0, most)
        return NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What DeepEP gives for calls of num_sms programs, at most num_allocated_qps. No call uses
        a QP here."""
        num_sms = checks.check_int("num_sms", num_sms, 1, MAX_NUM_SMS)
        num_qps = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(num_qps, self.num_allocated_qps)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """A call of DeepEP's `ElasticBuffer` that this one does not have."""
    raise BackendError(
        f"ElasticBuffer.{name} is not there yet: this version has dispatch, combine and barrier."
    )


for _name in (
    *("engram_write", "engram_fetch", "get_engram_storage_size_hint"),
    *("pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint"),
    *("create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config"),
    *("agrs_get_inplace_tensor", "all_gather", "get_agrs_buffer_size_hint"),
    "get_agrs_num_max_session_bytes",
):
    setattr(ElasticBuffer, _name, staticmethod(partial(_refuse, _name)))
