"""Processes of unequal speed train what equal parts train, and a program that does so."""

import json
import sys

import numpy as np
import pytest

from experiments import config as configs
from experiments.ctr import Config, from_anything
from shardjax.mesh import make_mesh
from tests.cluster import cluster, free_port, run_cluster

PROGRAM = """
start()
import json
import optax
import shardjax as sj
from shardjax import embed, train
from shardjax.data import Batch, BlockShare, InMemory, Loader, Share
from shardjax.metrics import Sum
from shardjax.network import Network
from shardjax.state import compute_metrics, init_state

class Clicks:
    feature_names, n_dense = ("item", "bag"), 2

    def chunks(self, start_chunk=0):
        rng = np.random.default_rng(1)
        lengths = rng.integers(0, 3, 1000)
        bag = embed.Jagged(rng.integers(0, 60, lengths.sum()), lengths)
        yield Batch(rng.integers(0, 2, 1000), rng.normal(size=(1000, 2)),
                    rng.integers(0, 60, (1, 1000)), ("item",), {"bag": bag})

def apply(params, state, dense, embeddings, *, train):
    x = jax.numpy.concatenate([dense, embeddings["item"], embeddings["bag"]], 1)
    return jax.numpy.tanh(x @ params["in"]) @ params["out"], state

def run(share):
    table = embed.TableSpec("item", dim=4, optimizer=embed.rowwise_adagrad(0.1))
    features = {"item": embed.FeatureSpec(table),
                "bag": embed.FeatureSpec(table, combiner="mean")}
    collection = embed.EmbeddingCollection(features, mesh=sj.make_mesh("8x1"))
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(10, 8)), "out": rng.normal(size=8)}
    network = Network(apply, jax.tree.map(np.float32, params), {})
    tx, sizes, losses, examples = optax.sgd(0.1), [], [], 0
    state = init_state(network, tx, collection, {"weights": Sum("weights")})
    def noted(part):
        sizes.append(part.size)
        return part
    blocks = isinstance(share, BlockShare)
    step = train.make_train_step(network, tx, collection,
                                 microbatch_size=2 if blocks else None, skip_padding=blocks)
    loader = Loader(InMemory(Clicks()), 110, shuffle_seed=3, shuffle="global", share=share,
                    stream=train.prepare_stream(collection, train=True, check=noted),
                    window=2, prefetch=2)
    while loader.epoch < 4:
        for batch in loader:
            state, info = step(state, batch)
            losses.append(float(info["loss"]))
            examples += batch.size
            if blocks:  # process 1 takes three times as long, and then no longer
                share.observe(3.0 if INDEX == 1 and loader.epoch < 2 else 1.0, 1)
    read = collection.lookup_rows(state.tables, "item", np.arange(60))
    out = {"losses": losses, "sizes": sizes, "examples": examples,
           "metrics": compute_metrics(state.metrics),
           "item": np.asarray(read["rows"]).astype(float).tolist(),
           "found": read["found"].tolist(),
           "params": [np.asarray(x).tolist() for x in jax.tree.leaves(state.params)]}
    collection.close()
    return out

own = Share(INDEX, COUNT, DEVICES)
with processes.watch():
    print("FOUND " + json.dumps([run(own), run(BlockShare(own, 2, every=2))]))
"""


@pytest.mark.multiprocess
def test_unequal_parts_train_what_equal_ones_train():
    ended = run_cluster(PROGRAM, 2, 4, limit=240, whole=True)
    found = []
    for end in ended:
        [line] = [x for x in end.stdout.splitlines() if x.startswith("FOUND ")]
        found.append(json.loads(line[6:]))
    for equal, balanced in found:
        for name in ("losses", "item", "params"):
            assert_close(balanced[name], equal[name])
        assert balanced["found"] == equal["found"]
        assert balanced["examples"] == equal["examples"] == 4 * 1000
        assert balanced["metrics"] == pytest.approx(equal["metrics"])
    (_, first), (_, second) = found
    assert first["losses"] == second["losses"]
    a, b = np.array(first["sizes"]), np.array(second["sizes"])
    # 9 batches of 110, which blocks of 8 do not divide, and one of 10
    assert ((a + b).reshape(4, 10) == [[110] * 9 + [10]]).all()
    assert (a[0], b[0]) == (56, 54)
    assert set(zip(a[12:19].tolist(), b[12:19].tolist(), strict=True)) == {(88, 22)}
    assert set(a[-4:-1].tolist()) <= {56, 54}  # it has its share back
    assert b[12:19].min() > 0


def assert_close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-6)


@pytest.mark.multiprocess
def test_the_program_balances():
    command = [
        sys.executable, "-m", "experiments.ctr", "--mesh", "2x1", "--model.name", "lr",
        "--data.rows", "3000", "--data.eval-rows", "100", "--data.balance", "4",
        "--data.vocabulary", "300", "20", "--batch-size", "128",
        "--num-processes", "2", "--coordinator", f"localhost:{free_port()}",
    ]  # fmt: skip
    with cluster([[*command, "--process-id", str(p)] for p in range(2)]) as running:
        ended = running.wait(120)
    assert [e.rc for e in ended] == [0, 0], [e.stderr[-2000:] for e in ended]
    result = json.loads(ended[0].last)
    assert result["examples"] == result["planner/examples"] == 3000
    assert result["steps"] == 24
    # the last batch has 56 rows, 4 blocks of 16
    assert result["balance/most_blocks"] + result["balance/least_blocks"] == 4
    assert 0.4 < result["eval/auc"] < 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {"balance": 0}}, "`balance` must be positive, got 0"),
        (
            {"data": {"balance": 4}, "microbatch_size": 8},
            "`microbatch_size` and `data.balance` exclude each other.* got 8 and 4",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        from_anything(values)
    assert configs.to_dict(Config())["data"]["balance"] is None


def test_balance_needs_several_processes_and_a_row_per_block(monkeypatch):
    from experiments.cluster import block_share
    from shardjax import processes

    mesh = make_mesh("4x1")
    with pytest.raises(
        ValueError, match="several processes, and this run has one. Leave"
    ):
        block_share(mesh, 512, 8)
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="got 8 blocks with `batch_size` 31. Give 7 blocks at most"
    ):
        block_share(mesh, 31, 8)
    share = block_share(mesh, 512, 8)
    assert (share.block_size, share.share.devices, share.room(512)) == (16, 2, 16)
