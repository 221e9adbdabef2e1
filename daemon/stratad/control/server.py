"""Accepting, reading and answering on the control socket, with a limit on everything a client can take.

One coroutine per connection reads a message, answers it, and reads the next: calls on a connection are answered in
order. All of it runs on the daemon's event loop; nothing here waits for the engine, and nothing waits for a client
longer than the limits below.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncvarlink import (
    AnnotatedResult,
    VarlinkErrorReply,
    VarlinkInterface,
    VarlinkMethodCall,
    VarlinkMethodReply,
    VarlinkMethodSignature,
)
from asyncvarlink.conversion import ConversionError
from asyncvarlink.serviceinterface import InvalidParameter, MethodNotImplemented
from stratad.control.failures import ProtocolViolation, TooManyConnections, from_strata, internal
from stratad.control.interface import Control, PeerRegistry, Rows, registry_for
from stratad.control.peer import Policy, peer_of
from stratad.control.unixsocket import BACKLOG, BoundSocket, bind
from stratad.control.wire import END, MESSAGE_LIMIT, WireError, decode, encode
from stratad.errors import StrataError
from stratad.types import Service

_logger = logging.getLogger("stratad.control")


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take. Tests use smaller ones."""

    connections: int = 32
    refused: int = 32  # clients above that number who may read at leisure why; the rest are hung up on at once
    refused_s: float = 1.0
    idle_s: float = 30.0  # for a whole message to arrive
    write_s: float = 30.0  # for a client to take what was sent
    close_s: float = 1.0  # for running calls when the daemon stops


class _Wire(asyncio.StreamReaderProtocol):
    """A byte stream that tells at once when the client is gone, also while an answer is being made."""

    def __init__(self, reader: asyncio.StreamReader, gone: Callable[[], None]) -> None:
        super().__init__(reader)
        self._gone = gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the socket, to ask it how the client ended."""
        super().connection_made(transport)
        self._socket: Any = transport.get_extra_info("socket")

    def eof_received(self) -> bool | None:
        """A client that only shut its sending side down still reads answers; one that closed does not."""
        poll = select.poll()
        poll.register(self._socket.fileno(), 0)
        if any(events & select.POLLHUP for _, events in poll.poll(0)):
            self._gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport gave up: a write failed or the socket was closed."""
        super().connection_lost(exc)
        self._gone()


