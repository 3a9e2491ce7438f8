"""The frontend's end of the socket: whole messages, in order, from however many pieces; and its end, told once."""

import asyncio
import contextlib
import os
import pickle
import struct
import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc.channel import Channel, socket_pair
from engine.ipc.messages import Abort, SamplingParams, Submit


class Ends:
    """Both ends of one connection, inside a running loop."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.ended: list[str | None] = []

    async def open(self) -> None:
        ours, self.theirs = socket_pair()
        self.channel = await Channel.open(ours, self.received.append, self.ended.append)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


def _run(scenario) -> Ends:
    async def main() -> Ends:
        ends = Ends()
        await ends.open()
        await scenario(ends)
        ends.channel.close()
        with contextlib.suppress(OSError):
            ends.theirs.close()
        return ends

    return asyncio.run(main())


def test_messages_arrive_in_order_in_both_directions():
    async def scenario(ends: Ends) -> None:
        sent = [Submit(1, tuple(range(5)), SamplingParams(max_tokens=3)), Abort(1)]
        for message in sent:
            ends.channel.send(message)
        assert [await asyncio.to_thread(ends.theirs.recv) for _ in sent] == sent
        for number in range(100):
            ends.theirs.send(number)
        await ends.until(lambda: len(ends.received) == 100)

    assert _run(scenario).received == list(range(100))


def test_a_busy_model_process_does_not_block_the_frontend():
    big = Submit(1, tuple(range(200_000)), SamplingParams())

    async def scenario(ends: Ends) -> None:
        for _ in range(8):  # far more than a socket buffers; nobody reads yet
            ends.channel.send(big)
        got: list[Any] = []
        reader = threading.Thread(target=lambda: got.extend(ends.theirs.recv() for _ in range(8)))
        reader.start()
        await ends.until(lambda: len(got) == 8)
        assert got == [big] * 8

    _run(scenario)


def test_a_large_message_arrives_whole():
    async def scenario(ends: Ends) -> None:
        threading.Thread(target=ends.theirs.send, args=(b"x" * 3_000_000,)).start()
        await ends.until(lambda: ends.received)

    assert _run(scenario).received == [b"x" * 3_000_000]


def test_the_other_ends_close_is_told_once_after_its_last_message():
    async def scenario(ends: Ends) -> None:
        ends.theirs.send("last words")
        ends.theirs.close()
        await ends.until(lambda: ends.ended)
        ends.channel.send("into the void")
        assert ends.received == ["last words"]

    assert _run(scenario).ended == [None]


def test_what_is_not_a_frame_ends_the_channel_with_the_reason():
    async def scenario(ends: Ends) -> None:

        os.write(ends.theirs.fileno(), struct.pack("!i", -5) + b"junk")
        await ends.until(lambda: ends.ended)

    assert "not a message" in _run(scenario).ended[0]


@settings(max_examples=60)
@given(messages=st.lists(st.one_of(st.integers(), st.binary(max_size=200)), max_size=8), cuts=st.data())
def test_frames_may_be_cut_anywhere(messages, cuts):
    frames = b"".join(struct.pack("!i", len(data)) + data for data in map(pickle.dumps, messages))
    borders = sorted(cuts.draw(st.lists(st.integers(0, len(frames)), max_size=10)))
    received: list[Any] = []
    channel = Channel(received.append, lambda reason: None)
    for start, end in zip([0, *borders], [*borders, len(frames)], strict=True):
        channel.data_received(frames[start:end])
    assert received == messages
