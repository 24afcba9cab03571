"""What a low-latency call was begun with: fields that each rank tells all others, to compare.

They travel as words of `counts` (`device.ring.count_at`), each with the call's epoch, so that
nothing waits for them that waits for rows.
"""

import triton
import triton.language as tl

from .context import PHASE_FIELDS, REPORT_OURS, REPORT_THEIRS
from .lang import device_function, report_failure, report_pointer
from .ring import COUNT_BITS, COUNT_MASK, FIELDS


@triton.constexpr_function
def is_cast(row_format):
    """Whether rows are cast to e4m3 on their way, or travel as they are: "bf16" and "fp32"."""
    return row_format in ("fp8", "rounded", "ue8m0")


@triton.constexpr_function
def item_bytes(row_format, word_bytes):
    """Bytes of an item of a row on its way; in a combine, without a format, those of a word."""
    if row_format is None:
        return word_bytes
    return 4 if row_format == "fp32" else 2 if row_format == "bf16" else 1


@device_function
def num_scales(num_vecs, FORMAT: tl.constexpr):
    """4-byte words of scales of a row of `num_vecs` vectors, of 4 columns each if it was cast."""
    words = num_vecs * 0
    if FORMAT == "ue8m0":
        words = num_vecs // 128
    elif is_cast(FORMAT):
        words = num_vecs // 32
    return words


@device_function
def call_fields(field, num_tokens, dispatched, rows, FIXED: tl.constexpr):
    """Words `field` (a block) of 16 bits each: the tokens of a rank, then what must be the same on
    all, see `device_context.low_latency_fields`. The last: words of scales, or in a combine
    `dispatched`, the epoch of the handle's dispatch."""
    WORD_BYTES: tl.constexpr = FIXED.WORD.primitive_bitwidth // 8
    row_bytes = rows.num_vecs * WORD_BYTES
    last = num_scales(rows.num_vecs, FIXED.FORMAT)
    if FIXED.FORMAT is None:
        last = (dispatched & COUNT_MASK).to(tl.int32)
    fields = tl.where(field == 0, num_tokens, tl.where(field == 1, rows.max_tokens, 0))
    fields = tl.where(field == 2, row_bytes & COUNT_MASK, fields)
    fields = tl.where(field == 3, row_bytes >> COUNT_BITS, fields)
    fields = tl.where(field == 4, FIXED.NUM_TOPK, tl.where(field == 5, FIXED.NUM_EXPERTS, fields))
    mixed: tl.constexpr = FIXED.KIND * 16 + item_bytes(FIXED.FORMAT, WORD_BYTES)
    fields = tl.where(field == 6, mixed, fields)
    return tl.where(field == 7, last, fields)


@device_function
def report_fields(other, theirs, ours, words, slot, context):
    """Tell the host that rank `other` began another call than this one: the fields of both stand
    first among `words` (blocks)."""
    report = report_pointer(context)
    tl.store(report + REPORT_THEIRS + words, theirs.to(tl.int64), mask=words < FIELDS)
    tl.store(report + REPORT_OURS + words, ours.to(tl.int64), mask=words < FIELDS)
    report_failure(other, slot.epoch, context, PHASE_FIELDS)
