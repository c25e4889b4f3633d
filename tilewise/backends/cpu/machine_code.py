"""From Numba functions and LLVM modules to addresses, with the objects kept on disk.

An object's key is the text that made it: the sources that write it, the target, and the versions of LLVM
and of the spec. So a warm process loads objects with llvmlite alone and never imports Numba's compiler. The
folder is TILEWISE_CACHE_DIR, else the user's cache folder; where nothing can be written, objects live in
memory. Files appear by rename, so that parallel processes see whole objects or none.

A process that compiles a kernel says so, once, on the logger "tilewise.cpu": one line on stderr unless logging is
set up otherwise; `logging.getLogger("tilewise.cpu").setLevel(logging.ERROR)` silences it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import llvmlite.ir as ir

    from tilewise.backends.cpu.isa import Isa

_lock = threading.RLock()
_engines: list[Any] = []
_loaded: dict[str, dict[str, int]] = {}
"""Addresses by key. Code is never unloaded."""
_said: list[str] = []


_EMITTERS = ("isa", "parameters", "words", "lane_words", "row_words", "micro", "dropout")
_ROWS = ("pairs", "pair_launch", "pair_tiles", "ahead", "rows_in_order", "row_micro", "dot_rows")
_PAIRS = ("pairs", "pair_launch", "pair_tiles", "pair_loops", "pair_forward")
SOURCES = {
    "forward": (*_EMITTERS, *_PAIRS, "loops", "page_rows", "widen_kernel", "forward_kernel"),
    "turn": (*_EMITTERS, *_PAIRS, "loops"),
    "widen": (*_EMITTERS, "pair_launch", "loops", "widen_kernel"),
    "append": (*_EMITTERS, "loops", "append_kernel"),
    "combine": (*_EMITTERS, "loops", "ahead", "rows_in_order", "row_micro", "combine_kernel"),
    "decode": (*_EMITTERS, *_ROWS, "loops", "page_rows", "forward_kernel", "combine_kernel", "decode_kernel"),
    "backward": (
        *_EMITTERS,
        *_PAIRS,
        "loops",
        "backward_micro",
        "backward_rows",
        "pair_backward",
        "backward_kernel",
    ),
    "finish": (*_EMITTERS, "loops", "backward_kernel"),
    "fold": (
        *_EMITTERS,
        "counted",
        "print_vector",
        "leaf_bounds",
        "print_interval",
        "stage",
        "slots",
        "fold",
    ),
    "slopes": (*_EMITTERS, "counted", "print_vector", "stage", "slots", "fold", "fold_slopes"),
    "peak": ("isa", "words", "pairs", "pair_launch", "pair_tiles", "peaks"),
}
"""Modules that write each kind of object: another text of theirs is another key."""


_WRITTEN = {
    path.stem: hashlib.sha256(path.read_bytes()).digest() for path in Path(__file__).parent.glob("*.py")
}
"""The sources as they were when this process began: a release installed under a running process must not get its
objects under the new one's key."""


@functools.lru_cache(maxsize=16)
def _sources(kind: str) -> str:
    digest = hashlib.sha256()
    for name in ("machine_code", *SOURCES[kind]):
        digest.update(_WRITTEN[name])
    return digest.hexdigest()


def _folder() -> Path | None:
    """The cache folder, made if missing; None where nothing can be written."""
    named = os.environ.get("TILEWISE_CACHE_DIR")
    base = (
        Path(named)
        if named
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"
    )
    try:
        folder = base / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _target(isa: Isa) -> Any:
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="pic" if sys.platform != "win32" else "default",
        codemodel="default", jit=False,
    )  # fmt: skip


