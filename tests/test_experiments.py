"""The programs as users run them: in-process, and the documented commands."""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorboardX  # noqa: F401  its import sets an environment variable

from experiments import config as configs, ctr
from experiments.data import DataConfig, guess_format, open_data
from experiments.tiers import tier_rates
from shardjax import embed, export, metrics
from shardjax.writers import read_rows

ROOT = Path(__file__).parent.parent
SMALL = {"rows": 2000, "eval_rows": 1000}


def small(**changes):
    values = {"data": SMALL, "batch_size": 256, "eval_batch_size": 512, **changes}
    return ctr.from_anything(values)


@functools.cache
def plain_result():
    """Of four steps on one device."""
    return ctr.main(small(steps=4))


def run_program(*args, **environment):
    command = [sys.executable, "-m", "experiments.ctr", *args]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("name", list(ctr.MODELS))
def test_every_model_trains_and_is_evaluated(name):
    result = ctr.main(small(model={"name": name, "dim": 4}, steps=4))
    assert result["steps"] == 4 and result["examples"] == 1024
    assert result["eval/examples"] == 1000
    assert 0 < result["eval/logloss"] < 1 and 0.3 < result["eval/auc"] < 0.9
    assert 0.7 < result["bayes/auc"] < 0.9


def test_every_row_optimizer_moves_rows_in_its_own_way():
    found = {}
    for rows in ctr.ROW_OPTIMIZERS:
        optim = {"rows": rows, "rows_lr": 0.01}
        found[rows] = ctr.main(small(model={"name": "lr"}, optim=optim, steps=2))
    losses = [result["eval/logloss"] for result in found.values()]
    assert np.isfinite(losses).all() and len(set(losses)) == len(losses), losses


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_documented_command_prints_one_json_line_and_is_repeatable(tmp_path):
    args = ["--mesh", "8x1", "--data.rows", "2000", "--data.eval-rows", "1000"]
    args += ["--batch-size", "512", "--out"]
    # the second process need not compile what the first one has
    programs = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    programs["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    first = run_program(*args, str(tmp_path / "run"), **programs)
    second = run_program(*args, str(tmp_path / "again"), **programs)
    assert first.returncode == 0, first.stderr
    results = [json.loads(p.stdout.splitlines()[-1]) for p in (first, second)]
    timed = {"examples_per_s", "train_seconds", "seconds"}
    timed |= {"loader/wait_s", "device/wait_s", "planner/planner_ms"}
    kept = [{k: v for k, v in r.items() if k not in timed} for r in results]
    assert kept[0] == kept[1]
    wanted = {"experiment", "mesh", "devices", "steps", "examples", "examples_per_s"}
    wanted |= {"eval/auc", "eval/logloss", "eval/calibration", "unique_keys"}
    wanted |= {"bayes/auc", "bayes/logloss"}
    assert wanted <= results[0].keys()
    assert results[0]["mesh"] == "8x1" and results[0]["devices"] == 8
    assert "simulating 8 devices" in first.stderr
    assert "experiments.ctr" in first.stderr
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= files
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["mesh"] == "8x1" and saved["data"]["rows"] == 2000


def test_meshes_give_the_same_result():
    plain = plain_result()
    for r in (ctr.main(small(mesh=m, steps=4)) for m in ("4x2", "3x1")):
        assert r["unique_keys"] == plain["unique_keys"]
        np.testing.assert_allclose(r["eval/logloss"], plain["eval/logloss"], rtol=1e-4)


@pytest.fixture(scope="module")
def stage_3(tmp_path_factory):
    """A run with parameters in parts, which writes its model: config and result."""
    folder = str(tmp_path_factory.mktemp("stage_3") / "model")
    config = small(mesh="8x1", zero=3, steps=4, export=folder)
    return config, ctr.main(config)


def test_stages_of_the_network_give_the_same_result(stage_3):
    plain = plain_result()
    stage_2 = ctr.main(small(mesh="4x2", zero=2, steps=4))
    for stage, found in ((2, stage_2), (3, stage_3[1])):
        assert found["zero"] == stage
        np.testing.assert_allclose(
            found["eval/logloss"], plain["eval/logloss"], rtol=1e-4
        )
    few_bits = ctr.main(small(steps=4, precision="bf16"))
    np.testing.assert_allclose(
        few_bits["eval/logloss"], plain["eval/logloss"], rtol=0.02
    )
    assert few_bits["eval/logloss"] != plain["eval/logloss"]


def test_an_exported_model_gives_the_scores_of_the_evaluation(stage_3):
    config, result = stage_3
    model = export.load_model(config.export)
    assert model.step == 4 and result["eval/unseen"] > 0
    assert sum(map(len, model.tables.values())) == result["unique_keys"]
    metric = metrics.LogLoss()
    for chunk in open_data(config.data, config.seed).eval.chunks():
        keys = dict(zip(chunk.fixed_names, chunk.fixed, strict=True)) | chunk.jagged
        metric = metric.update(
            labels=chunk.labels,
            predictions=model(chunk.dense, keys),
            weights=np.ones(chunk.size),
        )
    np.testing.assert_allclose(metric.compute(), result["eval/logloss"], rtol=1e-6)


def test_a_folder_for_the_model_that_has_files_is_refused_at_once(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(
        FileExistsError, match="`export` needs a folder of its own, and"
    ):
        ctr.main(small(export=str(tmp_path)))


def test_steps_are_traced(tmp_path):
    profile = ["steps", "2:3"]
    lr = {"name": "lr"}
    ctr.main(small(model=lr, steps=4, profile=profile, out=str(tmp_path / "run")))
    assert list((tmp_path / "run" / "trace").rglob("*.xplane.pb"))


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        configs.from_command_line(ctr.Config, "ctr", "", ["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    names = [
        f.name.replace("_", "-")
        for c in (ctr.Config, DataConfig, ctr.ModelConfig, ctr.OptimConfig)
        for f in dataclasses.fields(c)
    ]
    for name in names:
        assert name in out
    assert "--config" in out


def test_a_bad_option_is_a_short_error():
    done = run_program("--mesh", "8xq")
    assert done.returncode != 0
    assert "8xq" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_a_short_error():
    done = run_program("--data.path", "nowhere/*.csv")
    assert done.returncode != 0
    assert "nowhere/*.csv" in done.stderr and "Traceback" not in done.stderr


def test_toml_and_dict_and_command_line_agree(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('batch-size = 128\n[data]\nrows = 500\ndense = ["a", "b"]\n')
    from_file = configs.from_toml(ctr.Config, file)
    from_values = ctr.from_anything(
        {"batch_size": 128, "data": {"rows": 500, "dense": ["a", "b"]}}
    )
    words = ["--config", str(file), "--steps", "3"]
    from_words = configs.from_command_line(ctr.Config, "ctr", "", words)
    assert from_file == from_values
    assert from_words == dataclasses.replace(from_file, steps=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"batchsize": 1},
            "unknown key 'batchsize'.*nearest known one is 'batch_size'",
        ),
        ({"data": {"pth": "x"}}, r"unknown key 'data\.pth'.*'data\.path'"),
        ({"data": 3}, "'data' must be a table of options, got 3"),
        ({"batch_size": "many"}, "'batch_size' must be int, got 'many'"),
        ({"model": {"name": "bert"}}, r"'model\.name' must be .* got 'bert'"),
        ({"batch_size": 0}, "`batch_size` must be positive, got 0"),
        ({"steps": 0}, "`steps` must be positive, got 0"),
        ({"zero": 5}, "'zero' must be .*got 5"),
        ({"profile": ["steps", "2:3"]}, "`profile` 'steps 2:3' needs a folder"),
        (
            {"profile": ["steps", "3"], "out": "x"},
            "must be FIRST:LAST, two steps, got '3'",
        ),
        ({"mesh": "0x1"}, "must be DATAxMODEL, two positive integers, got .0x1."),
        ({"data": {"eval_fraction": 1.0}}, r"`eval_fraction` must lie in \[0, 1\)"),
        ({"data": {"shuffle": "yes"}}, "`shuffle` must be a seed.*got 'yes'"),
        ({"data": {"format": "csv"}}, "format 'csv' needs a `path`"),
        ({"data": {"label_threshold": math.nan}}, "`label_threshold` must be finite"),
        ({"seed": 2**70}, "`seed` must be in"),
        ({"data": {"rows": 0}}, "`rows` must be positive, got 0"),
    ],
)
def test_bad_configs_say_what_is_wrong(values, message):
    with pytest.raises(configs.ConfigError, match=message):
        ctr.from_anything(values)


def test_bad_config_files_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config file"):
        configs.from_toml(ctr.Config, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("batch = = 3")
    with pytest.raises(configs.ConfigError, match="is not TOML"):
        configs.from_toml(ctr.Config, tmp_path / "bad.toml")
    words = ["--config", str(tmp_path / "bad.toml")]
    with pytest.raises(SystemExit, match=r"bad\.toml.*is not TOML"):
        configs.from_command_line(ctr.Config, "ctr", "", words)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.csv", "label,x\n1,2\n", "csv"),
        ("a.tsv", "label\tx\n1\t2\n", "csv"),
        ("a.txt", "0\t" + "\t".join(["1"] * 39) + "\n", "criteo"),
        ("a.txt", "1 3:1 10:1 11:1\n", "libsvm"),
        ("a.txt", "1 9:3 5:3 7:4\n", "slots"),
        ("a.parquet", "", "parquet"),
        ("a.feather", "", "arrow"),
    ],
)
def test_formats_are_guessed(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    assert guess_format(str(tmp_path / name)) == kind


def test_a_csv_with_bags_groups_and_an_evaluation_file(tmp_path):
    rng = np.random.default_rng(0)
    for name, rows in (("train.csv", 600), ("test.csv", 200)):
        lines = ["click,user_id,price,tags"]
        for _ in range(rows):
            user, tag = rng.integers(0, 9), rng.integers(0, 5)
            lines.append(f"{int(tag > 2)},{user},{rng.random():.3f},t{tag}|t9")
        (tmp_path / name).write_text("\n".join(lines))
    config = {
        "path": str(tmp_path / "train.csv"),
        "eval_path": str(tmp_path / "test.csv"),
        "group": "user_id",
    }
    opened = open_data(DataConfig(**config), 0)
    assert opened.bags == ("tags",) and opened.features == ("user_id", "tags")
    values = {"data": config, "batch_size": 32, "epochs": 2, "optim": {"rows_lr": 0.5}}
    result = ctr.main(ctr.from_anything(values))
    assert result["examples"] == 1200 and result["eval/examples"] == 200
    assert result["eval/auc"] > 0.95 and result["eval/gauc"] > 0.9


def test_one_class_gives_null_not_nan(tmp_path):
    file = tmp_path / "ones.csv"
    file.write_text("label,city\n" + "1,a\n1,b\n" * 20)
    out = tmp_path / "run"
    values = {"data": {"path": str(file)}, "batch_size": 8, "out": str(out)}
    values["model"] = {"name": "lr"}
    result = ctr.main(ctr.from_anything(values))
    assert result["eval/auc"] is None
    text = (out / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["eval/auc"] is None


def test_evaluation_files_must_have_the_columns_of_training(tmp_path):
    (tmp_path / "a.csv").write_text("label,x,z\n" + "1,0.5,1.5\n0,2.5,0.1\n" * 9)
    (tmp_path / "b.csv").write_text("label,z,x\n" + "1,0.5,1.5\n0,2.5,0.1\n" * 9)
    config = DataConfig(path=str(tmp_path / "a.csv"), eval_path=str(tmp_path / "b.csv"))
    with pytest.raises(ValueError, match=r"dense columns of .*b\.csv.*same order"):
        open_data(config, 0)


def test_evaluation_files_are_read_as_those_of_training(tmp_path):
    train_lines = [f"{i % 2},{i},t{i}|u" for i in range(90)]
    (tmp_path / "a.csv").write_text("\n".join(["label,age,tags", *train_lines]))
    (tmp_path / "b.csv").write_text("label,age,tags\n1,3,t1\n0,4,t2\n")
    config = DataConfig(
        path=str(tmp_path / "a.csv"), eval_path=str(tmp_path / "b.csv"), dense=("age",)
    )
    chunk = next(iter(open_data(config, 0).eval.chunks()))
    assert chunk.n_dense == 1 and list(chunk.jagged) == ["tags"]


def test_a_used_folder_and_a_file_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="has a run in it already"):
        ctr.main(small(out=str(tmp_path)))
    with pytest.raises(FileExistsError, match="must be a folder"):
        ctr.main(small(out=str(tmp_path / "config.json")))


def test_labels_that_are_no_probabilities_are_refused(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("label,city\n" + "1,a\n2,b\n" * 20)
    values = {"data": {"path": str(file)}, "batch_size": 8, "model": {"name": "lr"}}
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 1\], got 2 "):
        ctr.main(ctr.from_anything(values))


def test_a_loss_that_is_not_finite_stops_the_run():
    optim = {"dense": "sgd", "dense_lr": 1e30, "rows_lr": 1e30, "decay": "none"}
    with pytest.raises(ValueError, match="the training loss is .* at step"):
        ctr.main(small(optim=optim, log_every=1, model={"name": "dlrm"}))


def test_data_without_keys_is_refused(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("click,price\n" + "".join(f"{i % 2},{i}.5\n" for i in range(50)))
    with pytest.raises(ValueError, match=r"no column has keys.*--data\.categorical"):
        ctr.main(ctr.from_anything({"data": {"path": str(path)}}))


def test_steps_beyond_the_data_are_noticed(caplog):
    assert ctr.main(small(model={"name": "lr"}, steps=9))["steps"] == 8
    assert "--steps 9 is more than the data have: 8 steps" in caplog.text


def test_a_file_that_only_claims_to_be_gzip(tmp_path):
    path = tmp_path / "clicks.txt.gz"
    path.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(OSError, match=r"clicks\.txt\.gz: cannot be unpacked"):
        guess_format(str(path))
    path.write_bytes(b"1 3:1 10:0.5\n")
    assert guess_format(str(path)) == "libsvm"


def test_rows_off_the_devices_give_the_same_result(tmp_path):
    plain = ctr.main(small(batch_size=128))
    storage = {"device_rows": 1000, "lookahead": 3, "host_bytes": "90KB"}
    storage["disk"] = str(tmp_path)
    tiered = ctr.main(small(batch_size=128, storage=storage))
    assert tiered["planner/written_back_rows"] > 0
    assert tiered["planner/disk_hits"] > 0
    assert not list(tmp_path.glob("*rows"))
    for name in ("eval/auc", "eval/logloss", "unique_keys", "eval/unseen"):
        assert tiered[name] == plain[name]


def test_where_rows_were_found_is_reported(tmp_path):
    batches = ["abcd", "abef", "cdab"]  # four rows on the device: cd leave, then ef
    lines = [f"{i % 2},{key}" for batch in batches for i, key in enumerate(batch)]
    (tmp_path / "a.csv").write_text("\n".join(["label,letter", *lines]))
    data = {"path": str(tmp_path / "a.csv"), "eval_fraction": 0.0, "shuffle": "none"}
    data["categorical"] = ["letter"]
    out = tmp_path / "out"
    values = {"data": data, "batch_size": 4, "log_every": 1, "out": str(out)}
    values["storage"] = {"device_rows": 4, "lookahead": 1}
    values["model"] = {"name": "lr"}
    result = ctr.main(ctr.from_anything(values))

    names = ("device_hit_rate", "host_hit_rate", "disk_hit_rate", "new_rate")
    rows = [r for r in read_rows(out / "metrics.jsonl") if "train/step_ms" in r]
    rates = [[row[f"tiers/{name}"] for name in names] for row in rows]
    assert rates == [[0, 0, 0, 1], [0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0]]
    assert [row["tiers/window_steps"] for row in rows] == [1, 1, 1]
    np.testing.assert_allclose(
        [result[f"tiers/{name}"] for name in names], [4 / 12, 2 / 12, 0, 6 / 12]
    )
    assert result["tiers/window_steps"] == 1
    assert result["unique_keys"] == 6
    held = [result[f"tiers/{tier}_rows"] for tier in ("device", "host", "disk")]
    assert held == [4, 2, 0]
    assert result["tiers/host_bytes"] > 0 and result["tiers/index_bytes"] > 0
    assert result["tiers/disk_bytes"] == 0

    for name in ("loader/wait_s", "device/wait_s"):
        assert result[name] == pytest.approx(sum(r[name] for r in rows), abs=1e-3)
    times = [row["planner/planner_ms"] for row in rows]
    assert result["planner/planner_ms"] == pytest.approx(sum(times))
    assert min(times) > 0 and min(row["train/step_ms"] for row in rows) > 0
    for file in ("curves.png", "tiers.png"):
        assert (out / file).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_storage_has_no_tiers(tmp_path):
    lr = {"name": "lr"}
    result = ctr.main(small(model=lr, steps=3, out=str(tmp_path), log_every=2))
    [row, last, _] = read_rows(tmp_path / "metrics.jsonl")
    assert (row["planner/examples"], last["planner/examples"]) == (512, 256)
    for found in (result, row, last):
        assert {"planner/planner_ms", "loader/wait_s", "device/wait_s"} <= found.keys()
        assert not [name for name in found if name.startswith("tiers/")]
        assert found["device/wait_s"] <= found["loader/wait_s"]
    assert not (tmp_path / "tiers.png").exists()


def test_keys_of_batches_that_were_only_planned_are_not_counted(monkeypatch):
    found = []
    sizes = ctr.Run.sizes

    def count(run):
        [stats] = run.collection.stats().values()
        tables = [t.spec.name for g in run.collection.groups for t in g.tables]
        found.append(sum(len(run.collection.keys(name)) for name in tables))
        found.append(stats["rows"])
        return sizes(run)

    monkeypatch.setattr(ctr.Run, "sizes", count)
    result = ctr.main(small(model={"name": "lr"}, batch_size=64, steps=2))
    assert result["unique_keys"] == found[0] == result["planner/inserted"] < found[1]


def test_rates_are_of_sums_and_absent_where_nothing_was_counted():
    counters = {"device_hits": 6, "host_hits": 2, "disk_hits": 1, "inserted": 3}
    rates = tier_rates(counters | {"windows": 4}, 10)
    assert list(rates.values()) == [6 / 12, 2 / 12, 1 / 12, 3 / 12, 2.5]
    assert "tiers/window_steps" not in tier_rates(counters | {"windows": 0}, 10)
    nothing = dict.fromkeys(counters, 0) | {"windows": 2}
    assert tier_rates(nothing, 4) == {"tiers/window_steps": 2}
    assert tier_rates({"inserted": 3}, 4) == {}


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"storage": {"host_bytes": "8GB"}}, "`device_rows`"),
        ({"storage": {"disk": "rows"}}, "`device_rows`"),
        ({"storage": {"disk_bytes": "8GB"}}, "`device_rows`"),
        ({"storage": {"map_bytes": "8GB"}}, "`device_rows`"),
        ({"storage": {"merge_rate": "8MB"}}, "`device_rows`"),
        ({"storage": {"lookahead": 8}}, "`device_rows`"),
        ({"storage": {"keep": "lfu"}}, "`device_rows`"),
        ({"admit": {"most_keys": 10_000_000}}, "a `min_count` of 2 or more"),
        ({"admit": {"false_positive_rate": 0.1}}, "a `min_count` of 2 or more"),
        (
            {"admit": {"probability": 0.5, "most_keys": 5}},
            "a `min_count` of 2 or more",
        ),
        (
            {"evict": {"every": 1000}},
            "one of `ttl`, `lru`, `lfu` and `show_click`",
        ),
        ({"evict": {"decay": 0.98}}, "`show_click`"),
        ({"evict": {"decay": 0.5, "ttl": 9}}, "`show_click`"),
    ],
)
def test_an_option_without_effect_says_what_it_needs(values, needed):
    [options] = values.values()
    name = next(k for k in options if k not in ("probability", "ttl"))
    message = re.escape(
        f"`{name}` has no effect without {needed}, got {options[name]!r}."
    )
    with pytest.raises(ValueError, match=message):
        ctr.from_anything(values)


