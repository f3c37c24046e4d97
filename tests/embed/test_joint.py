"""Tables over several processes: the same as in one."""

import itertools
import json
import tempfile

import numpy as np
import pytest

from shardjax.embed.drafting import TIER_COUNTERS
from tests.cluster import run_cluster

PROGRAM = """
{start}
from tests.embed import joint_run
joint_run.main({mesh!r}, {tiers}, {disk!r})
"""


def run(processes: int, devices: int, mesh: str, tiers: bool):
    """What `joint_run` finds in each process."""
    with tempfile.TemporaryDirectory() as disk:
        start = "start()" if processes > 1 else ""
        program = PROGRAM.format(start=start, mesh=mesh, tiers=tiers, disk=disk)
        ended = run_cluster(program, processes, devices, limit=240, whole=True)
    found = []
    for end in ended:
        [line] = [x for x in end.stdout.splitlines() if x.startswith("FOUND ")]
        found.append(json.loads(line[6:]))
    return found


def counted(found) -> dict[str, float]:
    """Counters that do not depend on how much RAM there is in all."""
    return {k: n for k, n in found["counters"].items() if k not in TIER_COUNTERS}


def total(found, name):
    return {key: sum(each[name][key] for each in found) for key in found[0][name]}


def pytest_generate_tests(metafunc):
    """One run of two processes; with `--all-combinations` all numbers and meshes."""
    names = ("processes", "mesh", "tiers")
    if set(names) <= set(metafunc.fixturenames):
        cases = [(2, "8x1", True)]
        if metafunc.config.getoption("--all-combinations"):
            meshes = ("8x1", "1x8", "4x2", "2x4")
            cases = list(itertools.product((2, 4), meshes, (True, False)))
        metafunc.parametrize(names, cases)


def test_processes_train_tables_as_one_does(processes, mesh, tiers):
    [alone] = run(1, 8, mesh, tiers)
    found = run(processes, 8 // processes, mesh, tiers)
    for each in found:
        np.testing.assert_allclose(each["losses"], alone["losses"], atol=1e-6)
        assert counted(each) == counted(alone)
        for name in ("eval", "train"):
            assert each[name] == pytest.approx(alone[name], abs=1e-6)
        for name in ("shrunk", "found"):
            assert each[name] == alone[name]
        for name in ("item", "small"):
            np.testing.assert_allclose(each[name], alone[name], atol=1e-6)
            assert each[name] == found[0][name]
        assert each["params"] == found[0]["params"]
    copied = {"small": processes * alone["keys"]["small"]}
    assert total(found, "keys") == alone["keys"] | copied
    assert total(found, "exported") == alone["exported"]
    assert alone["counters"]["refused"] and alone["counters"]["bad_ids"]
    assert alone["counters"]["evicted_rows"] and alone["eval"]["unseen"]
    if tiers:
        assert alone["counters"]["disk_hits"] and alone["counters"]["host_hits"]
