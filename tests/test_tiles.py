"""Tile classes: sound for every tree, exact for the masks whose form allows it."""

from __future__ import annotations

import pytest
import torch
from expression_strategies import calls, tile_slices, trees
from hypothesis import event, given
from hypothesis import strategies as st

from examples import examples
from tilewise.spec import expression as ex
from tilewise.spec import masks
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.custom import custom
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, census, classify_tiles, visible_pairs
from tilewise.testing.cases_masks import Draw
from tilewise.testing.cases_named import MASKS
from tilewise.testing.grid import make_grid

blocks = st.sampled_from([1, 2, 3, 4, 16])


def brute_classes(visible: torch.Tensor, grid: TileGrid) -> torch.Tensor:
    """Classes by looking at every pair of (B, H, N_q, N_k)."""
    classes = torch.empty(grid.num_q_tiles, grid.num_k_tiles, dtype=torch.uint8)
    for at, where in tile_slices(grid):
        tile = visible[where]
        classes[at] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return classes


# ---- soundness ---------------------------------------------------------------------------------------------


@examples(150)
@given(trees(kind="bool", depth=5), calls(), blocks, blocks, st.data())
def test_classes_are_sound(tree, call, block_q, block_k, data):
    b_lo = data.draw(st.integers(0, len(call.q_offset) - 1))
    b_hi = data.draw(st.integers(b_lo, len(call.q_offset) - 1))
    grid = call.grid(block_q, block_k, b_lo, b_hi)
    slabs = list(grid.slabs(data.draw(st.sampled_from([1, 7, 10**9]))))  # looked at in parts, or at once
    classes = torch.cat([classify_tiles(tree, part, call.leaves, call.ints, call.floats) for part in slabs])
    assert classes.shape == (grid.num_q_tiles, grid.num_k_tiles) and classes.dtype == torch.uint8
    for dtype in (torch.float32, torch.float64):
        visible = call.values(tree, dtype, b_lo, b_hi)
        for at, where in tile_slices(grid):
            event(f"class {int(classes[at])}")
            assert classes[at] != EMPTY or not visible[where].any(), (at, dtype)
            assert classes[at] != FULL or visible[where].all(), (at, dtype)


@pytest.mark.parametrize("feature", MASKS, ids=lambda feature: feature.name)
@pytest.mark.parametrize("offsets", [(4, 0), (-9, 6)])
def test_masks_of_the_cases_are_sound(feature, offsets):
    """A mask that joins the conformance cases joins this test."""
    batch, heads, lengths = 2, (4, 2), (19, 23)
    leaves = feature.draw(Draw(torch.Generator().manual_seed(5), batch, heads, lengths, torch.float32))
    moved = tuple(torch.full((batch,), offset) for offset in offsets)
    visible = feature.dense(make_grid(torch.arange(batch), heads, lengths, moved), leaves)
    for block_q, block_k in ((1, 1), (4, 3), (8, 32)):
        q, k = offsets
        grid = TileGrid(block_q, block_k, *lengths, q, q, k, k, 0, batch - 1, *heads)
        check_sound(masks.as_mask(feature.make(*leaves)), visible, grid)


# ---- exactness ---------------------------------------------------------------------------------------------


def test_slabs_are_rows_of_the_whole_grid():
    ids, allowed = torch.randint(0, 4, (1, 50)).sort(-1)[0], torch.rand(1, 1, 50, 41) < 0.9
    grid = TileGrid(4, 5, 50, 41, 3, 3)
    for mask in (masks.causal() & masks.window(9, 0), masks.document(ids, ids[:, :41]), masks.dense(allowed)):
        term = mask.term
        keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
        whole = classify_tiles(keep, grid, term.leaves, term.ints, term.floats)
        for most in (1, 20, 400):
            parts = [classify_tiles(keep, s, term.leaves, term.ints, term.floats) for s in grid.slabs(most)]
            assert len(parts) == {1: 13, 20: 7, 400: 1}[most]
            torch.testing.assert_close(torch.cat(parts), whole)


def check_exact(mask: masks.Mask, visible: torch.Tensor, grid: TileGrid) -> None:
    """The classes equal those found by looking at every pair."""
    term = mask.term
    keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
    got = classify_tiles(keep, grid, term.leaves, term.ints, term.floats)
    want = brute_classes(visible, grid)
    assert torch.equal(got, want), f"{mask}\n{got}\n{want}"


