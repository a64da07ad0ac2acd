"""Development tasks that have no `make` target.

`nox -l` lists the sessions. Sessions that test another Python or another PyTorch create their own
environments. All other sessions run in the environment of nox itself. `make setup` creates this
environment, so call for example `.venv/bin/nox -s zoo`. Arguments after `--` are passed to the
program that the session runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
RELEASES = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
PARALLEL = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
CACHE = ROOT / ".native_cache"

nox.options.default_venv_backend = "uv"
nox.options.sessions = []
os.environ.setdefault("TORCHOP_CACHE_DIR", str(CACHE))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# uv does not read pip's configuration, so pass this setting on.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
# nox and uv look for interpreters only in PATH, so add those that pyenv has installed.
for _folder in sorted(Path.home().glob(".pyenv/versions/*/bin")):
    os.environ["PATH"] += f"{os.pathsep}{_folder}"


# --------------------------------------------------------------------------------------------------
# Other Pythons and other releases of PyTorch


@nox.session(python=PYTHONS)
@nox.parametrize("torch", RELEASES)
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests with one Python and one PyTorch; `-- FILE ...` runs only these test files."""
    _install(session, f"torch=={torch}")
    session.run("python", "-m", "pytest", *PARALLEL, *(session.posargs or ["-m", "not project"]))


@nox.session
def prerelease(session: nox.Session) -> None:
    """Run the tests with the newest PyTorch, even if it is a prerelease."""
    _install(session, "--prerelease=allow", "torch")
    session.run("python", "-m", "pytest", *PARALLEL, *(session.posargs or ["-m", "not project"]))


@nox.session(python=PYTHONS)
def headers(session: nox.Session) -> None:
    """Compile the C++ sources against the headers of each Python, without linking them."""
    program = str(session.virtualenv.bin_paths[0] + "/python")
    # Test with unknown autograd nodes just once, because Python's headers do not affect them.
    options = ["--unknown-nodes"] if session.python == PYTHONS[0] else []
    session.run(sys.executable, "tools/headers.py", *options, program, external=True)


def _install(session: nox.Session, *torch: str) -> None:
    session.install(*torch, "-r", "requirements/dev.txt")
    session.install("--no-deps", "--no-build-isolation", "--editable", ".")


# --------------------------------------------------------------------------------------------------
# Tests that are not part of `make test`


@nox.session(venv_backend="none")
def project(session: nox.Session) -> None:
    """Run the tests of the site, examples, notebooks, benchmarks, packaging and type checkers."""
    files = session.run("git", "grep", "-l", "pytest.mark.project", "--", "tests", silent=True)
    session.run(sys.executable, "-m", "pytest", *PARALLEL, "-m", "project", *files.split())


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """Run the device tests on a simulated device; set TORCHOP_TEST_DEVICE=cuda:0 to use a GPU."""
    _pytest(session, "tests/integration/device")


@nox.session(venv_backend="none")
def on_device(session: nox.Session) -> None:
    """Run all tests with their tensors on a simulated device, or on TORCHOP_TEST_DEVICE."""
    os.environ.setdefault("TORCHOP_TEST_DEVICE", "standin:1")
    session.run(sys.executable, "-m", "pytest", *PARALLEL, "-p", "tests._support.on_device")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run all tests and benchmarks that need a GPU. Takes at most nine minutes."""
    session.run(sys.executable, "tools/gpu.py", *session.posargs)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Compare native calls with the dispatcher on 200,000 random examples, or `-- N [SEED]`."""
    number, *seed = session.posargs or ["200000"]
    os.environ["TORCHOP_FUZZ_EXAMPLES"] = number
    if seed:
        os.environ["TORCHOP_FUZZ_SEED"] = seed[0]
    file = "tests/integration/differential/test_differential.py"
    session.run(sys.executable, "-m", "pytest", "-s", file)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Remove each condition from the C++ sources in turn, and check that a test then fails."""
    session.run(sys.executable, "tools/mutants.py", *session.posargs)


@nox.session(venv_backend="none")
def leaks(session: nox.Session) -> None:
    """Repeat each kind of call a million times, and check that memory usage does not grow."""
    os.environ["TORCHOP_LEAK_CALLS"] = "1000000"
    _pytest(session, "tests/native/test_leaks.py")


SANITIZED_TESTS = [
    "tests/native/test_bypass.py",
    "tests/native/test_handle.py",
    "tests/native/test_switch.py",
    "tests/native/test_overrides.py",
    "tests/native/test_later_registrations.py",
    "tests/native/test_operator_end.py",
    "tests/native/test_exceptions.py",
    "tests/native/test_changes_during_calls.py",
    "tests/native/test_processes.py",
    "tests/native/test_unusual_arguments.py",
    "tests/native/test_opaque_arguments.py",
    "tests/native/test_overloads.py",
    "tests/native/test_passed_arguments.py",
    "tests/native/test_greenlets.py",
    "tests/native/test_dispatcher_calls.py",
    "tests/native/test_reset_libraries.py",
    "tests/native/test_thread_end.py",
    "tests/native/test_deep_recursion.py",
    "tests/native/test_autograd_fallback.py",
    "tests/native/test_optional_lists.py",
    "tests/native/gradients",
    "tests/accelerate",
    "tests/rules/autograd/derived/test_native.py",
    "tests/rules/providers/test_choice.py",
    "tests/inspect/explain",
    "tests/native/test_native.py",
]


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """Run the native tests with AddressSanitizer and UndefinedBehaviorSanitizer."""
    _build_with(
        session,
        "sanitized",
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=undefined",
        # Ignore the attribute `flatten`. It puts the variables of all inlined functions into one
        # stack frame, and the sanitizers enlarge this frame so much that the stack overflows.
        "-D__flatten__=",
    )
    # Load the sanitizers before Python, and libstdc++ too, because the sanitizers must find it to
    # intercept C++ exceptions.
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    session.run(
        *(sys.executable, "-m", "pytest", "-p", "no:faulthandler", *SANITIZED_TESTS),
        env={
            "LD_PRELOAD": " ".join(libraries),
            # Don't look for leaks here, because PyTorch and Python leak some memory on purpose. The
            # session `leaks` finds torchop's leaks.
            "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
    )


@nox.session(venv_backend="none")
def threads(session: nox.Session) -> None:
    """Call operators in 16 threads while they are redefined, and measure how calls scale."""
    os.environ["TORCHOP_NATIVE"] = "require"
    session.run(sys.executable, "tools/threads.py", *session.posargs)
    session.run(sys.executable, "tools/threads.py", "--scaling")


@nox.session(venv_backend="none")
def threads_sanitized(session: nox.Session) -> None:
    """Run the session `threads` with ThreadSanitizer. Requires free-threaded Python."""
    _build_with(session, "threads", "-fsanitize=thread")
    session.run(
        *("setarch", "-R", sys.executable, "tools/threads.py", "--threads", "4", *session.posargs),
        env={
            "PYTHON_GIL": "0",
            "TORCHOP_NATIVE": "require",
            "LD_PRELOAD": _library("libtsan.so"),
            "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 history_size=7 "
            "suppressions=tools/threads.supp",
        },
        external=True,
    )


def _pytest(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, "-m", "pytest", *arguments, *session.posargs)


def _build_with(session: nox.Session, name: str, *flags: str) -> None:
    """Compile the extension with additional flags, into a separate cache folder."""
    folder = CACHE / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TORCHOP_CACHE_DIR"] = str(folder)
    os.environ["CXX"] = " ".join(["g++ -g -fno-omit-frame-pointer", *flags])
    # `python -m torchop build` would also load the extension, which fails with a sanitizer.
    build = "from torchop._native.extension import api; api.build()"
    session.run(sys.executable, "-c", build, env={"TORCHOP_NATIVE": "0"})


def _library(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# --------------------------------------------------------------------------------------------------
# Tests of `torchop.testing.check`


@nox.session(venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Run all checks on a collection of correct and incorrect operators, and print the score."""
    session.run(sys.executable, "-m", "tests.testing.zoo", *session.posargs)


