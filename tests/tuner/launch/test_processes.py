"""Ports, markers and the processes that carry them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.launch import ports
from tuner.launch.processes import MARKER, Family, look, marker_of, marker_text, ourselves, send, snapshot, wait_until
from tuner.launch.reap import marked, reap

SLEEPER = "import time; print(flush=True); time.sleep(60)"


def sleeper(marker: str, code: str = SLEEPER) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        env={**os.environ, MARKER: marker},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_free_port_is_free_and_below_the_ephemeral_range_where_outgoing_connections_are() -> None:
    port = ports.free_port()
    assert ports.is_free(port)
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert port < int(file.read().split()[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_is_seen_by_its_socket(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        inode = os.fstat(server.fileno()).st_ino
        assert ports.listeners(port) == {inode}
    assert ports.listeners(port) == frozenset()


def test_a_listener_on_another_address_is_none_of_ours() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        assert ports.listeners(server.getsockname()[1], "127.0.0.1") == frozenset()


@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=2, max_size=4))
def test_a_marker_of_fewer_entries_is_a_prefix_of_no_other_value(marker: dict[str, str]) -> None:
    names = list(marker)
    first = marker_text({names[0]: marker[names[0]]})
    assert marker_text(marker).startswith(first)
    assert not marker_text({**marker, names[0]: marker[names[0]] + "x"}).startswith(first)


def test_reap_ends_what_carries_the_prefix_and_nothing_else() -> None:
    mine = marker_text({"study": f"reap {os.getpid()}"})
    first, second = sleeper(mine + "launch=1;"), sleeper(mine + "launch=2;")
    other = sleeper(marker_text({"study": f"reap {os.getpid()}x"}))
    try:
        assert {p.pid for p in marked(mine)} == {first.pid, second.pid}
        assert reap(mine) == sorted([first.pid, second.pid])
        assert marked(mine) == []
        assert first.wait() == second.wait() == -signal.SIGTERM
        assert other.poll() is None
        assert reap(mine) == []
    finally:
        for process in (first, second, other):
            process.kill()
            process.wait()


def test_reap_kills_what_does_not_heed_sigterm() -> None:
    mine = marker_text({"study": f"stubborn {os.getpid()}"})
    process = sleeper(mine, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER)
    assert reap(mine, grace_s=0.2) == [process.pid]
    assert process.wait() == -signal.SIGKILL


def test_reap_without_a_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="every study"):
        reap("")


def test_a_process_that_drops_the_marker_is_still_family_by_descent_and_remembered_when_orphaned() -> None:
    code = (
        "import os, time, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(60)'], env={},"
        " start_new_session=True); print(child.pid, flush=True); time.sleep(60)"
    )
    marker = marker_text({"study": f"drop {os.getpid()}", "nonce": "1"})
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        env={**os.environ, MARKER: marker},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        family = Family(process.pid, marker)
        assert wait_until(lambda: marker_of(child) is None, 5)
        assert {p.pid for p in family.living()} == {process.pid, child}
        process.kill()
        process.wait()
        assert {p.pid for p in family.living()} == {child}
    finally:
        os.kill(child, signal.SIGKILL)


def test_we_and_our_ancestors_are_never_family() -> None:
    me = snapshot()[os.getpid()]
    assert {os.getpid(), os.getppid(), 1} <= ourselves(snapshot())
    with pytest.raises(ValueError, match="refusing"):
        send(me, signal.SIGTERM)


def test_a_signal_never_reaches_a_later_process_of_the_same_pid() -> None:
    process = sleeper("x=1;")
    try:
        seen = look(process.pid)
        assert seen is not None
        from dataclasses import replace

        assert not send(replace(seen, started=seen.started - 1), signal.SIGKILL)
        assert process.poll() is None
        assert send(seen, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
