"""Triton's interpreter, made to run under NumPy 2.4 and newer, to multiply bfloat16, and to round a fused
multiply-add once."""

from __future__ import annotations


def repair() -> None:
    """Let scalars of the interpreter be range bounds (NumPy turns no array of one element into a number any more),
    products of bfloat16, which it keeps as 16-bit integers, be products of the numbers these stand for, and a fused
    multiply-add of float32 be rounded once, as on a GPU."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor
    dot = interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(t):
        if t.dtype.scalar != tl.bfloat16:
            return t
        numbers = (t.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, wide(a), wide(b), *rest)

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_dot = create_dot