@st.composite
def shapes(draw):
    """A grid of one batch entry with odd sizes and any offsets, and its positions (q, 1) and (1, k)."""
    seqlen_q, seqlen_k = draw(st.integers(1, 33)), draw(st.integers(1, 33))
    q_offset, k_offset = draw(st.integers(-20, 20)), draw(st.integers(-20, 20))
    grid = TileGrid(draw(blocks), draw(blocks), seqlen_q, seqlen_k, q_offset, q_offset, k_offset, k_offset)
    return grid, torch.arange(seqlen_q)[:, None] + q_offset, torch.arange(seqlen_k)[None] + k_offset


exact = examples(60)


@exact
@given(shapes(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 20), st.integers(1, 9))
def test_position_masks_are_exact(shape, left, right, n, size):
    grid, q, k = shape
    everywhere = torch.ones(grid.seqlen_q, grid.seqlen_k, dtype=torch.bool)
    causal, window = k <= q, (k >= q - left) & (k <= q + right)
    check_exact(masks.causal(), causal, grid)
    check_exact(masks.window(left, right), window, grid)
    check_exact(masks.window(left, None), k >= q - left, grid)
    check_exact(masks.window(None, right), k <= q + right, grid)
    check_exact(masks.prefix(n), (k < n) & everywhere, grid)
    check_exact(
        masks.chunk(size),
        torch.div(q, size, rounding_mode="floor") == torch.div(k, size, rounding_mode="floor"),
        grid,
    )
    check_exact(~masks.causal(), ~causal, grid)
    check_exact(~masks.window(left, right), ~window, grid)
    check_exact(masks.causal() & masks.window(left, 0), causal & (k >= q - left), grid)


@exact
@given(shapes(), st.integers(0, 20), st.integers(0, 9), st.integers(0, 40))
def test_compositions_are_sound_and_exact_where_tiles_are_certain(shape, n, left, length):
    """A join is exact where a side is certain: the classes may only differ by PARTIAL."""
    grid, q, k = shape
    j = torch.arange(grid.seqlen_k)[None]
    lengths = torch.tensor([length])
    for mask, visible in (
        (masks.causal() | masks.prefix(n), (k <= q) | (k < n)),
        (masks.causal() & (masks.window(left, 0) | masks.prefix(n)), (k <= q) & ((k >= q - left) | (k < n))),
        (masks.causal() & masks.key_padding(lengths), (k <= q) & (j < length)),
        (~masks.causal() & masks.key_padding(lengths), (k > q) & (j < length)),
    ):
        keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
        term = mask.term
        got = classify_tiles(keep, grid, term.leaves, term.ints, term.floats)
        want = brute_classes(visible.expand(grid.seqlen_q, grid.seqlen_k), grid)
        assert ((got == want) | (got == PARTIAL)).all()


def test_prefix_lm_and_streaming_are_exact_on_aligned_grids():
    q, k = torch.arange(32)[:, None], torch.arange(32)[None]
    grid = TileGrid(4, 4, 32, 32)
    check_exact(masks.causal() | masks.prefix(8), (k <= q) | (k < 8), grid)
    streaming = masks.causal() & (masks.window(7, 0) | masks.prefix(4))
    check_exact(streaming, (k <= q) & ((q - k <= 7) | (k < 4)), grid)


