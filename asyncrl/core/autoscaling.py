"""How many replicas a run wants, from what its two sides wait for. Pure.

    Trainer waits for samples ──▶ more replicas     pacing keeps replicas idle ──▶ fewer replicas

Both shares are measured over a whole period with a constant number of replicas, so each decision rests on what the last
one has achieved. If generation is proportional to the number of replicas, no decision is undone by the next one:
replicas leave only if the others have the capacity for what all of them generated, with `spare_capacity` left.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

GAP_S = 10.0
"""Maximum time that one observation accounts for. If observations are further apart, the observer was suspended."""
ROUNDING = 1e-9


class ReplicaLoad(NamedTuple):
    """What the two sides of a run waited for, as shares of time in [0, 1]. Their sum is at most 1."""

    trainer_wait: float
    """Time in which the Trainer waited for samples while replicas generated."""
    idle: float
    """Time, over all replicas, without requests because pacing was shut, while the Trainer had samples."""

    @classmethod
    def now(cls, *, trainer_waits: bool, pacing_shut: bool, idle_replicas: float) -> ReplicaLoad:
        """Return the load at one moment. `idle_replicas` is the share of replicas without requests.

        Replicas without requests while pacing is open are not idle: they have just joined, or requests are on the way.
        """
        idle = idle_replicas if pacing_shut else 0.0
        return cls(1.0 - idle, 0.0) if trainer_waits else cls(0.0, idle)


@dataclass(frozen=True, slots=True)
class AutoscalingPolicy:
    """The bounds and the hysteresis of the number of replicas; see `rollout.autoscaling` in the configuration."""

    min_replicas: int
    max_replicas: int
    target_trainer_wait: float
    """Share of time for which the Trainer may wait for samples, below 1."""
    spare_capacity: float
    """Share of the remaining replicas' capacity that must stay free when replicas leave, below 1."""
    up_after_s: float
    down_after_s: float

    def more(self, num_replicas: int, load: ReplicaLoad) -> int:
        """Return the number with which the Trainer would not wait, at most twice `num_replicas`; `num_replicas` itself
        while the Trainer waits no longer than it may."""
        if load.trainer_wait <= self.target_trainer_wait:
            return num_replicas
        busy = max(0.5, 1.0 - load.trainer_wait)
        return self.bounded(math.ceil(num_replicas / busy - ROUNDING))

    def fewer(self, num_replicas: int, load: ReplicaLoad, *, serving: int) -> int:
        """Return the smallest number that has the capacity for the work of `serving` replicas, at most `num_replicas`;
        `num_replicas` itself while the Trainer waits longer than it may."""
        if load.trainer_wait > self.target_trainer_wait:
            return num_replicas
        needed = serving * (1.0 - load.idle) / (1.0 - self.spare_capacity)
        return self.bounded(min(num_replicas, math.ceil(needed - ROUNDING)))

    def bounded(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)


class _Observed(NamedTuple):
    seconds: float
    load: ReplicaLoad


@dataclass(eq=False)
class ReplicaAutoscaler:
    """Follows the load of a run and decides how many replicas it wants."""

    policy: AutoscalingPolicy
    wanted: int
    """The number of replicas that the run wants. It is within the bounds of the policy after each observation."""
    load: ReplicaLoad = field(default=ReplicaLoad(0.0, 0.0), init=False)
    """The load on which the last change rests."""
    _serving: int = field(default=0, init=False)
    _observed: deque[_Observed] = field(default_factory=deque, init=False)
    """The latest observations with `_serving` replicas, over at least the longer of the two periods if there are as
    many."""
    _last_s: float | None = field(default=None, init=False)

    def observe(self, now_s: float, load: ReplicaLoad, *, serving: int) -> int:
        """Return the wanted number after the load since the last observation, at `now_s` (monotonic).

        Args:
            serving: the number of replicas that serve requests. A change of this number starts a new period. No
                further replica is wanted before all wanted ones serve, and the wanted number stays as it is while more
                serve, because what the last decision achieves is not known yet.
        """
        policy = self.policy
        self.wanted = policy.bounded(self.wanted)
        seconds = 0.0 if self._last_s is None else min(now_s - self._last_s, GAP_S)
        self._last_s = now_s
        if serving != self._serving or serving > self.wanted:
            self._serving = serving
            self._observed.clear()
            return self.wanted
        self._observed.append(_Observed(seconds, load))
        self._forget(max(policy.up_after_s, policy.down_after_s))
        wanted = self.wanted
        if serving >= wanted and (mean := self._mean(policy.up_after_s)) is not None:
            wanted, self.load = policy.more(wanted, mean), mean
        if wanted == self.wanted and serving and (mean := self._mean(policy.down_after_s)) is not None:
            wanted, self.load = policy.fewer(wanted, mean, serving=serving), mean
        if wanted != self.wanted:
            self.wanted = wanted
            self._observed.clear()
        return wanted

    def skip(self, now_s: float) -> None:
        """Leave out the time since the last observation: a part of the run was being replaced."""
        self._last_s = now_s

    def _mean(self, period_s: float) -> ReplicaLoad | None:
        """Return the mean load over the last `period_s`, or None if the observations are shorter."""
        total = waited = idle = 0.0
        for seconds, load in reversed(self._observed):
            total, waited, idle = total + seconds, waited + seconds * load.trainer_wait, idle + seconds * load.idle
            if total >= period_s - ROUNDING:
                return ReplicaLoad(waited / total, idle / total)
        return None

    def _forget(self, period_s: float) -> None:
        """Remove observations that no period needs."""
        held = sum(seconds for seconds, _ in self._observed)
        while held - self._observed[0].seconds >= period_s:
            held -= self._observed.popleft().seconds