class _Connection:
    """One client. `run` returns when the client is done, gone, too slow, or out of step."""

    def __init__(self, registry: PeerRegistry, limits: Limits, closing: asyncio.Event) -> None:
        self._registry = registry
        self._limits = limits
        self._closing = closing
        self._task: asyncio.Task[None] | None = None
        self.answering = False

    async def run(self, sock: socket.socket) -> None:
        """Serve `sock`, which is closed on return."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MESSAGE_LIMIT)
        transport, wire = await loop.connect_accepted_socket(lambda: _Wire(reader, self._client_gone), sock)
        self._writer = asyncio.StreamWriter(transport, wire, reader, loop)
        self._task = asyncio.current_task()
        try:
            await self._converse(reader)
        except WireError as err:
            self._writer.write(encode(ProtocolViolation(message=str(err)).toreply()))
        except (ConnectionError, asyncio.CancelledError):
            # The client is gone, or the daemon stops. Only an idle client gets the rest of what was written.
            if self.answering:
                transport.abort()
        finally:
            self._task = None  # from here on nothing is left to interrupt
            await self._hang_up()

    def _client_gone(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _converse(self, reader: asyncio.StreamReader) -> None:
        while not self._closing.is_set():
            message = await self._next_message(reader)
            if message is None:
                return
            call = decode(message)
            self.answering = True
            await self._answer(call)
            self.answering = False

    async def _next_message(self, reader: asyncio.StreamReader) -> bytes | None:
        """The next message without its NUL; None after the last. Raises WireError when it is too long or too slow."""
        try:
            async with asyncio.timeout(self._limits.idle_s):
                return (await reader.readuntil(END))[: -len(END)]
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise WireError(f"the message is larger than {MESSAGE_LIMIT} bytes") from None
        except TimeoutError:
            raise WireError(f"no complete message arrived within {self._limits.idle_s:g} seconds") from None

    async def _answer(self, call: VarlinkMethodCall) -> None:
        """Run the method and send its replies; every failure becomes an error reply. Raises only ConnectionError."""
        failure: VarlinkErrorReply
        try:
            await self._call(call)
            return
        except ConnectionError:
            raise
        except VarlinkErrorReply as err:
            failure = err
        except StrataError as err:
            failure = from_strata(err)
        except Exception:
            _logger.exception("%s failed", call.method)
            failure = internal(f"{call.method} failed; the log of stratad says why")
        await self._send(call, failure.toreply())

    async def _call(self, call: VarlinkMethodCall) -> None:
        if call.upgrade:
            raise MethodNotImplemented(method=call.method)
        method, signature = self._registry.lookup_method(call)
        running = method(**_parameters(signature, call))
        if signature.more:
            async with contextlib.aclosing(running) as results:
                async for result in results:
                    await self._send(call, _reply(signature, result))
        else:
            await self._send(call, _reply(signature, await running if signature.asynchronous else running))

    async def _send(self, call: VarlinkMethodCall, reply: VarlinkMethodReply) -> None:
        """Send one reply; a client that does not read is given up after a while. Raises ConnectionError."""
        if call.oneway:
            return
        self._writer.write(encode(reply))
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionAbortedError("the client does not read") from None

    async def _hang_up(self) -> None:
        """Close once what was written has left, or at once when it does not leave."""
        self._writer.close()
        try:
            async with asyncio.timeout(self._limits.refused_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            self._writer.transport.abort()


def _parameters(signature: VarlinkMethodSignature, call: VarlinkMethodCall) -> dict[str, Any]:
    try:
        parameters: dict[str, Any] = signature.parameter_type.fromjson(call.parameters)
    except ConversionError as err:
        where = ".".join(str(step) for step in err.location)
        raise InvalidParameter(parameter=where) from None
    return parameters


def _reply(signature: VarlinkMethodSignature, result: AnnotatedResult) -> VarlinkMethodReply:
    return VarlinkMethodReply(signature.return_type.tojson(result.parameters), continues=result.continues)


class ControlServer:
    """A listening control socket; made by `serve`. `path` is its file."""

    def __init__(self, bound: BoundSocket, control: VarlinkInterface, limits: Limits, closing: asyncio.Event) -> None:
        self._bound = bound
        self._control = control
        self._limits = limits
        self._closing = closing
        self._policy = Policy.of_socket(bound.gid)
        self._clients: dict[asyncio.Task[None], _Connection] = {}
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}
        # Given up for a moment when the process is out of descriptors, so that a client can still be told no.
        self._spare: int | None = None
        self._refill_spare()
        self._listen()

    @property
    def path(self) -> str:
        """Where clients connect."""
        return self._bound.path

    @property
    def connections(self) -> int:
        """How many clients are being served."""
        return len(self._clients)

    async def close(self) -> None:
        """Stop listening, remove the file if it is still ours, let running calls end, hang up. Idempotent."""
        if self._closing.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._bound.sock)
        self._bound.remove()
        self._closing.set()
        for sock in list(self._refused):
            self._drop(sock)
        for task, connection in self._clients.items():
            if not connection.answering:
                task.cancel()
        await self._wait_for_clients()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def _wait_for_clients(self) -> None:
        """First they may finish, then the answers are given up, at last the writing of what was answered."""
        for _ in range(3):
            if self._clients:
                await asyncio.wait(list(self._clients), timeout=self._limits.close_s)
            for task in self._clients:
                task.cancel()

    def _listen(self) -> None:
        if not self._closing.is_set():
            asyncio.get_running_loop().add_reader(self._bound.sock, self._accept_ready)

    def _accept_ready(self) -> None:
        for _ in range(BACKLOG):
            try:
                sock, _ = self._bound.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in (errno.EMFILE, errno.ENFILE) or not self._refuse_on_spare():
                    self._pause(err)
                    return
            else:
                self._admit(sock)

    def _pause(self, err: OSError) -> None:
        """Accepting fails for want of something: try again soon, rather than at once and for ever."""
        _logger.error("control socket cannot accept: %s", err.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._bound.sock)
        loop.call_later(1.0, self._listen)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._clients) >= self._limits.connections:
            self._refuse(sock)
            return
        try:
            peer = peer_of(sock)
        except OSError:  # gone already
            sock.close()
            return
        connection = _Connection(registry_for(peer, self._policy, self._control), self._limits, self._closing)
        task = asyncio.get_running_loop().create_task(connection.run(sock), name=f"control {peer}")
        self._clients[task] = connection
        task.add_done_callback(functools.partial(self._forget, sock))

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # a task that was cancelled before its first step has not done so
        del self._clients[task]
        if not task.cancelled() and task.exception() is not None:
            _logger.error("control connection failed", exc_info=task.exception())

    def _refuse(self, sock: socket.socket) -> None:
        """Say why, then leave the client a moment to send its call and read the answer before the line is cut."""
        self._tell_full(sock)
        if len(self._refused) >= self._limits.refused:
            sock.close()
            return
        loop = asyncio.get_running_loop()
        self._refused[sock] = loop.call_later(self._limits.refused_s, self._drop, sock)

    def _refuse_on_spare(self) -> bool:
        """Out of descriptors: turn one client away on the spare one. False when there is none to use."""
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            sock, _ = self._bound.sock.accept()
            sock.setblocking(False)
            self._tell_full(sock)
            sock.close()
        self._refill_spare()
        return True

    def _refill_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _tell_full(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.send(encode(TooManyConnections(limit=self._limits.connections).toreply()))
            sock.shutdown(socket.SHUT_WR)

    def _drop(self, sock: socket.socket) -> None:
        self._refused.pop(sock).cancel()
        sock.close()


async def serve(
    service: Service,
    path: str | os.PathLike[str],
    *,
    settings_rows: Rows = lambda: [],
    group: str | int | None = None,
    limits: Limits | None = None,
) -> ControlServer:
    """Answer `io.strata.Control` at `path` until `close()`.

    `settings_rows` is called for every question about settings (`Settings.describe`). `group` (name or id) may read;
    None leaves the socket to the group of the process. Raises StrataError `control_socket` when the path is too long,
    taken, or not a socket.
    """
    bound = await bind(path, group)
    closing = asyncio.Event()
    return ControlServer(bound, Control(service, settings_rows, closing), limits or Limits(), closing)
