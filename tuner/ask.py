"""One HTTP request to a server that may answer anything, at any pace: bounded in bytes and time, and given up whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tuner.foreign import LIMIT, parse

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Answer:
    """A status and the whole body."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, whatever bytes it holds."""
        return self.body.decode("utf-8", "replace")

    def json(self, *, strict: bool = False) -> Any:
        """The body as `tuner.foreign.parse` has it.

        Raises:
            ValueError: it is no JSON, or none that can be used.
        """
        return parse(self.body, strict=strict)


class TooLong(httpx.HTTPError):
    """The answer has more bytes than anybody needs."""


class Compressed(httpx.HTTPError):
    """The answer is compressed although that was ruled out; it could unfold to any size."""


def ask(
    method: str,
    url: str,
    *,
    timeout_s: float,
    total_s: float | None = None,
    body: Mapping[str, Any] | None = None,
    content: str | None = None,
    headers: Mapping[str, str] | None = None,
    limit: int = LIMIT,
    surroundings: bool = False,
    watch: Callable[[], None] | None = None,
) -> Answer:
    """Makes a request on a connection of its own and waits for the whole answer. Not for use in a running event loop.

    Args:
        method: of HTTP.
        url: whom to ask.
        timeout_s: for each step of the request.
        total_s: for all of it; twice `timeout_s` when None.
        body: sent as JSON.
        content: sent as it is, in place of a body.
        headers: to send.
        limit: bytes of the answer.
        surroundings: whether proxies of the environment are used; they must not stand before a server on this machine.
        watch: called twenty times a second; when it raises, the request is given up.

    Raises:
        httpx.TimeoutException: no answer, or no complete one, in time.
        httpx.HTTPError: any other failure of the connection, `TooLong` and `Compressed` among them.
    """
    most = 2 * timeout_s if total_s is None else total_s
    sent = {"Accept-Encoding": "identity", **(headers or {})}
    # Reading the certificates takes far longer than the rest of a request, and plain HTTP to this machine needs none.
    verify = surroundings or not url.startswith("http://")

    async def request() -> Answer:
        async with httpx.AsyncClient(trust_env=surroundings, timeout=timeout_s, headers=sent, verify=verify) as client:
            async with client.stream(method, url, json=body, content=content) as response:
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise Compressed("the answer is compressed, which was not asked for")
                gathered = bytearray()
                async for part in response.aiter_raw():
                    gathered += part
                    if len(gathered) > limit:
                        raise TooLong(f"the answer is longer than {limit >> 20} MiB")
                return Answer(response.status_code, bytes(gathered))

    async def watched() -> Answer:
        task = asyncio.create_task(request())
        try:
            async with asyncio.timeout(most):
                while not task.done():
                    await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                    if watch:
                        watch()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete answer in {most:g} s") from None
        finally:
            task.cancel()
        return task.result()

    return asyncio.run(watched())
