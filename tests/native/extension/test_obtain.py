"""Finding, loading and compiling the extension in a process. Uses private names."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from torchop._compat import logs
from torchop._native.extension import api, files
from torchop._native.extension.api import (
    NOTICE_IN_BACKGROUND,
    Extension,
    mode,
    why_missing,
)
from torchop._native.extension.build import Build
from torchop.native import NativeBuildWarning, NativeUnavailableError

Compiler = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("cache_folder")


class Receiver:
    def __init__(self) -> None:
        self.modules: list[ModuleType] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, module: ModuleType) -> None:
        self.modules.append(module)
        self.threads.append(threading.current_thread())


@pytest.fixture
def extension(source: Path) -> Extension:
    return Extension(source)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(Build, "__init__", refuse)


def refuse(module: ModuleType) -> None:
    raise ImportError("made for another layout")


def finish(extension: Extension) -> None:
    for thread in threading.enumerate():
        if thread.name == "torchop-build":
            thread.join(60)
    assert extension.status().state in ("ready", "failed")


def obtain_twice(extension: Extension) -> None:
    for _ in range(2):
        extension.obtain(Receiver())
        extension.obtain(Receiver(), build=True)


def obtain_and_finish(extension: Extension) -> None:
    extension.obtain(Receiver(), build=True)
    finish(extension)


def runs(log: Path) -> int:
    return len(log.read_text().splitlines())


# --------------------------------------------------------------------------------------------------
# Values of TORCHOP_NATIVE


@pytest.mark.parametrize("value", ["auto", "0", "require", "prebuilt"])
def test_value_is_the_mode(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", value)
    assert mode() == value


def test_default_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHOP_NATIVE", raising=False)
    assert mode() == "auto"
    monkeypatch.setenv("TORCHOP_NATIVE", "")
    assert mode() == "auto"


def test_another_value_is_an_error_that_names_the_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "yes")
    with pytest.raises(ValueError, match=r"is 'yes'.*auto \(.*0 \(.*require \(.*prebuilt \("):
        mode()


# --------------------------------------------------------------------------------------------------
# The extension is found or built


@pytest.mark.usefixtures("no_child")
def test_existing_extension_is_loaded_immediately(extension: Extension, in_cache: Path) -> None:
    receiver = Receiver()
    extension.obtain(receiver)
    assert receiver.threads == [threading.current_thread()]
    assert receiver.modules[0].__file__ == str(in_cache)
    status = extension.status()
    assert (status.state, status.path, status.reason) == ("ready", in_cache, None)


@pytest.mark.parametrize("value", ["auto", "prebuilt"])
@pytest.mark.usefixtures("needs_lock", "in_cache", "no_child", "without_lock")
def test_python_without_gil_does_not_load_an_extension_that_needs_it(
    extension: Extension, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading this extension would enable the GIL for the whole process, so it is not loaded."""
    monkeypatch.setenv("TORCHOP_NATIVE", value)
    receiver = Receiver()
    extension.obtain(receiver)
    assert receiver.modules == []
    status = extension.status()
    reason = "native calls need the GIL, and this Python runs without it"
    assert (status.state, status.reason) == ("off", reason)
    assert not extension.wait(receiver, None)
    monkeypatch.setattr(api, "extension", extension)
    assert why_missing() == f"the native call path is not loaded ({reason})"


@pytest.mark.usefixtures("needs_no_lock", "in_cache", "no_child", "without_lock")
def test_python_without_gil_loads_an_extension_that_supports_it(extension: Extension) -> None:
    """Loading this extension does not enable the GIL, so there is no warning."""
    receiver = Receiver()
    extension.obtain(receiver)
    assert len(receiver.modules) == 1
    assert extension.status().state == "ready"


@pytest.mark.usefixtures("needs_lock", "in_cache", "no_child", "without_lock")
def test_require_enables_the_gil_with_a_warning(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "require")
    receiver = Receiver()
    with pytest.warns(NativeBuildWarning, match=r"require turns the GIL on .*=auto to") as caught:
        extension.obtain(receiver)
    assert caught[0].filename == __file__
    assert len(receiver.modules) == 1
    assert extension.status().state == "ready"


