"""The daemon's life: lock, bind, control socket, engine, HTTP; then reload, drain and an orderly end.

Order of the start: the state directory is locked and every address is bound before the model is loaded, so that a
second daemon or a taken port costs nothing. Control socket and HTTP answer while the engine loads. Order of the end:
no new connections, running answers get `drain_limit_s`, then the engine is stopped, the store is closed, and the
control socket goes last, so that `stratactl` can watch all of it. A second signal shortens every wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import sdnotify  # type: ignore[import-untyped]
from stratad import config, logs
from stratad import metrics as figures
from stratad.child import Command, Effects, real_effects
from stratad.errors import StrataError
from stratad.generation import ScheduledGeneration
from stratad.launch import check_places, engine_command
from stratad.lock import StateLock
from stratad.scheduler import Scheduler
from stratad.settings import control_socket, state_directory
from stratad.status import snapshot, state_detail
from stratad.storage import Storage
from stratad.supervisor import EngineState, Supervisor
from stratad.types import EngineFacts, GenRequest
from stratastore import Store

_logger = logging.getLogger("stratad.app")

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 78
CLOSE_GRACE_S = 1.0  # for answers that are complete to reach their clients
FAST_STOP_S = 1.0  # for the engine, after a second signal
ENDS = (signal.SIGTERM, signal.SIGINT)


class Front(Protocol):
    """Something that serves clients: bound at once, accepting from `start` to `stop_accepting`."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where it is served, as HOST:PORT."""
        ...

    async def start(self) -> None:
        """Read what is needed of the model and begin to accept connections. Raises ConfigError for a bad model."""
        ...

    async def stop_accepting(self) -> None:
        """Accept no more; what is open goes on."""
        ...

    async def close(self, grace_s: float) -> None:
        """End what is still open, after so many seconds at most."""
        ...


class ControlFront(Protocol):
    """The control socket."""

    async def close(self) -> None:
        """Stop answering and remove the socket."""
        ...


OpenHttp = Callable[["Daemon"], Awaitable[Front]]
"""Binds the addresses, so that a taken port is known before the model is loaded. Raises StrataError or OSError."""


class Notifier:
    """Messages to systemd; without NOTIFY_SOCKET nothing is sent. Texts are made ASCII, which sdnotify needs."""

    def __init__(self) -> None:
        self._client = sdnotify.SystemdNotifier()
        self._last_status = ""

    def send(self, message: str) -> None:
        """One message as it is."""
        self._client.notify(message.encode("ascii", "replace").decode("ascii"))

    def status(self, text: str) -> None:
        """`STATUS=`, when it changed."""
        if text != self._last_status:
            self._last_status = text
            self.send("STATUS=" + text.replace("\n", " "))


