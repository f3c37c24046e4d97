"""Processes of a run find each other, and tell each other things."""

import contextlib
import json
import signal
import socket
import threading
import time

import pytest

from shardjax import processes
from shardjax.processes.meeting import Meeting
from tests.cluster import cluster, free_port, python_commands, run_cluster

TALK = """
import json, threading
start()
assert (processes.process_index(), processes.process_count()) == (INDEX, COUNT)
channel = processes.Channel("talk")
for size in (0, 1, 300_000):  # before there are any devices
    found = channel.exchange(bytes([65 + INDEX]) * size)
    assert found == [bytes([65 + i]) * size for i in range(COUNT)]
kept = processes.service.get_all("shardjax/")
assert len(kept) <= 2 * COUNT, kept  # of past rounds nothing
begun, rounds = time.perf_counter(), 50
for _ in range(rounds):
    channel.exchange(b"x" * 100)
took = 1e3 * (time.perf_counter() - begun) / rounds
try:
    processes.Channel("talk")
except ValueError as error:
    refused = str(error)
processes.barrier("all")
processes.barrier("all")
processes.check_agreement({"config": {"seed": 1}, "list": [1, 2]})
try:
    what = {"config": {"seed": INDEX // 2, "a": {"b": 1}}, "versions": "1"}
    processes.check_agreement(what | ({"more": INDEX} if INDEX == 1 else {}))
except ValueError as error:
    differs = str(error)
try:
    start()
except RuntimeError as error:
    again = str(error)

closed = processes.Channel("closed")
def close():
    time.sleep(0.3)
    globals()["mark"] = time.perf_counter()
    closed.close()
if INDEX == 0:
    threading.Thread(target=close).start()
    try:
        closed.exchange(b"")
    except processes.ChannelClosed as error:
        closing = time.perf_counter() - mark
late = processes.Channel("late", timeout=0.5)
if INDEX == 0:
    try:
        late.exchange(b"")
    except TimeoutError as error:
        timed_out = str(error)
    try:
        late.exchange(b"")
    except processes.ChannelClosed:
        pass

sum_of_all = total()
processes.barrier("end")
names = "sum_of_all took refused differs again timed_out closing"
print(json.dumps({name: globals().get(name) for name in names.split()}))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 1)])
def test_processes_tell_each_other_things(count, devices):
    ended = run_cluster(TALK, count, devices)
    for process in ended:
        found = json.loads(process.last)  # whatever Gloo wrote before
        assert found["sum_of_all"] == 276
        assert found["took"] < 200
        assert "has not used before, got 'talk'" in found["refused"]
        differs = found["differs"]
        assert ("`config.seed` is 0 in processes 0, 1 and 1 in" in differs) == (
            count > 2
        )
        assert "`more` is missing in process" in differs
        assert "and 1 in process 1" in differs
        assert "config.a.b" not in differs and "versions`" not in differs
        assert f"the {count} processes of this run are joined already" in found["again"]
    first = json.loads(ended[0].last)
    assert first["closing"] < 0.5
    names = "processes 1, 2, 3" if count > 2 else "process 1"
    late = f"{names} did not come to round 0 of channel 'late' within 0.5 seconds"
    assert late in first["timed_out"]
    print("milliseconds of a round:", [json.loads(e.last)["took"] for e in ended])


def _meet(*runs, timeout=1.0):
    """What each of processes (count, index) gets to hear, met at one port."""
    port, found = free_port(), [""] * len(runs)

    def meet(number, count, index):
        try:
            Meeting("localhost", port, count, index, timeout).meet()
            found[number] = "met"
        except (OSError, ValueError) as error:
            found[number] = f"{type(error).__name__} {error}"

    threads = [
        threading.Thread(target=meet, args=(i, *run)) for i, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("localhost", port)) as s,
    ):
        s.sendall(b"GET / HTTP/1.1\r\n\r\n\n")
    for thread in threads:
        thread.join()
    return port, found


def test_a_process_that_does_not_come_is_named():
    port, found = _meet((4, 0), (4, 2))
    for text in found:
        assert (
            "TimeoutError processes 1, 3 of 4 did not come to the coordinator" in text
        )
        assert f"localhost:{port} within 1 seconds. Start all of them" in text
    port, (text,) = _meet((2, 1))
    assert "TimeoutError process 1 of 2 found no process 0 at the coordinator" in text
    assert f"localhost:{port} within 1 seconds: " in text


def test_numbers_that_do_not_fit_are_named():
    _, found = _meet((3, 0), (3, 1), (3, 1), timeout=5.0)
    for text in found:
        assert "ValueError `process_id` 1 was given to two processes" in text
    _, found = _meet((3, 0), (2, 1), timeout=5.0)
    for text in found:
        assert "ValueError process 1 has `num_processes` 2, process 0 3" in text


WATCH = """
case = sys.argv[5]
start(heartbeat=3)
channel = processes.Channel("talk", timeout=60)
def say(text):
    print(text, flush=True)
