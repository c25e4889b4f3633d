"""The backend `hopper`: Gluon kernels for compute capability 9.0, built on the printer and launch layer of `triton`."""
