"""The CPU backend: tile loops in Numba, matrix microkernels and vector words emitted as LLVM IR from Python.

`isa` what the processor can do; `words` vector words on an LLVM builder; `micro` the microkernels, as Numba
intrinsics; `loops`, `forward_kernel`, `backward_kernel` the tile loops; `fold` the spec's trees printed into vector
words; `machine_code` compiles both and keeps the objects on disk; `pool` runs them on torch's threads;
`launch` and `backend` turn a Problem into calls. Nothing here is imported by `import tilewise`.
"""
