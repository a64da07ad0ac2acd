"""The end of the interpreter waits for a thread at work, and stops one that comes later."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from torchop._native.extension import exiting

# From its file, because importing torchop would take a second.
PROGRAM = """
    import importlib.util, sys, threading, time

    spec = importlib.util.spec_from_file_location("exiting", sys.argv[1])
    exiting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exiting)
    at_work = threading.Event()

    def work():
        with exiting.not_exiting:
            at_work.set()
            time.sleep(0.3)
            print("finished", flush=True)
        time.sleep(0.1)
        with exiting.not_exiting:
            print("too late", flush=True)

    threading.Thread(target=work, daemon=True).start()
    at_work.wait()
    import atexit
    atexit._run_exitfuncs()  # what the end of the interpreter does
    time.sleep(0.5)          # and time for the thread to do what it should not
"""


def test_thread_at_work_finishes_and_does_no_more() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), exiting.__file__]
    assert subprocess.check_output(command, text=True, timeout=60) == "finished\n"
