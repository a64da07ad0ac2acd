"""The servers from which the programs of tests are forked, when something ends too early."""

import os
import signal
import socket
import tempfile
import threading
import time

import pytest

from tests._support import forking

pytestmark = pytest.mark.project


def answer(server: forking._Server, source: str = "print(1)") -> str:
    run = server.run(
        60,
        source=source,
        file=None,
        arguments=["-c"],
        path="",
        folder=os.getcwd(),
        environment=dict(os.environ),
    )
    return run.stdout


def test_the_folder_of_temporary_files_may_have_a_long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert answer(forking._Server("long", (), ())) == "1\n"


@pytest.mark.parametrize("when", ["before", "while"])
def test_another_server_takes_the_place_of_one_that_is_killed(monkeypatch, when):
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = f"{forking._folder()}/torchop-{os.getpid()}-{when}"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(place)
        if when == "before":
            killed.close()
        else:  # while somebody connects with it
            killed.listen()
            threading.Thread(target=lambda: killed.accept()[0].close()).start()
        server = forking._Server(when, (), ())
    assert answer(server) == "1\n"


def test_a_program_ends_when_the_tests_are_interrupted(tmp_path):
    server = forking._Server("interrupted", (), ())
    written = tmp_path / "process"

    def interrupt() -> None:
        while not written.exists():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        answer(
            server,
            "import os, pathlib, time\n"
            f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
            f"os.rename({str(tmp_path / 'new')!r}, {str(written)!r})\n"
            "time.sleep(60)",
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
    assert answer(server) == "1\n"
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)
