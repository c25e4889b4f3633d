"""torch.nn.attention.flex_attention without torch.compile, on every device, with a backward.

score_mod and mask_mod are traced into expressions (see `flex_trace`); tensors they close over get gradients; lse is
-inf where nothing is visible. torch's own BlockMask objects are taken, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.api import attention
from tilewise.compat.flex_block_mask import BLOCK, BlockMask, check_sizes, noop_mask
from tilewise.compat.flex_trace import Mod, sizes_of, trace_mod
from tilewise.errors import OptionError, ShapeError, UnsupportedProblem, message
from tilewise.spec.scores import ScoreTerm

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "ScoreMod", "and_masks", "create_block_mask", "create_mask",
    "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip

Function = Callable[..., Any]


class ScoreMod:
    """A score_mod that was traced where it was made; still the function that it was, when it is called.

    Inside torch.compile such an object joins the graph, tensors and numbers that the function reaches included, as a
    BlockMask made outside does; a plain function is traced at each call and interrupts the graph.

    Raises SpecError, with the line, for a function that is no expression.
    """

    def __init__(self, score_mod: Function) -> None:
        self.score_mod = score_mod
        self.traced: Mod = trace_mod(score_mod, mask=False)

    def __call__(self, *args: Any) -> Any:
        return self.score_mod(*args)

    def __repr__(self) -> str:
        return f"ScoreMod({getattr(self.score_mod, '__name__', self.score_mod)})"


class AuxRequest(NamedTuple):
    """What flex_attention returns beside out. max_scores is refused."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was requested; lse is (B, H, N_q), natural log."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: Any = None, backend: str = "auto",
) -> Any:  # fmt: skip
    """Attention whose scores go through score_mod and whose pairs are chosen by block_mask.

    Args:
        query: (B, H, N_q, D). key: (B, H_kv, N_k, D). value: (B, H_kv, N_k, D_v). key and value may have B = 1.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, after scale, in float32; q_idx and kv_idx count rows and
            columns. -inf hides the pair. A `ScoreMod` holds one that is traced already.
        block_mask: of `create_block_mask` or torch's; made for these lengths.
        scale: default D^-1/2. enable_gqa: H_kv may divide H.
        return_lse, return_aux: also return lse, or AuxOutput(lse).
        kernel_options: for torch's kernels; ignored, with a warning.
        backend: Tilewise's.

    Returns: out (B, H, N_q, D_v), (out, lse), or (out, AuxOutput).
    Raises: SpecError, with the line, for functions that are no expression; ShapeError; UnsupportedProblem for
        max_scores.
    """
    if return_lse and return_aux is not None:
        raise OptionError(
            "return_lse and return_aux exclude each other\nGive return_aux=AuxRequest(lse=True)."
        )
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedProblem("the rows' largest scores are not returned\nGive AuxRequest(lse=True).")
    if kernel_options:
        warnings.warn(
            f"kernel_options {sorted(kernel_options)} are for torch's kernels, and change nothing here",
            stacklevel=2,
        )
    key, value = _same_batch(query, key, value, enable_gqa)
    mask, sizes = None, sizes_of(query, key)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            block_mask = _theirs(block_mask)
        check_sizes(block_mask, query, key)
        mask = block_mask.mask(sizes)
    scores = []
    if score_mod is not None:
        mod = score_mod.traced if isinstance(score_mod, ScoreMod) else trace_mod(score_mod, mask=False)
        scores = [ScoreTerm(mod.fitted(sizes))]
    out, lse = attention(
        query, key, value, mask=mask, scores=scores, scale=scale, return_lse=True, backend=backend
    )
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _theirs(block_mask: Any) -> BlockMask:
    """torch's BlockMask as ours.  Raises OptionError for anything else."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise OptionError(
            f"block_mask is a BlockMask, not a {type(block_mask).__name__}\n"
            "Give create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
        )
    return BlockMask.from_torch(block_mask)


def _same_batch(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """key and value with the batch of query, as views."""
    given = {"query": query, "key": key, "value": value}
    if any(t.is_nested for t in given.values()):
        raise UnsupportedProblem(
            "nested tensors are not read\nUse tilewise.attention_varlen on their values."
        )
    if any(t.ndim != 4 for t in given.values()):
        raise ShapeError(message("query, key and value are (B, H, N, D)", given))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(
            message(
                "query and key have one number of heads", given, "Give enable_gqa=True for grouped heads."
            )
        )
    if key.shape[0] == value.shape[0] == 1:
        return key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    return key, value


def create_block_mask(
    mask_mod: Function, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK, _compile: bool = False, separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """A BlockMask of mask_mod(b, h, q_idx, kv_idx), True = may attend.

    The function is traced here, and refused here if it is no expression. B or H None: one for all. Nothing of size
    Q_LEN x KV_LEN is made. BLOCK_SIZE and separate_full_blocks shape the block lists for those who read them;
    _compile, compute_dq_write_order and dq_kv_order are accepted and change nothing.

    Raises: SpecError with the reason and the line; ShapeError for negative sizes.
    """
    sizes = (1 if B is None else B, 1 if H is None else H)
    if min(*sizes, Q_LEN, KV_LEN) < 0:
        raise ShapeError(f"sizes are not negative: B, H, Q_LEN, KV_LEN = {(*sizes, Q_LEN, KV_LEN)}")
    blocks = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    if len(blocks) != 2 or not all(isinstance(size, int) and size > 0 for size in blocks):
        raise OptionError(f"BLOCK_SIZE is a positive int, or a pair of them, not {BLOCK_SIZE!r}")
    made = BlockMask(
        mask_mod, sizes, (Q_LEN, KV_LEN), blocks, device, separate_full_blocks=separate_full_blocks
    )
    made.traced  # noqa: B018 (raises here rather than in the first attention call)
    return made


def create_mask(
    mod_fn: Function, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Tensor:
    """The mask itself, bool (B, H, Q_LEN, KV_LEN): quadratic memory, for inspection. Takes mask_mod functions."""
    whole = create_block_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)
    return whole.rows(0, Q_LEN).contiguous()


def and_masks(*mask_mods: Function) -> Function:
    """A mask_mod that is true where all are."""
    return _joined(mask_mods, lambda a, b: a & b, True)


def or_masks(*mask_mods: Function) -> Function:
    """A mask_mod that is true where one is."""
    return _joined(mask_mods, lambda a, b: a | b, False)


def _joined(mask_mods: tuple[Function, ...], join: Function, start: bool) -> Function:
    if not all(callable(fn) for fn in mask_mods):
        raise OptionError(f"mask_mods are functions, not {mask_mods}")

    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = start
        for fn in mask_mods:
            result = join(result, fn(b, h, q_idx, kv_idx))
        return result

    return joined
