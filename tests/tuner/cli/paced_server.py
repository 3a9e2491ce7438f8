"""An OpenAI-compatible server that gives tokens at a set pace, faster with more steps. Standard library only.

`/echo` tells how it was started; arguments that it does not know are left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma"


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace_s: float) -> None:
    try:
        while line := await reader.readline():
            path = line.decode().split(" ")[1]
            length = 0
            while (header := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = header.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = json.loads(await reader.readexactly(length)) if length else {}
            if path == "/health":
                respond(writer, 200, {})
            elif path == "/echo":
                respond(writer, 200, {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()})
            elif not path.endswith("/completions"):
                respond(writer, 404, {"error": {"message": path}})
            elif body.get("stream"):
                await stream(writer, body, pace_s)
            else:
                count = int(body["max_tokens"])
                choice = {
                    "index": 0,
                    "text": " ".join(random.choices(WORDS.split(), k=count)),
                    "finish_reason": "length",
                }
                respond(writer, 200, {"choices": [choice], "usage": {"completion_tokens": count}})
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, body: dict, pace_s: float) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head)
    count, loop = int(body["max_tokens"]), asyncio.get_running_loop()
    start = loop.time()
    for i in range(1, count + 1):
        await asyncio.sleep(start + i * pace_s - loop.time())
        word = random.choice(WORDS.split()) + " "
        choice = {
            "index": 0,
            "delta": {"content": word},
            "text": word,
            "finish_reason": "length" if i == count else None,
        }
        usage = {"prompt_tokens": 8, "completion_tokens": i, "total_tokens": 8 + i}
        send(writer, "data: " + json.dumps({"choices": [choice], "usage": usage}) + "\n\n")
        await writer.drain()
    send(writer, "data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def send(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def respond(writer: asyncio.StreamWriter, status: int, body: dict) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def serve(host: str, port: int, pace_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: handle(r, w, pace_s), host, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-steps", type=int, default=0)
    options, _ = parser.parse_known_args()
    asyncio.run(serve(options.host, options.port, 0.03 / (1 + 0.1 * options.num_steps)))