def _key(isa: Isa, name: str) -> str:
    import llvmlite
    import llvmlite.binding as llvm

    parts = (
        _sources(name.split(" ")[0]),
        repr(tuple(isa)),
        llvmlite.__version__,
        repr(llvm.llvm_version_info),
        sys.platform,
        name,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def load(isa: Isa, name: str, symbols: tuple[str, ...], make: Callable[[], str]) -> dict[str, int]:
    """Addresses of `symbols` in the object called `name`; `make` writes its LLVM text if it is nowhere yet."""
    key = _key(isa, name)
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded:
            _loaded[key] = _link(_object(isa, key, name, make), symbols)
        return _loaded[key]


def _say(isa: Isa, name: str, folder: Path | None) -> None:
    """What a first call waits for. Code of a spec's terms takes a moment only, and is not spoken of."""
    kind, _, dtype = name.partition(" ")
    if _said or kind not in ("forward", "backward", "decode"):
        return
    _said.append(name)
    kept = (
        f"kept in {folder}"
        if folder
        else "not kept: no folder can be written, TILEWISE_CACHE_DIR names another"
    )
    logging.getLogger("tilewise.cpu").warning(
        "tilewise: compiling CPU kernels for %s (%s %s first), some seconds each; %s",
        isa.cpu,
        dtype,
        kind,
        kept,
    )


def _object(isa: Isa, key: str, name: str, make: Callable[[], str]) -> bytes:
    folder = _folder()
    if folder is None:
        _say(isa, name, None)
        return assemble(isa, make())
    path = folder / f"{key}.o"
    found = _read(path)
    if found is None:
        with _alone(path.with_suffix(".lock")):
            found = _read(path)
            if found is None:
                _say(isa, name, folder)
                found = assemble(isa, make())
                _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    """A stored object, if it is there and whole."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if hashlib.sha256(data[:-32]).digest() == data[-32:]:
            return data[:-32]
    return None


def _write(path: Path, body: bytes) -> None:
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest())
        os.replace(temporary, path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Other processes that want the same object wait for this one instead of compiling it too, where files lock."""
    try:
        import fcntl

        file = path.open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        with contextlib.suppress(OSError):
            path.unlink()


def assemble(isa: Isa, text: str) -> bytes:
    """Machine code of an LLVM module."""
    import llvmlite.binding as llvm

    target = _target(isa)
    module = llvm.parse_assembly(text)
    module.verify()
    missing = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if missing:
        raise RuntimeError(f"compiled code calls what nothing defines: {missing}")
    return target.emit_object(module)


def optimise(isa: Isa, module: ir.Module | str) -> str:
    """LLVM text of a module after the usual passes."""
    import llvmlite.binding as llvm

    target = _target(isa)
    if not isinstance(module, str):
        module.triple = target.triple
        module.data_layout = str(target.target_data)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(parsed, builder)
    return str(parsed)


def _link(body: bytes, symbols: tuple[str, ...]) -> dict[str, int]:
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    # One block for all sections: code reaches its constants by 32-bit offsets, and sections mapped one by one may
    # lie further apart than that, which LLVM answers by ending the process.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(body))
    engine.finalize_object()
    _engines.append(engine)
    addresses = {name: engine.get_function_address(name) for name in symbols}
    if not all(addresses.values()):
        raise RuntimeError(f"the object lacks one of {symbols}")
    return addresses


ENTRY = "tilewise_entry"
LONG = 600
"""Lines of LLVM text from which a function is called and not inlined: loops over tiles, in which a call is nothing.
Written into each other they took LLVM 2.6 s of a forward kernel and 4.8 s of a backward one, and take 1.1 and 1.6
(measured on Zen 3). From 60 lines on, calls of 16 rows take 3 % longer."""


@contextlib.contextmanager
def _text_only() -> Iterator[None]:
    """Inside, Numba types and lowers, and does no more.

    By itself it runs LLVM's passes over every function that calls another once more, and makes machine code of each,
    which is more than half of its time. The text of the whole goes through `optimise` and `assemble` once instead.
    Where Numba has other insides, it does all it always does.
    """
    from numba.core import codegen
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    class Library(codegen.CPUCodeLibrary):
        """A library that is text: no passes, no addresses."""

        def _optimize_functions(self, module: Any) -> None:
            module.data_layout = self._codegen._data_layout

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_specific(self) -> None:
            pass

        def get_pointer_to_function(self, name: str) -> int:
            self._ensure_finalized()
            return 0

    own: dict[str, Any] = {
        "_library_class": Library,
        "_add_module": lambda _: None,
        "set_env": lambda *_: None,
    }
    with global_compiler_lock:
        maker = getattr(cpu_target.target_context, "_internal_codegen", None)
        if maker is None or not all(hasattr(maker, name) for name in (*own, "_data_layout")):
            yield
            return
        vars(maker).update(own)
        try:
            yield
        finally:
            for name in own:
                delattr(maker, name)


def numba_text(isa: Isa, function: Callable[[int], None]) -> str:
    """LLVM text of a Numba-compilable `function(int64) -> None` under the C name ENTRY, after the usual passes.

    Numba's own calling convention (a pointer for the result, one for an exception) stays behind a C function of one
    argument, which a thread pool can call.
    """
    from numba import njit, types

    with _text_only():
        compiled = njit(
            types.void(types.int64), nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
        )(function)  # fmt: skip
        text = compiled.inspect_llvm(compiled.signatures[0])
    name = _defined(text, function.__name__)
    # Nothing but the entry is called from outside, so that LLVM may change how functions are called.
    text = re.sub(r"^define (linkonce_odr )?", "define internal ", text, flags=re.M)
    text = re.sub(r"^define [^\n]*\n.*?^}", _apart, text, flags=re.M | re.S)
    return optimise(isa, text + (
        f"\ndefine void @{ENTRY}(i64 %task) {{\n  %result = alloca ptr\n  %error = alloca ptr\n"
        f"  %status = call i32 @{name}(ptr %result, ptr %error, i64 %task)\n  ret void\n}}\n"
    ))  # fmt: skip


def _apart(function: re.Match[str]) -> str:
    """The text of a function, not to be inlined if it is long."""
    head, body = function.group(0).split("\n", 1)
    if body.count("\n") < LONG:
        return function.group(0)
    return f"{head.rstrip().removesuffix('{')}noinline {{\n{body}"


def _defined(text: str, name: str) -> str:
    found = [
        m for m in re.findall(r'^define [^@\n]*@("?[\w.$]+"?)\(', text, re.M) if f"{len(name)}{name}B" in m
    ]
    if not found:
        raise RuntimeError(f"Numba's module does not define {name}")
    return found[-1]
