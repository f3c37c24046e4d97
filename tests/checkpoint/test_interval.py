"""When a run saves, by simulated runs: no test sleeps, and no clock is real."""

import logging
import math
import random
from datetime import timedelta

import numpy as np
import pytest

from shardjax.checkpoint.figures import needs
from shardjax.checkpoint.interval import Interval, SavePolicy, merge, parse_interval

LOG = "shardjax.checkpoint"


class Run:
    """A training run on a clock of its own.

    Attributes:
      at: the steps after which it saved.
      ks: the interval that the policy followed after each of them.
      in_flight: the most saves that were written at a time.
    """

    def __init__(
        self,
        interval="auto",
        *,
        start=0,
        step=lambda s: 0.1,
        stall=lambda s: 0.02,
        write=lambda s: 2.0,
        slower=0.0,
        noise=0.0,
        planned=0,
        seed=0,
        **options,
    ):
        self.now = 1000.0
        self.policy = SavePolicy(interval, clock=lambda: self.now, **options)
        self.ahead = options.get("ahead", 1)
        self.step, self.stall, self.write = step, stall, write
        self.slower, self.noise, self.planned = slower, noise, planned
        self.random = random.Random(seed)
        self.done = self.front = start
        self.due, self.writing = set(), {}
        self.at, self.ks, self.times, self.extra = [], [], [], {}
        self.in_flight = 0

    def noisy(self, value):
        return value * math.exp(self.random.gauss(0, self.noise))

    def go(self, steps):
        """Trains on; the loop of a program that plans ahead."""
        for _ in range(steps):
            while self.front <= self.done + self.planned:
                due = self.policy.next_step(self.front)
                if due is not None:
                    assert self.front < due <= self.front + self.ahead
                    assert self.policy.next_step(self.front) == due
                    self.due.add(due)
                self.front += self.ahead
            self._step()
        return self

    def _step(self):
        self.done += 1
        alone = self.noisy(self.step(self.done))
        seconds = alone * (1 + self.slower * bool(self.writing))
        self.now += seconds
        self.extra[self.done] = seconds - alone
        for save in self.writing.values():
            save["slowed"] += seconds - alone
        self.policy.stepped(self.done, seconds)
        for step, save in list(self.writing.items()):
            if save["end"] <= self.now:
                del self.writing[step]
                self.policy.written(step, save["write"], save["slowed"])
        if self.done in self.due:
            self._save()

    def _save(self):
        stall = self.noisy(self.stall(self.done))
        self.now += stall
        self.extra[self.done] += stall
        self.policy.saved(self.done, stall)
        write = self.noisy(self.write(self.done))
        end = self.now + write
        self.writing[self.done] = {"end": end, "write": write, "slowed": 0.0}
        self.in_flight = max(self.in_flight, len(self.writing))
        self.at.append(self.done)
        self.ks.append(self.policy.figures()["interval"])
        self.times.append(self.now)

    def overhead(self, first, last):
        """The part of the time of the steps that saves cost from one save to another."""
        saves = [s for s in self.at if first <= s <= last]
        steps = range(saves[0], saves[-1])
        return sum(self.extra[s] for s in steps) / sum(self.step(s) for s in steps)

    def gaps(self, first=0):
        at = [s for s in self.at if s >= first]
        return [b - a for a, b in zip(at, at[1:], strict=False)]


def compiles(s):
    """Steps of 0.1 s, of which the first, and a few later ones, compile."""
    return 8.0 if s in (1, 2, 7, 300, 301, 2000) else 0.1


# --- what users write


@pytest.mark.parametrize(
    ("text", "kind", "every"),
    [
        ("auto", "auto", 0),
        (" None ", "none", 0),
        (500, "steps", 500),
        ("500", "steps", 500),
        (1e3, "steps", 1000),
        ("90s", "time", 90),
        ("10m", "time", 600),
        ("1.5 H", "time", 5400),
        ("2d", "time", 172800),
        (timedelta(minutes=3), "time", 180),
        (timedelta(microseconds=20), "time", 2e-5),
        (Interval("steps", 7), "steps", 7),
        (Interval("none"), "none", 0),
        (12345678, "steps", 12345678),
        (np.int64(5), "steps", 5),
    ],
)
def test_an_interval_is_read_and_written(text, kind, every):
    interval = parse_interval(text)
    assert interval == Interval(kind, every)
    assert parse_interval(str(interval)) == interval


