"""Traces of a window of steps."""

import jax
import jax.numpy as jnp
import pytest

from shardjax.profiling import TraceWindow


@pytest.fixture
def calls(monkeypatch):
    """What the profiler is told, instead of tracing."""
    told = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda f: told.append(("start", f))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append("stop"))
    return told


def _files(folder):
    return sorted(p.suffix for p in folder.rglob("*") if p.is_file())


def test_a_trace_appears(tmp_path):
    step = jax.jit(lambda x: x @ x)
    x = jnp.ones((8, 8))
    with TraceWindow("1:2", tmp_path / "trace") as trace:
        for i in range(4):
            trace.before(i)
            x = step(x)
            trace.after(i, x)
    assert _files(tmp_path / "trace") == [".gz", ".pb"]
    assert next((tmp_path / "trace").rglob("*.trace.json.gz")).stat().st_size > 0


def test_leaving_early_ends_the_trace(tmp_path):
    def fails():
        with TraceWindow("0:9", tmp_path) as trace:
            trace.before(0)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert ".pb" in _files(tmp_path)
    with TraceWindow("0:0", tmp_path / "b") as trace:  # the profiler is free again
        trace.before(0)
    assert ".pb" in _files(tmp_path / "b")


def test_it_runs_from_the_first_to_the_last_step_and_never_again(calls, tmp_path):
    trace = TraceWindow("2:3", tmp_path)
    seen = []
    for step in [*range(6), *range(6)]:
        trace.before(step)
        seen.append((step, len(calls)))
        trace.after(step)
    assert seen[:6] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert calls == [("start", str(tmp_path)), "stop"]


def test_as_a_hook_it_acts_between_steps(calls, tmp_path):
    trace = TraceWindow("2:3", tmp_path)
    seen = []
    for taken in range(1, 6):
        trace(taken, jnp.ones(2), {})
        seen.append(len(calls))
    assert seen == [1, 1, 2, 2, 2]  # starts after step 1, ends after step 3


def test_a_run_that_resumes_inside_is_traced_and_one_after_is_not(calls, tmp_path):
    inside = TraceWindow("2:9", tmp_path)
    inside.before(5)
    assert len(calls) == 1
    after = TraceWindow("2:9", tmp_path)
    after.before(10)
    after.after(10)
    after.close()
    assert len(calls) == 1


def test_a_step_past_the_last_ends_it(calls, tmp_path):
    trace = TraceWindow("2:3", tmp_path)
    trace.before(3)
    trace.after(5)
    assert calls[-1] == "stop"


@pytest.mark.parametrize(
    "text", ["", "10", "10:", ":15", "a:b", "1:2:3", "-1:2", "1 :2"]
)
def test_other_forms_are_refused(text, tmp_path):
    with pytest.raises(
        ValueError, match="must be FIRST:LAST, two steps, got '.*'. Write"
    ):
        TraceWindow(text, tmp_path)


def test_windows_that_end_before_they_start_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="not end before it starts, got '15:10'.*'10:15'"
    ):
        TraceWindow("15:10", tmp_path)


def test_other_types_are_refused(tmp_path):
    with pytest.raises(
        TypeError, match=r"string such as '10:15', got tuple \(10, 15\)"
    ):
        TraceWindow((10, 15), tmp_path)
