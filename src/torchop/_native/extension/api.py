"""Load the extension into this process, and compile it first if necessary.

The first use of an operator loads a compiled extension. If there is none, a background thread
compiles it once the program has made many calls (see `switch.CALLS_BEFORE_BUILD`). Until it is
loaded, calls go through PyTorch's dispatcher. A program waits only with TORCHOP_NATIVE=require or
in `torchop.native.wait`.
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
from torchop._native.extension.build import Announce, Build, printable
from torchop._native.extension.files import UnusableFileError
from torchop._native.extension.recipe import Recipe, find_compiler, lock_problem, make_recipe

NOTICE = (
    "torchop: compiling the native call path. This takes about 20 s and happens once. "
    "TORCHOP_NATIVE=0 turns this off."
)
NOTICE_IN_BACKGROUND = (
    "torchop: compiling the native call path. This takes about 20 s and happens once. Calls take "
    "longer until it is ready: call torchop.native.wait() before you time them. TORCHOP_NATIVE=0 "
    "turns this off."
)
NOTICE_OF_ANOTHER = (
    "torchop: another process is compiling the native call path, so this process waits for it. "
    "TORCHOP_NATIVE=0 turns this off."
)
Mode = Literal["auto", "0", "require", "prebuilt"]
State = Literal["off", "idle", "found", "building", "ready", "failed"]
OnReady = Callable[[ModuleType], None]


def mode() -> Mode:
    value = os.environ.get("TORCHOP_NATIVE") or "auto"
    if value not in get_args(Mode):
        raise ValueError(
            f"the environment variable TORCHOP_NATIVE is {short_repr(value)}, and must be one of: "
            "auto (use a compiled native call path, or compile it in the background after many "
            "calls), 0 (turn it off), require (compile it if needed, and raise if that fails), "
            "prebuilt (use a compiled one, and never compile)."
        )
    return cast(Mode, value)


class Status(NamedTuple):
    """The state of the native call path in this process.

    Attributes:
        mode: the value of TORCHOP_NATIVE: `"auto"`, `"0"`, `"require"` or `"prebuilt"`.
        state: `"off"`, `"idle"` (not compiled yet: the 1,000th call of an operator's kernel starts
            to compile it), `"building"` (being compiled), `"found"` (being loaded), `"ready"` (in
            use) or `"failed"`.
        path: the extension file that is in use, being loaded or being compiled.
        reason: why compiling or loading failed, or why the native call path is off although
            TORCHOP_NATIVE is not 0. While another process compiles, this says so.
        seconds: how many seconds compiling took, or has taken so far.
        key: a text that identifies the PyTorch, the Python, the platform and the C++ sources that
            the extension is compiled for.

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
    def __init__(self, source: Path | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._is_requested = False
        # True if no compiled extension was found, so that `obtain(build=True)` may compile one.
        self.is_deferred = False
        # Prevents a duplicate warning, since compiling starts by searching the same folders again.
        self._has_reported_unfit = False
        self._is_settled = threading.Event()  # set when loading has succeeded or failed
        # The number of running calls to `wait`. If loading fails during such a call, the call
        # raises an error, so no warning is needed.
        self._waiters = 0
        self._state: State = "idle"
        self._path: Path | None = None
        self._reason: str | None = None
        self._key: str | None = None
        self._build: Build | None = None
        self._thread: threading.Thread | None = None
        self._build_started = 0.0
        self._build_seconds: float | None = None

    def obtain(self, on_ready: OnReady, *, build: bool = False) -> None:
        """Load the extension, or start to compile it if `build` is True.

        If a compiled file exists, this function loads it and calls `on_ready` before it returns.
        Otherwise a call with `build` starts a thread, which compiles the extension, loads it and
        calls `on_ready`. Later calls are no-ops, except for the first call with `build`.

        TORCHOP_NATIVE changes this: with "require", this function compiles the extension before it
        returns. With "prebuilt", nothing is compiled. With "0", nothing is loaded. On free-threaded
        Python, an extension that would turn the GIL on is loaded only with "require".

        If anything fails, including `on_ready`, one warning reports it. But with "require", or
        while `wait` is running, the error is raised instead. A missing compiler is only logged,
        because a program that imports a package with operators need not have one.
        """
        wanted = mode()
        with self._lock:
            if self._is_requested and not (build and self.is_deferred):
                if self._state == "failed" and wanted == "require":
                    raise _required(self._reason)
                return
            problem = lock_problem()
            if wanted == "0" or (problem is not None and wanted != "require"):
                self._state = "off"
                self._reason = None if wanted == "0" else problem
                return
            self._is_settled.clear()
            self._is_requested = True
            self.is_deferred = False
        try:
            self._load_or_build(wanted, on_ready, build or wanted == "require")
        except BaseException as error:
            # Reraise Ctrl-C and RecursionError, since they do not mean that loading is impossible.
            # The next call to `obtain` tries again.
            is_passed_on = not isinstance(error, Exception) or isinstance(error, RecursionError)
            try:
                self._fail(error)
            finally:
                self._is_requested = not is_passed_on
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
                    "TORCHOP_NATIVE=auto to run without the GIL and without native calls.",
                    NativeBuildWarning,
                )

    def wait(self, on_ready: OnReady, timeout: float | None) -> bool:
        """Load the extension, wait until that succeeds or fails, and return whether it is loaded.

        Raises NativeUnavailableError if compiling or loading failed.
        """
        with self._lock:
            self._waiters += 1
        try:
            self.obtain(on_ready, build=True)
            if self._is_requested:
                self._is_settled.wait(timeout)
        finally:
            with self._lock:
                self._waiters -= 1
        # Check this even if the timeout has expired, because a failure after this call only causes
        # a warning.
        if self._state == "failed":
            raise NativeUnavailableError(
                "torchop.native.wait: the native call path is not available, so calls take longer. "
                "Fix the problem, run `python -m torchop build`, and restart this program. Or set "
                "TORCHOP_NATIVE=0, which makes `wait` return False. The problem: "
                f"{self._reason}"
            )
        return self._state == "ready"

    def status(self) -> Status:
        seconds = self._build_seconds
        if self._state == "building":
            seconds = time.monotonic() - self._build_started
        return Status(mode(), self._state, self._path, self._reason, seconds, self._key)

    def after_fork(self) -> None:
        """Reset the state in a forked child, because the child lacks the compiling thread."""
        self._lock = threading.Lock()
        self._is_settled = threading.Event()
        self._waiters = 0
        self._build = self._thread = None
        if self._state in ("idle", "found", "building"):
            self._is_requested = self.is_deferred
            self._state = "idle"
            self._reason = None
        else:
            self._is_settled.set()

    def stop(self) -> None:
        """Stop compiling before the interpreter exits.

        The exiting interpreter terminates daemon threads, such as the compiling thread. If the
        thread is in the dynamic linker or writing to stderr at that time, the process aborts.
        """
        if self._build is not None and self._thread is not None:
            self._build.stop()
            self._thread.join(10)

    def _load_or_build(self, wanted: Mode, on_ready: OnReady, builds: bool) -> None:
        recipe = make_recipe(self._source)
        self._key = recipe.key
        misses: list[str] = []
        unfit: list[str] = []  # why files that the user has installed or selected are not loaded
        for place in files.places(recipe):
            if place.file is None:
                misses.append(place.miss())
            else:
                try:
                    self._use(place.file, on_ready)
                    self._is_settled.set()
                    unfit = [text for text in unfit if text.startswith(files.CHOSEN)]
                    break
                except UnusableFileError as error:
                    misses.append(f"{place.name}: {error}")
            if (remedy := place.remedy()) is not None:
                unfit.append(f"{misses[-1]}, but this program needs {recipe.key}. {remedy}")
            elif place.name == "cache" and place.file is not None:
                raise NativeUnavailableError(
                    f"{misses[-1]}. `python -m torchop build --force` compiles it again"
                )
        else:
            if wanted == "prebuilt":
                raise NativeUnavailableError(
                    f"this program needs {recipe.key}, and TORCHOP_NATIVE=prebuilt does not "
                    "compile it; " + "; ".join(misses)
                )
            try:
                find_compiler()
            except NativeUnavailableError as error:
                self._give_up(". ".join([str(error), *unfit]), builds or bool(unfit))
                return
            if builds or not self._defer():
                self._start_build(recipe, wanted, on_ready)
        if unfit and not self._has_reported_unfit:
            self._has_reported_unfit = True
            text = f"{'. '.join(unfit)}. Using another folder, or compiling it."
            _errors.warn_at(_errors.users_place(), text, NativeBuildWarning)

    def _give_up(self, problem: str, raises: bool) -> None:
        error = NativeUnavailableError(problem)
        if raises or self._waiters:
            raise error
        self._fail(error)
        logs.extension.debug("calls will not be native: %s", self._reason)

    def _defer(self) -> bool:
        """Defer compiling to a later `obtain(build=True)`. Return False if a thread is in `wait`.

        Check for waiting threads and defer under the same lock. Otherwise a thread could call
        `wait` in between, and would then wait for a build that nothing starts.
        """
        with self._lock:
            self.is_deferred = not self._waiters
            return self.is_deferred

    def _start_build(self, recipe: Recipe, wanted: Mode, on_ready: OnReady) -> None:
        file = files.make_cache_folder() / recipe.file_name
        is_awaited = wanted == "require" or self._waiters > 0
        build = self._build = Build(recipe, file, background=wanted != "require")
        self._path, self._build_started = file, time.monotonic()
        self._state = "building"
        writes_notices = _writes_notices()

        def announce(is_elsewhere: bool) -> None:
            self._reason = "another process is compiling it" if is_elsewhere else None
            if writes_notices:
                here = NOTICE if is_awaited else NOTICE_IN_BACKGROUND
                _write(NOTICE_OF_ANOTHER if is_elsewhere else here)
            verb = "waiting for another process to compile" if is_elsewhere else "compiling"
            logs.extension.info("%s %s for %s", verb, file, recipe.key)

        if wanted == "require":
            self._finish_build(build, announce, writes_notices, on_ready)
            return
        place = _errors.users_place()

        def finish() -> None:
            try:
                self._finish_build(build, announce, writes_notices, on_ready)
            except Exception as error:
                self._fail(error)
                if not build.is_stopped:
                    self._warn_of_failure(place)

        thread = threading.Thread(target=finish, name="torchop-build", daemon=True)
        thread.start()
        # Set only now, because `stop` cannot join a thread that could not be started.
        self._thread = thread

    def _finish_build(
        self, build: Build, announce: Announce, writes_notices: bool, on_ready: OnReady
    ) -> None:
        build.run_in_cache(announce)
        self._reason = None
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
        # Set the state last, because other threads read the reason once the state is set.
        self._state = "failed"
        self._is_settled.set()

    def _warn_of_failure(self, place: _errors.Place) -> None:
        if not self._waiters:
            _errors.warn_at(
                place,
                "torchop's native call path is not available. Operators work without it, but calls "
                "take longer. Fix the problem and run `python -m torchop build`, or set "
                "TORCHOP_NATIVE=0 to turn it off without this warning. The problem: "
                f"{self._reason}",
                NativeBuildWarning,
            )


