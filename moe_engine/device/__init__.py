"""All device code that several kernels share, and what it shares with the host."""