def test_build_goes_on_in_the_background(
    extension: Extension,
    copying_compiler: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    receiver = Receiver()
    extension.obtain(receiver)
    assert (extension.status().state, extension.is_deferred) == ("idle", True)
    assert runs(copying_compiler) == 0
    extension.obtain(receiver, build=True)
    status = extension.status()
    assert (status.state, receiver.modules, extension.is_deferred) == ("building", [], False)
    assert status.seconds is not None
    assert 0 <= status.seconds < 0.3  # the compiler takes 0.3 seconds
    finish(extension)
    assert receiver.threads != [threading.current_thread()]
    assert receiver.modules[0].__file__ == str(target)
    status = extension.status()
    assert (status.state, status.path) == ("ready", target)
    assert status.seconds is not None
    assert status.seconds > 0.3
    assert extension.wait(Receiver(), 60)  # returns only after "native calls are ready" was printed
    notice, ready = capsys.readouterr().err.splitlines()
    assert notice == NOTICE_IN_BACKGROUND
    assert re.fullmatch(r"torchop: native calls are ready, after \d+ s\.", ready)


@pytest.mark.usefixtures("in_cache", "no_child")
def test_mode_0_does_not_look(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "0")
    receiver = Receiver()
    extension.obtain(receiver)
    assert (extension.status().state, receiver.modules) == ("off", [])


def test_require_waits(
    extension: Extension, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "require")
    receiver = Receiver()
    extension.obtain(receiver)
    assert receiver.threads == [threading.current_thread()]
    assert extension.status().state == "ready"


# --------------------------------------------------------------------------------------------------
# The extension is not available

WARNING = (
    r"torchop's native call path is not available\. Operators work without it.*"
    r"`python -m torchop build`, or set TORCHOP_NATIVE=0 .*The problem: "
)


@pytest.mark.filterwarnings("error")
def test_no_compiler_is_only_logged(
    extension: Extension, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    logs.extension.setLevel(logging.DEBUG)
    monkeypatch.setattr(logs.extension, "propagate", True)
    with caplog.at_level(logging.DEBUG):
        obtain_twice(extension)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("extension")]
    (line,) = lines
    assert line.startswith("calls will not be native: there is no C++ compiler")
    assert extension.status().state == "failed"
    assert "there is no C++ compiler" in str(extension.status().reason)


def test_thread_that_cannot_be_started_is_a_warning(
    extension: Extension, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    with pytest.warns(NativeBuildWarning, match=f"{WARNING}RuntimeError: can't start new thread"):
        extension.obtain(Receiver(), build=True)
    extension.stop()  # joins the thread only if it was started


def test_compiler_that_fails_is_one_warning_with_its_message(
    extension: Extension, compiler: Compiler
) -> None:
    compiler("echo 'call_path.cpp:1: fatal error' >&2; exit 1")
    with pytest.warns(
        NativeBuildWarning, match=f"{WARNING}.*exit code 1:\ncall_path.cpp:1: fatal error"
    ) as caught:
        obtain_and_finish(extension)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    assert extension.status().state == "failed"


def test_require_raises_with_the_message_of_the_compiler(
    extension: Extension, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("echo 'fatal error' >&2; exit 1")
    monkeypatch.setenv("TORCHOP_NATIVE", "require")
    message = r"TORCHOP_NATIVE=require is set, .*TORCHOP_NATIVE=auto .*exit code 1:\nfatal error"
    for _ in range(2):  # twice, because a program may retry the import that raised
        with pytest.raises(NativeUnavailableError, match=message):
            extension.obtain(Receiver())


def test_cache_that_cannot_be_made_is_a_warning(extension: Extension, cache_folder: Path) -> None:
    cache_folder.write_text("")
    with pytest.warns(NativeBuildWarning, match=f"{WARNING}the cache folder .* cannot be created"):
        extension.obtain(Receiver(), build=True)


@pytest.mark.usefixtures("no_child")
def test_unsafe_cache_is_a_warning(extension: Extension, in_cache: Path) -> None:
    in_cache.parent.chmod(0o777)
    receiver = Receiver()
    with pytest.warns(NativeBuildWarning, match=f"{WARNING}.*is writable by others"):
        extension.obtain(receiver, build=True)
    assert receiver.modules == []


@pytest.mark.usefixtures("in_cache", "no_child")
def test_receiver_that_raises_is_a_warning(extension: Extension) -> None:
    with pytest.warns(NativeBuildWarning, match=f"{WARNING}ImportError: made for another layout"):
        extension.obtain(refuse)
    assert extension.status().state == "failed"


@pytest.mark.usefixtures("in_cache", "no_child")
def test_receiver_that_raises_is_an_error_when_required(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "require")
    with pytest.raises(NativeUnavailableError, match="made for another layout") as caught:
        extension.obtain(refuse)
    assert isinstance(caught.value.__cause__, ImportError)


# --------------------------------------------------------------------------------------------------
# Only existing files may be used

KEY = r"torch\d\S*"


@pytest.fixture
def other(in_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put an extension for another PyTorch into TORCHOP_NATIVE_DIR, and return its key."""
    folder = tmp_path / "chosen"
    folder.mkdir()
    name = in_cache.name.replace("torch2", "torch9")
    in_cache.rename(folder / name)
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(folder))
    return name.removeprefix("_call_path-").removesuffix(".so")


@pytest.mark.usefixtures("no_child")
def test_prebuilt_loads_an_existing_extension(
    extension: Extension, in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "prebuilt")
    extension.obtain(Receiver())
    assert (extension.status().state, extension.status().path) == ("ready", in_cache)


@pytest.mark.usefixtures("no_child", "compiler")
def test_prebuilt_does_not_compile(
    extension: Extension, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "prebuilt")
    with pytest.warns(NativeBuildWarning, match="TORCHOP_NATIVE=prebuilt does not") as caught:
        obtain_twice(extension)
    (warning,) = caught
    message = str(warning.message)
    assert f"this program needs {extension.status().key}," in message
    assert re.search(rf"TORCHOP_NATIVE_DIR \(.*chosen\) has {re.escape(other)}; package", message)
    assert message.endswith("cache) has no extension")


@pytest.mark.parametrize("native", ["auto", "require"])
def test_a_folder_without_the_key_is_reported_and_the_extension_compiled(
    native: str,
    extension: Extension,
    other: str,
    copying_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", native)
    told = rf"^TORCHOP_NATIVE_DIR \(.*chosen\) has {re.escape(other)}, but this program needs {KEY}"
    with pytest.warns(NativeBuildWarning, match=told) as caught:
        obtain_twice(extension)
    finish(extension)
    assert len(caught) == 1
    assert (extension.status().state, runs(copying_compiler)) == ("ready", 1)


@pytest.fixture
def wheel(in_cache: Path, tmp_path: Path) -> str:
    """Install a wheel torchop-native for other C++ sources, and return the key of its file."""
    folder = tmp_path / "packages" / files.WHEEL_PACKAGE
    folder.mkdir(parents=True)
    name = re.sub("-[0-9a-f]{16}[.]so$", f"-{'0' * 16}.so", in_cache.name)
    in_cache.rename(folder / name)
    return re.escape(name.removeprefix("_call_path-").removesuffix(".so"))


UNFIT = r"torchop-native \(.*torchop_native\) has {key}, but this program needs {needed}\. `python"


def test_wheel_of_other_sources_is_reported(
    extension: Extension, wheel: str, copying_compiler: Path
) -> None:
    with pytest.warns(NativeBuildWarning, match=UNFIT.format(key=wheel, needed=KEY)) as caught:
        obtain_twice(extension)
    finish(extension)
    assert len(caught) == 1
    assert extension.status().state == "ready"


@pytest.mark.parametrize("is_awaited", [False, True])
def test_wheel_of_other_sources_is_reported_without_a_compiler(
    extension: Extension, wheel: str, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/absent")
    message = rf"the compiler '/absent' .* is not installed\. {UNFIT.format(key=wheel, needed=KEY)}"
    if is_awaited:
        with pytest.raises(NativeUnavailableError, match=message):
            extension.wait(Receiver(), None)
    else:
        with pytest.warns(NativeBuildWarning, match=message) as caught:
            obtain_twice(extension)
        assert len(caught) == 1


def test_wheel_in_another_folder_is_reported(
    extension: Extension, wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/absent")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(files, "WHEEL_FOLDERS", (tmp_path / "elsewhere",))
    expected = rf"torchop-native: .*torchop_native has {wheel}, and is not installed in .*elsewhere"
    with pytest.warns(NativeBuildWarning, match=expected):
        extension.obtain(Receiver())


# --------------------------------------------------------------------------------------------------
# A file that does not load


@pytest.mark.usefixtures("no_child")
def test_damaged_file_in_the_cache_is_a_warning_with_the_command(
    extension: Extension, in_cache: Path
) -> None:
    in_cache.write_text("damaged")
    told = r"cache: .*`python -m torchop build --force` compiles it again"
    with pytest.warns(NativeBuildWarning, match=told):
        extension.obtain(Receiver())
    assert extension.status().state == "failed"


@pytest.mark.usefixtures("no_child")
def test_damaged_file_outside_the_cache_is_skipped(
    extension: Extension, in_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / in_cache.name).write_text("damaged")
    monkeypatch.setenv("TORCHOP_NATIVE_DIR", str(tmp_path / "chosen"))
    with pytest.warns(NativeBuildWarning, match=r"TORCHOP_NATIVE_DIR: .*this program needs"):
        extension.obtain(Receiver())
    assert extension.status().path == in_cache


# --------------------------------------------------------------------------------------------------
# Several processes, and exit during a build


PROGRAM = """
import sys, time
from pathlib import Path
from torchop._native.extension.api import Extension, atexit
extension = Extension(Path(sys.argv[1]))
atexit.register(extension.stop)
extension.obtain(lambda module: None, build=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", [pytest.param(0, marks=pytest.mark.exhaustive), 0.5])
def test_the_end_of_the_program_stops_the_compiler(
    seconds: float, source: Path, compiler: Compiler, target: Path
) -> None:
    numbers = target.parent.parent / "numbers"
    log = compiler(f"echo $$ >> {numbers}; sleep 60")
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    program = subprocess.run(
        [*command, str(source), str(seconds)], stderr=subprocess.PIPE, text=True, timeout=50
    )
    assert (program.returncode, program.stderr) == (0, f"{NOTICE_IN_BACKGROUND}\n")
    assert [file.name for file in target.parent.iterdir()] == [f"{target.name}.lock"]
    if seconds:
        assert runs(log) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(int(numbers.read_text()), 0)
