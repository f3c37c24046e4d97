import io
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tensorboardX  # noqa: F401 (here, as its import sets an environment variable)

from shardjax import writers
from shardjax.writers import (
    JsonlWriter,
    MultiWriter,
    ProgressBar,
    TensorBoardWriter,
    Writer,
    read_rows,
)


class Recorder(Writer):
    """Keeps what it is given."""

    def __init__(self, *, enabled=True, fail=None):
        super().__init__(enabled=enabled)
        self.rows, self.closed, self.fail = [], 0, fail

    def _write(self, step, values):
        self.rows.append((step, values))

    def _close(self):
        self.closed += 1
        if self.fail:
            raise self.fail


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(writers, "time", clock)
    return clock


# --- steps, names and values ----------------------------------------------------------


def test_scalars_of_all_kinds_become_python_numbers():
    recorder = Recorder()
    values = {
        "int": 2**53 + 1,
        "float": 0.1,
        "bool": True,
        "np/uint64": np.uint64(2**64 - 1),
        "np/float32": np.float32(0.5),
        "np/array": np.array(3, np.int8),
        "jax/float": jnp.float32(0.25),
        "jax/bfloat16": jnp.bfloat16(1.5),
        "jax/int": jnp.int32(-7),
    }
    recorder.write(np.int64(3), values)
    step, got = recorder.rows[0]
    assert (step, type(step)) == (3, int)
    assert list(got.values()) == [2**53 + 1, 0.1, 1, 2**64 - 1, 0.5, 3, 0.25, 1.5, -7]
    assert {type(v) for v in got.values()} == {int, float}
    assert type(got["jax/bfloat16"]) is float


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (1 + 2j, "complex of dtype complex128"),
        (np.complex64(1), "complex64"),
        ("0.5", "str"),
        (None, "NoneType"),
        (np.datetime64("2020-01-01"), "datetime64"),
    ],
)
def test_values_that_are_no_real_numbers_are_refused_by_name(value, got):
    with pytest.raises(TypeError, match=f"'eval/x' must be a real number, got .*{got}"):
        Recorder().write(1, {"train/loss": 0.5, "eval/x": value})


@pytest.mark.parametrize("value", [[1.0, 2.0], np.ones((2, 1)), jnp.ones(1)])
def test_arrays_are_refused_by_name(value):
    with pytest.raises(
        TypeError, match=r"'eval/x' must be a scalar, got an array of sh"
    ):
        Recorder().write(1, {"eval/x": value})


def test_names_and_steps_are_checked():
    with pytest.raises(TypeError, match="names of values must be strings, got int 3"):
        Recorder().write(1, {3: 0.5})  # pyright: ignore[reportArgumentType]
    for name in ("", "step"):
        with pytest.raises(ValueError, match="a value must have a name other than"):
            Recorder().write(1, {name: 0.5})
    with pytest.raises(TypeError, match="`step` must be an integer, got float 1.0"):
        Recorder().write(1.0, {"a": 0.5})  # pyright: ignore[reportArgumentType]


def test_nothing_is_written_after_closing():
    recorder = Recorder()
    with recorder:
        recorder.write(1, {})
    recorder.close()
    assert recorder.closed == 1
    with pytest.raises(ValueError, match="Recorder is closed, got values of step 2"):
        recorder.write(2, {})


def test_a_writer_that_is_not_enabled_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    off = [
        JsonlWriter(tmp_path / "new" / "a.jsonl", enabled=False),
        TensorBoardWriter(tmp_path / "tb", enabled=False),
        ProgressBar(10, enabled=False),
        Recorder(enabled=False),
    ]
    with MultiWriter(off) as writer:
        assert not writer.enabled
        # Not even looked at: on other processes it may not be there.
        writer.write(1, {"eval/x": object()})  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert off[-1].closed == 0  # pyright: ignore[reportAttributeAccessIssue]


# --- MultiWriter ----------------------------------------------------------------------


def test_multi_writer_passes_on_to_all_that_are_enabled():
    a, b, off = Recorder(), Recorder(), Recorder(enabled=False)
    with MultiWriter([a, b, off]) as writer:
        writer.write(7, {"train/loss": jnp.float32(0.5)})
    assert a.rows == b.rows == [(7, {"train/loss": 0.5})]
    assert (a.closed, b.closed) == (1, 1)
    assert off.rows == []


def test_multi_writer_closes_all_even_if_one_fails():
    a, b = Recorder(fail=OSError("disk full")), Recorder()
    writer = MultiWriter([a, b])
    with pytest.raises(ExceptionGroup, match="some writers could not be closed") as e:
        writer.close()
    assert b.closed == 1
    assert isinstance(e.value.exceptions[0], OSError)


# --- JSON lines -----------------------------------------------------------------------


def test_jsonl_lines_are_valid_and_start_with_the_step(tmp_path):
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(1, {"train/loss": 0.5, "planner/unique_ids": 2**53 + 1})
        # Flushed per line: it is there before the file is closed.
        assert path.read_text() == (
            '{"step": 1, "train/loss": 0.5, "planner/unique_ids": 9007199254740993}\n'
        )
        writer.write(2, {"a": math.nan, "b": math.inf, "c": -np.float32(np.inf)})
        writer.write(3, {})
    assert path.read_text().splitlines()[1:] == [
        '{"step": 2, "a": null, "b": null, "c": null}',
        '{"step": 3}',
    ]
    assert read_rows(path)[1] == {"step": 2, "a": None, "b": None, "c": None}