def test_options_that_are_left_out_have_their_defaults():
    plain = ctr.from_anything({})
    assert plain.storage.window == 1 and plain.storage.storage() is None
    storage = ctr.from_anything({"storage": {"device_rows": 9}}).storage
    assert storage.window == 8 and storage.storage() == embed.Storage(9)
    evict = ctr.from_anything({"evict": {"ttl": 9, "show_click": 0.8}}).evict
    assert evict.policies() == (embed.TTL(9), embed.ShowClick(every=1000))
    admit = ctr.from_anything({"admit": {"min_count": 2}}).admit
    assert admit.policy() == embed.MinCount(2)


def test_policies_reach_the_tables():
    values = {
        "data": {"rows": 2000, "eval_rows": 500, "vocabulary": [20, 3000], "zipf": 0.5},
        "batch_size": 100,
        "model": {"name": "lr"},
        "admit": {"min_count": 2},
        "evict": {"ttl": 4, "every": 5, "lfu": 300, "show_click": 0.0},
    }
    config = ctr.from_anything(values)
    assert config.evict.policies() == (
        embed.TTL(4, 5), embed.ShowClick(0.98, 0.0, every=5), embed.LFU(300, 5),
    )  # fmt: skip
    result = ctr.main(config)
    assert result["planner/refused"] > 500
    assert result["planner/evicted_rows"] > 100
    gone = result["planner/inserted"] - result["planner/evicted_rows"]
    assert result["unique_keys"] == gone


def test_the_rate_of_merging_reaches_the_disk(tmp_path):
    values = {"device_rows": 9, "host_bytes": "1MB", "disk": str(tmp_path)}
    config = ctr.from_anything({"storage": values | {"merge_rate": "2MB"}})
    assert config.storage.storage().merge_rate == 2_000_000


def test_two_ways_to_admit_keys_are_one_too_many():
    with pytest.raises(ValueError, match="`min_count` and `probability` are two ways"):
        ctr.from_anything({"admit": {"min_count": 2, "probability": 0.5}})


def test_several_processes_do_not_export(monkeypatch, tmp_path):
    monkeypatch.setattr("shardjax.processes.process_count", lambda: 2)
    config = ctr.Config(export=tmp_path / "model")
    with pytest.raises(ValueError, match="`export` is for one process.* run has 2"):
        ctr.run(config)
