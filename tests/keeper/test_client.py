from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from relight.errors import (
    ConfigError,
    FencedError,
    KeeperUnavailableError,
    WaitTimeoutError,
)
from relight.keeper import client as client_module
from relight.keeper.client import KeeperClient, at_short_path, socket_path
from relight.keeper.messages import PROTOCOL, AttachRequest, DetachRequest, Health, StopRequest, TierPlan
from relight.keeper.node import Node
from relight.keeper.server import serve


def read_request(connection: socket.socket) -> None:
    data = b""
    while not data.endswith(b"\r\n\r\n" if data.startswith(b"GET") else b"}"):
        part = connection.recv(65536)
        if not part:
            return
        data += part


@pytest.fixture
def answer(shared: Path) -> Iterator[Callable[[bytes], KeeperClient]]:
    """Listen where a keeper would, and answer every connection with the same bytes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path(shared)))
    listener.listen()
    replies: list[bytes] = []
    clients: list[KeeperClient] = []

    def live() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                read_request(connection)
                if replies[0] == b"silence":
                    connection.recv(65536)
                connection.sendall(replies[0])

    thread = threading.Thread(target=live, daemon=True)

    def start(reply: bytes) -> KeeperClient:
        replies.append(reply)
        thread.start()
        clients.append(KeeperClient(shared, timeout_seconds=0.3))
        return clients[0]

    yield start
    for client in clients:
        client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def http_reply(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def test_no_keeper_is_unavailable(shared: Path) -> None:
    with pytest.raises(KeeperUnavailableError, match="does not answer"):
        KeeperClient(shared).health()


def test_an_arena_that_is_not_there_is_unavailable(shared: Path) -> None:
    with pytest.raises(KeeperUnavailableError):
        KeeperClient(shared / ("y" * 150) / "gone").health()


def test_a_keeper_that_ended_without_closing_its_socket_is_unavailable(shared: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path(shared)))
    with pytest.raises(KeeperUnavailableError):
        KeeperClient(shared).health()


def test_a_keeper_that_does_not_answer_in_time_is_unavailable(answer) -> None:
    with pytest.raises(KeeperUnavailableError):
        answer(b"silence").health()


@pytest.mark.parametrize(
    "reply", [b"", b"garbage\r\n\r\n", http_reply(200, b"not json"), http_reply(200, b"[1]")]
)
def test_an_answer_that_cannot_be_read_is_unavailable(answer, reply: bytes) -> None:
    with pytest.raises(KeeperUnavailableError):
        answer(reply).health()


def test_an_endless_answer_is_not_read(answer, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_REPLY_MAX_BYTES", 10)
    with pytest.raises(KeeperUnavailableError, match="more than 10 bytes"):
        answer(http_reply(200, b"x" * 100)).health()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, {"error": "FencedError", "message": "gone on"}, FencedError),
        (409, {"error": "WaitTimeoutError", "message": "too long"}, WaitTimeoutError),
        (400, {"error": "ConfigError", "message": "no"}, ConfigError),
        (503, {"error": "KeeperUnavailableError", "message": "leaving"}, KeeperUnavailableError),
        (400, {"error": "SystemExit", "message": "not one of ours"}, ConfigError),
        (500, {"error": "Any", "message": "typing.Any is no error"}, KeeperUnavailableError),
        (500, {"oops": 1}, KeeperUnavailableError),
    ],
)
def test_a_refusal_is_raised_as_the_error_it_names(answer, status: int, body: dict[str, str], kind) -> None:
    with pytest.raises(kind) as caught:
        answer(http_reply(status, json.dumps(body).encode())).seal(0, 0)
    assert type(caught.value) is kind


def test_a_keeper_that_speaks_another_protocol_is_refused(answer) -> None:
    health = Health(protocol=PROTOCOL + 1, version="9", pid=7, root="/x", is_stopping=False)
    with pytest.raises(ConfigError, match="relight keeper stop"):
        answer(http_reply(200, msgspec.json.encode(health))).health()


def test_a_long_path_is_reached_by_a_short_name(shared: Path) -> None:
    folder = shared / ("z" * 150)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        at_short_path(socket_path(folder), listener.bind)
        listener.listen()
        with socket.socket(socket.AF_UNIX) as caller:
            at_short_path(socket_path(folder), caller.connect)
    assert socket_path(folder).is_socket()


@pytest.fixture
def served(make_node: Callable[..., Node], run) -> Iterator[KeeperClient]:
    """A keeper whose server runs in a thread of this process."""
    node = make_node(start=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path(run.folder)))
    listener.listen()
    ready = threading.Event()

    def live() -> None:
        asyncio.run(_serve_without_signals(node, listener, ready))

    thread = threading.Thread(target=live)
    thread.start()
    assert ready.wait(10)
    client = KeeperClient(run.folder)
    yield client
    client.stop(drain=False)
    thread.join(10)
    client.close()
    listener.close()


async def _serve_without_signals(node: Node, listener: socket.socket, ready: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler = lambda *args: None  # type: ignore[method-assign]
    await serve(node, listener, on_ready=ready.set, on_tick=lambda: None)


def ask(run, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("keeper")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(socket_path(run.folder)))
    connection.request(method, path, body)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, json.loads(data)


def test_each_thread_has_a_connection_of_its_own(served: KeeperClient) -> None:
    served.health()
    mine = served._local.connection
    others: list[object] = []

    def look() -> None:
        served.health()
        others.append(served._local.connection)
        served.close()

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    served.health()
    assert served._local.connection is mine
    assert len({id(one) for one in [mine, *others]}) == 4


def test_a_forked_child_does_not_talk_on_its_parents_connection(served: KeeperClient) -> None:
    served.health()
    parents = served._local.connection
    parents.pid -= 1
    served.health()
    assert served._local.connection is not parents


@pytest.mark.parametrize(
    ("request_line", "body", "refusal"),
    [
        ("POST /seal", b'{"rank":0,"slot":0,"colour":"red"}', (400, "colour")),
        ("POST /seal", b'{"rank":"zero","slot":0}', (400, "rank")),
        ("POST /seal", b"", (400, "/seal")),
        ("POST /request-save", b'{"times":2}', (400, "times")),
        ("POST /seal", b'{"x":"' + b"x" * 300_000 + b'"}', (413, "/seal")),
        ("GET /nowhere", b"", (404, "/nowhere")),
        ("GET /seal", b"", (405, "/seal")),
        ("GET /wait", b"", (400, "step is missing")),
        ("GET /wait?step=x&generation=1", b"", (400, "'x' is not a number")),
        ("GET /inventory?timeout=soon", b"", (400, "'soon'")),
    ],
)
def test_a_wrong_request_says_why(run, served, request_line, body, refusal) -> None:
    seen, reply = ask(run, *request_line.split(), body)
    assert seen == refusal[0]
    assert refusal[1] in str(reply["message"])
    assert reply["error"] == "ConfigError"


def test_another_user_is_refused(run, served: KeeperClient, monkeypatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr("relight.keeper.server.os.getuid", lambda: uid + 1)
    status, reply = ask(run, "GET", "/healthz")
    monkeypatch.undo()
    assert status == 403
    assert f"user {uid} may not talk" in str(reply["message"])


def test_a_wait_ends_when_the_step_is_committed(run, served: KeeperClient) -> None:
    served.attach(run.attach_request())
    states: list[str] = []
    waiter = threading.Thread(
        target=lambda: states.append(KeeperClient(run.folder).wait(5, 1, timeout_seconds=20).state)
    )
    waiter.start()
    index = served.acquire(0, timeout_seconds=5)
    run.seal(5, index=index)
    served.seal(0, index)
    waiter.join(20)
    assert states[0] in ("committed", "verified")


def test_a_wait_that_takes_too_long_says_where_the_step_stands(run, served: KeeperClient) -> None:
    assert served.wait(99, 1, timeout_seconds=0.05).state == "unknown"
    run.seal(5, rank=0, world_size=2)
    served.inventory()
    reply = served.wait(5, 1, tier=run.root_url, timeout_seconds=0.2)
    assert reply.state in ("draining", "digested", "durable")


def test_a_step_of_an_earlier_keeper_is_looked_up_on_the_tier(run, served: KeeperClient) -> None:
    from relight.testing.checkpoints import write_checkpoint

    write_checkpoint(run.catalog(), 77)
    assert served.wait(77, 1, timeout_seconds=5).state == "committed"


def test_status_tells_everything(run, served: KeeperClient, eventually) -> None:
    served.attach(run.attach_request())
    index = served.acquire(0, timeout_seconds=5)
    run.seal(5, index=index)
    served.seal(0, index)
    served.wait(5, 1, timeout_seconds=20)
    eventually(lambda: served.status().counters.get("saves_verified") == 1)
    status = served.status()
    assert status.health.root == run.root_url
    assert [(one.rank, one.pid, one.is_alive) for one in status.ranks] == [(0, os.getpid(), True)]
    assert [(one.rank, one.slot, one.step, one.state) for one in status.slots] == [(0, index, 5, "digested")]
    assert [(one.step, one.generation, one.world_size) for one in status.steps] == [(5, 1, 1)]
    tier = status.steps[0].tiers[0]
    assert (tier.url, tier.ranks[0].state, tier.ranks[0].stored_bytes) == (
        run.root_url,
        "durable",
        len(run.image(5)),
    )
    assert status.counters["saves_committed"] == 1
    assert status.errors == ()


def test_metrics_are_in_the_prometheus_format(run, served: KeeperClient, eventually) -> None:
    served.attach(run.attach_request())
    run.seal(5)
    served.inventory()
    eventually(lambda: served.status().counters.get("saves_verified") == 1)
    lines = served.metrics().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(samples["relight_keeper_saves_committed_total"]) == 1
    assert float(samples["relight_keeper_newest_committed_step"]) == 5
    assert float(samples['relight_keeper_slots{state="digested"}']) == 1
    assert float(samples["relight_keeper_ranks_attached"]) == 1
    assert served.metrics().endswith("\n")


def test_messages_are_the_same_after_a_round_trip() -> None:
    for message in (
        AttachRequest(
            rank=0,
            world_size=2,
            pid=7,
            tiers=(TierPlan(url="/x", every=2, keep=1, keep_every=1000),),
            generation=3,
            keep_best=("loss", "min"),
            protect=((100, 2),),
        ),
        DetachRequest(rank=0, pid=7, clean=True),
        StopRequest(drain=False),
    ):
        assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message
