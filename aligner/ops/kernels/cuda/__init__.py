"""Kernels in Triton, and the torch operations that call them. Nothing here is imported where there is no GPU."""
