"""Kernels kept between processes: their names, what is found again, and how their arguments are laid out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from versions import needs_triton

from tilewise.backends.triton import shelf, stored
from tilewise.backends.triton.compile import Build
from tilewise.backends.triton.descriptors import Descriptor

pytestmark = needs_triton

ENTRY = """.entry forward(
	.param .u64 .ptr .global .align 1 forward_param_0,
	.param .align 64 .b8 forward_param_1[128],
	.param .u32 forward_param_2,
	.param .u32 forward_param_3,
	.param .u64 forward_param_4,
	.param .u64 forward_param_5,
	.param .u32 forward_param_6,
	.param .f32 forward_param_7,
	.param .u64 .ptr .global .align 1 forward_param_8,
	.param .u64 .ptr .global .align 1 forward_param_9
)"""
BUILD = Build(("*bf16", "tensordesc<bf16[64,64]>", "constexpr", "i32", "fp32"), (0,), (("A", 1),), 4, 3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Kernels are kept in a folder of the test's own."""
    monkeypatch.setattr(shelf, "folder", lambda: tmp_path)
    return tmp_path


def _compiled(**changes):
    about = {"name": "forward", "shared": 98360, "num_warps": 4, "num_ctas": 1, "launch_pdl": False}
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    about |= {"global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": [meta]} | changes
    return SimpleNamespace(
        metadata=SimpleNamespace(**about), asm={"ptx": f"x\n{ENTRY}\n{{}}", "cubin": b"\x7fELF" * 9}
    )


def test_what_is_kept_is_found_whole_or_not_at_all(here):
    name = shelf.name_of("text", "forward", BUILD, 90)
    assert shelf.find(name) is None and not shelf.proven()
    shelf.keep(name, _compiled())
    found = shelf.find(name)
    assert found.binary == b"\x7fELF" * 9 and (found.name, found.shared, found.warps) == ("forward", 98360, 4)
    assert found.maps == ((3, 2, 9, (64, 64)),) and found.entry == ENTRY and shelf.proven()
    whole = (here / name).read_bytes()
    for broken in (whole[:-1], whole[:20], b"", whole[:-1] + b"\x00"):
        (here / name).write_bytes(broken)
        assert shelf.find(name) is None


@pytest.mark.parametrize("change", [{"global_scratch_size": 8}, {"num_ctas": 2}, {"tensordesc_meta": [None]}])
def test_a_kernel_that_is_launched_in_another_way_is_not_kept(here, change):
    shelf.keep("name", _compiled(**change))
    assert shelf.find("name") is None


