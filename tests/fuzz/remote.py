"""Simulated processes: actors that can be killed at any moment, and calls to them.

The tasks of a killed process still run their cleanup. That changes only the memory of the process, because its ports
are behind a closed `Gate`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass, replace
from inspect import isasyncgenfunction
from typing import Any

import anyio

from asyncrl.core.failures import InfraError


class Gate:
    """The gate between one process and the rest of the run.

    After `kill`, every message raises `InfraError`. After `freeze`, messages wait until `kill`.
    """

    def __init__(self) -> None:
        self._dead = False
        self._thawed = anyio.Event()
        self._thawed.set()
        self._asked: list[asyncio.Future[Any]] = []
        self.last_arrival = 0.0
        """Time at which the last message of the process arrives. Messages stay in order, as in Ray."""

    def freeze(self) -> None:
        if not self._dead and self._thawed.is_set():
            self._thawed = anyio.Event()

    def kill(self) -> None:
        self._dead = True
        self._thawed.set()
        for answer in self._asked:
            self._refuse(answer)

    def asks(self, answer: asyncio.Future[Any]) -> bool:
        """Register an answer that the process waits for. Return False if the process is dead and must not call."""
        if self._dead:
            self._refuse(answer)
            return False
        self._asked.append(answer)
        return True

    @staticmethod
    def _refuse(answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            answer.set_exception(InfraError("this process was killed"))

    @property
    def dead(self) -> bool:
        return self._dead

    @property
    def frozen(self) -> bool:
        return not self._thawed.is_set()

    async def answering(self) -> None:
        """Wait while the process is frozen, as a probe of the process does; `kill` ends the wait."""
        await self._thawed.wait()

    async def passing(self) -> None:
        await self._thawed.wait()
        self.check()

    def check(self) -> None:
        if self._dead:
            raise InfraError("this process was killed")


class Gated:
    """A port as one process uses it: each call and its answer pass the gate of the process."""

    def __init__(self, port: Any, gate: Gate, pause: Callable[[], Awaitable[None]]) -> None:
        self._port = port
        self._gate = gate
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)

        async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            await self._gate.passing()
            await self._pause()
            self._gate.check()
            async with aclosing(method(*args, **kwargs)) as items:
                async for item in items:
                    await self._gate.passing()
                    yield item
            await self._gate.passing()

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._gate.passing()
            await self._pause()
            self._gate.check()
            result = await method(*args, **kwargs)
            await self._gate.passing()
            return result

        return stream if isasyncgenfunction(method) else call


class ActorHost:
    """An actor that restarts after it was killed. Its `handle` is like Ray's: `await handle.method.remote(...)`."""

    def __init__(self, make: Callable[[int], Any], unavailable: Callable[[], Exception], rng: random.Random) -> None:
        """
        Args:
            make: The actor's constructor; its argument is the number of the process, from 0.
            unavailable: Makes the error that calls to a dead or restarting actor raise.
            rng: Determines delays.
        """
        self._make = make
        self._unavailable = unavailable
        self._rng = rng
        self._num_started = 1
        self._actor: Any = make(0)
        self._hung = False
        self._calls: dict[asyncio.Task[Any], _Call] = {}
        self._waiting: list[_Call] = []
        """Calls that have arrived at a hung process."""
        self._over = False

    def handle(self, gate: Gate) -> Any:
        """Return a handle for the process behind this gate."""
        return _Handle(self, gate)

    @property
    def number(self) -> int:
        """Number of the process that was started last."""
        return self._num_started - 1

    def kill(self, down_s: float) -> None:
        """Kill the process with all its calls. The next one is up after `down_s`."""
        if self._actor is None:
            return
        self._hung = False
        self._actor.die()
        self._actor = None
        calls, self._calls = self._calls, {}
        waiting, self._waiting = self._waiting, []
        for task in calls:
            task.cancel()
        for call in (*calls.values(), *waiting):
            self._fail(call, self._rng.uniform(1.0, 1.8))
        _later(down_s, self._restart)

    def _restart(self) -> None:
        if not self._over:
            self._actor = self._make(self._num_started)
            self._num_started += 1

    def hang(self) -> None:
        """Stop the process. Calls that arrive and pending answers wait until it is killed."""
        self._hung = self._actor is not None

    def end_known(self, number: int, down_s: float) -> bool | None:
        """Kill process `number` and return whether it hung, or return None if it no longer exists."""
        if self._actor is None or number != self.number:
            return None
        hung = self._hung
        self.kill(down_s)
        return hung

    def _fail(self, call: _Call, after_s: float) -> None:
        def fail() -> None:
            if call.answer.done():
                return
            if self._over:
                call.answer.set_exception(InfraError("the actor is gone for good"))
            elif call.retries:
                self._arrive(call)
            else:
                call.answer.set_exception(self._unavailable())

        _later(after_s, fail)

    def end(self) -> None:
        """Kill the process without a successor."""
        self._over = True
        self.kill(0.0)

    def call(self, gate: Gate, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, retries: bool) -> _Ref:
        """Call a method. With `retries`, the call is repeated after each death of the process without a limit."""
        answer = asyncio.get_running_loop().create_future()
        call = _Call(method, args, kwargs, retries, answer)
        if gate.asks(answer):
            loop = asyncio.get_running_loop()
            # Timers that are due at the same time may run in any order.
            gate.last_arrival = max(loop.time() + self._latency(), gate.last_arrival + 1e-6)
            loop.call_at(gate.last_arrival, self._arrive, call)
        return _Ref(answer)

    def _arrive(self, call: _Call) -> None:
        if self._actor is None:
            self._fail(call, 1.0)
            return
        if self._hung:
            self._waiting.append(call)
            return
        coroutine = getattr(self._actor, call.method)(*call.args, **call.kwargs)
        task = asyncio.get_running_loop().create_task(coroutine, name=f"actor.{call.method}")
        self._calls[task] = call
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Send the answer of a method that has ended, unless the process dies first."""
        if task not in self._calls:
            if not task.cancelled():
                task.exception()
            return
        _later(self._latency(), self._deliver, task)

    def _deliver(self, task: asyncio.Task[Any]) -> None:
        if self._hung:
            return
        call = self._calls.pop(task, None)
        if call is None or call.answer.done():
            return
        answer = call.answer
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def _latency(self) -> float:
        return self._rng.random() * 0.002


@dataclass(eq=False, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    retries: bool
    answer: asyncio.Future[Any]


class _Ref:
    """The reference that a call returns at once. Cancelling a wait for it does not cancel the call."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        answer = self._answer
        if not answer.done():
            arrived = asyncio.get_running_loop().create_future()

            def wake(_: object) -> None:
                if not arrived.done():
                    arrived.set_result(None)

            answer.add_done_callback(wake)
            yield from arrived
        return answer.result()


class _Handle:
    def __init__(self, host: ActorHost, gate: Gate) -> None:
        self._host = host
        self._gate = gate

    def __getattr__(self, name: str) -> _RemoteMethod:
        return _RemoteMethod(self._host, self._gate, name)


@dataclass(frozen=True)
class _RemoteMethod:
    host: ActorHost
    gate: Gate
    name: str
    retries: bool = False

    def options(self, *, max_task_retries: int) -> _RemoteMethod:
        return replace(self, retries=max_task_retries != 0)

    def remote(self, *args: Any, **kwargs: Any) -> _Ref:
        return self.host.call(self.gate, self.name, args, kwargs, retries=self.retries)


def _later(seconds: float, callback: Callable[..., None], *args: Any) -> None:
    asyncio.get_running_loop().call_later(seconds, callback, *args)
