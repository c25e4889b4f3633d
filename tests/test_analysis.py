"""Counts of operations and bytes, against sums written out by hand."""

from __future__ import annotations

import pytest

from tilewise.analysis import attention_flops, bytes_ordinary, bytes_tiled, exponentials, matrix_bytes_avoided
from tilewise.errors import OptionError

MIB, GIB = 2**20, 2**30
SIZES = {"batch": 2, "num_heads_q": 8, "seqlen_q": 100, "seqlen_k": 300, "head_dim": 64, "head_dim_v": 32}


def test_matrix_of_8192():
    assert matrix_bytes_avoided(1, 1, 8192, 8192, 2) == 128 * MIB
    assert matrix_bytes_avoided(1, 32, 8192, 8192, 2) == 4 * GIB


def test_flops():
    # Q K^T of a 3 x 5 problem over D = 7: 15 dot products of 7 multiplies and 7 adds; P V over D_v = 4.
    assert attention_flops(15, 7, 4) == 15 * 2 * 7 + 15 * 2 * 4
    assert attention_flops(15, 7, 4, num_heads=3, batch=2) == 6 * attention_flops(15, 7, 4)
    assert 2 * attention_flops(15, 7, 4, backward=True) == 5 * attention_flops(15, 7, 4)
    # 8192 x 8192, D = 128: the figure of the literature, 4 N^2 D.
    assert attention_flops(8192**2, 128, 128) == 4 * 8192**2 * 128
    assert exponentials(15, 3, 2) == 90


def test_flops_stay_integers_beyond_floats():
    pairs = (1 << 20) ** 2 + 1
    assert attention_flops(pairs, 1, 0, 4096, 4096) == 2 * pairs * 4096**2


def test_bytes_ordinary():
    q, out = 2 * 8 * 100 * 64 * 2, 2 * 8 * 100 * 32 * 2
    k, v = 2 * 4 * 300 * 64 * 2, 2 * 4 * 300 * 32 * 2
    matrix = 2 * 8 * 100 * 300
    assert bytes_ordinary(**SIZES, num_heads_kv=4, itemsize=2) == q + k + v + out + 4 * 2 * matrix
    assert (
        bytes_ordinary(**SIZES, num_heads_kv=4, itemsize=2, score_itemsize=4)
        == q + k + v + out + 4 * 4 * matrix
    )


def test_bytes_tiled():
    q, out, lse = 2 * 8 * 100 * 64 * 2, 2 * 8 * 100 * 32 * 2, 2 * 8 * 100 * 4
    one_pass = 2 * 8 * 300 * (64 + 32) * 2
    assert (
        bytes_tiled(**SIZES, itemsize=2, block_q=32) == q + out + lse + 4 * one_pass
    )  # 100 rows: 4 tiles of 32
    assert bytes_tiled(**SIZES, itemsize=2, block_q=128) == q + out + lse + one_pass
    assert bytes_tiled(**SIZES, itemsize=2, block_q=128, lse_itemsize=0) == q + out + one_pass
    some = bytes_tiled(**SIZES, itemsize=2, block_q=32, key_rows_read=700)  # a mask empties some tiles
    assert some == q + out + lse + 2 * 8 * 700 * (64 + 32) * 2


def test_folding_reads_keys_once_a_group():
    folded = {**SIZES, "num_heads_q": 2, "seqlen_q": 400}
    apart = bytes_tiled(**SIZES, itemsize=2, block_q=400)
    together = bytes_tiled(**folded, itemsize=2, block_q=400)
    assert apart - together == (8 - 2) * 2 * 300 * (64 + 32) * 2


def test_theorem_2():
    # With M elements on the chip and tiles of M / (4 d) rows, traffic is about 4 N^2 d^2 * 2 / M elements.
    n, d, m = 1 << 16, 64, 1 << 16
    sizes = {"batch": 1, "num_heads_q": 1, "seqlen_q": n, "seqlen_k": n, "head_dim": d, "head_dim_v": d}
    tiled = bytes_tiled(**sizes, itemsize=1, block_q=m // (4 * d), lse_itemsize=0)
    assert tiled == pytest.approx(8 * n**2 * d**2 / m, rel=0.01)
    assert bytes_ordinary(**sizes, num_heads_kv=1, itemsize=1) == pytest.approx(4 * n**2, rel=0.01)


def test_empty_sizes_cost_nothing():
    assert attention_flops(0, 64, 64) == 0
    nothing = {**SIZES, "seqlen_q": 0}
    assert bytes_tiled(**nothing, itemsize=2, block_q=64) == 0


def test_refusals():
    with pytest.raises(OptionError, match="visible_pairs"):
        attention_flops(-1, 64, 64)
    with pytest.raises(OptionError, match="seqlen_k"):
        bytes_ordinary(**{**SIZES, "seqlen_k": -1}, num_heads_kv=8, itemsize=2)
    with pytest.raises(OptionError, match="block_q"):
        bytes_tiled(**SIZES, itemsize=2, block_q=0)