with processes.watch():
    assert total() == 276
    processes.barrier("ready")
    say("ready")
    if case == "code":
        raise SystemExit(5)
    if case == "error" and INDEX == 1:
        raise KeyError("the reason")
    if case == "message" and INDEX == 0:
        raise SystemExit("another reason")
    if case in ("collective", "error"):
        while INDEX != COUNT - 1 or case == "collective":
            total()
    if case == "interrupt" and INDEX:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    if case == "exchange" and INDEX:
        channel.exchange(b"")
    if case != "end":
        time.sleep(100)
    time.sleep(INDEX)
say("end")
"""

CASES = {"collective": 2, "exchange": 2, "host": 2, "stopped": 2, "frozen": 2}
CASES |= {"error": 3, "message": 2, "code": 2, "end": 2, "interrupt": 2}


@pytest.mark.multiprocess
def test_no_process_waits_for_one_that_is_gone():
    commands, first = [], {}
    for case, count in CASES.items():
        first[case] = len(commands)
        commands += [[*c, case] for c in python_commands(WATCH, count)]
    with cluster(commands) as running:
        for number in range(len(commands)):
            running.wait_for(number, "ready")

        def send(case, index, what):
            running.processes[first[case] + index].send_signal(what)

        begun = time.monotonic()
        send("collective", 1, signal.SIGKILL)
        send("exchange", 0, signal.SIGKILL)
        send("host", 1, signal.SIGKILL)
        send("stopped", 0, signal.SIGSTOP)
        send("frozen", 1, signal.SIGSTOP)
        last = {first["stopped"], first["frozen"] + 1}
        ended = running.wait(60, without=last)
        took = time.monotonic() - begun
    print("seconds until all had ended:", took)
    assert took < 40

    def check(case, index, rc, *words):
        process = ended[first[case] + index]
        assert process.rc == rc, (case, index, process)
        for word in words:
            assert word in process.stderr, (case, index, process.stderr)
        return process

    again = "Start the same command in all processes again"
    silent = "process 1 has given no sign of life for more than 1.5 seconds"
    check("collective", 0, 76, "process 0 of 2 ends", silent, again, "Gloo")
    check("exchange", 1, 76, "process 0, whose service all need, is gone", again)
    check("host", 0, 76, silent, again)
    check("stopped", 1, 76, "process 0 has given no sign of life", again)
    check("frozen", 0, 76, silent, again)
    check("error", 1, 1, "KeyError: 'the reason'", "Traceback")
    for index in (0, 2):
        check("error", index, 76, "process 1 has failed: KeyError: 'the reason'")
    check("message", 0, 1, "another reason")
    check("message", 1, 76, "process 0 has failed: another reason")
    check("interrupt", 1, 1, "KeyboardInterrupt")
    check("interrupt", 0, 76, "process 1 has failed: KeyboardInterrupt. Start the same")
    for index in range(2):
        check("code", index, 5)
        assert check("end", index, 0).last == "end"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "`num_processes` and `process_id` are missing"),
        ((None, 2, 1), "`coordinator` is missing. Give all three, or none"),
        (("localhost", 2, 0), "`coordinator` must be HOST:PORT, .* got 'localhost'"),
        (("a:0", 2, 0), "`coordinator` must be HOST:PORT, .* got 'a:0'"),
        (("a:1", 0, 0), "`num_processes` must be at least 1, got 0"),
        (("a:1", 2, 2), r"`process_id` must be in \[0, 2\), .* got 2"),
        (("a:1", 2, "1"), "`process_id` must be an integer, got '1'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        processes.start_processes(*given)


def test_times_below_a_second_are_refused():
    with pytest.raises(
        ValueError, match="`timeout` and `heartbeat` must be at least 1"
    ):
        processes.start_processes("a:1", 2, 0, heartbeat=0.5)


def test_it_must_come_before_jax_runs():
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="must come before the first JAX operation"):
        processes.start_processes("localhost:1", 2, 0)


def test_one_process_waits_for_nobody():
    processes.start_processes()  # no cluster here
    processes.start_processes("localhost:1", 1, 0)
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    channel = processes.Channel("alone")
    assert channel.exchange(b"a") == [b"a"]
    processes.barrier("alone")
    processes.check_agreement({"a": 1})
    channel.close()
    with pytest.raises(processes.ChannelClosed, match="channel 'alone' is closed"):
        channel.exchange(b"")
    with pytest.raises(
        ValueError, match="a name that this process has not used before"
    ):
        processes.Channel("alone")


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            OSError, match=f"cannot listen .* localhost:{port}, tried for 1"
        ):
            Meeting("localhost", port, 2, 0, 1.0).meet()
