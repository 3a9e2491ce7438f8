from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from toy_worker import SPECIAL_TEXT

from engine.text.byte_level import _ALPHABET

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


class ToyServer:
    """A server process of ours, its log, and where it listens (once it does)."""

    def __init__(self, log: Path, worker: str, settings: dict[str, Any]) -> None:
        self.log = log
        command = [sys.executable, str(Path(__file__).with_name("toy_serve.py")), worker, json.dumps(settings)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True
            )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if match := re.search(pattern, self.log.read_text()):
                return match
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no '{pattern}' in the log:\n{self.log.read_text()}")

    @property
    def url(self) -> str:
        return self.wait_for(r"listening on (\S+)")[1]

    def model_pid(self) -> int:
        return int(self.wait_for(r"model process (\d+)")[1])

    def end(self) -> int:
        """Waits for its exit, which has to come by itself."""
        return self.process.wait(timeout=20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose tokenizer has one token per byte (id = byte) and the toy's special tokens."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE(dict(_ALPHABET), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TEXT))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


Start = Callable[..., ToyServer]


@pytest.fixture
def start(toy_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers that are stopped after the test; keywords are settings of `EngineConfig`."""
    started: list[ToyServer] = []

    def run(worker: str = "main", **settings: Any) -> ToyServer:
        settings = {"model": str(toy_model), "port": 0, **settings}
        started.append(ToyServer(tmp_path / f"server-{len(started)}.log", worker, settings))
        return started[-1]

    yield run
    for one in started:
        one.stop()


@pytest.fixture(scope="session")
def shared(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    """One server for all tests that leave it as it was. Rounds bring up to four tokens, as with speculation."""
    spec = {"speculation": "ngram", "num_steps": 3, "num_draft_tokens": 4}
    settings = {"model": str(toy_model), "port": 0, "spec": spec}
    server = ToyServer(tmp_path_factory.mktemp("shared") / "server.log", "main", settings)
    yield server
    server.stop()
    assert server.process.returncode == 0, server.log.read_text()


@pytest.fixture
def http(shared: ToyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=20) as client:
        yield client
