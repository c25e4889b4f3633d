"""What a call must satisfy. `check_tensors` looks at shapes and types, `check_values` at leaves and lengths.

Values are read on the CPU only. Elsewhere lengths are clamped to their tensors and never trusted, since a
look would be a synchronisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.dtypes import lookup
from tilewise.errors import DeviceError, DTypeError, OptionError, ShapeError, UnsupportedProblem, message
from tilewise.leaf_extents import check_extents
from tilewise.spec.scores import LARGEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilewise.problem import Inputs, Problem

DENSE = {"q": "(B, H, N_q, D)", "k": "(B, H_kv, N_k, D)", "v": "(B, H_kv, N_k, D_v)"}
FAR = 2**30
"""Offsets stay within this, so that a position and the distance of two positions fit int32."""
FLOAT8 = torch.float8_e4m3fn
PACKED = {"q": "(T_q, H, D)", "k": "(T_k, H_kv, D)", "v": "(T_k, H_kv, D_v)"}


def check_tensors(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Raise ShapeError, DTypeError or DeviceError unless q, k and v fit together."""
    given = {"q": q, "k": k, "v": v}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise DTypeError(f"{name} is a tensor, not {type(t).__name__}")
    check_strided(given)
    expected = PACKED if layout == "varlen" else DENSE
    rank = 3 if layout == "varlen" else 4
    if q.ndim != rank or k.ndim != rank or v.ndim != rank:
        wanted = ", ".join(f"{name} {shape}" for name, shape in expected.items())
        raise ShapeError(message(f"q, k and v have {rank} dimensions: {wanted}", given))
    if not (q.dtype == k.dtype == v.dtype):
        raise DTypeError(
            message(
                "q, k and v have one dtype", given, "Convert them, or run under torch.autocast, which does."
            )
        )
    lookup(q.dtype)
    if not (q.device == k.device == v.device):
        raise DeviceError(message("q, k and v are on one device", given))
    token, head = (0, 1) if layout == "varlen" else (2, 1)
    if layout == "dense" and not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise ShapeError(message("q, k and v have one batch size B", given))
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(message("q and k have one head size D", given))
    if k.shape[token] != v.shape[token]:
        raise ShapeError(message("k and v have one length N_k", given))
    heads, heads_kv = q.shape[head], k.shape[head]
    if heads_kv != v.shape[head]:
        raise ShapeError(message("k and v have one number of heads H_kv", given))
    if (heads % heads_kv if heads_kv else heads) != 0:
        raise ShapeError(message("H is a multiple of H_kv: each KV head serves H / H_kv query heads", given))


def check_strided(given: Mapping[str, Tensor | None]) -> None:
    """Raise UnsupportedProblem for tensors without strides: sparse, nested, or packed by another library."""
    for name, t in given.items():
        if t is None or (t.layout == torch.strided and not t.is_nested):
            continue
        if t.is_nested:
            kind, remedy = "nested", "Use tilewise.attention_varlen on its values."
        else:
            kind, remedy = str(t.layout).removeprefix("torch."), "Convert it with .to_dense()."
        raise UnsupportedProblem(f"{name} is a tensor with strides, not {kind}\n{remedy}")


