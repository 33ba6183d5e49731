"""One request in vLLM, and what it has made so far.

vLLM tells of a request once, when it ends (`FINAL_ONLY`), which costs nothing per token. What it has until then is read
from its own books in this process, where it stays when the engine core dies.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from asyncrl.failures import BugError
from asyncrl.types import FinishReason
from rollouter.serving.pieces import Piece, cut

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
"""vLLM's words for the ends that are no failure."""


@dataclass(slots=True)
class Running:
    """Use it on the engine client's loop: nothing changes there while no await lies between."""

    number: int
    request_id: str
    collector: RequestOutputCollector | None = None
    state: RequestState | None = None
    """None: not in the engine yet, or it ended before anybody could look."""
    output: RequestOutput | None = None
    """Its end."""
    told: int = 0
    """Tokens that were told of."""
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        """It has made so far."""
        if (end := self._end()) is not None:
            return len(end.token_ids)
        if self.state is None or self.state.detokenizer is None:
            return 0
        return len(self.state.detokenizer.output_token_ids)

    def piece(self) -> Piece | None:
        """What there is since the last call; None: nothing.

        Raises:
            BugError: tokens without log-probs or versions.
        """
        if self.closed:
            return None
        end = self._end()
        if end is not None and end.finish_reason in FINISH:
            self.closed = True
            spans = [span for span in end.weight_versions or () if span.end > span.start]
            return self._cut(
                end.token_ids,
                end.logprobs.logprobs if end.logprobs else [],
                [(span.version, span.start) for span in spans],
                FINISH[end.finish_reason],
                done=True,
            )
        if self.state is None or self.state.detokenizer is None or self.state.logprobs_processor is None:
            return None
        tokens = self.state.detokenizer.output_token_ids
        if len(tokens) == self.told:
            return None
        held = self.state.logprobs_processor.logprobs
        return self._cut(
            tokens,
            held.logprobs if held else [],
            self.state.weight_version_starts,
            FinishReason.ABORTED,
            done=False,
        )

    def _end(self) -> CompletionOutput | None:
        """Its end may lie with the collector and not be taken from there yet."""
        waiting = self.collector.output if self.collector is not None else None
        output = self.output or (waiting if isinstance(waiting, RequestOutput) else None)
        return output.outputs[0] if output is not None else None

    def _cut(
        self,
        tokens: list[int],
        log_probs: list[float],
        starts: list[tuple[str, int]],
        finish: FinishReason,
        *,
        done: bool,
    ) -> Piece:
        if len(log_probs) != len(tokens):
            raise BugError(f"request {self.request_id}: {len(tokens)} tokens with {len(log_probs)} log-probs")
        if tokens and not starts:
            raise BugError(f"request {self.request_id}: the engine did not say which version sampled its tokens")
        turn = cut(tokens, log_probs, starts, self.told, finish)
        self.told = len(tokens)
        return Piece(self.number, turn, done)
