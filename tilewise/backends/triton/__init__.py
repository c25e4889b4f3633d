"""The backend `triton`: every feature of the spec on GPUs, in kernels printed from the spec's trees."""