@exact
@given(shapes(), st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_document_is_exact_where_ids_are_sorted_or_hidden(shape, seed, count, hidden):
    grid, q, k = shape
    generator = torch.Generator().manual_seed(seed)
    length = max(grid.seqlen_q, grid.seqlen_k)
    ids = torch.randint(0, count, (length,), generator=generator).sort().values
    if hidden:
        ids[length // 2 :] = -1
    ids_q, ids_k = ids[: grid.seqlen_q], ids[: grid.seqlen_k]
    visible = (ids_q[:, None] == ids_k[None]) & (ids_q[:, None] >= 0)
    mask = masks.document(ids_q, ids_k)
    keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
    got = classify_tiles(keep, grid, mask.term.leaves, (), ())
    want = brute_classes(visible, grid)
    if hidden:  # a tile across the border may mix -1 with real ids
        assert ((got == want) | (got == PARTIAL)).all()
    else:
        assert torch.equal(got, want)


def test_sorted_documents_are_empty_off_the_diagonal():
    ids = torch.arange(64) // 16
    q, k = torch.arange(64)[:, None], torch.arange(64)[None]
    same = ids[:, None] == ids[None]
    check_exact(masks.document(ids), same, TileGrid(8, 8, 64, 64))
    check_exact(masks.document(ids) & masks.causal(), same & (k <= q), TileGrid(8, 8, 64, 64))
    check_exact(masks.document(ids), same, TileGrid(5, 3, 64, 64))


@exact
@given(shapes(), st.integers(0, 2**31), st.sampled_from([0.02, 0.5, 0.98]), st.data())
def test_leaf_masks_are_exact(shape, seed, share, data):
    grid, q, k = shape
    generator = torch.Generator().manual_seed(seed)

    def bools(*sizes):
        return torch.rand(sizes, generator=generator) < share

    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    grid = TileGrid(**{**vars(grid), "b_hi": batch - 1, "num_heads_q": heads})
    full = (batch, heads, grid.seqlen_q, grid.seqlen_k)
    sizes = [data.draw(st.sampled_from([1, n])) for n in full]
    dense = bools(*sizes)
    check_exact(masks.dense(dense), dense.expand(full), grid)
    check_exact(~masks.dense(dense), ~dense.expand(full), grid)
    present = bools(batch, grid.seqlen_k)
    check_exact(masks.key_padding(present), present[:, None, None].expand(full), grid)
    block_q, block_k = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    layout = bools(sizes[0], sizes[1], -(-grid.seqlen_q // block_q), -(-grid.seqlen_k // block_k))
    fine = layout.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
    fine = fine[:, :, : grid.seqlen_q, : grid.seqlen_k].expand(full)
    check_exact(masks.block_sparse(layout, (block_q, block_k)), fine, grid)


@exact
@given(shapes(), st.lists(st.integers(0, 40), min_size=3, max_size=3), st.data())
def test_lengths_use_only_the_batch_entries_of_the_call(shape, lengths, data):
    grid, q, k = shape
    b_lo = data.draw(st.integers(0, 2))
    b_hi = data.draw(st.integers(b_lo, 2))
    grid = TileGrid(**{**vars(grid), "b_lo": b_lo, "b_hi": b_hi})
    j = torch.arange(grid.seqlen_k)
    of_call = torch.tensor(lengths)[b_lo : b_hi + 1, None, None]
    full = (b_hi - b_lo + 1, grid.seqlen_q, grid.seqlen_k)
    check_exact(masks.key_padding(torch.tensor(lengths)), (j < of_call).expand(full), grid)
    check_exact(masks.prefix(torch.tensor(lengths)), (k < of_call).expand(full), grid)


@exact
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    blocks,
    blocks,
    st.lists(st.integers(-9, 9), min_size=1, max_size=3),
)
def test_offsets_per_batch_entry(seqlen_q, seqlen_k, block_q, block_k, offsets):
    """Only the range of the offsets is known: exact for the extremes, so exact over all entries."""
    grid = TileGrid(block_q, block_k, seqlen_q, seqlen_k, min(offsets), max(offsets), b_hi=len(offsets) - 1)
    q = torch.arange(seqlen_q)[:, None] + torch.tensor(offsets)[:, None, None]
    check_exact(masks.causal(), torch.arange(seqlen_k) <= q, grid)


# ---- leaves ------------------------------------------------------------------------------------------------


def check_sound(mask: masks.Mask, visible: torch.Tensor, grid: TileGrid) -> torch.Tensor:
    keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
    term = mask.term
    got = classify_tiles(keep, grid, term.leaves, term.ints, term.floats)
    want = brute_classes(visible, grid)
    assert ((got == want) | (got == PARTIAL)).all(), f"{got}\n{want}"
    return got


def test_leaf_by_position_and_distance():
    q, k = torch.arange(24)[:, None] - 5, torch.arange(20)[None] - 2
    leaf = torch.arange(16) > 6
    grid = TileGrid(4, 4, 24, 20, -5, -5, -2, -2)
    by_position = leaf[q.clamp(0, 15)].expand(24, 20)
    check_exact(custom(lambda q, t: t[q], leaf), by_position, grid)
    by_distance = leaf[(q - k).abs().clamp(0, 15)]
    got = check_sound(custom(lambda q, k, t: t[abs(q - k)], leaf), by_distance, grid)
    assert got.unique().tolist() == [EMPTY, PARTIAL, FULL]
    check_exact(
        custom(lambda i, t: t[i // 3], leaf), leaf[torch.arange(24) // 3][:, None].expand(24, 20), grid
    )


def test_leaf_read_twice_along_one_axis():
    generator = torch.Generator().manual_seed(0)
    leaf = torch.rand(12, 12, generator=generator) > 0.5
    i = torch.arange(12)
    diagonal = leaf[i, i][:, None].expand(12, 10)
    check_sound(custom(lambda i, t: t[i, i], leaf), diagonal, TileGrid(1, 3, 12, 10))
    check_exact(custom(lambda j, i, t: t[j, i], leaf), leaf[:10].mT, TileGrid(4, 3, 12, 10))


def test_leaf_shorter_than_the_call_repeats_its_last_element():
    leaf = torch.tensor([True, True, False])
    want = leaf[torch.arange(11).clamp(max=2)][:, None].expand(11, 2)
    check_exact(custom(lambda i, t: t[i], leaf), want, TileGrid(4, 2, 11, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8]
)
def test_leaf_dtypes(dtype):
    leaf = torch.tensor([0, 1, 2, 3, 4, 5]).to(torch.float32).to(dtype)
    check_exact(
        custom(lambda i, t: t[i] >= 3, leaf),
        (torch.arange(6) >= 3)[:, None].expand(6, 2),
        TileGrid(2, 2, 6, 2),
    )


def test_unknown_and_empty_leaves_are_partial():
    node = ex.load(0, "bool", (ex.variable("i"),))
    grid = TileGrid(2, 2, 4, 4)
    assert (
        classify_tiles(node, grid, [torch.ones(4, dtype=torch.bool, device="meta")], [], []) == PARTIAL
    ).all()
    assert (classify_tiles(node, grid, [torch.ones(0, dtype=torch.bool)], [], []) == PARTIAL).all()


def test_a_leaf_with_gradient_is_only_read():
    leaf = torch.ones(4, requires_grad=True)
    node = ex.apply("gt", ex.load(0, "float", (ex.variable("i"),)), ex.const(0.5))
    assert (classify_tiles(node, TileGrid(2, 2, 4, 4), [leaf], [], []) == FULL).all()


# ---- the grid ----------------------------------------------------------------------------------------------


def test_no_mask_is_full_and_no_tile_is_fine():
    assert (classify_tiles(None, TileGrid(4, 4, 9, 9), [], [], []) == FULL).all()
    for seqlen_q, seqlen_k in ((0, 9), (9, 0), (0, 0)):
        grid = TileGrid(4, 4, seqlen_q, seqlen_k)
        got = classify_tiles(ex.apply("le", ex.variable("k"), ex.variable("q")), grid, [], [], [])
        assert got.shape == (grid.num_q_tiles, grid.num_k_tiles)
        assert visible_pairs(got, grid) == (0, 0) and census(got) == (0, 0, 0)


@exact
@given(shapes())
def test_census_and_pairs(shape):
    grid, q, k = shape
    keep = ex.apply("le", ex.variable("k"), ex.variable("q"))
    classes = classify_tiles(keep, grid, [], [], [])
    assert census(classes) == tuple(int((classes == c).sum()) for c in (EMPTY, PARTIAL, FULL))
    least, most = visible_pairs(classes, grid)
    assert least <= int((k <= q).sum()) <= most
    everything = classify_tiles(None, grid, [], [], [])
    assert visible_pairs(everything, grid) == (grid.seqlen_q * grid.seqlen_k,) * 2


def test_long_sequences_stay_small():
    """Causal at 16384: the diagonal is PARTIAL, the rest is known."""
    grid = TileGrid(64, 64, 16384, 16384)
    classes = classify_tiles(ex.apply("le", ex.variable("k"), ex.variable("q")), grid, [], [], [])
    assert census(classes) == (256 * 255 // 2, 256, 256 * 255 // 2)