class Daemon:
    """The running service. Implements `stratad.types.Service`."""

    def __init__(
        self,
        inputs: config.Inputs,
        loaded: config.Loaded,
        *,
        effects: Effects | None = None,
        open_http: OpenHttp | None = None,
    ) -> None:
        self.inputs = inputs
        self.settings = loaded.settings
        self.environ: Mapping[str, str] = inputs.environ
        self._effects = effects or real_effects()
        self._open_http = open_http
        self._started = self._effects.now()
        self._notifier = Notifier()
        self._end = asyncio.Event()
        self._hurry = asyncio.Event()
        self._news = asyncio.Event()  # set, and replaced, when the engine's state changes
        self._serving = self._announced = False
        self.front: Front | None = None
        self.storage = Storage(self.settings, self.environ, self._effects.now)
        self.scheduler = Scheduler(self.settings, self._effects)
        self.supervisor = Supervisor(self._command, self.settings, self._effects, self.scheduler, self._changed)
        self.scheduler.attach(self.supervisor)

    # -- Service

    def submit(self, request: GenRequest) -> ScheduledGeneration:
        """See `stratad.types.Service.submit`."""
        return self.scheduler.submit(request)

    @property
    def facts(self) -> EngineFacts | None:
        """What the engine said of itself; kept while it is started again."""
        return self.supervisor.facts

    @property
    def store(self) -> Store | None:
        """The conversation store; None when it is off, or not opened yet. Ask each time: it may come later."""
        return self.storage.store

    def status(self) -> dict[str, object]:
        """See `stratad.status`."""
        self.supervisor.refresh_stat()
        self.storage.refresh()
        listeners = self.front.addresses if self.front is not None else ()
        uptime = self._effects.now() - self._started
        return snapshot(self.settings, self.supervisor, self.scheduler, self.storage, listeners, uptime)

    def metrics(self) -> dict[str, object]:
        """See `stratad.metrics.snapshot`."""
        return figures.snapshot(self._view())

    def metrics_text(self) -> str:
        """See `stratad.metrics.text`."""
        return figures.text(self._view())

    def _view(self) -> figures.View:
        self.supervisor.refresh_stat()
        self.storage.refresh()
        uptime = self._effects.now() - self._started
        return figures.View(self.settings, self.supervisor, self.scheduler, self.storage, uptime)

    async def restart_engine(self) -> None:
        """See `stratad.types.Service.restart_engine`."""
        if self._end.is_set():
            raise StrataError("draining", "the server is stopping")
        problems = check_places(self.settings.after("engine-restart"))
        if problems:  # the running engine is better than none
            raise StrataError("invalid_value", "; ".join(map(str, problems)), param="configuration")
        news = self._news
        await self.supervisor.restart()
        await news.wait()
        while self.supervisor.state is not EngineState.READY:
            if self.supervisor.state is EngineState.FAILED:
                raise StrataError("engine_down", f"the engine does not run: {self.supervisor.reason}")
            if self._end.is_set():
                raise StrataError("draining", "the server is stopping")
            news = self._news
            await news.wait()

    # -- start

    def _command(self) -> Command:
        self.settings.adopt("engine-restart")
        return engine_command(self.settings, self.environ)

    async def run(self) -> int:
        """Serve until a signal or a failure that cannot be mended. Returns the exit code."""
        with StateLock(state_directory(self.settings, self.environ)), self._signals():
            control = await self._serve_control()
            try:
                return await self._serve()
            finally:
                await control.close()

    async def _serve_control(self) -> ControlFront:
        from stratad.control import server

        path = control_socket(self.settings, self.environ)
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        return await server.serve(self, path, settings_rows=self.settings.describe)

    async def _serve(self) -> int:
        if self._open_http is not None:
            self.front = await self._open_http(self)
        await self.storage.open()
        tasks = [
            asyncio.create_task(self.supervisor.run(), name="supervisor"),
            asyncio.create_task(self.scheduler.run(), name="scheduler"),
        ]
        try:
            await self._until_end(tasks)
        finally:
            await self._shut_down(tasks)
            await self.storage.close()
        if self.supervisor.permanent_at_start:  # why has been logged
            return EXIT_CONFIG
        return next((EXIT_FAILED for task in tasks if _crashed(task)), EXIT_OK)

    async def _until_end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until somebody asks for the end or a task is over that should not be; raises what kept HTTP from starting."""
        end = asyncio.create_task(self._end.wait())
        start = asyncio.create_task(self._start_front())
        waited: set[asyncio.Task[Any]] = {end, start, *tasks}
        try:
            while not end.done() and not any(task.done() for task in tasks):
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if start.done():
                    start.result()
                    waited.discard(start)
        finally:
            end.cancel()
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        for task in tasks:
            if _crashed(task):
                _logger.critical("internal error in the %s", task.get_name(), exc_info=task.exception())

    async def _start_front(self) -> None:
        if self.front is not None:
            await self.front.start()
        self._serving = True
        self._announce()

    def _changed(self) -> None:
        """The engine's state changed: tell systemd, and end if the very first start was hopeless."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        state = self.supervisor.state
        if state is EngineState.READY and self.supervisor.facts is not None:
            self.storage.engine_ready(self.supervisor.facts)
        detail = state_detail(self.supervisor, self.scheduler)
        self._notifier.status(detail or state.value)
        self._announce()
        if state is EngineState.FAILED and self.supervisor.facts is None:
            self._end.set()

    def _announce(self) -> None:
        """READY to systemd, once, as soon as a request would be served."""
        if self._serving and self.supervisor.state is EngineState.READY and not self._announced:
            self._announced = True
            self._notifier.send("READY=1")
            _logger.info("ready: %s", ", ".join(self.front.addresses) if self.front is not None else "no listener")

    # -- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in ENDS:
            loop.add_signal_handler(number, self.end, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._reload_logged)
        try:
            yield
        finally:
            for number in (*ENDS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def end(self, why: str) -> None:
        """Begin an orderly end; asked again, hurry."""
        if self._end.is_set():
            _logger.warning("%s again: stopping at once", why)
            self._hurry.set()
        else:
            _logger.info("%s: stopping", why)
            self._end.set()

    # -- reload

    def reload(self) -> list[str]:
        """Read the configuration again and take over what can change now. Returns one line per change.

        Raises ConfigError, with nothing changed, when anything in it is wrong.
        """
        loaded = config.load(self.inputs)
        problems = check_places(loaded.settings)
        if problems:
            raise config.ConfigError(problems)
        changes = self.settings.reload(loaded.settings)
        logs.set_level(self.settings.text("log_level"))
        self.storage.settings_changed()
        if self.supervisor.state is EngineState.FAILED:
            self.supervisor.retry()
        return changes

    def _reload_logged(self) -> None:
        if self._announced:
            self._notifier.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            changes = self.reload()
        except config.ConfigError as error:
            for problem in error.problems:
                _logger.error("reload refused, everything stays as it was: %s", problem)
        else:
            _logger.info("configuration read again, %d changes", len(changes))
            for change in changes:
                _logger.info("changed: %s", change)
        if self._announced:
            self._notifier.send("READY=1")

    # -- end

    async def _shut_down(self, tasks: list[asyncio.Task[None]]) -> None:
        self._notifier.send("STOPPING=1")
        self._notifier.status("stopping")
        if self.front is not None:
            await self.front.stop_accepting()
        await self._unless_hurried(self.scheduler.drain(self.settings.number("drain_limit_s")))
        self.scheduler.cut()
        if self.front is not None:
            await self.front.close(CLOSE_GRACE_S)
        await self._stop_engine()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _unless_hurried(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait([task, hurry], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (task, hurry):
                one.cancel()

    async def _stop_engine(self) -> None:
        await self._unless_hurried(self.supervisor.stop())
        if self._hurry.is_set():
            await self.supervisor.stop(FAST_STOP_S)


def _crashed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