@pytest.mark.parametrize(
    "text", ["", "often", "10x", "m", "1h30m", "1e400s", "nan", "9" * 400]
)
def test_an_interval_of_another_kind_names_what_is_allowed(text):
    message = (
        f"must be 'auto', 'none', a number of steps .* time in s, m, h or d .*{text}"
    )
    with pytest.raises(ValueError, match=message):
        parse_interval(text)


@pytest.mark.parametrize("text", [None, True, [5], b"5"])
def test_an_interval_of_another_type_is_refused(text):
    with pytest.raises(
        TypeError, match=r"must be 'auto', 'none', .*got (None|True|\[|b)"
    ):
        parse_interval(text)


@pytest.mark.parametrize(
    "text", [0, -3, "0", "-3", "0s", "-2m", timedelta(0), Interval("time")]
)
def test_an_interval_that_is_not_positive_is_refused(text):
    with pytest.raises(ValueError, match="must be positive, got .*Write 'none'"):
        parse_interval(text)


@pytest.mark.parametrize("text", [1.5, "1.5"])
def test_steps_are_whole(text):
    message = "whole number of steps, got .*1.5.*name its unit: s, m, h or d"
    with pytest.raises(ValueError, match=message):
        parse_interval(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_overhead": 0}, "`max_overhead` must be between 0 and 1, got 0"),
        (
            {"max_overhead": 3.5},
            "between 0 and 1, got 3.5. It is a part .* 0.035 for 3.5",
        ),
        ({"mtbf": 0}, "`mtbf` must be a positive number of seconds, got 0. Give None"),
        ({"mtbf": math.inf}, "`mtbf` must be a positive .* got inf"),
        (
            {"warmup_steps": -1},
            "`warmup_steps` must be 0 or more, got -1. Give a number",
        ),
        ({"ahead": 0}, "`ahead` must be 1 or more, got 0. Give a number of steps"),
    ],
)
def test_options_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        SavePolicy("auto", **option)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_out_of_range_are_refused(value):
    message = "must be a finite number of seconds, not negative, got .*time.monotonic"
    policy = SavePolicy("auto")
    with pytest.raises(ValueError, match=f"`seconds` {message}"):
        policy.stepped(1, value)
    with pytest.raises(ValueError, match=f"`stall_s` {message}"):
        policy.saved(1, value)
    policy.saved(1, 0.1)
    with pytest.raises(ValueError, match=f"`write_s` {message}"):
        policy.written(1, value)
    if value != -1.0:  # by noise, steps may seem to be faster
        with pytest.raises(ValueError, match=f"`slowed_s` {message}"):
            policy.written(1, 1.0, value)


def test_only_a_save_that_was_taken_is_written():
    policy = SavePolicy(5)
    assert policy.next_step(4) == 5
    policy.saved(3, 0.1)
    message = r"one of \[3\], got step 5. Call `saved` first"
    with pytest.raises(ValueError, match=message):
        policy.written(5, 1.0)


# --- fixed steps, and none


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 77])
@pytest.mark.parametrize("ahead", [1, 4])
def test_fixed_steps_are_multiples_wherever_the_run_starts(start, ahead):
    run = Run(10, start=start, ahead=ahead, planned=2, write=lambda s: 0.2).go(100)
    assert run.at == [s for s in range(start + 1, start + 101) if s % 10 == 0]


def test_fixed_steps_that_are_planned_further_ahead_than_they_lie_apart():
    run = Run(2, planned=9, write=lambda s: 0.05).go(20)
    assert run.at == list(range(2, 21, 2))


def test_a_short_interval_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING, LOG):
        Run(2).go(100)
        Run("1s").go(100)
    steps, seconds = caplog.messages
    assert steps.startswith(
        "a save every 0.2 s (2) is asked for, but writing one took 2 s"
    )
    assert seconds.startswith("a save every 1 s (1s) is asked for")


def test_none_saves_only_when_asked():
    run = Run("none").go(50)
    assert run.at == []
    run.policy.request(50)
    assert run.go(50).at == [51]


# --- time


@pytest.mark.parametrize("planned", [0, 5])
@pytest.mark.parametrize("ahead", [1, 8])
def test_time_is_kept_to_a_step(planned, ahead):
    run = Run("30s", planned=planned, ahead=ahead, noise=0.1).go(3000)
    since = [1000.0, *run.times]
    gaps = [b - a - 0.02 for a, b in zip(since, since[1:], strict=False)]
    assert len(gaps) == 10
    # Noise of 10 % over the steps that are planned ahead, and a step of 0.1 s.
    slack = 0.03 * math.sqrt(planned + ahead)
    assert all(30 - slack <= gap <= 30.13 + slack for gap in gaps), gaps


