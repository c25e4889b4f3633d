"""transformers' mask functions read as Tilewise masks: the same pairs, and never a matrix."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers import masking_utils as library  # noqa: E402

import tilewise as tw  # noqa: E402
import tilewise.compat.transformers as compat  # noqa: E402
from tilewise.compat.transformers_masks import make_mask_function  # noqa: E402

B, N = 2, 11
pytestmark = pytest.mark.skipif(
    not hasattr(library, "remap_positions_for_packed_sequence"),
    reason="held against the masks of transformers 5.24",
)


@pytest.fixture(params=["builders", "closures"])
def named(request):
    """With transformers' builders wrapped by `register`, and as they are."""
    if request.param == "builders":
        compat.register("tilewise_masks", backend="blockwise")
    yield request.param
    compat.unregister("tilewise_masks")


def visible(plan) -> torch.Tensor:
    """The pairs of a plan, bool (B, N_q, N_k): equal scores share out the weights, and the values tell them apart."""
    batch, _, rows, columns = plan.shape
    q, k = torch.zeros(batch, 1, rows, 4), torch.zeros(batch, 1, columns, 4)
    v = torch.eye(columns).expand(batch, 1, columns, columns)
    out = tw.attention(
        q, k, v, mask=plan.mask, q_offset=plan.q_offset, k_offset=plan.k_offset, backend="blockwise"
    )
    return out[:, 0] > 0


def hold(function, *, attention_mask=None, q=(0, N), k=(0, N), use_vmap=False) -> None:
    """Our plan for a mask function shows the pairs of transformers' own matrix."""
    call = {
        "batch_size": B, "q_length": q[1], "kv_length": k[1], "q_offset": q[0], "kv_offset": k[0],
        "mask_function": function, "attention_mask": attention_mask, "allow_is_causal_skip": False,
        "use_vmap": use_vmap,
    }  # fmt: skip
    theirs = library.sdpa_mask(**call)[:, 0]
    plan = make_mask_function(library)(**call, config=None, dtype=torch.float32)
    assert plan.ndim == 4 and plan.shape == (B, 1, q[1], k[1])
    assert torch.equal(visible(plan), theirs)
    terms = [t for t in (plan.mask.formula, plan.mask.padding) if t is not None]
    assert all(leaf.numel() <= B * (N + 1) for term in terms for leaf in term.leaves)


def functions():
    """Every kind of mask function that models of transformers make."""
    left = torch.tensor([0, 3])
    ids = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 2, -1], [0, 0, -1, -1, -1, 1, 1, -1, -1, -1, 3]])
    causal = library.causal_mask_function
    window = library.sliding_window_causal_mask_function(4)
    return {
        "causal": causal,
        "full": library.bidirectional_mask_function,
        "window": window,
        "window both ways": library.sliding_window_bidirectional_mask_function(2),
        "chunks": library.chunked_causal_mask_function(3, left),
        "blocks": library.or_masks(causal, library.blockwise_overlay(ids)),
        "blocks in a window": library.and_masks(
            library.sliding_window_overlay(4), library.or_masks(causal, library.blockwise_overlay(ids))
        ),
    }


KINDS = ("causal", "full", "window", "window both ways", "chunks", "blocks", "blocks in a window")


@pytest.mark.parametrize("kind", KINDS)
def test_whole_sequences_with_padding(named, kind):
    keep = torch.ones(B, N, dtype=torch.bool)
    hold(functions()[kind])
    hold(functions()[kind], attention_mask=keep)
    keep[1, :3] = False
    hold(functions()[kind], attention_mask=keep)
    keep[0, 8:] = False
    hold(functions()[kind], attention_mask=keep)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_before_the_queries(named, kind):
    """Offsets as ints, as a tensor (static caches), keys that are not there yet, keys that are gone already."""
    keep = torch.ones(B, 9, dtype=torch.bool)
    keep[1, :3] = False
    hold(functions()[kind], attention_mask=keep, q=(6, 3), k=(0, N))
    hold(functions()[kind], attention_mask=keep, q=(torch.tensor(6), 3), k=(0, N))
    hold(functions()[kind], q=(8, 1), k=(0, N))
    hold(functions()[kind], attention_mask=keep, q=(7, 2), k=(4, 5))


