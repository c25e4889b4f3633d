"""Triton's interpreter, made to run under NumPy 2.4 and newer, which turns no array of one element into a number."""

from __future__ import annotations


def repair() -> None:
    """Let scalars of the interpreter be range bounds again. No effect where they are."""
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
