"""Getting the native call path: what TORCHOP_NATIVE asks for, finding the extension, compiling it.

Nothing waits for the compiler, except where the user asks for that with TORCHOP_NATIVE=require or
`torchop.native.wait`. Until the extension is there, and if it never is, operators work through
PyTorch's dispatcher.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, cast, get_args

from torchop import _errors
from torchop._compat import logs
from torchop._errors import NativeBuildWarning, NativeUnavailableError, short_repr
from torchop._native.extension import child, files, worker
from torchop._native.extension.child import not_exiting
from torchop._native.extension.files import Place, UnusableFileError
from torchop._native.extension.recipe import Recipe, find_compiler, lock_problem, make_recipe

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
        self._is_settled = threading.Event()  # when it is known whether it is there
        self._waiters = 0  # those that get the failure as an exception
        self._state: State = "idle"
        self._path: Path | None = None
        self._reason: str | None = None
        self._key: str | None = None
        self._build_started = 0.0
        self._build_seconds: float | None = None
        self._chosen_folder_problem: str | None = None
        self._unusable_in_cache: str | None = None

    def obtain(self, on_ready: OnReady) -> None:
        """Gets the native call path, once per process; calls after the first do nothing.

        An extension that is compiled already is loaded, and handed over, before this returns.
        Otherwise it is compiled, in the background, and handed over in another thread; or with
        TORCHOP_NATIVE=require, before this returns. With TORCHOP_NATIVE=prebuilt nothing is
        compiled, and with TORCHOP_NATIVE=0 nothing happens. Nor does anything happen on a Python
        that runs without its lock, unless it is required, because loading would turn that on.

        Without TORCHOP_NATIVE=require, this raises nothing: it warns, once, with the reason, unless
        somebody waits, who gets it as an exception. What `on_ready` raises counts as a failure to
        load the extension.
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
            self._is_settled.clear()  # before: deep in a recursion, this may raise
            self._is_asked_for = True
        try:
            self._obtain(wanted, on_ready)
        except BaseException as error:
            # Ctrl-C, or a call deep in a recursion, where telling the failure may fail too: whoever
            # asks again gets an answer.
            is_passed_on = not isinstance(error, Exception) or isinstance(error, RecursionError)
            try:
                self._fail(error)
            finally:
                if is_passed_on:
                    self._is_asked_for = False
            if is_passed_on:
                raise
            if wanted == "require":
                cause = None if isinstance(error, NativeUnavailableError) else error
                raise _required(self._reason) from cause
            self._warn_of_failure(_errors.users_place())
        else:
            if self._chosen_folder_problem is not None:
                place = _errors.users_place()
                _errors.warn_at(place, self._chosen_folder_problem, NativeBuildWarning)
            if problem is not None:
                _errors.warn_at(
                    _errors.users_place(),
                    f"TORCHOP_NATIVE=require turns the GIL on for this process: {problem}. Set "
                    "TORCHOP_NATIVE=auto to work without the GIL and without native calls.",
                    NativeBuildWarning,
                )

    def wait(self, on_ready: OnReady, timeout: float | None) -> bool:
        """Obtains the native call path, and waits; returns whether it is there.

        Raises:
            NativeUnavailableError: it cannot be had.
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
        # Last: if this changes after the time is over, the failure is a warning.
        if self._state == "failed":
            raise NativeUnavailableError(
                "torchop.native.wait: the native call path is not available, so calls take longer. "
                "Fix the problem, run `python -m torchop build`, and start this program again; or "
                "set TORCHOP_NATIVE=0, with which `wait` returns False instead. The problem: "
                f"{self._reason}"
            )
        return self._state == "ready"

    def status(self) -> Status:
        """How far this process got."""
        seconds = self._build_seconds
        if self._state == "building":
            seconds = time.monotonic() - self._build_started
        return Status(mode(), self._state, self._path, self._reason, seconds, self._key)

    def after_fork(self) -> None:
        """Starts over in a forked child, which does not have the thread that was at work."""
        self._lock = threading.Lock()
        self._is_settled = threading.Event()
        self._waiters = 0
        if self._state in ("found", "building"):
            self._is_asked_for = False
            self._state = "idle"
        else:
            self._is_settled.set()

    def _obtain(self, wanted: Mode, on_ready: OnReady) -> None:
        recipe = make_recipe(self._source)
        self._key = recipe.key
        stale = None
        misses = []
        for place in files.places(recipe, any_build=wanted == "prebuilt"):
            if place.file is not None:
                # Read before the file is tried: what another process puts there afterwards is good.
                stale = worker.identity(place.file) if place.name == "cache" else None
                try:
                    self._use(place, on_ready)
                    self._is_settled.set()
                    if place.name == "TORCHOP_NATIVE_DIR":
                        self._chosen_folder_problem = None
                    return
                except UnusableFileError as error:
                    # Another place may have a better one; the one in the cache is built anew.
                    place = place._replace(problem=str(error))
                    if place.name == "cache":
                        self._unusable_in_cache = str(error)
            misses.append(place.miss())
            if place.name == "TORCHOP_NATIVE_DIR":
                self._chosen_folder_problem = (
                    f"{misses[-1]}, but this program needs {recipe.key}. The search continues "
                    f"elsewhere. `python -m torchop build --out {place.folder}` compiles it"
                )
        if wanted == "prebuilt":
            self._chosen_folder_problem = None  # it is one of these
            raise NativeUnavailableError(
                f"this program needs {recipe.key}, which TORCHOP_NATIVE=prebuilt does not compile; "
                + "; ".join(misses)
            )
        self._build(recipe, wanted, stale, on_ready)

    def _build(
        self, recipe: Recipe, wanted: Mode, stale: list[int] | None, on_ready: OnReady
    ) -> None:
        folder = files.make_cache_folder()
        file = folder / recipe.file_name(find_compiler())
        failure = worker.remembered_failure(file)
        if failure is not None:
            raise NativeUnavailableError(
                f"{failure}\n(This failed less than a day ago, so it is not tried again yet. "
                "`python -m torchop build` tries again at once.)"
            )
        self._path, self._build_started = file, time.monotonic()
        process = child.start(recipe, folder, stale=stale, background=wanted == "auto")
        self._state = "building"
        logs.extension.info("compiling %s for %s", file, recipe.key)
        if wanted == "require":
            self._finish(process, file, on_ready)
            return
        place = _errors.users_place()

        def finish() -> None:
            try:
                self._finish(process, file, on_ready)
            except Exception as error:
                self._fail(error)
                with not_exiting:
                    self._warn_of_failure(place)

        # A daemon: the program may end, and the process that compiles goes on.
        threading.Thread(target=finish, name="torchop-build", daemon=True).start()

    def _finish(self, process: subprocess.Popen[bytes], file: Path, on_ready: OnReady) -> None:
        is_awaited = mode() == "require" or self._waiters
        notice = child.NOTICE if is_awaited else child.NOTICE_IN_BACKGROUND
        is_told = child.wait(process, notice)
        self._build_seconds = time.monotonic() - self._build_started
        logs.extension.info("compiled %s in %.0f s", file, self._build_seconds)
        try:
            self._use(Place("cache", file.parent, file, None), on_ready)
        except UnusableFileError as error:
            # Tells later programs that building it once more does not help.
            worker.failure_record(file).write_text(worker.printable(str(error)), encoding="utf-8")
            raise
        if is_told:
            child.tell_user(f"torchop: native calls are ready, after {self._build_seconds:.0f} s.")
        self._is_settled.set()

    def _use(self, place: Place, on_ready: OnReady) -> None:
        self._state, self._path = "found", place.file
        with not_exiting:
            on_ready(place.load())
            logs.extension.info("loaded %s", place.file)
        self._state = "ready"

    def _fail(self, error: BaseException) -> None:
        explains_itself = isinstance(error, (NativeUnavailableError, UnusableFileError))
        reason = str(error) if explains_itself else f"{type(error).__name__}: {error}"
        for problem in (self._unusable_in_cache, self._chosen_folder_problem):
            if problem is not None and problem not in reason:
                reason = f"{reason}. Also: {problem}"
        self._reason = worker.printable(reason)
        self._state = "failed"  # after the reason, for which threads look when they see this
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


def earlier_failure(recipe: Recipe) -> str | None:
    """When and why the last build for a key failed, within the last day; None if none did."""
    try:
        file = files.cache_folder() / recipe.file_name(find_compiler())
        seconds = worker.failure_record(file).stat().st_mtime
    except (NativeUnavailableError, OSError):
        return None
    failure = worker.remembered_failure(file)
    when = time.strftime("%Y-%m-%d at %H:%M:%S", time.localtime(seconds))
    return None if failure is None else f"on {when}: {failure}"


def build(out: Path | None = None, *, force: bool = False, source: Path | None = None) -> Path:
    """Compiles the extension, also where that failed before, and waits for it; returns its file.

    The file goes into the user's cache if `out` is None; one that is there stays, without `force`.
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
    file = None if force else files.build_in(folder, recipe)
    is_dangling = file is not None and worker.identity(file) is None  # a link whose target is gone
    if file is None or (is_dangling and out is not None):
        file = folder / recipe.file_name(find_compiler())
        stale = worker.identity(file)
        child.wait(child.start(recipe, folder, stale=stale, in_cache=out is None, retry=True))
    elif out is None:
        files.check_private(file)
    return file


def _required(reason: str | None) -> NativeUnavailableError:
    return NativeUnavailableError(
        "TORCHOP_NATIVE=require asks for torchop's native call path, which is not available. "
        f"Fix the problem, or set TORCHOP_NATIVE=auto to work without it. The problem: {reason}"
    )
