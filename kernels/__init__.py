"""GPU kernels of rft: one file per op, reached as `rft.kernels`. Imports torch and triton, nothing of rft."""
