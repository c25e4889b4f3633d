"""Two processes on one machine (gloo): DDP, FSDP2 and cut heads give the gradients of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.skipif(sys.platform != "linux", reason="gloo over a file is tested on Linux")
def test_two_processes(tmp_path):
    pytest.importorskip("torch.distributed.fsdp", minversion=None)
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("FSDP2 is public since torch 2.6")
    command = [sys.executable, str(HERE / "distributed_worker.py")]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=HERE.parent, env=environment(),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=150)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for rank, (process, text) in enumerate(zip(running, said, strict=True)):
        assert process.returncode == 0, text[-3000:]
        for what in ("DDP", "FSDP2", "h_offset"):
            assert f"rank {rank}: {what} holds" in text


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
