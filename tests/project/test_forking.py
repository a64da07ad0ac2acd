"""The servers that fork the programs of tests."""

import os
import socket
import tempfile
import threading

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