def check_pools(q: Tensor, k: Tensor, v: Tensor, other: Mapping[str, Tensor | None]) -> None:
    """Raise unless q reads from these pools.

    Args:
        q: (B, H, N_q, D), or (T, H, D) where `other` has cu_seqlens_q.
        k, v: (P, H_kv, page_size, D) and (P, H_kv, page_size, D_v).
        other: block_table (B, M), seqused_q, seqused_k, leftpad_k (B,), k_scale, v_scale (H_kv,) or (P, H_kv).
    """
    for name, t in {"q": q, "k": k, "v": v}.items():
        if not isinstance(t, Tensor):
            raise DTypeError(f"{name} is a tensor, not {type(t).__name__}")
    check_strided({"q": q, "k": k, "v": v})
    packed = other["cu_seqlens_q"] is not None
    if q.ndim != (3 if packed else 4) or k.ndim != 4 or v.ndim != 4:
        shape = PACKED["q"] if packed else DENSE["q"]
        rule = f"q is {shape}; the pools are (P, H_kv, page_size, D) and (P, H_kv, page_size, D_v)"
        raise ShapeError(message(rule, {"q": q, "k": k, "v": v}))
    pools = {"k": k, "v": v}
    lookup(q.dtype)
    eighth = k.dtype == FLOAT8 and q.dtype in (torch.float16, torch.bfloat16)
    if k.dtype != v.dtype or not (k.dtype == q.dtype or eighth):
        rule = "the cache has q's dtype, or float8_e4m3fn with q in float16 or bfloat16"
        raise DTypeError(message(rule, {"q": q, **pools}))
    if eighth and (k.requires_grad or v.requires_grad):
        raise OptionError("float8 is for storage: keys and values in it have no gradients")
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[-1] or not k.shape[2]:
        rule = "k and v have the same pages, heads and page size (at least 1), and k has q's head size"
        raise ShapeError(message(rule, {"q": q, **pools}))
    heads, heads_kv = q.shape[-2 if packed else 1], k.shape[1]
    if (heads % heads_kv if heads_kv else heads) != 0:
        raise ShapeError(
            message("H is a multiple of H_kv: each KV head serves H / H_kv query heads", {"q": q, **pools})
        )
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (k, v)):
        raise ShapeError(message("a key's entries lie next to each other: the last stride is 1", pools))
    _check_pool_tables(q, pools, other)


def _check_pool_tables(q: Tensor, pools: Mapping[str, Tensor], other: Mapping[str, Tensor | None]) -> None:
    cu_seqlens, table = other["cu_seqlens_q"], other["block_table"]
    if cu_seqlens is not None:
        check_int_tensor("cu_seqlens_q", cu_seqlens)
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ShapeError(message("cu_seqlens_q has shape (B + 1,)", {"cu_seqlens_q": cu_seqlens}))
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name in ("seqused_q", "seqused_k", "leftpad_k"):
        t = other[name]
        if t is not None:
            check_int_tensor(name, t)
            if t.ndim != 1 or t.shape[0] != batch:
                raise ShapeError(message(f"{name} has one number per sequence, ({batch},)", {name: t}))
    if table is None:
        if pools["k"].shape[0] < batch:
            raise ShapeError(
                message("without block_table sequence b is page b of the pools", {"q": q, **pools})
            )
    else:
        if table.is_floating_point() or table.dtype == torch.bool:
            raise DTypeError(message("block_table holds integers", {"block_table": table}))
        if table.ndim != 2 or table.shape[0] != batch:
            raise ShapeError(
                message(f"block_table has one row per sequence, ({batch}, M)", {"block_table": table})
            )
    pages, heads_kv = pools["k"].shape[:2]
    for name in ("k_scale", "v_scale"):
        t = other[name]
        if t is None:
            continue
        if not t.is_floating_point():
            raise DTypeError(message(f"{name} holds factors", {name: t}))
        if tuple(t.shape) not in ((heads_kv,), (pages, heads_kv)):
            rule = f"{name} has shape (H_kv,) = ({heads_kv},) or (P, H_kv) = ({pages}, {heads_kv})"
            raise ShapeError(message(rule, {name: t, **pools}))
    check_leaves(q, {**pools, **{name: t for name, t in other.items() if isinstance(t, Tensor)}})


