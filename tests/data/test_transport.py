"""Bytes between real processes, and rows that lie with them."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from shardjax.data import DeviceExchange
from shardjax.data.transport import rounds

WORKER = """
import json, sys
import jax
import numpy as np

port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, process, initialization_timeout=60)

from jax.experimental.multihost_utils import process_allgather
from shardjax.data import DeviceExchange, LocalShuffle, Share, Synthetic, row_range

def agree(data):
    # Bytes of equal sizes, which is what is asked of it here.
    return [row.tobytes() for row in process_allgather(np.frombuffer(data, np.uint8))]

exchange = DeviceExchange(agree, round_bytes=1 << 14)
random = np.random.default_rng(0)
for sizes in ([[0, 0], [0, 0]], [[0, 3], [0, 0]], [[5, 20_001], [8192, 1]]):
    sent = [[random.bytes(size) for size in row] for row in sizes]
    assert exchange(sent[process]) == [row[process] for row in sent], sizes

# 700 rows here, 50 there; then none there.
rows, found = Synthetic(rows=750, vocabulary=(1000,), n_dense=1), []
for ends in ((0, 700, 750), (0, 750, 750)):
    own = row_range(rows, ends[process], ends[process + 1])
    loop = LocalShuffle(
        own, 100, Share(process, 2, 2), exchange, shuffle_seed=0, window_rows=200
    )
    parts = list(loop)
    found.append({
        "keys": np.concatenate([part.batch.fixed[0] for part in parts]).tolist(),
        "dense": np.concatenate([part.batch.dense[:, 0] for part in parts]).tolist(),
        "sizes": [[p.first_row, p.batch.size, p.global_rows] for p in parts],
    })
print(json.dumps(found))
"""


@pytest.mark.multiprocess
def test_two_processes_exchange_rows():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(p)], **pipes) for p in range(2)]
    try:
        results = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], results[0] + results[1]
    found = [json.loads(out.splitlines()[-1]) for out, _ in results]

    from shardjax.data import Synthetic

    rows = Synthetic(rows=750, vocabulary=(1000,), n_dense=1).read(0, 750)
    expected = sorted(
        zip(rows.fixed[0].tolist(), rows.dense[:, 0].tolist(), strict=True)
    )
    for epoch in range(2):
        got = [found[process][epoch] for process in range(2)]
        pairs = [zip(part["keys"], part["dense"], strict=True) for part in got]
        assert sorted([*pairs[0], *pairs[1]]) == expected
        assert got[0]["sizes"] == [[0, 50, 100]] * 7 + [[0, 50, 50]]
        assert got[1]["sizes"] == [[50, 50, 100]] * 7 + [[50, 0, 50]]


def test_one_process_sends_to_itself():
    exchange = DeviceExchange(lambda data: [data])
    assert exchange([b"abc"]) == [b"abc"]
    with pytest.raises(
        ValueError, match="one for each of 1 processes, got 2. Give b''"
    ):
        exchange([b"", b""])


def test_devices_are_one_of_each_process():
    with pytest.raises(ValueError, match=r"one of each of 1 processes, .* of \[0, 0\]"):
        DeviceExchange(lambda data: [data], devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="`round_bytes` must be at least 1, got 0"):
        DeviceExchange(lambda data: [data], round_bytes=0)


@pytest.mark.parametrize("words", [0, 1, 1023, 1024, 1025, 4096, 5000, 99_999])
def test_rounds_cover_all_words_in_few_sizes(words):
    found = rounds(words, 4096)
    assert sum(size for size, _ in found) >= words
    starts = np.cumsum([0, *(size for size, _ in found)])
    assert [at for _, at in found] == starts[:-1].tolist()
    assert {size for size, _ in found} <= {1024, 2048, 4096}
