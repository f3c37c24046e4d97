"""Checkpoints that several processes write, and others read."""

import json

import numpy as np

from tests.cluster import run_cluster

PROGRAM = """
{start}
from tests.checkpoint import jointly_run
jointly_run.main({mesh!r}, {folder!r}, {disk!r}, {restore})
"""


def run(tmp_path, processes: int, mesh: str, folder, restore: bool):
    disk = str(tmp_path / f"disk{processes}{restore}")
    start = "start()" if processes > 1 else ""
    program = PROGRAM.format(
        start=start, mesh=mesh, folder=str(folder), disk=disk, restore=restore
    )
    found = []
    devices = 8 // processes
    for end in run_cluster(program, processes, devices, limit=240, whole=True):
        [line] = [x for x in end.stdout.splitlines() if x.startswith("FOUND ")]
        found.append(json.loads(line[6:]))
    return found


def all_rows(found):
    """Rows of all processes, each once."""
    out: dict = {}
    for each in found:
        for table, rows in each["rows"].items():
            known = out.setdefault(table, {})
            assert not known.keys() & rows.keys()
            known |= rows
    return out


def test_what_two_processes_save_one_and_four_go_on_from(tmp_path, request):
    folder = tmp_path / "run"
    saved = run(tmp_path, 2, "8x1", folder, restore=False)
    assert all(each["steps"] == [3, 6, 9] for each in saved)
    counts = (1, 2, 4) if request.config.getoption("--all-combinations") else (1, 4)
    found = {n: run(tmp_path, n, "8x1", folder, restore=True) for n in counts}
    rows = all_rows(found[1])
    assert {name: len(x) > 10 for name, x in rows.items()} == dict.fromkeys(rows, True)
    for parts in found.values():
        assert all_rows(parts) == rows
        for each in parts:
            np.testing.assert_allclose(each["losses"], saved[0]["losses"], atol=1e-6)
    if 2 in found:  # bit for bit
        assert found[2][0]["losses"] == saved[0]["losses"]