def check_leaves(q: Tensor, leaves: Mapping[str, Tensor | None]) -> None:
    """Raise DeviceError unless every tensor of the call is on q's device, UnsupportedProblem for sparse ones."""
    check_strided(leaves)
    if q.device.type == "meta":
        return  # shapes only, as `explain` and fake tensors have them
    for name, leaf in leaves.items():
        if leaf is not None and leaf.device != q.device:
            raise DeviceError(
                message(f"{name} is on q's device", {"q": q, name: leaf}, f"Move it: {name}.to(q.device).")
            )


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    """Raise unless sink is one floating-point logit per query head."""
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        raise DTypeError(f"sink is a tensor, not {type(sink).__name__}")
    if not sink.is_floating_point():
        raise DTypeError(message("sink holds floating-point logits", {"sink": sink}))
    if sink.ndim != 1 or sink.shape[0] != q.shape[1]:
        raise ShapeError(message("sink has one logit per query head, shape (H,)", {"sink": sink, "q": q}))


def check_dropout(p: float) -> float:
    """p as a float.  Raises OptionError outside [0, 1]."""
    if (
        isinstance(p, (bool, Tensor))
        or not isinstance(p, (int, float, torch.SymFloat))
        or not 0.0 <= p <= 1.0
    ):
        raise OptionError(f"dropout is a probability from 0 to 1, not {p!r}")
    return p


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor of q.k; None is D^-1/2."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    if (
        isinstance(scale, Tensor)
        or not isinstance(scale, (int, float, torch.SymFloat))
        or not -LARGEST < scale < LARGEST
    ):
        raise OptionError(
            f"scale is a finite number, not {scale!r}\nA learned scale is a factor of q, or a score term: "
            "tilewise.custom_score(lambda s, t: s * t, tensor)."
        )
    return float(scale)


def check_h_offset(h_offset: object) -> int:
    """The number of the first head.  Raises OptionError unless it is an int that fits int32."""
    if (
        isinstance(h_offset, bool)
        or not isinstance(h_offset, (int, torch.SymInt))
        or not -(2**31) < h_offset < 2**31
    ):
        raise OptionError(f"h_offset is an int within int32, not {h_offset!r}")
    return h_offset  # type: ignore[return-value]  # a SymInt passes as an int


def check_offset(name: str, value: int | torch.SymInt) -> None:
    """Raise OptionError for a position offset beyond FAR."""
    if not -FAR <= value <= FAR:
        raise OptionError(
            f"{name} is {value}, and offsets stay within +-2**30: positions and their distances are int32"
        )


def check_int_tensor(name: str, t: Tensor, length: int | None = None) -> None:
    """Raise unless t is a 1-d (or one-element) integer tensor, of the given length if one is given."""
    if not isinstance(t, Tensor):
        raise DTypeError(f"{name} is an integer tensor, not {type(t).__name__}")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise DTypeError(message(f"{name} holds integers", {name: t}))
    if t.ndim > 1 or (length is not None and t.numel() not in (1, length)):
        size = "B" if length is None else length
        raise ShapeError(message(f"{name} has shape ({size},)", {name: t}))


# ---- values --------------------------------------------------------------------------------------------------


def _longest(cu_seqlens: Tensor | None) -> int | None:
    """Longest sequence of a packed call, if that can be seen without a sync."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return None
    return max(_lengths(cu_seqlens), default=0)


def _lengths(cu_seqlens: Tensor) -> list[int]:
    edges = cu_seqlens.tolist()
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def check_cu_seqlens(name: str, t: Tensor | None, tokens: str, total: int) -> None:
    """Raise ShapeError for edges of sequences that fall or leave their `total` tokens; looked at on the CPU."""
    if t is None or t.device.type != "cpu":
        return
    edges = t.tolist()
    if edges[0] < 0 or edges[-1] > total or any(n < 0 for n in _lengths(t)):
        raise ShapeError(
            f"{name} rises from 0 or more to at most {tokens} = {total}\n"
            f"  {name} : {edges[:12]}{'...' if len(edges) > 12 else ''}"
        )


def _check_used(name: str, used: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if used is None or cu_seqlens is None or used.device.type != "cpu" or cu_seqlens.device.type != "cpu":
        return
    for b, (u, n) in enumerate(zip(used.tolist(), _lengths(cu_seqlens), strict=True)):
        if not 0 <= u <= n:
            raise ShapeError(f"{name} is from 0 to the sequence's length\n  sequence {b}: {u} used of {n}")


def can_look(t: Tensor) -> bool:
    """Whether a tensor's numbers are there to be read, without a synchronisation and not by somebody who records."""
    plain = type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _most(lengths: Tensor | None, capacity: int) -> int | None:
    """Longest sequence of a cached call, if that can be seen without a sync."""
    if lengths is None:
        return capacity
    return max(lengths.tolist(), default=0) if lengths.device.type == "cpu" else None


