"""Losses that are sent to ranks: one that trains, and others that fail or block."""

from __future__ import annotations

import os
import time
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from trainer.engines.base import LossParts, Tokens, TokenScores


class Likelihood:
    """Negative log-likelihood of the trained tokens."""

    agg_mode: str = "token-mean"
    agg_scale = 1.0
    entropy_gradient = False

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        loss = -(scores.log_probs * tokens.weight).sum()
        return LossParts(loss, {"nll": loss.detach()}, {"entropy": scores.entropy.detach()})


class GoesWrong(Likelihood):
    """Fails on one rank in the middle of a step, while the other ranks enter the next collective."""

    def __init__(self, rank: int, how: Literal["dies", "raises", "sleeps"]) -> None:
        self.rank = rank
        self.how = how

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        if torch.distributed.get_rank() == self.rank:
            if self.how == "dies":
                os._exit(3)
            if self.how == "raises":
                raise KeyError("only here")
            time.sleep(1000)
        return super().__call__(scores, tokens)


class TakesTime(Likelihood):
    """Keeps the interpreter busy for `seconds` in each micro-batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        ends = time.monotonic() + self.seconds
        while time.monotonic() < ends:
            pass
        return super().__call__(scores, tokens)


class NotFinite(Likelihood):
    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        parts = super().__call__(scores, tokens)
        return parts._replace(loss=parts.loss * float("nan"))
