"""Chat completions from an OpenAI-compatible address: bounded, retried, cached and counted.

A call that gets no usable answer raises :class:`EndpointError`: whoever asked has no answer, and must not take one
for granted. Where no call can succeed (a wrong address or key, twenty failures in a row) :class:`EndpointRefused`
stops the command; what was answered until then is in the cache, and the same command goes on from there.

The key is read from an environment variable, sent in one header, and taken out of everything that the endpoint
says; it is in no cache, no message and no result.
"""

from __future__ import annotations

import datetime
import email.utils
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from jaxguard.baselines.completion import Completion, Malformed, read_completion
from jaxguard.settings import require, require_at_least, require_at_most, require_positive
from jaxguard.types import JaxguardError

CASE_HEADER = "X-Jaxguard-Case"
"""Names the case that a request is about, for the scripted server alone; it is sent nowhere else."""
LARGEST_ANSWER = 16_000_000
"""Bytes; a longer body is not read to its end."""
_MISCONFIGURED = frozenset({401, 403, 404, 405})
_PASSING = frozenset({408, 425, 429})

T = TypeVar("T")
R = TypeVar("R")


class EndpointError(JaxguardError):
    """One call got no usable answer; ``reason`` says why in a word or two."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class EndpointRefused(JaxguardError):
    """No call to this endpoint can succeed as things are."""


class _Passing(Exception):
    """A failure that another attempt may not meet; ``after`` seconds at the earliest."""

    def __init__(self, reason: str, message: str, after: float = 0.0):
        super().__init__(message)
        self.reason, self.after = reason, after


@dataclass(frozen=True)
class EndpointConfig:
    """Where a model answers, how it is asked, and what it costs.

    Attributes:
        url: Address up to ``/chat/completions``, e.g. ``http://localhost:8000/v1``.
        model: Name of the model there.
        key_variable: Environment variable that holds the key; ``""`` for an endpoint without.
        timeout: Seconds for one attempt.
        attempts: How often one call is tried.
        backoff: Seconds before the second attempt; doubled for each further one, and jittered.
        longest_wait: Most seconds to wait between two attempts; an endpoint that asks for more has failed the call.
        concurrency: Most requests at a time.
        give_up_after: So many failed calls in a row, and the endpoint is taken as down.
        max_tokens: Longest answer.
        max_tokens_field: Its name in a request; newer models want ``max_completion_tokens``.
        temperature: ``null`` leaves it out.
        reasoning_effort: ``""`` leaves it out.
        prompt_price: Of a million tokens read, in any currency; ``null`` where it is not known.
        completion_price: Of a million tokens written.
    """

    url: str = ""
    model: str = ""
    key_variable: str = ""
    timeout: float = 60.0
    attempts: int = 5
    backoff: float = 1.0
    longest_wait: float = 60.0
    concurrency: int = 8
    give_up_after: int = 20
    max_tokens: int = 1024
    max_tokens_field: str = "max_tokens"
    temperature: float | None = 0.0
    reasoning_effort: str = ""
    prompt_price: float | None = None
    completion_price: float | None = None

    def __post_init__(self) -> None:
        if self.url:
            parts = urlsplit(self.url)
            plain = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
            secret = "@" in parts.netloc
            require(bool(plain) and not secret, "endpoint.url", "an address with credentials" if secret else self.url,
                    "http(s)://host/path without credentials, query or fragment")  # fmt: skip
        require_positive(self, "endpoint", "timeout")
        require_at_least(self, "endpoint", 1, "attempts", "concurrency", "give_up_after", "max_tokens")
        require_at_least(self, "endpoint", 0, "backoff", "longest_wait")
        require_at_most(self, "endpoint", 256, "concurrency")
        fields = ("max_tokens", "max_completion_tokens")
        require(self.max_tokens_field in fields, "endpoint.max_tokens_field", self.max_tokens_field,
                " or ".join(fields))  # fmt: skip
        for name in ("temperature", "prompt_price", "completion_price"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"endpoint.{name}", value, "0 or more, or null")
        priced = (self.prompt_price is None) == (self.completion_price is None)
        require(priced, "endpoint.completion_price", self.completion_price, "a price where prompt_price is one")


@dataclass
class Usage:
    """What an endpoint was asked, in this run.

    Attributes:
        answered: Calls that it answered.
        cached: Calls that the cache answered.
        failed: Calls that got no usable answer.
        retries: Further attempts.
        prompt_tokens: Read, of the answered calls; ``completion_tokens`` likewise.
        without_tokens: Answers that did not tell their tokens; those and the price of them are not counted.
        cost: Of the tokens counted; ``None`` where there were some and no price is known.
    """

    answered: int = 0
    cached: int = 0
    failed: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    without_tokens: int = 0
    cost: float | None = 0.0


def require_named(config: EndpointConfig) -> None:
    """Refuses an endpoint without an address or a model."""
    for name in ("url", "model"):
        if not getattr(config, name):
            raise EndpointRefused(f"endpoint.{name}: got none, expected one; see --endpoint and --model")


class Endpoint:
    """A model behind an address. Methods may be called from many threads.

    Args:
        config: Address, model and limits.
        cache: SQLite file of answers by the whole request; ``None`` keeps none.
        sleep: Waits between attempts; for tests.

    Raises:
        EndpointRefused: Its packages are not installed, no address or model is given, the key's variable is empty, or
            the cache cannot be opened.
    """

    def __init__(self, config: EndpointConfig, cache: Path | None = None, sleep: Callable[[float], None] = time.sleep):
        try:
            import httpx
            import tenacity
        except ImportError as error:
            raise EndpointRefused(
                f"endpoint: {error.name} is not installed; pip install 'jaxguard[endpoint]'"
            ) from error
        require_named(config)
        self.config = config
        self._key = os.environ.get(config.key_variable, "") if config.key_variable else ""
        if config.key_variable and not (self._key.isascii() and self._key.isprintable() and self._key.strip()):
            raise EndpointRefused(
                f"environment variable {config.key_variable}: is empty or no plain line of ASCII, expected a key"
            )
        if self._key and len(self._key) < 8:  # could not be taken out of what the endpoint echoes
            raise EndpointRefused(
                f"environment variable {config.key_variable}: has {len(self._key)} characters, expected 8 or more"
            )
        # A model on this machine is not behind a proxy, whatever the environment says of others.
        local = {"all://localhost": None, "all://127.0.0.1": None, "all://[::1]": None}
        limits = httpx.Limits(max_connections=config.concurrency)
        self._client = httpx.Client(timeout=config.timeout, limits=limits, mounts=local)
        self._httpx = httpx
        self._retry = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(config.attempts),
            wait=_waits(tenacity.wait_exponential_jitter(config.backoff, config.longest_wait, jitter=config.backoff)),
            retry=tenacity.retry_if_exception_type(_Passing),
            before_sleep=lambda _: self._count(retries=1),
            sleep=sleep,
            reraise=True,
        )
        self._slots = threading.BoundedSemaphore(config.concurrency)
        self._lock = threading.Lock()
        self._usage = Usage()
        self._row = 0
        self._cache = None if cache is None else _Cache(cache)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections and cache."""
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    @property
    def usage(self) -> Usage:
        """What was asked so far."""
        with self._lock:
            told, c = self._usage, self.config
            priced = told.prompt_tokens * (c.prompt_price or 0) + told.completion_tokens * (c.completion_price or 0)
            unknown = told.answered > 0 and c.prompt_price is None
            return Usage(**{**vars(told), "cost": None if unknown else priced / 1e6})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        logprobs: bool = False,
        case: str = "",
    ) -> Completion:
        """The model's answer to a conversation.

        Args:
            messages: As the API has them.
            tools: Function schemas that the model may call.
            logprobs: Ask for the twenty likeliest tokens of each place.
            case: See :data:`CASE_HEADER`.

        Raises:
            EndpointError: No usable answer after all attempts.
            EndpointRefused: No call can succeed.
        """
        c = self.config
        body: dict[str, Any] = {"model": c.model, "messages": list(messages), c.max_tokens_field: c.max_tokens}
        if c.temperature is not None:
            body["temperature"] = c.temperature
        if c.reasoning_effort:
            body["reasoning_effort"] = c.reasoning_effort
        if tools:
            body["tools"] = list(tools)
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 20}
        text = json.dumps(body, ensure_ascii=True, sort_keys=True, allow_nan=False)
        digest = hashlib.sha256(f"{c.url.rstrip('/')}\n{text}".encode()).hexdigest()
        if self._cache is not None and (held := self._cache.get(digest)) is not None:
            self._count(cached=1)
            return read_completion(held, cached=True)
        try:
            answer, completion = self._retry(self._attempt, text, case)
        except _Passing as error:
            self._failed(error.reason, f"{error} ({c.attempts} attempts)", down=True)
        except EndpointError as error:  # it answered: what it refuses is this request
            self._failed(error.reason, str(error), down=False)
        if self._cache is not None:
            self._cache.put(digest, answer)
        read, written = completion.prompt_tokens, completion.completion_tokens
        unknown = read is None or written is None
        self._count(answered=1, prompt_tokens=read or 0, completion_tokens=written or 0, without_tokens=int(unknown))
        with self._lock:
            self._row = 0
        return completion

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self._usage, name, getattr(self._usage, name) + value)

    def _failed(self, reason: str, message: str, *, down: bool) -> NoReturn:
        self._count(failed=1)
        with self._lock:
            self._row = row = self._row + 1 if down else 0
        message = f"endpoint {self.config.url}: {self._plain(message)}"
        if row >= self.config.give_up_after:
            raise EndpointRefused(f"{message}; {row} calls in a row have failed")
        raise EndpointError(reason, message)

    def _attempt(self, text: str, case: str) -> tuple[str, Completion]:
        """One request; body and completion."""
        with self._slots:
            status, headers, body = self._send(text, case)
        if 200 <= status < 300:
            try:
                return body, read_completion(body)
            except Malformed as error:  # a proxy may have cut it
                raise _Passing("malformed answer", f"malformed answer: {error}") from error
        told = f"status {status}: {' '.join(body.split())[:300]}"
        if status in _MISCONFIGURED or 300 <= status < 400:
            raise EndpointRefused(f"endpoint {self.config.url}: {told}")
        if status not in _PASSING and status < 500:
            raise EndpointError(f"status {status}", told)
        after = _retry_after(headers.get("retry-after", ""))
        if after > self.config.longest_wait:
            raise EndpointError(
                f"status {status}", f"{told}; it asks to wait {after:g} s, and longest_wait is "
                f"{self.config.longest_wait:g}"
            )  # fmt: skip
        raise _Passing(f"status {status}", told, after)

    def _send(self, text: str, case: str) -> tuple[int, Mapping[str, str], str]:
        headers = {"Content-Type": "application/json"} | ({CASE_HEADER: case} if case else {})
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url, end = f"{self.config.url.rstrip('/')}/chat/completions", time.monotonic() + self.config.timeout
        try:
            with self._client.stream("POST", url, content=text, headers=headers) as response:
                pieces, size = [], 0
                for piece in response.iter_bytes():
                    size += len(piece)
                    if size > LARGEST_ANSWER:
                        raise EndpointError("answer too long", f"the answer has more than {LARGEST_ANSWER:,} bytes")
                    if time.monotonic() > end:  # a body that drips never runs into a timeout of its own
                        raise _Passing("timeout", f"no whole answer within {self.config.timeout:g} s")
                    pieces.append(piece)
                return response.status_code, response.headers, self._plain(b"".join(pieces).decode("utf-8", "replace"))
        except self._httpx.TimeoutException as error:
            raise _Passing("timeout", f"no answer within {self.config.timeout:g} s") from error
        except self._httpx.TransportError as error:
            raise _Passing("no connection", f"no connection ({type(error).__name__}: {error})") from error
        except self._httpx.DecodingError as error:
            raise _Passing("malformed answer", f"malformed answer: {error}") from error

    def _plain(self, text: str) -> str:
        """Without the key, should the endpoint repeat it."""
        return text.replace(self._key, "[key]") if self._key else text


def _waits(backoff: Callable[[Any], float]) -> Callable[[Any], float]:
    """The backoff, or what the endpoint asked for where that is longer."""

    def wait(state: Any) -> float:
        error = state.outcome.exception()
        return max(float(backoff(state)), error.after)

    return wait


def _retry_after(value: str) -> float:
    """Seconds that a ``Retry-After`` header asks for; 0 where it says nothing that can be read."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (email.utils.parsedate_to_datetime(value) - datetime.datetime.now(datetime.UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return max(seconds, 0.0) if seconds == seconds else 0.0


class _Cache:
    """Answers by the digest of the whole request and the address."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._run("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, body TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise EndpointRefused(f"cache {path}: cannot be opened ({error})") from error

    def get(self, digest: str) -> str | None:
        found = self._run("SELECT body FROM answers WHERE request = ?", digest)
        return found[0][0] if found else None

    def put(self, digest: str, body: str) -> None:
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", digest, body)

    def close(self) -> None:
        self._database.close()

    def _run(self, statement: str, *values: str) -> list[tuple[str]]:
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise EndpointRefused(f"cache {self._path}: {error}") from error


def in_threads(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Results in the order of ``items``, made by so many threads; an error stops what has not begun."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