extension = Extension()
atexit.register(extension.stop)
if hasattr(os, "register_at_fork"):  # missing on Windows, which cannot fork
    os.register_at_fork(after_in_child=extension.after_fork)


def status() -> Status:
    """Return the state of the native call path (calls without the dispatcher) in this process.

    Example:
        >>> import torchop
        >>> torchop.native.status().mode in ("auto", "0", "require", "prebuilt")
        True
    """
    return extension.status()


def why_missing() -> str:
    state = status()
    if state.state == "idle":
        return (
            "the native call path is not compiled yet (the 1,000th call starts to compile it, and "
            "torchop.native.wait() compiles it now)"
        )
    fallback = "TORCHOP_NATIVE=0 turns it off" if state.state == "off" else state.state
    return f"the native call path is not loaded ({state.reason or fallback})"


def build(out: Path | None = None, *, force: bool = False, source: Path | None = None) -> Path:
    """Compile the extension, by default into the cache folder, and return the path of the file."""
    recipe = make_recipe(source)
    if out is None:
        folder = files.make_cache_folder()
    else:
        folder = out.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {folder} cannot be created: {error.strerror}"
            ) from None
    file = folder / recipe.file_name
    if force or not file.exists():
        build = Build(recipe, file)

        def announce(is_elsewhere: bool) -> None:
            if _writes_notices():
                _write(NOTICE_OF_ANOTHER if is_elsewhere else NOTICE)

        if out is None:
            build.run_in_cache(announce, force=force)
        else:
            announce(False)
            build.run()
    return file


def _writes_notices() -> bool:
    """Return whether this process may print notices. Only the main process of a program does."""
    is_first = os.environ.get("LOCAL_RANK") in (None, "", "0")
    return is_first and multiprocessing.parent_process() is None


def _write(line: str) -> None:
    # Ignore errors, because stderr may be closed, or be None under pythonw.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _required(reason: str | None) -> NativeUnavailableError:
    return NativeUnavailableError(
        "TORCHOP_NATIVE=require is set, but torchop's native call path is not available. "
        f"Fix the problem, or set TORCHOP_NATIVE=auto to run without it. The problem: {reason}"
    )
