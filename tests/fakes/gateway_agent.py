"""An external agent between a scripted policy and the real HTTP side, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx
import numpy as np
import uvicorn
from anyio.lowlevel import checkpoint
from openai import AsyncOpenAI
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from asyncrl.config.schema import Config
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, Turn
from rollouter.agent.conversation import TurnRequest
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.http import TrajectoryKeyMiddleware
from rollouter.gateway.program import AgentProgram, FunctionProgram
from rollouter.gateway.session import ChatCache
from rollouter.gateway.task import AgentTask
from rollouter.prompts.chat_template import load_tokenizer
from tests.fakes.engine import FakeFleet

MODEL = "tiny"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
]
QUESTION = {"role": "user", "content": "3*4="}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "3*4"}}\n</tool_call>'

FIRST = SampleId(0, 1)
Line = str | BaseException | Callable[[TurnRequest], Awaitable[str]]


class GatewayRig:
    """A gateway whose policy answers with the given lines in order; a line that ends in `…` is cut by length."""

    def __init__(self, *lines: Line, template: str | None = None, **agent: Any) -> None:
        rollout = agent.pop("rollout", {})
        more = agent.pop("config", {})
        self.config = Config.model_validate(
            {
                "model": {"path": "asyncrl://calculator"},
                "reward": {"function": "none"},
                "rollout": {
                    "response_length": 200,
                    "max_model_len": 260,
                    "multi_turn": {"tokenization_sanity_check_mode": "strict"},
                    **rollout,
                    "agent": {"program": "examples:agent", "timeout_s": 20, **agent},
                },
                **more,
            }
        )
        self.tokenizer = load_tokenizer(self.config.model)
        if template is not None:
            self.tokenizer.chat_template = template
        self.cache = ChatCache(
            self.tokenizer,
            format=self.config.rollout.multi_turn.format,
            template_kwargs={},
            end_ids=(self.tokenizer.eos_token_id,),
        )
        self.lines = list(lines)
        self.pace: Callable[[int], Awaitable[None]] = lambda _: checkpoint()
        """Awaited after each report of a streamed turn, with the number of its tokens so far."""
        self.asked: list[TurnRequest] = []
        self.agent: ExternalAgent
        self.tasks: list[AgentTask] = []

    def text(self, ids: Sequence[int] | Any) -> str:
        text = self.tokenizer.decode(list(ids))
        assert isinstance(text, str)
        return text

    def app(self) -> ASGIApp:
        """Return the HTTP application. Calls without a trajectory key get the response `not recorded`."""

        return TrajectoryKeyMiddleware(PlainTextResponse("not recorded"), self.agent.gateway)

    def http(self, task: AgentTask | None = None, app: ASGIApp | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {task.api_key}"} if task is not None else {}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app or self.app(), root_path="/prefix"),
            base_url="http://run/prefix/v1/",
            headers=headers,
        )

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """Serve the application on a port of this machine while the context is open. Yield its base URL."""
        server = uvicorn.Server(uvicorn.Config(self.app(), port=0, log_level="warning", lifespan="off"))
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve)
            while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await anyio.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
            server.should_exit = True

    def client(self, task: AgentTask) -> AsyncOpenAI:
        """Return OpenAI's official client for a trajectory."""
        return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=self.http(), max_retries=0)

    async def ask(self, request: TurnRequest) -> Turn:
        self.asked.append(request)
        version = len(self.asked)
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        text = line if isinstance(line, str) else await line(request)
        ids = self.tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"]
        finish = FinishReason.STOP
        if text.endswith("…"):
            finish = FinishReason.LENGTH
        else:
            ids = [*ids, self.tokenizer.eos_token_id]
        if len(ids) > request.max_tokens:
            ids, finish = ids[: request.max_tokens], FinishReason.LENGTH
        log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32) - 100 * version
        turn = Turn(np.array(ids, dtype=np.int32), log_probs, (Span(0, version),), finish)
        if request.progress is not None:
            for number in range(1, len(ids)):
                request.progress(
                    replace(
                        turn,
                        response_ids=turn.response_ids[:number],
                        rollout_log_probs=log_probs[:number],
                        finish_reason=FinishReason.ABORTED,
                    )
                )
                await self.pace(number)
        return turn

    def prompt(self) -> Prompt:
        messages = (QUESTION,)
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(np.array(ids, dtype=np.int32), messages, ground_truth="12")

    def made(self, program: Callable[[AgentTask], Any] | AgentProgram) -> ExternalAgent:
        if callable(program):
            function = program

            async def run(task: AgentTask) -> Any:
                self.tasks.append(task)
                return await function(task)

            program = FunctionProgram("test", run, 4)
        self.agent = ExternalAgent(self.config, program, self.cache, model=MODEL)
        self.agent.serve_at("http://run/prefix/v1", incarnation=3)
        return self.agent

    async def converse(
        self, program: Callable[[AgentTask], Any] | AgentProgram, *, sample_id: SampleId | str = FIRST
    ) -> Trajectory:
        return await self.made(program).converse(sample_id, 0, self.prompt(), self.ask)

    async def question(self, task: AgentTask, *more: Any, **options: Any) -> Any:
        """Ask the model the question of the prompt, followed by `more` messages. Return its message."""
        messages = [QUESTION, *more]
        answer = await self.client(task).chat.completions.create(model=MODEL, messages=messages, **options)
        return answer.choices[0].message

    async def talk(self, task: AgentTask, num_turns: int = 2) -> float:
        """Hold a conversation in which the user says `1` after each answer. Return the trajectory's number."""
        more: list[Any] = []
        for _ in range(num_turns):
            more += [await self.question(task, *more), {"role": "user", "content": "1"}]
        return float(task.trajectory)

    def fleet(self, text: str) -> FakeFleet:
        """Return a fleet that answers all requests with `text`."""
        ids = [*self.cache.tokens(text), self.tokenizer.eos_token_id]
        return FakeFleet(answer=lambda request: ids[: request.sampling["max_tokens"]])
