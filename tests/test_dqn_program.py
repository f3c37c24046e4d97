"""The program of deep Q-learning as users run it: in-process, and the documented command."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import gymnasium  # noqa: F401  its import sets an environment variable
import jax
import numpy as np
import pytest
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import config as configs, dqn
from experiments.checkpoints import CheckpointConfig, Checkpoints
from shardjax import rl
from shardjax.writers import MultiWriter, read_rows

ROOT = Path(__file__).parent.parent
SMALL = {
    "steps": 384,
    "num_envs": 4,
    "layers": [16],
    "batch_size": 16,
    "train_every": 64,
    "updates": 4,
    "updates_per_call": 2,
    "learning_starts": 64,
    "target_every": 3,
    "capacity": 300,
    "eval_every": 192,
    "eval_episodes": 3,
}


def config_of(**changes):
    return dqn.from_anything(SMALL | changes)


def trained(**changes):
    """A run in which all steps are taken, and its part of the result."""
    config = config_of(**changes)
    run = dqn.Run(config)
    collection = run.learner.collection
    with Checkpoints(config, config.rounds(), collection=collection) as checkpoints:
        result = run.train(MultiWriter([]), checkpoints)
        checkpoints.end(None)
    return run, result


def test_the_result_has_what_it_promises(tmp_path):
    result = dqn.main(config_of(replay="proportional", out=str(tmp_path / "run")))
    assert result["experiment"] == "dqn" and result["env"] == "CartPole-v1"
    assert result["mesh"] == "1x1" and result["devices"] == 1 and result["seed"] == 0
    assert result["parameters"] == 4 * 16 + 16 + 16 * 2 + 2
    assert result["steps"] == 384 and result["updates"] == 6 * 4
    assert result["eval/episodes"] == 3 and result["stale_priorities"] == 0
    assert 1 <= result["eval/return_min"] <= result["eval/return_mean"] <= 500
    for name in ("env_steps_per_s", "updates_per_s", "samples_per_insert", "seconds"):
        assert result[name] > 0
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= files
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [192, 384]
    values = {"train/loss", "train/td", "train/return_mean", "valid/return_mean"}
    for row in rows:
        assert values <= set(row)
    assert rows[-1]["valid/return_mean"] == result["valid/return_mean"]
    with pytest.raises(FileExistsError, match="has a run in it already"):
        dqn.main(config_of(out=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("8x1", {"zero": 3}),
        ("8x1", {"zero": 2, "target": "polyak", "replay": "proportional"}),
    ],
    ids=str,
)
def test_a_mesh_gives_the_curve_of_one_device(mesh, options):
    options = {**options, "layers": [32, 64], "n_step": 2}
    plain, _ = trained(**options | {"zero": 0})
    run, _ = trained(mesh=mesh, **options)
    if options["zero"] == 3:
        kernel = run.learner.state.target["body"]["layers"][1]["kernel"].get_value()
        assert kernel.addressable_data(0).size * 8 == kernel.size
    assert len(run.rows) == len(plain.rows) == 2
    for row, wanted in zip(run.rows, plain.rows, strict=True):
        assert set(row) == set(wanted)
        for name in row:
            np.testing.assert_allclose(row[name], wanted[name], rtol=1e-4)
    for part in ("params", "target"):
        for x, y in zip(
            jax.tree.leaves(getattr(run.learner.state, part)),
            jax.tree.leaves(getattr(plain.learner.state, part)),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, atol=1e-4)


def test_the_same_seed_gives_the_same_digits_and_another_one_others():
    (first, _), (second, _), (other, _) = (trained(seed=s) for s in (3, 3, 4))
    assert first.rows == second.rows != other.rows


@pytest.mark.parametrize(
    "changes",
    [
        {"dueling": True, "n_step": 3, "clip": 0, "replay": "rank"},
        {"double": False, "target": "polyak", "num_envs": 1, "learning_starts": 0},
    ],
    ids=str,
)
def test_options_train(changes):
    run, result = trained(**changes)
    assert run.learner.state.step == result["updates"] == 24
    assert np.isfinite(result["train/loss"])


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    saving = {"checkpoint": {"dir": str(tmp_path / "saved")}, "replay": "proportional"}
    first, result = trained(**saving)
    inserted = first.replay.stats()["inserted"]
    assert inserted > 300  # the ring has come round
    again = dqn.Run(config_of(**saving))
    # before the first evaluation there is no best one, and JSON has no infinity
    assert json.loads(json.dumps(again._extra(), allow_nan=False))["best"] is None
    config = config_of(**saving)
    with Checkpoints(config, config.rounds()) as checkpoints:
        begun, kept, extra = checkpoints.begin(again._kept())
        assert begun == 6
        again._go_on(begun, kept, extra)
        checkpoints.end(None)
    assert again.rows == first.rows
    assert again._rng.random() == first._rng.random()
    for x, y in zip(
        jax.tree.leaves((again.learner.state, again.replay.sample(32))),
        jax.tree.leaves((first.learner.state, first.replay.sample(32))),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    obs = again._obs
    np.testing.assert_array_equal(
        again.learner.q_values(obs), first.learner.q_values(obs)
    )
    # the same command ends with the same result; a longer one goes on
    _, same = trained(**saving)
    assert same["eval/return_mean"] == result["eval/return_mean"]
    longer, more = trained(**saving, steps=512)
    assert longer.learner.state.step == 24 + 8 and more["updates"] == 32
    assert longer.replay.stats()["inserted"] > inserted
    assert [row["step"] for row in longer.rows] == [192, 384, 512]


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        configs.from_command_line(dqn.Config, "dqn", "", ["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for kind in (dqn.Config, CheckpointConfig):
        for field in dataclasses.fields(kind):
            assert field.name.replace("_", "-") in out


@pytest.mark.slow
def test_the_documented_command_prints_one_json_line():
    args = ["--mesh", "2x1", "--zero", "3", "--steps", "128", "--train-every", "64"]
    args += ["--updates", "2", "--updates-per-call", "2", "--learning-starts", "64"]
    command = [sys.executable, "-m", "experiments.dqn", *args, "--layers", "16"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["mesh"] == "2x1" and result["zero"] == 3
    assert "simulating 2 devices" in done.stderr
    assert "step 2/2" in done.stderr  # the progress


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batchsize": 1}, "unknown key 'batchsize'.*is 'batch_size'"),
        ({"zero": 5}, r"`zero` must be one of \(0, 1, 2, 3\), got 5"),
        ({"steps": 0}, "`steps` must be positive, got 0"),
        ({"seed": -1}, "`seed` must be in"),
        ({"mesh": "8"}, "must be DATAxMODEL, two positive integers, got '8'"),
        (
            {"mesh": "3x1"},
            "`batch_size` must be a multiple of the 3 devices along data",
        ),
        (
            {"num_envs": 7},
            "`train_every` must be a multiple of the 7 `num_envs`, got 64",
        ),
        (
            {"updates": 5},
            "`updates` must be a multiple of the 2 `updates_per_call`, got 5",
        ),
        ({"layers": [0]}, r"`layers` must be positive widths, got \(0,\)"),
        ({"discount": 1.5}, r"`discount` must lie in \[0, 1\], got 1.5"),
        ({"target_every": 0}, "`every` must be at least 1 step, got 0"),
        ({"target": "polyak", "tau": 2}, r"`tau` must be in \(0, 1\), got 2"),
        ({"alpha": 0.5}, "`alpha` 0.5 has no effect with `replay` uniform"),
        ({"lr": -1}, "`lr` must not be negative"),
        ({"resume": "last"}, "`resume` must be auto, none or the number"),
        ({"env": "recsim", "keep": "best"}, "`keep` best would copy whole tables"),
        ({"env": "recsim", "dueling": True}, "`dueling` has no effect in `env` recsim"),
        ({"env": "recsim", "recsim": {"users": 0}}, "`users` must be positive, got 0"),
        ({"env": "recsim", "recsim": {"dim": 1}}, "`dim` must be at least 2, a.*got 1"),
        (
            {"env": "recsim", "recsim": {"rows_accumulator": 0}},
            "`rows_accumulator` must be positive, got 0",
        ),
        (
            {"env": "recsim", "recsim": {"rows": "sgd", "rows_accumulator": 0.1}},
            "`rows_accumulator` has no effect with `rows` sgd",
        ),
        (
            {"recsim": {"items": 9}},
            "options of `recsim` have no effect with `env` Cart",
        ),
        (
            {"storage": {"device_rows": 9}},
            "`device_rows` has no effect without `env` recsim, got 9",
        ),
    ],
)
def test_wrong_configs_are_refused(values, message):
    with pytest.raises(configs.ConfigError, match=message):
        config_of(**values)


def test_environments_whose_observations_are_no_vectors_are_refused():
    with pytest.raises(ValueError, match="`env` 'FrozenLake-v1' must be vectors"):
        dqn.Run(config_of(env="FrozenLake-v1"))


def test_a_network_that_diverges_ends_the_run():
    with pytest.raises(ValueError, match="not finite: lower --lr|has diverged: lower"):
        trained(lr=1e30, clip=0)


RECSIM = {
    "env": "recsim",
    "steps": 256,
    "num_envs": 8,
    "layers": [8],
    "batch_size": 16,
    "n_step": 2,
    "target_every": 3,
    "replay": "proportional",
    "recsim": {"users": 400, "items": 600, "slate": 4, "dim": 4, "rows_lr": 0.05},
}


def test_the_settings_of_the_recommender_fit():
    config = configs.from_toml(dqn.Config, ROOT / "experiments/recsim.toml")
    assert config.env == "recsim" and config.target_rule() == rl.HardCopy(100)


def test_tables_in_tiers_on_a_mesh_give_the_curve_of_one_device(tmp_path):
    plain, result = trained(**RECSIM)
    storage = {
        "device_rows": 320,
        "lookahead": 2,
        "host_bytes": "9KB",
        "disk": str(tmp_path / "rows"),
    }
    run, same = trained(**RECSIM, mesh="8x1", zero=3, storage=storage)
    counters = run.learner.counters
    assert counters["written_back_rows"] > 0 and counters["disk_hits"] > 0
    assert result["updates"] == 16
    for row, wanted in zip(run.rows, plain.rows, strict=True):
        assert set(row) == set(wanted)
        for name in row:
            np.testing.assert_allclose(row[name], wanted[name], rtol=1e-4)
    for name in ("return_mean", "random", "popularity", "myopic_best", "planning_best"):
        assert same[f"eval/{name}"] == result[f"eval/{name}"]
    assert 0 < result["eval/random"] < result["eval/planning_best"] <= 20
    tables = run.learner, plain.learner
    for name in ("user", "item"):
        keys = plain.learner.collection.keys(name)
        assert set(run.learner.collection.keys(name)) == set(keys)
        for view in (None, rl.read_target):
            found, wanted = (
                x.collection.lookup_rows(x.tables, name, keys, view)["rows"]
                for x in tables
            )
            np.testing.assert_allclose(found, wanted, atol=1e-4)
    run.learner.close()


class Interrupted(Exception):
    """Ends a run in its middle."""


def test_a_recommender_that_goes_on_ends_as_one_that_was_not_interrupted(
    tmp_path, monkeypatch
):
    saving = {"dir": str(tmp_path / "saved"), "interval": 1, "full_every": 2}
    options = {**RECSIM, "n_step": 3}
    plain, result = trained(**options)
    learn, calls = dqn.Run._learn, []

    def interrupted(self, progress):
        calls.append(progress)
        if len(calls) == 3:  # a row is due after it
            raise Interrupted
        return learn(self, progress)

    monkeypatch.setattr(dqn.Run, "_learn", interrupted)
    with pytest.raises(Interrupted):
        trained(**options, checkpoint=saving)
    again, same = trained(**options, checkpoint=saving)
    assert len(calls) == 3 + 2  # of the four there are, two were kept

    def own(row):
        return {k: v for k, v in row.items() if not k.startswith("checkpoint/")}

    assert [own(row) for row in again.rows] == plain.rows
    for name in ("eval/return_mean", "eval/return_min", "train/loss"):
        assert same[name] == result[name]
    states = [
        (x.learner.state, x._n_step.state_dict(), x._obs, x.learner.q_values(x._obs))
        for x in (again, plain)
    ]
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(x, y)
    # the next updates are the same, those of the tables' target included
    for _ in range(2):
        batches = [x.replay.sample(16, groups=2) for x in (again, plain)]
        (td, info), (wanted, _) = (
            x.learner.learn(batch)
            for x, batch in zip((again, plain), batches, strict=True)
        )
        np.testing.assert_array_equal(td, wanted)
        assert np.isfinite(info["loss"]).all()