def test_time_follows_steps_that_become_slower():
    run = Run("30s", step=lambda s: 0.1 if s < 1000 else 0.5).go(2000)
    gaps = [b - a for a, b in zip(run.times, run.times[1:], strict=False)]
    assert all(29.5 < gap < 31 for gap in gaps)


def test_time_that_passes_before_the_first_step_does_not_count():
    run = Run("30s")
    run.now += 100
    assert not run.go(299).at
    assert run.go(10).at == [300]


def test_time_with_steps_that_nobody_has_timed_yet():
    run = Run("30s", step=lambda s: 20.0).go(6)  # all of them warm-up
    assert run.at == [3, 6]


def test_the_expected_overhead_of_a_time():
    figures = Run("30s").go(1000).policy.figures()
    assert figures["interval"] == 300
    assert figures["overhead"] == pytest.approx(0.02 / 30)


# --- auto


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("planned", [0, 6])
def test_auto_keeps_to_the_budget_despite_compiling_steps(seed, planned):
    run = Run(
        step=compiles, stall=lambda s: 0.3, noise=0.05, seed=seed, planned=planned
    ).go(8000)
    assert run.at[0] == 16 + planned  # right after warm-up, to measure
    k = 0.3 / (0.035 * 0.1)  # 85.7
    assert all(0.9 * k < gap < 1.3 * k for gap in run.gaps(500)), run.gaps()
    assert run.overhead(500, 8000) <= 0.035 * 1.01
    assert run.in_flight == 1


def test_auto_counts_slower_steps():
    run = Run(stall=lambda s: 0.1, slower=0.2, write=lambda s: 4.0).go(3000)
    # Of 4 s a sixth: 0.67 s, and the stall: 220 steps of 0.1 s.
    assert run.gaps(500)[-1] == pytest.approx(0.77 / 0.0035, rel=0.05)
    assert run.overhead(500, 3000) <= 0.035


def test_auto_saves_as_often_as_writing_allows_if_saves_are_cheap():
    run = Run(stall=lambda s: 1e-4, write=lambda s: 2.05).go(1000)
    assert set(run.gaps(100)) == {22}
    assert run.in_flight == 1


def test_a_first_save_that_compiles_is_forgotten():
    run = Run(stall=lambda s: 3.0 if s < 20 else 0.02, write=lambda s: 1.95).go(1500)
    assert run.gaps()[:3] == [103, 21, 21]  # not 858


def test_auto_raises_the_interval_at_once_and_lowers_it_again():
    def stall(s):
        return 1.2 if 3000 <= s < 8000 else 0.3

    run = Run(stall=stall, noise=0.05, planned=3).go(14000)
    late = [s for s in run.at if s >= 3000]
    gaps = run.gaps(3000)
    # The first dear save is followed by an interval that pays for it.
    assert gaps[0] > 0.9 * 1.2 / 0.0035
    assert run.overhead(late[0], 8000) <= 0.035 * 1.05
    # And the cheap ones come more often again.
    settled = [gap for gap in run.gaps(12000)]
    assert all(gap < 1.3 * 0.3 / 0.0035 for gap in settled), settled
    assert run.overhead(12000, 14000) <= 0.035