# --------------------------------------------------------------------------------------------------
# Operators of real packages

REALWORLD = ROOT / ".realworld"
QUANTO = "optimum-quanto==0.2.7"
QUANTO_TESTS = REALWORLD / "sources" / "optimum_quanto-0.2.7" / "test"


@nox.session(venv_backend="none")
@nox.parametrize("part", ["operators", "checks", "steps", "tests", "vllm", "quick"])
def realworld(session: nox.Session, part: str) -> None:
    """Run operators of real packages natively, compare the results, and run checks and tests."""
    packages = _realworld(session, "vllm" if part == "vllm" else "packages")
    env = {
        "PYTHONPATH": str(packages),
        "TORCHOP_NATIVE": "require",
        "WARP_CACHE_PATH": str(REALWORLD / "warp"),
    }
    programs = {
        "operators": [["operators.py"]],
        "checks": [["checks.py"], ["found.py"]],
        "steps": [["steps.py"]],
        "tests": [["own_tests.py", str(QUANTO_TESTS)]],
        "vllm": [["vllm_decoding.py"]],
        "quick": [["operators.py", "--quick"], ["own_tests.py", "--quick", str(QUANTO_TESTS)]],
    }
    if part == "checks":
        _realworld(session, "anemoi")
        _realworld(session, "fbgemm")
        _realworld(session, "spikingjelly")
        _realworld(session, "vllm")
    for program, *arguments in programs[part]:
        session.run(sys.executable, f"benchmarks/realworld/{program}", *arguments, env=env)


def _realworld(session: nox.Session, name: str) -> Path:
    """Install packages into a separate folder, because they must not replace PyTorch."""
    folder = REALWORLD / name
    finished = REALWORLD / f".{name}"
    requirements = ROOT / "requirements" / f"realworld-{name}.txt"
    if finished.exists() and finished.stat().st_mtime > requirements.stat().st_mtime:
        return folder
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    install = [*pip, "install", "--no-deps", "--no-compile", "--upgrade"]
    session.run(*install, "--target", str(folder), "-r", str(requirements))
    if name == "packages":  # Quanto's tests are only in the source distribution
        sources = REALWORLD / "sources"
        download = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        session.run(*download, "--dest", str(sources), QUANTO)
        for archive in sources.glob("*.tar.gz"):
            session.run("tar", "-xzf", str(archive), "-C", str(sources), external=True)
    finished.touch()
    return folder


# --------------------------------------------------------------------------------------------------
# Documentation


@nox.session(venv_backend="none")
def notebooks(session: nox.Session) -> None:
    """Run the notebooks and store their outputs, and redraw the documentation's pictures."""
    session.run(sys.executable, "tools/notebooks.py")
    session.run(sys.executable, "tools/trace_picture.py")
    session.run(sys.executable, "benchmarks/report.py")


@nox.session(venv_backend="none")
def sharding(session: nox.Session) -> None:
    """Compare torchop's sharding rules with DTensor's own, on a fake process group."""
    session.run(sys.executable, "benchmarks/sharding.py", *session.posargs)
