"""Shared-memory segments: whose they are, and that nobody else's is touched."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.launch import shm, sysv

pytestmark = pytest.mark.skipif(not shm.FOLDER.is_dir(), reason="there is no /dev/shm here")


def segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(b"\0" * 4096)
    return path


def test_mapped_and_open_segments_are_held(tmp_path: Path) -> None:
    mapped, opened, neither = (segment(tmp_path, name) for name in ("mapped", "opened", "neither"))
    with mapped.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 4096)
    with opened.open():
        assert shm.held(os.getpid(), tmp_path) == {mapped.stat().st_ino, opened.stat().st_ino}
        assert neither.stat().st_ino not in shm.holders(tmp_path)
    view.close()
    assert shm.held(os.getpid(), tmp_path) == set()


def test_only_new_segments_that_the_family_held_or_is_named_in_are_removed(tmp_path: Path) -> None:
    segment(tmp_path, "old")
    watch = shm.SegmentWatch(tmp_path)
    code = f"import sys; f = open({str(tmp_path / 'mine')!r}, 'w'); print(flush=True); sys.stdin.read()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    watch.look([worker.pid])
    worker.communicate()
    for name in (f"torch_{worker.pid}_7", "a_strangers", f"psm_{worker.pid}0"):
        segment(tmp_path, name)
    assert watch.clear() == (("mine", f"torch_{worker.pid}_7"), ())
    assert sorted(shm.snapshot(tmp_path)) == sorted(["a_strangers", "old", f"psm_{worker.pid}0"])


def test_what_somebody_still_holds_stays(tmp_path: Path) -> None:
    path = segment(tmp_path, "shared")
    with path.open():
        assert shm.remove(shm.snapshot(tmp_path).values(), tmp_path) == ((), ())
    assert shm.remove(shm.snapshot(tmp_path).values(), tmp_path) == (("shared",), ())


def test_system_v_segments_of_the_family_are_removed_and_those_of_others_are_not() -> None:
    code = "import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600), flush=True)"
    watch = shm.SegmentWatch()
    ids = []
    for mine in (True, False):
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        if mine:
            watch.look([worker.pid])
        assert worker.stdout is not None
        ids.append(int(worker.communicate()[0]))
    try:
        removed, left = watch.clear()
        assert f"SysV segment {ids[0]}" in removed
        assert left == ()
        assert ids[1] in [segment.id for segment in sysv.snapshot()]
    finally:
        sysv.remove(segment for segment in sysv.snapshot() if segment.id in ids)


def test_what_came_up_meanwhile_and_nobody_holds_is_named_but_stays(tmp_path: Path) -> None:
    watch = shm.SegmentWatch(tmp_path)
    path = segment(tmp_path, "psm_0badcafe")
    assert watch.clear() == ((), ())
    assert watch.unclaimed() == ("psm_0badcafe",)
    with path.open():
        assert watch.unclaimed() == ()
