"""When alarms open and close: single cases, and random sequences against a plain model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observe.health.alarms import GONE_S, Alarms, Condition, HealthNotice, RuleResult

HOLD_S, CALM_S = 10.0, 20.0


def judge(condition: Condition, key: str = "lag/queue", **given: object) -> RuleResult:
    return RuleResult(key, condition, "it is bad", "it is good", HOLD_S, CALM_S)._replace(**given)  # type: ignore[arg-type]


def course(alarms: Alarms, *conditions: Condition | None, every_s: float = 5.0) -> list[list[HealthNotice]]:
    return [
        alarms.observe(number * every_s, 1000 + number * every_s, [] if each is None else [judge(each)])
        for number, each in enumerate(conditions)
    ]


def test_an_alarm_is_reported_once_after_the_hold_time_and_once_when_it_is_over() -> None:
    alarms = Alarms()
    notices = course(alarms, *["bad"] * 6, "fair", "bad", *["good"] * 4, "fair", *["good"] * 6)
    assert [number for number, each in enumerate(notices) if each] == [2, 17]
    assert notices[2] == [HealthNotice("warning", "lag/queue", "it is bad")]
    assert notices[17] == [HealthNotice("", "lag/queue", "it is good")]
    assert alarms.open == ()


def test_a_short_bad_condition_opens_no_alarm() -> None:
    alarms = Alarms()
    assert not any(course(alarms, *["bad", "bad", "fair"] * 10))
    assert not any(course(Alarms(), *["bad", "bad", None] * 10))


def test_an_open_problem_has_its_start_time() -> None:
    alarms = Alarms()
    course(alarms, "good", *["bad"] * 4)
    (problem,) = alarms.open
    assert (problem.key, problem.since, problem.text) == ("lag/queue", 1005.0, "it is bad")


def test_the_alarm_of_a_subject_that_disappears_closes_without_a_notice_and_may_open_again() -> None:
    alarms = Alarms()
    course(alarms, *["bad"] * 4)
    assert alarms.observe(15 + GONE_S, 0.0, []) == [] and alarms.open
    assert alarms.observe(16 + GONE_S, 0.0, []) == [] and not alarms.open
    assert alarms.observe(20 + GONE_S, 0.0, [judge("bad")]) == []
    assert len(alarms.observe(31 + GONE_S, 0.0, [judge("bad")])) == 1


def test_without_a_hold_time_the_alarm_opens_at_once() -> None:
    assert Alarms().observe(0.0, 0.0, [judge("bad", hold_s=0.0, level="hint")])[0].level == "hint"


_steps = st.lists(
    st.tuples(
        st.floats(0.1, 15.0),
        st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["bad", "fair", "good"]), max_size=2),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=300, deadline=None)
def test_warnings_and_recoveries_alternate_and_come_in_time(steps: list[tuple[float, dict[str, Condition]]]) -> None:
    alarms, now_s = Alarms(), 0.0
    history: dict[str, list[tuple[float, Condition | None]]] = {"a": [], "b": []}
    is_open = {"a": False, "b": False}
    for passed_s, conditions in steps:
        now_s += passed_s
        for key, seen in history.items():
            seen.append((now_s, conditions.get(key)))
        notices = alarms.observe(now_s, now_s, [judge(condition, key) for key, condition in conditions.items()])
        assert len({each.key for each in notices}) == len(notices)
        for key in ("a", "b"):
            known = [at_s for at_s, condition in history[key] if condition is not None]
            if not known or now_s - known[-1] > GONE_S:
                is_open[key] = False
        for each in notices:
            is_warning = each.level == "warning"
            assert is_open[each.key] != is_warning
            is_open[each.key] = is_warning
            run_s = _unbroken_s(history[each.key], "bad" if is_warning else "good")
            assert run_s >= (HOLD_S if is_warning else CALM_S)
        for key in conditions:  # no notice is missing
            assert is_open[key] or _unbroken_s(history[key], "bad") < HOLD_S
            assert not is_open[key] or _unbroken_s(history[key], "good") < CALM_S
        assert {problem.key for problem in alarms.open} == {key for key, opened in is_open.items() if opened}


def _unbroken_s(seen: list[tuple[float, Condition | None]], wanted: Condition) -> float:
    """Return how long the condition has lasted without interruption until the last observation."""
    since = None
    for at_s, condition in reversed(seen):
        if condition != wanted:
            break
        since = at_s
    return -1.0 if since is None else seen[-1][0] - since