@pytest.mark.parametrize("planned", [0, 7])
@pytest.mark.parametrize("ahead", [1, 8])
def test_a_disk_that_becomes_slow_never_has_two_writes(planned, ahead):
    def write(s):
        return 15.0 if (s // 700) % 2 else 1.0

    run = Run(
        stall=lambda s: 1e-3, write=write, noise=0.1, planned=planned, ahead=ahead
    ).go(8000)
    assert run.in_flight == 1
    slow = [g for g, s in zip(run.gaps(), run.at, strict=False) if (s // 700) % 2]
    fast = [g for g, s in zip(run.gaps(), run.at, strict=False) if not (s // 700) % 2]
    assert min(fast) < 30 and max(slow) > 130


@pytest.mark.parametrize("seed", range(10))
def test_no_flapping_under_noise(seed):
    run = Run(stall=lambda s: 0.1, noise=0.1, seed=seed).go(20000)
    ks = [k for k, s in zip(run.ks, run.at, strict=True) if s > 2000]
    changes = sum(a != b for a, b in zip(ks, ks[1:], strict=False))
    falls = sum(a > b for a, b in zip(ks, ks[1:], strict=False))
    assert len(ks) > 400 and changes <= 10 and falls <= 2, ks
    assert max(ks) < 1.4 * 0.1 / 0.0035
    assert run.overhead(2000, 20000) <= 0.035


def test_one_save_that_stalls_for_long_is_soon_forgotten():
    run = Run(stall=lambda s: 5.0 if 1000 < s < 1080 else 0.3).go(8000)
    long = [gap for gap in run.gaps() if gap > 100]
    # Two intervals pay for it: of a low stall the second is believed.
    assert len(long) == 2 and run.overhead(100, 8000) <= 0.035


def test_saves_that_are_dear_every_other_time_do_not_flap():
    turns = iter(range(10000))
    run = Run(stall=lambda s: (0.1, 0.4)[next(turns) % 2]).go(20000)
    assert len(set(run.ks[5:])) == 1
    assert run.overhead(500, 20000) <= 0.035


def test_decisions_are_logged_in_a_line(caplog):
    with caplog.at_level(logging.INFO, LOG):
        Run(stall=lambda s: 0.35).go(500)
    assert caplog.messages == [
        "saving every 100 steps (10 s, before: 0 steps): step 0.1 s, stall 0.35 s, write"
        " 2 s, slower steps 0 s, overhead 3.50 % of at most 3.50 %"
    ]


def test_figures_say_what_was_measured():
    run = Run(stall=lambda s: 0.35).go(525)
    figures = run.policy.figures()
    assert all(isinstance(value, int | float) for value in figures.values())
    names = ("stall_s", "write_s", "interval", "overhead", "saves", "last", "done")
    wanted = (0.35, 2.0, 100, 0.035, 5, 516, 525)
    for name, value in zip(names, wanted, strict=True):
        # The last save was taken, and is not written yet.
        assert figures[name] == pytest.approx(value), name
    assert figures["open"] == 1 and figures["urgent"] == 0
    assert figures["since_s"] == pytest.approx(0.9)


def test_slower_steps_that_were_not_measured_keep_their_estimate():
    policy = SavePolicy("auto", warmup_steps=0)
    for step, slowed in enumerate([0.2, None, 0.2, None], start=1):
        policy.saved(step, 0.1)
        policy.written(step, 1.0, slowed)
    assert policy.figures()["slowed_s"] == pytest.approx(0.2)


# --- failures between which a run should not lose much


def test_young_and_daly_bound_what_hysteresis_would_keep(caplog):
    def stall(s):
        return 1.0 if s < 3000 else 0.85  # a fall that alone is not followed

    without = Run(stall=stall).go(12000)
    # sqrt(2 * 0.85 s * 370 s) is 25.1 s, where the budget asks for 24.3 s.
    capped = Run(stall=stall, mtbf=370.0).go(12000)
    assert without.gaps(9000)[-1] == 286
    assert capped.gaps(9000)[-1] == 250
    assert capped.overhead(9000, 12000) <= 0.035


def test_the_budget_wins_over_young_and_daly_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, LOG):
        run = Run(stall=lambda s: 1.0, mtbf=100.0).go(5000)
    assert run.overhead(1000, 5000) <= 0.035
    (message,) = caplog.messages
    assert message.startswith(
        "saves cannot be as frequent as failures every 100 s advise"
    )
    assert "every 141 steps, where overhead and writing allow every 286" in message


# --- requests and failures


@pytest.mark.parametrize("interval", ["auto", "none", 500, "10m"])
def test_a_request_is_served_at_the_next_step(interval):
    run = Run(interval, planned=4).go(200)
    before = len(run.at)
    run.policy.request(run.done)
    run.go(50)
    assert run.at[before:][0] == 200 + 4 + 1


def test_a_request_is_served_while_another_save_is_written():
    run = Run("none", write=lambda s: 100.0)
    run.go(10).policy.request(10)
    run.go(10).policy.request(20)
    assert run.go(10).at == [11, 21]


def test_a_save_that_is_planned_serves_a_request():
    policy = SavePolicy(10)
    assert policy.next_step(9) == 10
    policy.request(8)
    assert policy.next_step(10) is None
    policy.request(10)
    assert policy.next_step(10) == 11


@pytest.mark.parametrize("interval", ["auto", "5s"])
def test_a_failed_save_is_tried_once_more_and_then_in_time(interval, caplog):
    run = Run(interval, stall=lambda s: 0.35, write=lambda s: 0.05).go(405)
    policy = run.policy
    gap = run.gaps()[-1]
    at = []
    for step in range(405, 1000):
        if (due := policy.next_step(step)) is not None:
            at.append(due)
            run.now += 0.1
            policy.stepped(due, 0.1)
            with caplog.at_level(logging.WARNING, LOG):
                policy.failed(due)
        else:
            run.now += 0.1
            policy.stepped(step + 1, 0.1)
    assert at[1] == at[0] + 1
    assert all(abs(b - a - gap) <= 1 for a, b in zip(at[1:], at[2:], strict=False))
    assert caplog.messages[0].endswith(
        "1 in a row; the next try is as soon as possible"
    )
    assert caplog.messages[1].endswith(
        "2 in a row; the next try is when the next one is due"
    )


def test_first_saves_that_fail_are_not_tried_all_the_time():
    policy, at = SavePolicy("auto", warmup_steps=0), []
    for step in range(1, 400):
        policy.stepped(step, 0.1)
        if (due := policy.next_step(step)) is not None:
            at.append(due)
            policy.failed(due)
    assert at == [6, 7, 107, 207, 307]


def test_fixed_steps_wait_for_the_next_multiple_after_a_failure():
    policy, at = SavePolicy(10), []
    for step in range(25):
        if (due := policy.next_step(step)) is not None:
            at.append(due)
            policy.failed(due)
    assert at == [10, 20]


def test_a_requested_save_that_failed_is_tried_once_more():
    policy, at = SavePolicy("none"), []
    policy.request(0)
    for step in range(10):
        if (due := policy.next_step(step)) is not None:
            at.append(due)
            policy.failed(due)
    assert at == [1, 2]


def test_a_save_that_nobody_planned_counts():
    run = Run(stall=lambda s: 0.35).go(150)
    assert run.at[-1] == 116
    run.policy.saved(150, 0.35)
    run.policy.written(150, 1.0)
    assert run.go(150).at[-1] == 250


# --- several processes


@pytest.mark.parametrize("interval", ["auto", "7s", "none", 50])
def test_processes_with_different_times_agree(interval):
    """Each asks by what all measured; what is written when differs."""
    runs = [
        Run(interval, stall=stall, noise=0.1, seed=seed)
        for seed, stall in enumerate([lambda s: 0.1, lambda s: 0.3, lambda s: 0.2])
    ]
    for step in range(6000):
        if step == 2345:
            runs[1].policy.request(step)
        together = merge([run.policy.figures() for run in runs])
        (due,) = {run.policy.next_step(step, together) for run in runs}
        for run, behind in zip(runs, [0, 2, 5], strict=True):
            run.due.add(due)
            if step >= behind:  # of what is planned
                run._step()
    at = [[s for s in run.at if s <= 5990] for run in runs]
    assert at[0] == at[1] == at[2]
    assert 2346 in runs[0].at
    if interval == "auto":
        assert runs[0].ks[-1] == runs[2].ks[-1] > 0.9 * 0.3 / 0.0035


def test_merged_figures_are_the_greatest_but_of_what_all_have():
    first = SavePolicy("auto").figures()
    second = first | {"stall_s": 2.0, "saves": 3, "steps": 5, "open": 1, "urgent": 1}
    merged = merge([first, second])
    assert merged == second | {"saves": 0, "steps": 0}
    assert merged == merge([second, first])


def test_figures_of_nobody_or_of_other_names_do_not_merge():
    with pytest.raises(ValueError, match="one process or more, got none. Give what"):
        merge([])
    message = r"same names in all processes, got \['a'\] and \['b'\]. Run one version"
    with pytest.raises(ValueError, match=message):
        merge([{"a": 1.0}, {"b": 1.0}])


def test_needs_are_the_write_or_the_budget():
    figures = {"step_s": 0.5, "stall_s": 0.1, "slowed_s": -1.0, "write_s": 2.1}
    assert needs(figures, 0.5).steps == math.ceil(2.1 / 0.5) + 1
    assert needs(figures, 0.01).steps == 20
    assert needs(figures, 0.01, mtbf=500.0).most == pytest.approx(20.0)
