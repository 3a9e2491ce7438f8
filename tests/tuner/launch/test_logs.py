"""Capped logs: what is kept, and that offsets into the whole output find it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.launch import logs, pump


@settings(deadline=None)  # of a busy machine
@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 40), st.integers(1, 30))
def test_the_beginning_and_the_end_are_kept_within_the_cap(chunks: list[bytes], head: int, segment: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "launch.log"
        path.touch()
        sink = pump.Sink(path, head, segment)
        for chunk in chunks:
            sink.write(chunk)
        whole = b"".join(chunks)
        files = pump.segments(path)
        assert pump.size(path) == sink.total == len(whole)
        assert path.read_bytes() == whole[:head]
        assert sum(file.stat().st_size for _, file in files) <= head + 2 * segment
        for offset, file in files:
            data = file.read_bytes()
            assert data == whole[offset : offset + len(data)]
        assert len(whole) <= head or files[-1][0] + files[-1][1].stat().st_size == len(whole)


def test_a_sink_goes_on_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "launch.log"
    for part in (b"0123", b"456789", b"abcdef"):
        pump.Sink(path, 8, 4).write(part)
    assert logs.read(path) == "0123456789abcdef"
    assert [offset for offset, _ in pump.segments(path)] == [0, 8, 12]


def test_a_gap_says_how_much_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "launch.log"
    pump.Sink(path, 4, 4).write(b"0123456789abcdefghij")
    assert logs.read(path) == "0123\n(8 bytes of the log are not kept)\ncdefghij"
    assert logs.read(path, 13, 18) == "defgh"
    assert logs.read(path, 2, 18, limit=4) == "23\n(12 bytes of the log are not kept)\ngh"
    assert logs.tail(path, 1) == "cdefghij"


def test_a_log_that_cannot_be_written_loses_output_and_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "launch.log"
    sink = pump.Sink(path, 100, 100)
    sink.write(b"lost")
    assert (sink.total, sink.lost) == (0, 4)
    path.parent.mkdir()
    sink.write(b"kept")
    assert path.read_bytes() == b"kept"


def test_everything_written_to_the_pipe_is_in_the_files_after_drain(tmp_path: Path) -> None:
    log = logs.LaunchLog(tmp_path / "launch.log", os.environ)
    writer = os.dup(log.write_end)
    log.started()
    for i in range(50):
        os.write(writer, b"%d\n" % i * 1000)
        log.drain()
        assert logs.tail(log.path, 1) == str(i)
    os.close(writer)
    assert log.close()
    assert log.close()


def test_a_pump_that_somebody_still_writes_to_is_ended(tmp_path: Path) -> None:
    log = logs.LaunchLog(tmp_path / "launch.log", os.environ)
    writer = os.dup(log.write_end)
    log.started()
    assert not log.close(timeout_s=0.1)
    os.close(writer)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file|directory"):
        logs.LaunchLog(tmp_path / "file" / "launch.log", os.environ)
