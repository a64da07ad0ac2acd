"""Tests run their programs in forks of a server process, which has imported PyTorch."""

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


def test_temporary_folder_may_have_a_long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert answer(forking._Server("long", (), ())) == "1\n"


@pytest.mark.parametrize("when", ["before", "while"])
def test_new_server_replaces_a_killed_one(monkeypatch, when):
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = f"{forking._folder()}/torchop-{os.getpid()}-{when}"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(place)
        if when == "before":
            killed.close()
        else:  # the server is killed while a client connects
            killed.listen()
            threading.Thread(target=lambda: killed.accept()[0].close()).start()
        server = forking._Server(when, (), ())
    assert answer(server) == "1\n"
