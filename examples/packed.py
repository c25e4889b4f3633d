"""Documents of different lengths in one batch, without padding: three ways to say the same.

python examples/packed.py

packed      (T, H, D) and cu_seqlens: attention_varlen, one problem per document
documents   one row of T tokens and ids: causal() & document(ids), tiles between documents are skipped
padded      (B, N_max) and lengths: key_padding, the rows past a document's end are computed and thrown away
"""

from __future__ import annotations

import argparse

import torch

import tilewise as tw


def main(given: list[str] | None = None) -> dict[str, float]:
    """Returns the largest difference of the other two to `packed`, gradients included, and the shares of work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 33, 250, 1, 512])
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(given)
    torch.manual_seed(0)
    lengths = torch.tensor(options.lengths)
    total, longest = int(lengths.sum()), int(lengths.max())
    q, k, v = (torch.randn(total, h, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    common = {"mask": tw.causal(), "backend": options.backend}

    packed = tw.attention_varlen(q, k, v, cu_seqlens, **common)

    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    row = [t.transpose(0, 1)[None] for t in (q, k, v)]
    common["mask"] = tw.causal() & tw.document(ids)
    documents = tw.attention(*row, **common)[0].transpose(0, 1)

    present = torch.arange(longest) < lengths[:, None]
    padded = []
    for t in (q, k, v):
        room = t.new_zeros(len(lengths), longest, *t.shape[1:])
        padded.append(room.masked_scatter(present[..., None, None], t).transpose(1, 2))
    # Top-left: a document's tokens stand at the start of its row, whatever follows.
    common["mask"] = tw.causal() & tw.key_padding(lengths)
    padded_out = tw.attention(*padded, q_offset=0, **common).transpose(1, 2)[present]

    found: dict[str, float] = {}
    truth = (packed, *torch.autograd.grad(packed.square().sum(), (q, k, v)))
    for name, out in (("documents", documents), ("padded", padded_out)):
        ours = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
        found[name] = max(float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True))
        print(f"{name:>9} against packed: largest difference {found[name]:.1e}, gradients included")
    found["useful_tokens"] = total / (len(lengths) * longest)
    census = tw.explain(*row, mask=tw.causal() & tw.document(ids)).census
    found["skipped_tiles"] = census[0] / max(sum(census), 1)
    print(f"tokens of the padded batch that are real: {found['useful_tokens']:.0%}")
    print(f"tiles that the document mask skips: {found['skipped_tiles']:.0%}")
    return found


if __name__ == "__main__":
    main()
