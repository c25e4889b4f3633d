"""Dropout's bits: known answers of Philox4x32-10, and a mask that is a function of position alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import DTypeError, OptionError, ShapeError
from tilewise.spec.dropout import dropout_mask, keep_mask, keep_threshold, keep_tile, philox4x32

# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEED = torch.tensor(0x0123456789ABCDEF)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The published algorithm in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    got = philox4x32(tuple(map(torch.tensor, words(counter))), tuple(map(torch.tensor, words(key))))
    assert [int(word) for word in got] == words(answer)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
@examples(50)
def test_philox_agrees_with_unbounded_integers(numbers):
    got = philox4x32(tuple(map(torch.tensor, numbers[:4])), tuple(map(torch.tensor, numbers[4:])))
    assert tuple(int(word) for word in got) == philox_in_integers(tuple(numbers[:4]), tuple(numbers[4:]))


def test_mask_is_the_written_formula():
    seed, p = -2, 0.37  # a negative seed is its 64 bits
    kept = dropout_mask(torch.tensor(seed), p, 2, 3, 4, 9, q_offset=-2, k_offset=-5, h_offset=7, b_offset=11)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist():
        k = j - 5
        word = philox_in_integers(((k >> 2) & 0xFFFFFFFF, (i - 2) & 0xFFFFFFFF, h + 7, b + 11), key)[k & 3]
        assert kept[b, h, i, j].item() == (word >= math.floor(p * 2**32))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_kept_fraction(p):
    kept = dropout_mask(SEED, p, 2, 4, 384, 384)
    draws = kept.numel()
    assert draws >= 10**6
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / draws)
    for dim in range(4):  # no head, row or column is favoured
        share = kept.double().mean([d for d in range(4) if d != dim])
        assert (share - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) * kept.shape[dim] / draws)


def test_ends_of_the_range():
    assert dropout_mask(SEED, 0.0, 1, 2, 8, 8).all()
    assert not dropout_mask(SEED, 1.0, 1, 2, 8, 8).any()
    assert keep_threshold(1.0) == 2**32
    assert keep_threshold(0.5) == 2**31
    for p in (-1e-9, 1 + 1e-9, float("nan"), float("inf")):
        with pytest.raises(OptionError, match=r"\[0, 1\]"):
            dropout_mask(SEED, p, 1, 1, 1, 1)


@given(st.data())
@examples(40)
def test_tiles_do_not_matter(data):
    rows, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 23))
    q_offset, k_offset = data.draw(st.integers(-40, 40)), data.draw(st.integers(-40, 40))
    start = data.draw(st.integers(0, keys))
    stop = data.draw(st.integers(start, keys))
    whole = dropout_mask(SEED, 0.5, 2, 3, rows, keys, q_offset=q_offset, k_offset=k_offset)
    q_pos = torch.arange(rows)[:, None] + q_offset
    heads, batches = torch.arange(3).reshape(1, 3, 1, 1), torch.arange(2).reshape(2, 1, 1, 1)
    number = k_offset + start
    for k0 in (
        number,
        torch.tensor(number),
        torch.tensor([number, number], dtype=torch.int32).reshape(2, 1, 1, 1),
    ):
        tile = keep_tile(SEED, 0.5, q_pos, k0, stop - start, heads, batches)
        assert torch.equal(tile, whole[..., start:stop])
    k_pos = k_offset + torch.arange(start, stop)
    assert torch.equal(keep_mask(SEED, 0.5, q_pos, k_pos, heads, batches), whole[..., start:stop])
    assert torch.equal(keep_mask(SEED, 0.5, q_pos, k_pos, 1, 0), whole[0, 1, :, start:stop])


def test_offsets_differ_by_batch():
    q_offset, k_offset = torch.tensor([5, -3, 0]), torch.tensor([1, 2, -9], dtype=torch.int32)
    together = dropout_mask(SEED, 0.4, 3, 2, 6, 13, q_offset=q_offset, k_offset=k_offset)
    for b in range(3):
        options = {"q_offset": int(q_offset[b]), "k_offset": int(k_offset[b]), "b_offset": b}
        assert torch.equal(together[b : b + 1], dropout_mask(SEED, 0.4, 1, 2, 6, 13, **options))


def test_offsets_shift_heads_and_batches():
    whole = dropout_mask(SEED, 0.5, 3, 4, 16, 16)
    assert torch.equal(dropout_mask(SEED, 0.5, 1, 2, 16, 16, h_offset=2, b_offset=1), whole[1:2, 2:])
    shard = dropout_mask(SEED, 0.5, 3, 4, 5, 7, q_offset=11, k_offset=9)
    assert torch.equal(shard, whole[:, :, 11:, 9:])
    assert torch.equal(dropout_mask(SEED, 0.5, 3, 4, 5, 16), whole[:, :, 11:])  # default: bottom-right


def test_every_bit_of_the_seed_matters():
    masks = {tuple(dropout_mask(torch.tensor(0), 0.5, 1, 1, 8, 16).flatten().tolist())}
    for bit in range(64):
        seed = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        masks.add(tuple(dropout_mask(seed, 0.5, 1, 1, 8, 16).flatten().tolist()))
    assert len(masks) == 65


def test_the_seed_is_one_int64():
    assert torch.equal(dropout_mask(SEED.reshape(1), 0.5, 1, 1, 4, 4), dropout_mask(SEED, 0.5, 1, 1, 4, 4))
    with pytest.raises(DTypeError):
        dropout_mask(SEED.int(), 0.5, 1, 1, 4, 4)
    with pytest.raises(ShapeError):
        dropout_mask(SEED.repeat(2), 0.5, 1, 1, 4, 4)


def test_the_seed_is_not_read():
    kept = dropout_mask(torch.zeros((), dtype=torch.int64, device="meta"), 0.5, 2, 3, 4, 5)
    assert kept.shape == (2, 3, 4, 5)
    offset = torch.zeros(2, dtype=torch.int64, device="meta")
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    assert dropout_mask(seed, 0.5, 2, 3, 4, 5, k_offset=offset).shape == (2, 3, 4, 5)


def test_compiled_bits():
    """Neither signed overflow nor arange in index arithmetic may change the bits under torch.compile."""

    def kept(seed):
        return dropout_mask(seed, 0.3, 2, 2, 9, 33, k_offset=-5)

    seed = torch.tensor(-7)
    assert torch.equal(torch.compile(kept, fullgraph=True)(seed), kept(seed))


def test_empty_sizes():
    assert dropout_mask(SEED, 0.5, 1, 1, 0, 4).shape == (1, 1, 0, 4)
    assert dropout_mask(SEED, 0.5, 1, 1, 4, 0).shape == (1, 1, 4, 0)
    assert dropout_mask(SEED, 0.5, 2, 1, 4, 0, k_offset=torch.tensor([1, 2])).shape == (2, 1, 4, 0)
