"""From the kernels' sums to the gradients of leaves: see `leaf_sums` for who sums what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tilewise.backends.protocol import Gradients
from tilewise.backends.triton.leaf_sums import Places, Sites
from tilewise.backends.triton.source import derivative_roots

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.protocol import Needs
    from tilewise.backends.triton.launch_backward import Call
    from tilewise.problem import Inputs


class LeafGradients:
    """Sums of the sites, gathered into the gradients of their leaves."""

    def __init__(self, call: Call, sites: Sites, needs: Needs) -> None:
        self.call, self.sites = call, sites
        self.nodes = derivative_roots(call.problem.spec)[1]
        self.places = Places(call.problem, call.inputs)
        leaves = call.inputs.leaves
        self.pair_slot = int(self.nodes[sites.pair].value) if sites.pair >= 0 else -1  # type: ignore[arg-type]
        self.pair_target = torch.zeros_like(leaves[self.pair_slot]) if sites.pair >= 0 else None
        self.totals: list[Tensor | None] = [
            torch.zeros(leaf.shape, dtype=torch.float32, device=leaf.device)
            if need and n != self.pair_slot
            else None
            for n, (leaf, need) in enumerate(zip(leaves, needs.leaves, strict=True))
        ]
        self.types = [leaf.dtype for leaf in leaves]

    def _total(self, site: int) -> Tensor:
        found = self.totals[int(self.nodes[site].value)]  # type: ignore[arg-type]
        assert found is not None  # every sorted site belongs to a wanted leaf
        return found

    def add_tokens(self, sites: tuple[int, ...], sums: Tensor, rows: bool) -> None:
        """Row or column sums (sites, B, H, tokens)."""
        if sites:
            variables = self.places.tokens(rows)
            for n, site in enumerate(sites):
                self.places.add(self.nodes[site], sums[n].unsqueeze(-1), self._total(site), variables)

    def add_others(self) -> None:
        """The sites that have kernels of their own."""
        call, s = self.call, self.call.problem.shape
        for site in self.sites.scatters:
            total = self._total(site)
            strides = (*total.stride(), 0, 0, 0, 0)[:4]
            call.site_gradient(site, "scatter", total, strides)
        for site in self.sites.pairs:
            total = self._total(site)
            names = [str(a.value) for a in self.nodes[site].args]
            order = [names.index(n) for n in ("b", "h", "i", "j") if n in names]
            view = total.permute(order)
            for axis, name in enumerate(("b", "h", "i", "j")):
                if name not in names:
                    view = view.unsqueeze(axis)
            part = torch.zeros_like(view)
            call.site_gradient(site, "pairs", part, part.stride())
            view += part
        for site in self.sites.diagonals:
            size = call.tiles.prepare.block_m
            row_tiles, key_tiles = -(-s.seqlen_q // size), -(-s.seqlen_k // size)
            lines = row_tiles + key_tiles - 1
            parts = call.inputs.q.new_empty((s.batch, s.num_heads_q, lines, 2, size), dtype=torch.float32)
            call.site_gradient(site, "diagonal", parts, (0, 0, 0, 0))
            # Diagonals below a tile's own are those at or above the own of the tile before.
            sums = torch.zeros(
                (s.batch, s.num_heads_q, lines + 1, size), dtype=torch.float32, device=parts.device
            )
            sums[:, :, 1:] += parts[:, :, :, 0]
            sums[:, :, :-1] += parts[:, :, :, 1]
            variables = self.places.diagonals(-row_tiles * size, (lines + 1) * size)
            self.places.add(self.nodes[site], sums.flatten(2).unsqueeze(-1), self._total(site), variables)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Gradients in the leaves' types."""
        found = [None if t is None else t.to(dtype) for t, dtype in zip(self.totals, self.types, strict=True)]
        if self.pair_target is not None:
            found[self.pair_slot] = self.pair_target
        return tuple(found)


def sink_gradient(call: Call, slopes: Tensor | None) -> Tensor:
    """The sink is a key with value 0: ds = -p delta, summed over rows and batch entries.

    slopes (B, H, N): each row's sum of ds over all of its keys. All slopes of a row, the sink's among them, add up to
    dlse; from that the rounding of out, which is in `delta`, is taken out again. None where not all keys are there.
    """
    s, sink = call.problem.shape, call.inputs.sink
    shape = (1 if call.varlen else s.batch, s.num_heads_q, s.seqlen_q)
    m, low, delta = (t.view(*shape[:2], call.pitch)[:, :, : s.seqlen_q] for t in call.rows)
    logit = sink.detach().to(torch.float32).view(1, -1, 1)  # type: ignore[union-attr]
    log2e = math.log2(math.e)
    # Where an infinite sink is all a row has, m is infinite, too, and its weight 1; beside keys m is NaN.
    below = torch.where((logit == math.inf) & (m == math.inf), 0.0, logit - m)
    p = torch.where(logit == -math.inf, 0.0, torch.exp2(below * log2e - low))
    if slopes is not None:
        delta = (1 - p) * delta + slopes
        if call.dlse is not None:
            delta = delta - call.dlse.to(torch.float32).reshape(shape)
    return torch.where(p == 0, 0.0, -p * delta).sum((0, 2)).to(sink.dtype)  # type: ignore[union-attr]


def no_pairs(inputs: Inputs, lse: Tensor, dlse: Tensor | None, needs: Needs) -> Gradients:
    """No pair: every gradient is 0, except the sink's where its own weight is all there is."""
    zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.q, inputs.k, inputs.v)]
    leaves = tuple(
        torch.zeros_like(x) if need else None for x, need in zip(inputs.leaves, needs.leaves, strict=True)
    )
    sink = None
    if needs.sink and inputs.sink is not None:
        sink = torch.zeros_like(inputs.sink)
        if dlse is not None and dlse.numel():
            over = (1,) if lse.ndim == 2 else (0, 2)
            sink = torch.where(lse == -math.inf, 0.0, dlse).sum(over).to(sink.dtype)
    return Gradients(*zeros, leaves, sink)
