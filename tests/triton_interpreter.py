"""Triton's interpreter, made to run under NumPy 2.4 and newer, and to multiply bfloat16."""

from __future__ import annotations


def repair() -> None:
    """Let scalars of the interpreter be range bounds (NumPy turns no array of one element into a number any more),
    and products of bfloat16, which it keeps as 16-bit integers, be products of the numbers these stand for."""
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

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