def test_jsonl_floats_keep_all_digits(tmp_path):
    values = {
        f"x{i}": float(v) for i, v in enumerate(np.random.default_rng(0).random(9))
    }
    with JsonlWriter(tmp_path / "a.jsonl") as writer:
        writer.write(1, values)
    assert read_rows(tmp_path / "a.jsonl") == [{"step": 1, **values}]


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", 0),
        (b'{"step": 1, "a": 0.5}\n', 1),
        (b'{"step": 1}\n{"step": 2, "tra', 1),
        (b'{"step": 1}\n{"step": 2}', 1),
        (b'{"st', 0),
        (b'{"step": 1}\n' + b'{"step": 2, "' + b"x" * 200_000, 1),
        (b"x" * 65536, 0),
    ],
    ids=["empty", "whole", "partial", "no-newline", "only-partial", "long", "block"],
)
def test_jsonl_appends_after_the_last_whole_line(tmp_path, before, kept):
    path = tmp_path / "a.jsonl"
    path.write_bytes(before)
    assert len(read_rows(path)) == kept
    with JsonlWriter(path) as writer:
        writer.write(9, {"b": 1})
    rows = read_rows(path)
    assert len(rows) == kept + 1
    assert rows[-1] == {"step": 9, "b": 1}
    assert path.read_bytes().endswith(b'\n{"step": 9, "b": 1}\n' if kept else b"\n")


def test_jsonl_create_refuses_an_existing_file(tmp_path):
    path = tmp_path / "a.jsonl"
    with JsonlWriter(path, mode="create") as writer:
        writer.write(1, {})
    with pytest.raises(FileExistsError, match="exists already, and mode 'create' does"):
        JsonlWriter(path, mode="create")
    assert read_rows(path) == [{"step": 1}]


def test_jsonl_mode_is_checked(tmp_path):
    with pytest.raises(
        ValueError, match='`mode` must be "append" or "create", got "?\'w'
    ):
        JsonlWriter(tmp_path / "a", mode="w")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("line", ["{", "[1]", "", '{"a": 1}'])
def test_read_rows_says_which_line_is_wrong(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: a line must be a JSON object with"
    ):
        read_rows(path)


# --- TensorBoard ----------------------------------------------------------------------


def test_tensorboard_holds_the_values(tmp_path):
    with TensorBoardWriter(tmp_path / "tb") as writer:
        writer.write(1, {"train/loss": 0.5})
        writer.write(2, {"train/loss": 0.25, "eval/auc": math.nan})
    (file,) = (tmp_path / "tb").iterdir()
    assert _events(file) == [
        (1, "train/loss", 0.5),
        (2, "train/loss", 0.25),
        (2, "eval/auc", pytest.approx(math.nan, nan_ok=True)),
    ]


def _events(file):
    """The scalars of an event file: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore

    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + size :]
    return found


def test_tensorboard_names_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'shardjax\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


# --- progress -------------------------------------------------------------------------


def test_progress_prints_a_line_per_interval_where_there_is_no_terminal(clock):
    stream = io.StringIO()
    with ProgressBar(1000, batch_size=100, stream=stream) as bar:
        for step in range(1, 1001):
            clock.now += 0.04
            bar.write(step, {"train/loss": 1 / step})
        bar.write(1000, {"eval/auc": 0.78125, "eval/logloss": 3.0})
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "step 251/1000 2.5k examples/s train/loss=0.003984",
        "step 501/1000 2.5k examples/s train/loss=0.001996",
        "step 751/1000 2.5k examples/s train/loss=0.001332",
        "step 1000/1000 2.44k examples/s train/loss=0.001 eval/auc=0.7812",
    ]


def test_progress_draws_a_bar_on_a_terminal(clock):
    stream = Terminal()
    with ProgressBar(10, batch_size=1000, show=["train/loss"], stream=stream) as bar:
        for step in range(1, 11):
            bar.write(step, {"train/loss": 0.123456, "eval/auc": 0.7})
    last = stream.getvalue().rstrip().split("\r")[-1]
    assert "100%" in last
    assert "10.0k/10.0k" in last
    assert "examples/s" in last
    assert "train/loss=0.1235" in last
    assert "auc" not in last


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["bar", "lines"])
def test_progress_of_a_resumed_run_counts_its_own_steps_and_never_goes_back(
    clock, stream
):
    with ProgressBar(2000, stream=stream, show=()) as bar:
        bar.write(1000, {})
        clock.now += 2.0
        bar.write(1100, {})
        bar.write(1050, {"eval/auc": 0.7})
    last = stream.getvalue().rstrip().split("\r")[-1]
    if stream.isatty():
        assert "1.10k/2.00k" in last
    else:
        assert last == "step 1100/2000 50 steps/s"


def test_progress_without_a_total_and_without_steps(clock):
    stream = io.StringIO()
    with ProgressBar(None, stream=stream) as bar:
        bar.write(5, {"train/loss": math.nan})
    with ProgressBar(None, stream=stream):
        pass
    assert stream.getvalue() == "step 5 train/loss=nan\n"


def test_progress_goes_to_stderr(capsys):
    with ProgressBar(2) as bar:
        bar.write(2, {"train/loss": 2_000_000})
    assert capsys.readouterr() == ("", "step 2/2 train/loss=2e+06\n")


def test_progress_checks_its_batch_size():
    with pytest.raises(
        ValueError, match="`batch_size` of ProgressBar must be positive"
    ):
        ProgressBar(10, batch_size=0)
