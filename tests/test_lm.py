"""The language model program as users run it: in-process, and the documented command."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import config as configs, lm
from experiments.schedules import NetworkOptimConfig
from experiments.text import TextConfig
from shardjax.writers import read_rows

ROOT = Path(__file__).parent.parent
KINDS = ("params", "grads", "opt_state")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A little text that is easy to learn, and its options."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for number in range(12):
        words = random.choice(["ab ", "cde ", "fghi\n"], 300)
        (folder / f"{number}.txt").write_text("".join(words))
    return {"path": str(folder / "*.txt"), "held_out": 0.3}


def run(text, **changes):
    values = {"data": text, "size": "tiny", "batch_size": 8, "seq_len": 32, "steps": 4}
    return lm.main(lm.from_anything(values | {"eval_batch_size": 32} | changes))


def test_the_result_has_what_it_promises(text, tmp_path):
    profile = ["steps", "3:4"]
    result = run(
        text, mesh="2x1", steps=60, log_every=20, out=str(tmp_path), profile=profile
    )
    assert list((tmp_path / "trace").rglob("*.trace.json.gz"))
    assert result["experiment"] == "lm" and result["mesh"] == "2x1"
    assert result["devices"] == 2 and result["zero"] == 2 and result["steps"] == 60
    assert result["tokens"] == 60 * 8 * 32
    assert result["parameters"] == 115008
    assert result["eval/bytes"] == _held_out_bytes(text)
    assert result["eval/bits_per_byte"] == result["eval/loss"] / math.log(2)
    assert 0.3 < result["eval/bits_per_byte"] < 3  # 0.5 is what the words leave open
    for name in ("tokens_per_s", "mfu", "seconds", "train_seconds"):
        assert result[name] > 0
    assert set(result["bytes_per_device"]) == {*KINDS, "host"}
    files = {p.name for p in tmp_path.iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= files
    assert json.loads((tmp_path / "result.json").read_text()) == result
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [20, 40, 60, 60]
    assert rows[0]["train/loss"] > rows[2]["train/loss"]
    assert rows[3]["eval/loss"] == result["eval/loss"]
    with pytest.raises(FileExistsError, match="has a run in it already"):
        run(text, out=str(tmp_path))


def _held_out_bytes(text):
    opened = lm.open_text(TextConfig(**text))
    return sum(Path(f).stat().st_size + 1 for f in opened.held_out_files)


def test_every_stage_and_mesh_gives_the_same_curve(text):
    plain = run(text, mesh="1x1", zero=0, steps=6)
    others = [
        {"mesh": "8x1", "zero": 3},
        {"mesh": "4x2", "zero": 1, "microbatches": 2},
        {"mesh": "2x2", "zero": 3, "remat": "full", "offload": "all"},
    ]
    for other in others:
        found = run(text, steps=6, **other)
        for name in ("train/loss", "eval/loss"):
            np.testing.assert_allclose(found[name], plain[name], rtol=1e-4)
        assert found["eval/bytes"] == plain["eval/bytes"]
        for kind in KINDS:
            size = found["bytes_per_device"][kind]
            split = kind == "opt_state" or other["zero"] == 3 or other["mesh"] == "4x2"
            assert size < plain["bytes_per_device"][kind] or not split
        assert (found["bytes_per_device"]["host"] > 0) == ("offload" in other)


def test_the_same_command_gives_the_same_digits(text):
    first, second = (run(text, mesh="2x1", zero=3) for _ in range(2))
    for name in ("train/loss", "eval/loss"):
        assert first[name] == second[name]
    assert run(text, mesh="2x1", zero=3, seed=1)["eval/loss"] != first["eval/loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"positions": "learned"},
        {"optim": {"name": "lamb", "schedule": "one_cycle"}},
        {"optim": {"name": "adafactor"}},
        {"optim": {"name": "sgd", "base_batch_size": 16}},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_options_train(text, changes):
    result = run(text, mesh="2x1", zero=3, **changes)
    assert result["eval/loss"] < math.log(256) + 0.3


@pytest.mark.slow
def test_the_documented_command_prints_one_json_line(text):
    args = ["--mesh", "2x1", "--zero", "3", "--size", "tiny", "--steps", "2"]
    args += ["--batch-size", "4", "--seq-len", "32", "--data.path", text["path"]]
    done = _run_program(*args, "--data.held-out", "0.3")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["mesh"] == "2x1" and result["zero"] == 3
    assert "simulating 2 devices" in done.stderr
    assert "gathered in its layer" in done.stderr  # the plan is explained


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        configs.from_command_line(lm.Config, "lm", "", ["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for kind in (lm.Config, TextConfig, NetworkOptimConfig):
        for field in dataclasses.fields(kind):
            assert field.name.replace("_", "-") in out


def _run_program(*args):
    command = [sys.executable, "-m", "experiments.lm", *args]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batchsize": 1}, "unknown key 'batchsize'.*is 'batch_size'"),
        ({"data": {"pth": "x"}}, r"unknown key 'data\.pth'.*'data\.path'"),
        ({"zero": 5}, r"`zero` must be one of \(0, 1, 2, 3\), got 5"),
        ({"steps": 0}, "`steps` must be positive, got 0"),
        ({"seed": -1}, "`seed` must be in"),
        ({"mesh": "8"}, "must be DATAxMODEL, two positive integers, got '8'"),
        ({"size": "huge"}, "'size' must be .* got 'huge'"),
        ({"offload": "all"}, "`offload` 'all' needs ZeRO stage 3, .* got stage 2"),
        ({"remat": "some"}, "`remat` must be one of .* got 'some'"),
        (
            {"mesh": "4x1", "microbatches": 3},
            r"`batch_size` must be a multiple of 12 \(3 microbatches on 4 dev.*got 8",
        ),
        ({"mesh": "3x1", "batch_size": 3}, "`eval_batch_size` must be a multiple of"),
        ({"optim": {"clip": -1}}, "`clip` must be a number of at least 0"),
    ],
)
def test_bad_configs_say_what_is_wrong(values, message):
    with pytest.raises(configs.ConfigError, match=message):
        lm.from_anything(values)


def test_a_loss_that_is_not_finite_stops_the_run(text):
    optim = {"name": "sgd", "lr": 1e30, "clip": 0, "schedule": "constant", "warmup": 0}
    with pytest.raises(ValueError, match=r"the training loss is .* lower --optim\.lr"):
        run(text, optim=optim, log_every=1)


def test_text_shorter_than_a_sequence_is_refused(text):
    with pytest.raises(ValueError, match="more bytes than --seq-len 100000"):
        run(text, seq_len=100_000)


def test_a_file_of_options_and_the_command_line_agree(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('zero = 3\nbatch-size = 32\n[optim]\nname = "lamb"\n')
    words = ["--config", str(file), "--steps", "3"]
    found = configs.from_command_line(lm.Config, "lm", "", words)
    values = {"zero": 3, "batch_size": 32, "steps": 3, "optim": {"name": "lamb"}}
    assert found == lm.from_anything(values)


def test_parameters_are_made_in_parts():
    values = {"mesh": "8x1", "zero": 3, "size": "tiny"}
    config = lm.from_anything(values)
    state = lm.Run(config, lm.Text(*2 * (np.zeros(9, np.uint8),), (), ())).state
    embedding = state.params["embedding"][...]
    assert len(embedding.addressable_shards) == 8
    assert embedding.addressable_shards[0].data.shape == (32, 64)
