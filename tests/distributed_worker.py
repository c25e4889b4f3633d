"""One of two processes of tests/test_training_distributed.py: python distributed_worker.py RANK FILE."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from small_gpt import SmallGPT, batch, gradients, loss_of

import tilewise as tw


def whole() -> dict[str, torch.Tensor]:
    return gradients(SmallGPT().double(), batch())


def hold(found: dict[str, torch.Tensor], rank: int, what: str) -> None:
    for name, truth in whole().items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-12, msg=f"{what}: {name}")
    print(f"rank {rank}: {what} holds", flush=True)


def data_parallel(rank: int) -> None:
    """DDP: half of the batch each, gradients of the whole."""
    model = torch.nn.parallel.DistributedDataParallel(SmallGPT().double())
    loss_of(model, batch()[2 * rank : 2 * rank + 2]).backward()
    hold({name.removeprefix("module."): p.grad for name, p in model.named_parameters()}, rank, "DDP")


def sharded(rank: int) -> None:
    """FSDP2: every parameter cut in two, gathered for each block, gradients reduced and cut again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = SmallGPT().double()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, batch()[2 * rank : 2 * rank + 2]).backward()
    hold({name: p.grad.full_tensor() for name, p in model.named_parameters()}, rank, "FSDP2")


def tensor_parallel(rank: int) -> None:
    """Heads cut in two: with h_offset, dropout and slopes are those of the uncut run, bit for bit."""
    make = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, h, 9, 8, generator=make).requires_grad_() for h in (4, 2, 2))
    slopes = tw.alibi_slopes(4)
    options = {"mask": tw.causal(), "dropout": 0.4, "seed": 11, "backend": "blockwise"}
    uncut = tw.attention(q, k, v, scores=tw.alibi(slopes), **options)
    mine, mine_kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    part = tw.attention(
        q[:, mine], k[:, mine_kv], v[:, mine_kv], scores=tw.alibi(slopes[mine]), h_offset=2 * rank, **options
    )
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach().contiguous())
    assert torch.equal(torch.cat(parts, 1), uncut)
    found = torch.autograd.grad(part.pow(2).sum(), (q, k, v))
    for tensor, truth in zip(found, torch.autograd.grad(uncut.pow(2).sum(), (q, k, v)), strict=True):
        dist.all_reduce(tensor)  # each half contributes to its own heads
        assert torch.equal(tensor, truth)
    without = tw.attention(q[:, 2:], k[:, 1:], v[:, 1:], scores=tw.alibi(slopes[2:]), **options)
    assert not torch.equal(without, uncut[:, 2:])  # what h_offset is for
    print(f"rank {rank}: h_offset holds", flush=True)


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for test in (data_parallel, sharded, tensor_parallel):
        test(rank)
    dist.barrier()
    dist.destroy_process_group()
    # In 2 of some 60 runs torch aborted the process while the interpreter ended, after all had held ("terminate called
    # without an active exception"), as a thread does that asks for its lock then. So the interpreter is not ended.
    os._exit(0)


if __name__ == "__main__":
    main()
