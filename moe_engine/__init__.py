"""moe_engine: a mixture-of-experts communication engine in stock torch and Triton.

Letters used in names and shapes throughout:
T tokens per rank, H hidden, I expert intermediate, E experts, K top-k, R ranks,
L local experts (E / R), N received rows, S slot.
"""

__version__ = "0.1.0"
