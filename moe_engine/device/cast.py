"""Rows in e4m3, with a scale for each 128 columns."""

import triton.language as tl

from .lang import cast_e4m3, device_function


@device_function
def e4m3_scale(amax):
    """(scale, its inverse) of fp32 values, the largest of which in magnitude counts as 1e-4 at
    least, also where all are NaN. The scale of infinity is infinity, and its inverse 0: as e4m3
    these values are NaN, and others are 0, which the scale makes NaN."""
    amax = tl.where(amax > 1e-4, amax, 1e-4)
    largest = tl.where(amax > 0, 448.0, 448.0)  # makes a block like `amax`, in Gluon too
    return amax * (1.0 / 448.0), tl.div_rn(largest, amax)


@device_function
def cast_row(row, FORMAT: tl.constexpr):
    """(e4m3 bits [B], scales int32 [B / 128]) of a row. The scale of 128 columns is amax / 448,
    where amax counts as at least 1e-4; for "rounded" and "ue8m0" it is the next power of 2 from
    there. An int32 has the bits of a float32, or for "ue8m0" four exponents + 127, 255 for a scale
    that is no number. A NaN stays NaN, and does not count for the scale."""
    values = row.to(tl.float32).reshape(row.shape[0] // 128, 128)
    scale, inverse = e4m3_scale(tl.max(tl.abs(values), 1))
    if FORMAT == "fp8":
        scales = scale.to(tl.int32, bitcast=True)
    else:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        inverse = (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)
        scales = exponent << 23
        if FORMAT == "ue8m0":
            byte = tl.arange(0, 4)[None, :] * 8
            scales = tl.sum(exponent.reshape(scale.shape[0] // 4, 4) << byte, 1)
    return cast_e4m3(values * inverse[:, None]).reshape(row.shape[0]), scales
