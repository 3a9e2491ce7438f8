"""Asks a running server for answers, and for the likelihood of answers, one at a time, over `/v1/completions`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import httpx

from tuner.ask import ask
from tuner.judge.quality import Answers, Likelihood
from tuner.records import LaunchRecord, short_hash

TIMEOUT_S = 600.0
"""Of one answer; several are made at once."""
CHECK_TIMEOUT_S = 600.0
LONGEST_TOKEN = 128
"""Characters. Runs of blanks are the longest tokens there are."""


class NoAnswer(Exception):
    """The server does not give what was asked for; why, in a sentence."""


class Probe(Protocol):
    """What the output-quality gate asks of a server."""

    def answers(self, record: LaunchRecord) -> Answers:
        """Greedy answers to the gate's prompts. Raises `NoAnswer`."""

    def judged(self, record: LaunchRecord, answers: Answers) -> Answers:
        """The same answers with the likelihoods that this server gives them, or with the reason why not."""


class HttpProbe:
    """A `Probe` of real servers. Prompts go one after the other, so that batches cannot differ; then `together` of
    them at once, over again where they do not suffice, for some settings do harm under load alone.

    A server must answer `/v1/completions` with `echo` and `logprobs` for likelihoods (the bundled engine and vLLM do);
    without them the gate falls back on the texts alone.
    """

    def __init__(self, prompts: Sequence[str], max_tokens: int, key: str | None = None, *, together: int = 0) -> None:
        self._alone = tuple(prompts)
        self._together = tuple(prompts[i % len(prompts)] for i in range(together if prompts else 0))
        self._prompts = self._alone + self._together
        self._max_tokens = max_tokens
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def answers(self, record: LaunchRecord) -> Answers:
        """See `Probe.answers`."""
        texts = [self._answer(record, prompt) for prompt in self._alone]
        if self._together:
            with ThreadPoolExecutor(len(self._together)) as pool:
                texts += pool.map(lambda prompt: self._answer(record, prompt), self._together)
        return Answers(tuple(texts), asked=short_hash([self._max_tokens, len(self._together), *self._prompts]))

    def _answer(self, record: LaunchRecord, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "seed": 0}
        return _text(self._ask(record, body))

    def judged(self, record: LaunchRecord, answers: Answers) -> Answers:
        """See `Probe.judged`."""
        if len(answers.texts) != len(self._prompts):
            return replace(answers, unknown="they are answers to other prompts, that another version asked")
        known: dict[tuple[str, str], Likelihood] = {}
        try:
            for prompt, text in zip(self._prompts, answers.texts, strict=True):
                if (prompt, text) in known:
                    continue
                body = {"prompt": prompt + text, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
                try:
                    reply = self._ask(record, body)
                except NoAnswer:
                    reply = self._ask(record, {**body, "max_tokens": 1})  # some want to make a token at least
                known[prompt, text] = _likelihood(reply, len(prompt), len(prompt) + len(text))
        except NoAnswer as error:
            why = f"the server gives no prompt log-probabilities ({error})"
            return replace(answers, likelihoods=(), unknown=why)
        asked = zip(self._prompts, answers.texts, strict=True)
        return replace(answers, likelihoods=tuple(known[each] for each in asked), unknown="")

    def _ask(self, record: LaunchRecord, body: Mapping[str, Any]) -> dict[str, Any]:
        url = f"{record.base_url}/v1/completions"
        try:
            reply = ask(
                "POST",
                url,
                body={"model": record.served_model, **body},
                headers=self._headers,
                timeout_s=TIMEOUT_S,
            )
            data = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoAnswer(f"/v1/completions: {type(error).__name__}") from error
        if reply.status != 200 or not isinstance(data, dict):
            raise NoAnswer(f"/v1/completions: status {reply.status}")
        return data


def _text(reply: Mapping[str, Any]) -> str:
    try:
        text = reply["choices"][0]["text"]
    except (KeyError, IndexError, TypeError):
        raise NoAnswer("/v1/completions: no text in the answer") from None
    if not isinstance(text, str):
        raise NoAnswer("/v1/completions: no text in the answer")
    return text


def _likelihood(reply: Mapping[str, Any], begin: int, end: int) -> Likelihood:
    """Of the tokens that begin between two characters of the echo; all of the text between them must be of such."""
    try:
        told = reply["choices"][0]["logprobs"]
        rows = list(zip(_offsets(told), told["token_logprobs"], told["top_logprobs"], strict=True))
    except (KeyError, IndexError, TypeError, ValueError):
        raise NoAnswer("/v1/completions: no log-probabilities in the answer") from None
    try:
        mine = [
            (at - begin, float(chosen), top) for at, chosen, top in rows if begin <= at < end and chosen is not None
        ]
        # What is not finite came as None: a token that is ruled out is not the best.
        if not _cover([at for at, _, _ in mine], end - begin):
            raise NoAnswer("/v1/completions: log-probabilities of something else than the echo")
        best = [max([chosen, *(x for x in (top or {}).values() if x is not None)]) for _, chosen, top in mine]
    except (TypeError, ValueError, AttributeError):
        raise NoAnswer("/v1/completions: log-probabilities that are no numbers") from None
    return Likelihood(tuple(at for at, _, _ in mine), tuple(chosen for _, chosen, _ in mine), tuple(best))


def _offsets(told: Mapping[str, Any]) -> list[int]:
    """Where each token begins in the echo; from the tokens' texts where a server does not count."""
    given = list(told["text_offset"])
    if all(isinstance(at, int) and at >= 0 for at in given) and given == sorted(given):
        return given
    return [0, *accumulate(len(token) for token in told["tokens"])][: len(given)]


def _cover(offsets: Sequence[int], length: int) -> bool:
    """Whether tokens that begin at these characters can make up a text of this length."""
    return all(b - a <= LONGEST_TOKEN for a, b in pairwise((0, *offsets, length))) if length else True


def check(command: Sequence[str], told: Mapping[str, Any]) -> str | None:
    """Runs a user's check with the answers as JSON on its standard input; why it objects, None when it does not.

    It objects by ending with another status than 0; what it wrote last, to either stream, is the reason. A check that
    cannot be run, or takes more than ten minutes, objects too: nobody has looked.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"the check {command[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
    try:
        said, _ = process.communicate(json.dumps(told, ensure_ascii=False), timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"the check {command[0]} took longer than {CHECK_TIMEOUT_S:g} s and was ended"
    if process.returncode == 0:
        return None
    last = said.strip().splitlines()[-1:]
    return last[0][:200] if last else f"the check {command[0]} ended with status {process.returncode}"
