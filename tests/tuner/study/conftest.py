from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM = 256 << 20


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one with room: thousands of commits wait for the disk otherwise."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < ROOM:
        yield tmp_path_factory.mktemp("study")
        return
    with tempfile.TemporaryDirectory(prefix="spec-tuner-test-", dir=MEMORY) as folder:
        yield Path(folder)