def test_a_name_depends_on_all_that_a_binary_depends_on(monkeypatch):
    first = shelf.name_of("text", "forward", BUILD, 90)
    others = [
        shelf.name_of("texts", "forward", BUILD, 90),
        shelf.name_of("text", "again", BUILD, 90),
        shelf.name_of("text", "forward", BUILD._replace(stages=2), 90),
        shelf.name_of("text", "forward", BUILD, 100),
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert shelf.name_of("text", "forward", BUILD, 90) == first
    monkeypatch.setenv("TRITON_PTXAS_PATH", "elsewhere")
    others.append(shelf.name_of("text", "forward", BUILD, 90))
    assert len({first, *others}) == 6


def test_a_process_that_finds_a_kernel_does_not_import_triton(tmp_path):
    keep = (
        "from tilewise.backends.triton import shelf, backend;"
        "import sys; (shelf.folder() / f'{shelf.identity()}_x.kernel').write_bytes(b'');"
        "print(backend._triton() >= (3, 0), 'triton' in sys.modules)"
    )
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", keep], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


@pytest.fixture
def launched(monkeypatch):
    """A kept kernel before a driver that notes what it is given."""
    seen = {}

    def launch(config, handle, places, extra):
        kinds = (ctypes.c_uint64, ctypes.c_char * 128, *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2)
        kinds += (ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        seen["values"] = [kind.from_address(at) for kind, at in zip(kinds, places, strict=True)]
        seen["grid"] = (config._obj.grid, config._obj.grid_y, config._obj.threads, config._obj.shared)
        return 0

    def encode(at, kind, rank, address, shape, steps, box, *rest):
        _, _, swizzle, *_ = rest  # after the element strides and the interleaving
        seen["maps"] = seen.get("maps", 0) + 1
        seen["map"] = (kind, rank, address.value, list(shape), steps[0], list(box), swizzle)
        ctypes.memset(at.value, 7, 128)
        return 0

    driver = SimpleNamespace(cuLaunchKernelEx=launch, cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(stored, "_driver", lambda: driver)
    monkeypatch.setattr(stored, "_function", lambda kept, device: 5)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return seen


def test_arguments_lie_where_the_driver_is_told(here, launched):
    shelf.keep("name", _compiled())
    run = stored.load("name", BUILD, 0)
    tensor, matrix = torch.zeros(4), torch.zeros(96, 64, dtype=torch.bfloat16)
    for n in (3, 4):
        run(n, [tensor, Descriptor(matrix, [96, 64], [64, 1], [64, 64]), None, -n, 0.5], 2)
        address, tensor_map, *rest = (
            value.value if hasattr(value, "value") else value for value in launched["values"]
        )
        assert address == tensor.data_ptr() and bytes(launched["values"][1].raw) == b"\x07" * 128
        assert rest == [96, 64, 64, 1, -n, 0.5, 0, 0]
        assert launched["grid"] == (n, 2, 128, 98360)
    assert launched["map"] == (9, 2, matrix.data_ptr(), [64, 96], 128, [64, 64], 3)


def test_a_tensor_map_is_made_once_for_a_place(here, launched):
    shelf.keep("name", _compiled())
    run = stored.load("name", BUILD, 0)
    tensor, matrix = torch.zeros(4), torch.zeros(96, 64, dtype=torch.bfloat16)

    def made(base, shape, strides):
        run(1, [tensor, Descriptor(base, shape, strides, [64, 64]), None, 1, 0.5])
        return launched["maps"]

    assert [made(matrix, [96, 64], [64, 1]) for _ in range(3)] == [1, 1, 1]
    assert made(matrix, [48, 64], [64, 1]) == 2 and launched["map"][3] == [64, 48]
    assert made(matrix, [48, 64], [128, 1]) == 3 and launched["map"][4] == 256
    assert made(matrix[8:], [48, 64], [128, 1]) == 4 and launched["map"][2] == matrix[8:].data_ptr()
    for n in range(2 * stored._MOST_MAPS):
        made(matrix, [n + 1, 64], [64, 1])
    assert len(run.known) <= stored._MOST_MAPS


@pytest.mark.parametrize("change", [{}, {"profile_scratch_size": 8}])
def test_hopper_launches_without_triton_s_own_launcher_where_it_can(launched, monkeypatch, change):
    from tilewise.backends.hopper import compile as hopper

    others = []
    made = _compiled(**change)
    if change:
        made.run, made.function, made.packed_metadata = lambda *values: others.append(values[:2]), 6, None
    monkeypatch.setattr(hopper, "compile_gluon", lambda kernel, build: made)
    run = hopper.GluonLauncher(SimpleNamespace(arg_names="abcdef"), BUILD, 0)
    matrix = Descriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64], [64, 1], [64, 64])
    run(3, [torch.zeros(4), matrix, None, 1, 0.5])
    assert others == ([(3, 1)] if change else [])
    assert launched.get("grid") == (None if change else (3, 1, 128, 98360))
    assert run.function == (6 if change else 5)


def test_a_kernel_with_other_parameters_is_compiled_anew(here, launched):
    shelf.keep("name", _compiled())
    assert stored.load("name", BUILD._replace(types=("*bf16", "i32")), 0) is None
    assert stored.load("another", BUILD, 0) is None


def test_the_compiler_s_digest_is_computed_once(monkeypatch, tmp_path):
    from tilewise.backends.triton import compiler_digest

    (tmp_path / "compiler").mkdir()
    code = tmp_path / "compiler" / "code.py"
    code.write_text("1")
    monkeypatch.setattr(compiler_digest, "folder", lambda: tmp_path)
    asked = []

    def compute():
        asked.append(1)
        return f"3.6-{code.read_text()}"

    assert [compiler_digest.recalled(compute, "3.6", tmp_path) for _ in range(3)] == ["3.6-1"] * 3
    assert len(asked) == 1
    code.write_text("22")
    assert compiler_digest.recalled(compute, "3.6", tmp_path) == "3.6-22"


def test_triton_s_own_digest_is_recalled_as_it_is():
    import triton
    from triton.runtime import cache

    from tilewise.backends.triton import compiler_digest

    compiler_digest.recall()
    assert cache.triton_key().startswith(triton.__version__)
