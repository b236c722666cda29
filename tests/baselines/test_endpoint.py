"""The endpoint against a scripted local server: what it retries, what it gives up, what it counts and keeps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from jaxguard.baselines.endpoint import Endpoint, EndpointConfig, EndpointError, EndpointRefused, in_threads
from jaxguard.online.local_server import LocalServer, Reply, completion
from jaxguard.settings import ConfigError

HELLO = [{"role": "user", "content": "hello"}]
KEY = "sk-4cc0unt-s3cret"


class Script:
    """Plays replies one after the other, the last one for ever; remembers what was asked."""

    def __init__(self, *replies: Reply | float):
        self.replies, self.asked, self.headers, self._lock = list(replies), [], [], threading.Lock()

    def __call__(self, headers: Any, request: dict[str, Any]) -> Reply:
        with self._lock:
            self.asked.append(request)
            self.headers.append(headers)
            reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        if isinstance(reply, float):
            time.sleep(reply)
            return completion("late")
        return reply


@contextmanager
def serving(
    script: Callable[..., Reply], cache: Path | None = None, **settings: Any
) -> Iterator[tuple[Endpoint, list[float]]]:
    waits: list[float] = []
    with LocalServer(script) as server:
        config = EndpointConfig(**{"url": server.url, "model": "m", "attempts": 3, "timeout": 5.0, **settings})
        with Endpoint(config, cache, waits.append) as endpoint:
            yield endpoint, waits


def test_an_answer_is_read_with_its_tokens_and_cost() -> None:
    script = Script(completion("hi", prompt_tokens=1_000, completion_tokens=10))
    with serving(script, prompt_price=2.0, completion_price=8.0) as (endpoint, _):
        assert endpoint.usage.cost == 0
        answer = endpoint.chat(HELLO)
        assert (answer.text, answer.finish, answer.cached) == ("hi", "stop", False)
        usage = endpoint.usage
    assert (usage.answered, usage.prompt_tokens, usage.completion_tokens) == (1, 1_000, 10)
    assert usage.cost == pytest.approx((1_000 * 2 + 10 * 8) / 1e6)
    assert script.asked[0]["messages"] == HELLO
    assert script.asked[0]["temperature"] == 0.0
    assert "tools" not in script.asked[0]


def test_without_prices_the_cost_of_calls_is_unknown_and_that_of_none_is_nothing() -> None:
    with serving(Script(completion("hi"))) as (endpoint, _):
        assert endpoint.usage.cost == 0
        endpoint.chat(HELLO)
        assert endpoint.usage.cost is None
        assert endpoint.usage.without_tokens == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Reply("busy", 500), "status 500"),
        (Reply("slow down", 429), "status 429"),
        (Reply("{broken"), "malformed answer"),
        (Reply("[]"), "malformed answer"),
        (Reply(json.dumps({"choices": []})), "malformed answer"),
        (Reply(json.dumps({"choices": [{"message": {"tool_calls": [{}]}}]})), "malformed answer"),
        (Reply(json.dumps({"choices": [{"message": {"content": 3}}]})), "malformed answer"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_an_error(fault: Reply, reason: str) -> None:
    with serving(Script(fault, fault, completion("at last"))) as (endpoint, waits):
        assert endpoint.chat(HELLO).text == "at last"
        assert len(waits) == endpoint.usage.retries == 2
        assert 1.0 <= waits[0] <= 2.0
        assert waits[0] < waits[1] <= 3.0  # doubled, with a second of jitter
    script = Script(fault)
    with serving(script) as (endpoint, _):
        with pytest.raises(EndpointError) as caught:
            endpoint.chat(HELLO)
        assert caught.value.reason == reason
        assert len(script.asked) == 3
        assert (endpoint.usage.failed, endpoint.usage.answered) == (1, 0)


def test_a_timeout_is_tried_again() -> None:
    with serving(Script(1.0, completion("in time")), timeout=0.2) as (endpoint, waits):
        assert endpoint.chat(HELLO).text == "in time"
        assert len(waits) == 1
    with serving(Script(1.0), timeout=0.2, attempts=2) as (endpoint, _):
        with pytest.raises(EndpointError) as caught:
            endpoint.chat(HELLO)
        assert caught.value.reason == "timeout"


def test_no_connection_is_an_error_of_the_call() -> None:
    with LocalServer(Script(completion("x"))) as server:
        url = server.url
    config = EndpointConfig(url=url, model="m", attempts=2)
    with Endpoint(config, sleep=lambda _: None) as endpoint, pytest.raises(EndpointError, match="no connection"):
        endpoint.chat(HELLO)


def test_retry_after_is_honoured_as_seconds_and_as_a_date() -> None:
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    script = Script(Reply("", 429, {"Retry-After": "17"}), Reply("", 503, {"Retry-After": at}), completion("thanks"))
    with serving(script) as (endpoint, waits):
        assert endpoint.chat(HELLO).text == "thanks"
    assert waits[0] == 17
    assert 20 < waits[1] <= 30


def test_an_endpoint_that_asks_for_too_long_a_wait_has_failed_the_call() -> None:
    script = Script(Reply("", 429, {"Retry-After": "3600"}))
    with serving(script) as (endpoint, waits), pytest.raises(EndpointError, match="asks to wait 3600 s"):
        endpoint.chat(HELLO)
    assert len(script.asked) == 1
    assert not waits


def test_an_unreadable_retry_after_leaves_the_backoff() -> None:
    with serving(Script(Reply("", 429, {"Retry-After": "soon"}), completion("ok"))) as (endpoint, waits):
        endpoint.chat(HELLO)
    assert 1.0 <= waits[0] <= 2.0


def test_a_refused_request_is_not_tried_again() -> None:
    script = Script(Reply("context length exceeded", 400))
    with serving(script) as (endpoint, _), pytest.raises(EndpointError, match="context length exceeded"):
        endpoint.chat(HELLO)
    assert len(script.asked) == 1


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_wrong_key_or_address_stops_at_once(status: int) -> None:
    script = Script(Reply("no", status))
    with serving(script) as (endpoint, _), pytest.raises(EndpointRefused, match=f"status {status}"):
        endpoint.chat(HELLO)
    assert len(script.asked) == 1


def test_an_endpoint_that_fails_again_and_again_is_down_but_one_answer_resets_the_count() -> None:
    script = Script(*[Reply("", 500)] * 2, completion("ok"), *[Reply("", 500)] * 3)
    with serving(script, give_up_after=3, attempts=1) as (endpoint, _):
        for _ in range(2):
            with pytest.raises(EndpointError):
                endpoint.chat(HELLO)
        endpoint.chat(HELLO)
        for _ in range(2):
            with pytest.raises(EndpointError):
                endpoint.chat(HELLO)
        with pytest.raises(EndpointRefused, match="3 calls in a row"):
            endpoint.chat(HELLO)


def test_an_endpoint_that_refuses_single_requests_is_not_down() -> None:
    script = Script(*[Reply("", 400)] * 6, completion("ok"))
    with serving(script, give_up_after=3) as (endpoint, _):
        for _ in range(6):
            with pytest.raises(EndpointError, match="status 400"):
                endpoint.chat(HELLO)
        assert endpoint.chat(HELLO).text == "ok"
        assert endpoint.usage.failed == 6


def test_answers_are_cached_by_the_whole_request_and_failures_are_not(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache.sqlite"
    script = Script(Reply("", 400), completion("first"), completion("second"), completion("third"))
    with serving(script, cache) as (endpoint, _):
        with pytest.raises(EndpointError):
            endpoint.chat(HELLO)
        assert endpoint.chat(HELLO).text == "first"
        again = endpoint.chat(HELLO)
        assert (again.text, again.cached) == ("first", True)
        assert endpoint.chat(HELLO, logprobs=True).text == "second"
        assert endpoint.chat([*HELLO, {"role": "user", "content": "?"}]).text == "third"
        assert (endpoint.usage.answered, endpoint.usage.cached, endpoint.usage.failed) == (3, 1, 1)
        url = endpoint.config.url
    script = Script(completion("other model"))
    with LocalServer(script):
        with Endpoint(EndpointConfig(url=url, model="m", attempts=1), cache) as endpoint:  # nobody answers there now
            assert endpoint.chat(HELLO).text == "first"
        other = EndpointConfig(url=url, model="n", attempts=1)
        with Endpoint(other, cache) as endpoint, pytest.raises(EndpointError):
            endpoint.chat(HELLO)


def test_a_broken_cache_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_text("this is no database, whatever its name says " * 50)
    with pytest.raises(EndpointRefused, match=r"cache .*cache\.sqlite"):
        Endpoint(EndpointConfig(url="http://localhost:1/v1", model="m"), path)


def test_no_more_requests_at_a_time_than_allowed() -> None:
    now, most, lock = [0], [0], threading.Lock()

    def respond(_: Any, __: Any) -> Reply:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return completion("ok")

    with serving(respond, concurrency=3) as (endpoint, _):
        ask = lambda i: endpoint.chat([{"role": "user", "content": str(i)}]).text  # noqa: E731
        assert list(in_threads(ask, range(12), 12)) == ["ok"] * 12
    assert most[0] == 3


def test_the_key_goes_into_one_header_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ENDPOINT_KEY", KEY)
    cache = tmp_path / "cache.sqlite"
    script = Script(completion(f"your key is {KEY}"), Reply(f"bad key {KEY}", 400), Reply(f"bad key {KEY}", 401))
    with serving(script, cache, key_variable="TEST_ENDPOINT_KEY") as (endpoint, _):
        assert endpoint.chat(HELLO).text == "your key is [key]"
        for kind in (EndpointError, EndpointRefused):
            with pytest.raises(kind) as caught:
                endpoint.chat([{"role": "user", "content": kind.__name__}])
            assert KEY not in str(caught.value)
            assert "[key]" in str(caught.value)
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in script.headers)
    assert KEY not in json.dumps(script.asked)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("value", [None, "", "  ", "line\nbreak", "schlüssel", "sevench"])
def test_an_unusable_key_is_refused_and_not_repeated(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("TEST_ENDPOINT_KEY", value)
    with pytest.raises(EndpointRefused, match="TEST_ENDPOINT_KEY") as caught:
        Endpoint(EndpointConfig(url="http://localhost:1/v1", model="m", key_variable="TEST_ENDPOINT_KEY"))
    assert not (value or "").strip() or value not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "endpoint.url"),
        ({"url": "ftp://host/v1"}, "endpoint.url"),
        ({"url": "http://me:pass@host/v1"}, "address with credentials"),
        ({"url": "http://host/v1?api-key=1"}, "endpoint.url"),
        ({"timeout": 0.0}, "endpoint.timeout"),
        ({"attempts": 0}, "endpoint.attempts"),
        ({"concurrency": 1_000}, "endpoint.concurrency"),
        ({"max_tokens_field": "tokens"}, "endpoint.max_tokens_field"),
        ({"prompt_price": 1.0}, "endpoint.completion_price"),
        ({"temperature": -1.0}, "endpoint.temperature"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EndpointConfig(**settings)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("missing", ["url", "model"])
def test_an_endpoint_needs_address_and_model(missing: str) -> None:
    with pytest.raises(EndpointRefused, match=f"endpoint.{missing}"):
        Endpoint(EndpointConfig(**{"url": "http://localhost:1/v1", "model": "m", missing: ""}))


def test_an_error_stops_what_has_not_begun() -> None:
    begun = []

    def work(i: int) -> int:
        begun.append(i)
        if i == 0:
            raise ValueError("no")
        time.sleep(0.05)
        return i

    with pytest.raises(ValueError, match="no"):
        list(in_threads(work, range(50), 2))
    assert len(begun) < 10
