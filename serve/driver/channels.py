"""The driver's four sockets."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from serve.driver.messages import FromDriver, ToDriver
from workers.step import FromWorker, ToWorker

SEND_TIMEOUT_MS = 10_000  # a peer that takes nothing for so long is gone
LINGER_MS = 1_000  # at the end, for Stop and EngineDead to leave


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where to connect. Lists hold the ipc address, then the tcp one if the driver was given a host."""

    steps: list[str]  # SUB, subscribed to everything: ToWorker
    replies: list[str]  # PUSH: FromWorker
    requests: str  # PUSH: ToDriver
    outputs: str  # PULL: FromDriver


class Channels:
    """Binds the sockets and speaks typed messages over them. For one thread at a time.

    Raises ValueError for a folder whose path is too long for an ipc address, zmq.ZMQError when binding fails.
    """

    def __init__(self, ipc_dir: str, host: str | None) -> None:
        longest = Path(ipc_dir, "requests")
        if len(bytes(longest)) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(f"ipc_dir: {longest} is longer than the {zmq.IPC_PATH_MAX_LEN} bytes a socket may have")
        self._context = zmq.Context()
        self._steps = self._open(zmq.XPUB, host)
        self._replies = self._open(zmq.PULL, host)
        self._requests = self._open(zmq.PULL, None)
        self._outputs = self._open(zmq.PUSH, None)
        self._outputs.setsockopt(zmq.SNDHWM, 0)  # unbounded: what waits is bounded by the requests in flight
        self._requests.setsockopt(zmq.RCVHWM, 0)
        self._steps.setsockopt(zmq.XPUB_VERBOSE, 1)  # one message a subscriber, else equal subscriptions count as one
        self._steps.setsockopt(zmq.XPUB_NODROP, 1)  # block when a queue is full instead of losing a plan
        self._poller = zmq.Poller()
        for socket in (self._steps, self._replies, self._requests):
            self._poller.register(socket, zmq.POLLIN)
        self.num_subscribers = 0  # to steps, as of the last poll; leaving is not counted
        self._encoder = msgspec.msgpack.Encoder()
        self._from_worker = msgspec.msgpack.Decoder(FromWorker)
        self._to_driver = msgspec.msgpack.Decoder(ToDriver)
        try:
            self.endpoints = Endpoints(
                steps=_bind(self._steps, ipc_dir, "steps", host),
                replies=_bind(self._replies, ipc_dir, "replies", host),
                requests=_bind(self._requests, ipc_dir, "requests", None)[0],
                outputs=_bind(self._outputs, ipc_dir, "outputs", None)[0],
            )
        except zmq.ZMQError:
            self.close(linger_ms=0)
            raise

    def poll(self, timeout_s: float | None) -> None:
        """Blocks until a message or a subscription is there, for `timeout_s` at most (None: for ever)."""
        events = self._poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
        if any(socket is self._steps for socket, _ in events):
            self.num_subscribers += sum(frame[:1] == b"\x01" for frame in _drain(self._steps))

    def broadcast(self, message: ToWorker) -> None:
        self._steps.send(self._encoder.encode(message))

    def send(self, message: FromDriver) -> None:
        """To the front end. Raises zmq.Again when none has been connected for SEND_TIMEOUT_MS."""
        self._outputs.send(self._encoder.encode(message))

    def replies(self) -> Iterator[FromWorker]:
        """Those that have arrived. Raises msgspec.DecodeError for what is no message."""
        return map(self._from_worker.decode, _drain(self._replies))

    def requests(self) -> Iterator[ToDriver]:
        """Those that have arrived. Raises msgspec.DecodeError for what is no message."""
        return map(self._to_driver.decode, _drain(self._requests))

    def close(self, *, linger_ms: int = LINGER_MS) -> None:
        """Waits `linger_ms` at most for what was sent to leave. Closing twice is fine."""
        self._context.destroy(linger=linger_ms)

    def _open(self, kind: int, host: str | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if host is not None and _is_ipv6(host):
            socket.setsockopt(zmq.IPV6, 1)
        return socket


def _bind(socket: zmq.Socket[bytes], ipc_dir: str, name: str, host: str | None) -> list[str]:
    addresses = [f"ipc://{Path(ipc_dir, name)}"]
    if host is not None:
        addresses.append(f"tcp://[{host}]:*" if _is_ipv6(host) else f"tcp://{host}:*")
    bound = []
    for address in addresses:
        socket.bind(address)
        bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return bound


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:  # a name
        return False


def _drain(socket: zmq.Socket[bytes]) -> Iterator[bytes]:
    while True:
        try:
            yield socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
