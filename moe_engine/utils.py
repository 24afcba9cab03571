"""Arithmetic of sizes that all layers share."""

FLAG_BYTES = 8
LINE_BYTES = 128
"""Rows begin at multiples of this, as the memory's lines do. A GEMM that gathers rows which begin
elsewhere reads two lines where one would do; DeepSeek-V3's up-projection took 40% longer so."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Smallest power of 2 that is at least `value`, 1 for 0. `triton.next_power_of_2` is made for
    kernels: on the host it takes microseconds, and a call needs tens of them."""
    return 1 << max(0, value - 1).bit_length()
