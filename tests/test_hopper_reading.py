"""A quicker reading of kernels: the same operations at the same places, and Triton as it was before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from versions import needs_triton

pytestmark = needs_triton

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) != (3, 6):
    pytest.skip("the backend 'hopper' needs Triton 3.6", allow_module_level=True)

from triton.compiler import code_generator  # noqa: E402
from triton.language import core  # noqa: E402
from triton.runtime import jit  # noqa: E402

from tilewise.backends.hopper import reading  # noqa: E402


def _state():
    owners = (code_generator, code_generator.CodeGenerator, core.tuple_type, core.tensor)
    names = ("warnings", "inspect", "_define_name_lookup", "__init__")
    return [vars(owner).get(name) for owner in owners for name in names]


def _read(quickly: bool, monkeypatch) -> str:
    """The operations of the causal kernel of D = 128."""
    import hopper_compile
    from triton.experimental.gluon import _runtime

    import tilewise as tw

    texts = []

    class Enough(Exception):
        pass

    def keep(*arguments):
        texts.append(whole(*arguments).str_nodebug())
        raise Enough

    with monkeypatch.context() as patch:
        whole = _runtime.GluonASTSource.make_ir
        patch.setattr(_runtime.GluonASTSource, "make_ir", keep)
        if not quickly:
            patch.setattr(reading, "replacements", tuple)
            patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        patch.setenv("TRITON_ALWAYS_COMPILE", "1")
        with pytest.raises(Enough):
            hopper_compile.compile_forward((128, 128), tw.causal())
    return texts[0]


def test_this_triton_is_the_one_that_was_written_for():
    assert reading.digest(code_generator, core, jit) in reading.KNOWN
    assert reading.replacements()


def test_a_kernel_is_read_as_before(monkeypatch):
    assert _read(True, monkeypatch) == _read(False, monkeypatch)


def test_triton_is_put_back_after_the_last_of_several_threads():
    before = _state()
    inside, go_on = threading.Event(), threading.Event()

    def other():
        with reading.quick_reading():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other)
    with reading.quick_reading():
        thread.start()
        inside.wait(10)
        assert code_generator.warnings is not before[0]
    assert code_generator.warnings is not before[0]  # the other still reads
    go_on.set()
    thread.join()
    assert _state() == before
    with pytest.raises(ZeroDivisionError), reading.quick_reading():
        raise ZeroDivisionError
    assert _state() == before


def test_another_text_of_triton_is_read_by_triton_itself(monkeypatch):
    monkeypatch.setattr(reading, "KNOWN", ())
    reading.replacements.cache_clear()
    try:
        assert reading.replacements() == ()
        with reading.quick_reading():
            assert code_generator.inspect.__name__ == "inspect"
    finally:
        reading.replacements.cache_clear()


def test_types_of_tuples_have_their_names_then_and_later():
    plain = core.tuple_type([core.int32, core.float32], ["a", "b"]).name
    with reading.quick_reading():
        made = core.tuple_type([core.int32, core.float32], ["a", "b"])
    assert plain == made.name == str(made) == "[a:int32,b:fp32]"
    assert made == core.tuple_type([core.int32, core.float32], ["a", "b"])


def test_signatures_and_arguments_are_those_of_inspect():
    import inspect

    def plain(a, b=2): ...

    def rest(a, *others): ...

    class Thing:
        def method(self, x): ...

    ours = reading._Signatures()
    thing = Thing()
    for function in (plain, rest, Thing.method, thing.method, len):
        for _ in range(2):
            assert ours.signature(function) == inspect.signature(function)
    for function, given in ((plain, (1,)), (plain, (1, 3)), (rest, (1, 2, 3))):
        assert ours.getcallargs(function, *given) == inspect.getcallargs(function, *given)
    assert ours.getcallargs(plain, 1, b=5) == {"a": 1, "b": 5}
    with pytest.raises(TypeError):
        ours.getcallargs(plain)


def _printed(text: str) -> list[str]:
    """What a process of its own prints."""
    command = [sys.executable, "-c", text]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_fork_may_read_while_its_parent_changes_something():
    text = (
        "import os, warnings; warnings.simplefilter('ignore')\n"
        "from tilewise.backends.hopper import reading\n"
        "reading.replacements()\n"
        "reading._lock.acquire()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with reading.quick_reading(): pass\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert _printed(text) == ["0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_fork_while_another_thread_reads_has_triton_as_it_was():
    text = (
        "import os, threading, warnings; warnings.simplefilter('ignore')\n"
        "from tilewise.backends.hopper import reading\n"
        "if not reading.replacements(): print(0); raise SystemExit\n"
        "owner, name, _ = reading.replacements()[0]\n"
        "before, inside, done = vars(owner)[name], threading.Event(), threading.Event()\n"
        "def read():\n"
        "    with reading.quick_reading(): inside.set(); done.wait()\n"
        "threading.Thread(target=read).start(); inside.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = vars(owner)[name] is before\n"
        "    with reading.quick_reading(): same &= vars(owner)[name] is not before\n"
        "    os._exit(not (same and vars(owner)[name] is before))\n"
        "done.set(); print(os.waitpid(child, 0)[1])\n"
    )
    assert _printed(text) == ["0"]


KEYS = """
import sys
from hopper_compile import spec_of
import tilewise as tw
from tilewise.backends.hopper import compile, source
from tilewise.backends.hopper.backward_entries import EARLY, HALVES
from tilewise.backends.triton.layout import Slots

def compiled(source, **options):
    print(name, source.hash())

import triton
triton.compile = compiled
calls = {"causal": (tw.causal(), HALVES), "plain": (None, HALVES), "early": (tw.causal(), EARLY)}
for name in sys.argv[1:]:
    mask, entry = calls[name]
    module = source.module_of(spec_of(mask)[0], Slots((), (), 0, 0, (), 0), entry.module, (entry,))
    kernel = getattr(module, entry.name)
    compile.compile_gluon(kernel, compile.Build((), (), tuple((n, 0) for n in kernel.arg_names), 4, 1))
"""


def test_names_in_the_cache_do_not_depend_on_what_was_compiled_before(tmp_path) -> None:
    """Seen with Triton 3.6: another process, which compiled kernels in another order, did not find them."""
    script = tmp_path / "keys.py"
    script.write_text(KEYS)
    found = set()
    for order in (("causal",), ("early", "causal"), ("plain", "early", "causal")):
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, script, *order], env=environment, capture_output=True, text=True, check=True
        )
        found |= {line for line in done.stdout.splitlines() if line.startswith("causal")}
    assert len(found) == 1
