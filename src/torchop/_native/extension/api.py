"""The extension of a process: what TORCHOP_NATIVE asks for, finding it, and compiling it.

Nothing waits for the compiler, unless the user asks for that with TORCHOP_NATIVE=require or
`torchop.native.wait`. Until the extension is loaded, operators work through PyTorch's dispatcher.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, cast, get_args

from torchop import _errors
from torchop._compat import logs
from torchop._errors import NativeBuildWarning, NativeUnavailableError, short_repr
from torchop._native.extension import files
from torchop._native.extension.build import Build, printable
from torchop._native.extension.files import UnusableFileError
from torchop._native.extension.recipe import Recipe, lock_problem, make_recipe

NOTICE = (
    "torchop: compiling its native call path, once, which takes about 20 s. TORCHOP_NATIVE=0 turns "
    "this off."
)
NOTICE_IN_BACKGROUND = (
    "torchop: compiling its native call path, once, which takes about 20 s. Calls take longer "
    "until it is ready: call torchop.native.wait() before you time them. TORCHOP_NATIVE=0 turns "
    "this off."
)
Mode = Literal["auto", "0", "require", "prebuilt"]
State = Literal["off", "idle", "found", "building", "ready", "failed"]
OnReady = Callable[[ModuleType], None]


def mode() -> Mode:
    """What TORCHOP_NATIVE asks for; "auto" if it is not set."""
    value = os.environ.get("TORCHOP_NATIVE") or "auto"
    if value not in get_args(Mode):
        raise ValueError(
            f"the environment variable TORCHOP_NATIVE is {short_repr(value)}, and must be one of: "
            "auto (use the native call path when it is there, and compile it in the background "
            "when it is not), 0 (never), require (wait for it, and fail without it), prebuilt (use "
            "it when it is there, and never compile it)."
        )
    return cast(Mode, value)


class Status(NamedTuple):
    """How far a process got with the native call path.

    Attributes:
        mode: what TORCHOP_NATIVE says: `"auto"`, `"0"`, `"require"` or `"prebuilt"`.
        state: `"off"`, `"idle"` (no operator was called yet), `"building"`, `"found"` (it is being
            loaded), `"ready"` (it is in use) or `"failed"`.
        path: the extension that is loaded, or being loaded or built.
        reason: why it failed, or why it is off, unless TORCHOP_NATIVE=0 says so.
        seconds: how long building took, or has taken so far.
        key: what the extension was compiled for: PyTorch, Python, platform and sources.

    Example:
        >>> import torchop
        >>> torchop.native.status().state in ("off", "idle", "building", "found", "ready", "failed")
        True
    """

    mode: Mode
    state: State
    path: Path | None
    reason: str | None
    seconds: float | None
    key: str | None


class Extension:
    """The extension of this process.

    The process has one; tests make more, of sources of their own.
    """

    def __init__(self, source: Path | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._is_asked_for = False
        self._is_settled = threading.Event()  # when it is known whether it can be loaded
        self._waiters = 0  # callers of `wait`, which raises the failure
        self._state: State = "idle"
        self._path: Path | None = None
        self._reason: str | None = None
        self._key: str | None = None
        self._build: Build | None = None
        self._thread: threading.Thread | None = None
        self._build_started = 0.0
        self._build_seconds: float | None = None

    def obtain(self, on_ready: OnReady) -> None:
        """Load the extension, or start to compile it; calls after the first do nothing.

        A compiled file is loaded, and passed to `on_ready`, before this returns. Otherwise the
        extension is compiled in a thread, which then calls `on_ready`; with TORCHOP_NATIVE=require,
        before this returns. With TORCHOP_NATIVE=prebuilt nothing is compiled, and with
        TORCHOP_NATIVE=0 nothing happens. Nor does anything happen on a Python that runs without its
        lock, unless it is required, because loading would turn the lock on.

        A failure is one warning, unless TORCHOP_NATIVE=require or a caller of `wait` asks for an
        exception. An exception in `on_ready` is such a failure.
        """
        wanted = mode()
        with self._lock:
            if self._is_asked_for:
                if self._state == "failed" and wanted == "require":
                    raise _required(self._reason)
                return
            problem = lock_problem()
            if wanted == "0" or (problem is not None and wanted != "require"):
                self._state = "off"
                self._reason = None if wanted == "0" else problem
                return
            self._is_settled.clear()
            self._is_asked_for = True
        try:
            self._load_or_build(wanted, on_ready)
        except BaseException as error:
            # After Ctrl-C, or in a call deep in a recursion, the next call tries again.
            is_passed_on = not isinstance(error, Exception) or isinstance(error, RecursionError)
            try:
                self._fail(error)
            finally:
                self._is_asked_for = not is_passed_on
            if is_passed_on:
                raise
            if wanted == "require":
                cause = None if isinstance(error, NativeUnavailableError) else error
                raise _required(self._reason) from cause
            self._warn_of_failure(_errors.users_place())
        else:
            if problem is not None:
                _errors.warn_at(
                    _errors.users_place(),
                    f"TORCHOP_NATIVE=require turns the GIL on for this process: {problem}. Set "
                    "TORCHOP_NATIVE=auto to work without the GIL and without native calls.",
                    NativeBuildWarning,
                )

    def wait(self, on_ready: OnReady, timeout: float | None) -> bool:
        """Obtain the extension, wait for it, and return whether it is loaded.

        Raises:
            NativeUnavailableError: it cannot be compiled or loaded.
        """
        with self._lock:
            self._waiters += 1
        try:
            self.obtain(on_ready)
            if self._is_asked_for:
                self._is_settled.wait(timeout)
        finally:
            with self._lock:
                self._waiters -= 1
        # Last: if the build fails after the timeout, the failure is a warning.
        if self._state == "failed":
            raise NativeUnavailableError(
                "torchop.native.wait: the native call path is not available, so calls take longer. "
                "Fix the problem, run `python -m torchop build`, and start this program again; or "
                "set TORCHOP_NATIVE=0, with which `wait` returns False instead. The problem: "
                f"{self._reason}"
            )
        return self._state == "ready"

    def status(self) -> Status:
        """Describe the extension of this process."""
        seconds = self._build_seconds
        if self._state == "building":
            seconds = time.monotonic() - self._build_started
        return Status(mode(), self._state, self._path, self._reason, seconds, self._key)

    def after_fork(self) -> None:
        """Start over in a forked child, in which the thread that compiles does not exist."""
        self._lock = threading.Lock()
        self._is_settled = threading.Event()
        self._waiters = 0
        self._build = self._thread = None
        if self._state in ("found", "building"):
            self._is_asked_for = False
            self._state = "idle"
        else:
            self._is_settled.set()

    def stop(self) -> None:
        """Stop a compilation in the background, because the interpreter ends.

        The interpreter would end the thread wherever it is. In the dynamic linker, or while it
        writes to stderr, that aborts the process. The timeout is for a thread that hangs.
        """
        if self._build is not None and self._thread is not None:
            self._build.stop()
            self._thread.join(10)

    def _load_or_build(self, wanted: Mode, on_ready: OnReady) -> None:
        recipe = make_recipe(self._source)
        self._key = recipe.key
        misses = []
        chosen = None
        for place in files.places(recipe):
            if place.file is None:
                misses.append(place.miss())
            else:
                try:
                    self._use(place.file, on_ready)
                    self._is_settled.set()
                    break
                except UnusableFileError as error:
                    misses.append(f"{place.name}: {error}")
            if place.name == "TORCHOP_NATIVE_DIR":
                chosen = (
                    f"{misses[-1]}, but this program needs {recipe.key}. "
                    f"`python -m torchop build --out {place.folder}` compiles it"
                )
            elif place.name == "cache" and place.file is not None:
                raise NativeUnavailableError(
                    f"{misses[-1]}. `python -m torchop build --force` compiles it again"
                )
        else:
            if wanted == "prebuilt":
                raise NativeUnavailableError(
                    f"this program needs {recipe.key}, which TORCHOP_NATIVE=prebuilt does not "
                    "compile; " + "; ".join(misses)
                )
            self._start_build(recipe, wanted, on_ready)
        if chosen is not None:
            text = f"{chosen}. Another folder has it, or it is compiled."
            _errors.warn_at(_errors.users_place(), text, NativeBuildWarning)

    def _start_build(self, recipe: Recipe, wanted: Mode, on_ready: OnReady) -> None:
        file = files.make_cache_folder() / recipe.file_name
        is_awaited = wanted == "require" or self._waiters > 0
        self._build = Build(recipe, file, background=wanted != "require")
        self._path, self._build_started = file, time.monotonic()
        self._state = "building"
        writes_notices = _writes_notices()
        if writes_notices:
            _write(NOTICE if is_awaited else NOTICE_IN_BACKGROUND)
        logs.extension.info("compiling %s for %s", file, recipe.key)
        if wanted == "require":
            self._finish_build(self._build, writes_notices, on_ready)
            return
        place = _errors.users_place()
        build = self._build

        def finish() -> None:
            try:
                self._finish_build(build, writes_notices, on_ready)
            except Exception as error:
                self._fail(error)
                if not build.is_stopped:
                    self._warn_of_failure(place)

        self._thread = threading.Thread(target=finish, name="torchop-build", daemon=True)
        self._thread.start()

    def _finish_build(self, build: Build, writes_notices: bool, on_ready: OnReady) -> None:
        build.run_in_cache()
        self._build_seconds = time.monotonic() - self._build_started
        logs.extension.info("compiled %s in %.0f s", build.target, self._build_seconds)
        self._use(build.target, on_ready)
        if writes_notices:
            _write(f"torchop: native calls are ready, after {self._build_seconds:.0f} s.")
        self._is_settled.set()

    def _use(self, file: Path, on_ready: OnReady) -> None:
        self._state, self._path = "found", file
        on_ready(files.load(file))
        logs.extension.info("loaded %s", file)
        self._state = "ready"

    def _fail(self, error: BaseException) -> None:
        explains_itself = isinstance(error, (NativeUnavailableError, UnusableFileError))
        self._reason = printable(
            str(error) if explains_itself else f"{type(error).__name__}: {error}"
        )
        self._state = "failed"  # after the reason, which other threads read when they see this
        self._is_settled.set()

    def _warn_of_failure(self, place: _errors.Place) -> None:
        if not self._waiters:
            _errors.warn_at(
                place,
                "torchop's native call path is not available. Operators work without it, but calls "
                "take longer. Fix the problem and run `python -m torchop build`, or set "
                "TORCHOP_NATIVE=0 to work without it and without this warning. The problem: "
                f"{self._reason}",
                NativeBuildWarning,
            )


extension = Extension()
atexit.register(extension.stop)
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=extension.after_fork)


def status() -> Status:
    """How far this process got with the native call path.

    Example:
        >>> import torchop
        >>> torchop.native.status().mode in ("auto", "0", "require", "prebuilt")
        True
    """
    return extension.status()


def why_missing() -> str:
    """Why calls go through the dispatcher, where the extension is not there."""
    state = status()
    fallback = "TORCHOP_NATIVE=0 turns it off" if state.state == "off" else state.state
    return f"the native call path is not there ({state.reason or fallback})"


def build(out: Path | None = None, *, force: bool = False, source: Path | None = None) -> Path:
    """Compile the extension, wait for the compiler, and return the file.

    Args:
        out: the folder of the file; the user's cache if this is None.
        force: whether to compile it again if the file exists.
        source: the folder of the sources; those of torchop if this is None.

    Raises:
        NativeUnavailableError: it cannot be compiled.
    """
    recipe = make_recipe(source)
    if out is None:
        folder = files.make_cache_folder()
    else:
        folder = out.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {folder} cannot be made: {error.strerror}"
            ) from None
    file = folder / recipe.file_name
    if force or not file.exists():
        build = Build(recipe, file)
        if _writes_notices():
            _write(NOTICE)
        if out is None:
            build.run_in_cache(force=force)
        else:
            build.run()
    return file


def _writes_notices() -> bool:
    """Whether this is the process, of those that a program consists of, that informs the user."""
    is_first = os.environ.get("LOCAL_RANK") in (None, "", "0")
    return is_first and multiprocessing.parent_process() is None


def _write(line: str) -> None:
    # A program may have closed its stderr, or have none, as with pythonw.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _required(reason: str | None) -> NativeUnavailableError:
    return NativeUnavailableError(
        "TORCHOP_NATIVE=require asks for torchop's native call path, which is not available. "
        f"Fix the problem, or set TORCHOP_NATIVE=auto to work without it. The problem: {reason}"
    )
