"""An exception that no request can be blamed for is answered, and reported so that the server ends."""

import asyncio
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.server.app import build_app
from engine.server.client import EngineClient
from engine.server.metrics import Metrics
from engine.server.service import Service


class BrokenTokenizer:
    stop_token_ids = ()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        raise ZeroDivisionError("a bug")


class Nowhere:
    def send(self, message: Any) -> None:
        raise AssertionError("nothing should have been submitted")


def test_a_bug_in_a_handler_is_500_and_reported():
    bugs: list[BaseException] = []
    service = Service(
        config=EngineConfig(),
        port=1,
        name="m",
        client=EngineClient(Nowhere()),
        tokenizer=BrokenTokenizer(),  # type: ignore[arg-type]
        context_length=64,
        vocab_size=10,
        metrics=Metrics(),
        created=0,
        on_bug=bugs.append,
    )

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "hi"})

    answer = asyncio.run(call())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert [type(bug) for bug in bugs] == [ZeroDivisionError]