def packed(function, positions):
    sequence = library.find_packed_sequence_indices(positions)
    remapped = library.remap_positions_for_packed_sequence(function, positions)
    return library.and_masks(remapped, library.packed_sequence_mask_function(sequence))


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])


@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_packed_positions(named, kind):
    function = functions()[kind]
    if kind == "chunks":
        function = library.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.int64))
    hold(packed(function, POSITIONS))


def test_a_function_of_the_users_own(named):
    """It is traced over positions, its captured tensors and numbers included."""
    prefix, every = torch.tensor([4, 2]), 3
    types = torch.tensor([[0, 1] * 6, [1, 1, 0] * 4])

    def prefix_or_every_third(b, h, q, k):
        return (k < prefix[b]) | ((q - k) % every == 0)

    def same_type(b, h, q, k):
        return torch.where(types[b, q] == 1, types[b, k] == 1, q >= k)

    hold(library.or_masks(library.causal_mask_function, prefix_or_every_third))
    hold(library.and_masks(library.causal_mask_function, prefix_or_every_third), q=(5, 6))
    hold(library.and_masks(same_type, library.sliding_window_overlay(5)), q=(7, 2), k=(4, 5), use_vmap=True)


def test_what_cannot_be_read_is_refused():
    make = make_mask_function(library)

    def host(b, h, q, k):
        return torch.ones(N, N, dtype=torch.bool)[q.item(), k.item()]

    with pytest.raises(tw.UnsupportedProblem, match="cannot be read"):
        make(batch_size=B, q_length=N, kv_length=N, q_offset=0, kv_offset=0, mask_function=host)
    plan = make(batch_size=B, q_length=N, kv_length=N, q_offset=0, kv_offset=0)
    with pytest.raises(tw.UnsupportedProblem, match="slices the attention mask"):
        plan[..., :3]
    assert "causal" in repr(plan)


def test_positions_as_older_releases_pass_them():
    plan = make_mask_function(library)(
        batch_size=B, cache_position=torch.arange(6, 9), kv_length=N, kv_offset=0, attention_mask=None,
    )  # fmt: skip
    theirs = library.sdpa_mask(batch_size=B, q_length=3, kv_length=N, q_offset=6, allow_is_causal_skip=False)
    assert torch.equal(visible(plan), theirs[:, 0])


def test_the_offset_of_a_static_cache_is_kept_when_the_cache_moves_on():
    length = torch.tensor(5)
    plan = make_mask_function(library)(batch_size=1, q_length=1, kv_length=8, q_offset=length, kv_offset=0)
    length.add_(1)
    assert plan.q_offset.tolist() == [5]
    moved = plan.to("meta")
    assert moved.q_offset.device.type == "meta" and moved.shape == plan.shape


def test_registering_changes_nothing_for_other_implementations():
    before = {name: getattr(library, name) for name in ("and_masks", "chunked_overlay")}
    compat.register("tilewise_masks")
    try:
        assert library.and_masks is not before["and_masks"]
        for name in KINDS:
            function = functions()[name]
            ours = library.sdpa_mask(B, N, N, mask_function=function, allow_is_causal_skip=False)
            compat.unregister("tilewise_masks")
            theirs = library.sdpa_mask(B, N, N, mask_function=functions()[name], allow_is_causal_skip=False)
            compat.register("tilewise_masks")
            assert torch.equal(ours, theirs)
    finally:
        compat.unregister("tilewise_masks")
    assert all(getattr(library, name) is was for name, was in before.items())
    assert "tilewise_masks" not in library.AttentionMaskInterface._global_mapping
    for name in ("eager", "sdpa", "flash_attention_2", "paged|x", "org/kernel"):
        with pytest.raises(tw.OptionError, match="choose another"):
            compat.register(name)