def check_lengths(problem: Problem, inputs: Inputs) -> None:
    """Raise ShapeError for lengths and pages of a cached call that leave their tensors; looked at on the CPU."""
    if inputs.k.device.type != "cpu":
        return
    capacity, rows = problem.shape.seqlen_k, problem.shape.seqlen_q
    limits = {"seqused_k": (inputs.seqused_k, capacity), "leftpad_k": (inputs.leftpad_k, capacity)}
    if problem.options.layout == "dense":
        limits["seqused_q"] = (inputs.seqused_q, rows)
    for name, (lengths, most) in limits.items():
        for b, n in enumerate(() if lengths is None else lengths.tolist()):
            if not 0 <= n <= most:
                raise ShapeError(f"{name} is from 0 to {most}\n  sequence {b}: {n}")
    if inputs.block_table is not None:
        spans = (inputs.leftpad_k, inputs.seqused_k)
        check_pages(inputs.block_table, problem.page_size, inputs.k.shape[0], spans)


def check_pages(
    table: Tensor, page_size: int, pages: int, spans: tuple[Tensor | None, Tensor | None]
) -> None:
    """Raise ShapeError unless every page that holds keys from spans[0] to spans[1] exists."""
    first = torch.arange(table.shape[1]) * page_size
    wrong = (table < 0) | (table >= pages)
    if spans[0] is not None:
        wrong = wrong & (first + page_size > spans[0][:, None])
    if spans[1] is not None:
        wrong = wrong & (first < spans[1][:, None])
    if bool(wrong.any()):
        b, page = wrong.nonzero()[0].tolist()
        raise ShapeError(f"page {page} of sequence {b} is {int(table[b, page])}, and there are {pages} pages")


def check_values(problem: Problem, inputs: Inputs) -> None:
    """Raise ShapeError for lengths that leave their tensor and for leaves that do not fit the call."""
    shape = problem.shape
    longest_q: int | None = shape.seqlen_q
    longest_k: int | None = shape.seqlen_k
    if problem.options.layout == "varlen":
        check_cu_seqlens("cu_seqlens_q", inputs.cu_seqlens_q, "T_q", shape.seqlen_q)
        check_cu_seqlens("cu_seqlens_k", inputs.cu_seqlens_k, "T_k", shape.seqlen_k)
        _check_used("seqused_q", inputs.seqused_q, inputs.cu_seqlens_q)
        _check_used("seqused_k", inputs.seqused_k, inputs.cu_seqlens_k)
    if problem.options.pages:
        check_lengths(problem, inputs)
    for name, offset in (("q_offset", inputs.q_offset), ("k_offset", inputs.k_offset)):
        if isinstance(offset, Tensor) and can_look(offset):
            for value in offset.tolist():
                check_offset(name, value)
    if not inputs.leaves:
        return
    if problem.options.layout == "varlen":
        longest_q = _longest(inputs.cu_seqlens_q)
        longest_k = _longest(inputs.cu_seqlens_k)
    if problem.options.pages:
        longest_k = _most(inputs.seqused_k, shape.seqlen_k)
    sizes = {
        "b": shape.batch,
        "h": shape.num_heads_q,
        "g": shape.num_heads_kv,
        "i": longest_q,
        "j": longest_k,
    }
    check_extents(problem, inputs, sizes)
