"""Arithmetic of sizes that all layers share."""

FLAG_BYTES = 8
LINE_BYTES = 128
"""Rows begin at multiples of this, as the memory's lines do: gathered elsewhere, a GEMM's rows take
two lines where one would do, and DeepSeek-V3's up-projection 40% longer."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Smallest power of 2 that is at least `value`, 1 for 0. `triton.next_power_of_2` is made for
    kernels, and on the host takes microseconds, of which a call would need tens."""
    return 1 << max(0, value - 1).bit_length()
