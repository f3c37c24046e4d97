"""A run whose rows do not fit into the RAM it is given, beside one that has enough.

    python benchmarks/larger_than_ram.py

Trains `experiments.ctr` on synthetic clicks that touch more than 30 M keys (dim 16 and the
state of rowwise Adagrad): with 200,000 rows on the devices, 512 MB of RAM and the rest on disk;
with half of that RAM more, which tells how much of the process's memory the budget is; with all
rows off the devices in RAM; and on few keys, for what the program takes without rows. Each is a
process of its own, whose resident memory is read five times a second: in all, and of memory
that is not a file's. Prints a table and, as the last line, JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = ["100", "1000", "10000"]


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind, of /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon")}


def run(arguments: list[str]) -> dict:
    """Runs the program; its result, with the peaks of its memory."""
    words = [sys.executable, "-m", "experiments.ctr", *arguments]
    peaks = {"VmRSS": 0, "RssAnon": 0}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=sys.stderr)
        while process.poll() is None:
            try:
                now = memory(process.pid)
            except (OSError, KeyError):  # it has just ended
                break
            peaks = {name: max(peaks[name], now[name]) for name in peaks}
            time.sleep(0.2)
        if process.wait():
            raise SystemExit(f"{' '.join(words)} failed")
        out.seek(0)
        return json.loads(out.read().splitlines()[-1]) | peaks


def main():
    """Runs the three and prints what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="examples")
    parser.add_argument("--ids", type=int, default=20_000_000, help="per large feature")
    parser.add_argument("--device-rows", type=int, default=200_000)
    parser.add_argument("--host-mb", type=int, default=512, help="RAM for rows")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--mesh", default="2x1")
    parser.add_argument("--disk", help="folder for the rows on disk; a temporary one")
    args = parser.parse_args()
    folder = Path(args.disk or tempfile.mkdtemp())
    common = [
        "--mesh", args.mesh, "--batch-size", "8192", "--data.zipf", "0.6",
        "--data.rows", str(args.rows),
    ]  # fmt: skip
    large = ["--data.vocabulary", *SMALL, *[str(args.ids)] * 5]
    few = ["--data.vocabulary", *SMALL, *["1000"] * 5, "--steps", "60"]
    storage = [
        "--storage.device-rows", str(args.device_rows), "--storage.lookahead",
        str(args.lookahead),
    ]  # fmt: skip
    disk = ["--storage.disk", str(folder), "--storage.host-bytes"]
    more = args.host_mb * 3 // 2
    results = {"few keys": run([*common, *few])}
    for budget in (args.host_mb, more):
        words = [*common, *large, *storage, *disk, f"{budget}MB"]
        results[f"{budget} MB, disk"] = run(words)
    results["RAM"] = run([*common, *large, *storage])
    shutil.rmtree(folder, ignore_errors=True)
    base = results["few keys"]["RssAnon"]
    print(
        f"{'':14}{'examples/s':>11}{'AUC':>9}{'keys':>11}{'RSS GB':>8}{'no files':>9}"
        f"{'above few keys':>16}{'counted':>9}"
    )
    for name, r in results.items():
        above = (r["RssAnon"] - base) / 1e6
        counted = (r.get("tiers/host_bytes", 0) + r.get("tiers/index_bytes", 0)) / 1e6
        print(
            f"{name:14}{r['examples_per_s']:>11}{r['eval/auc']:>9.5f}{r['unique_keys']:>11}"
            f"{r['VmRSS'] / 1e9:>8.2f}{r['RssAnon'] / 1e9:>9.2f}{above:>13.0f} MB"
            f"{counted:>6.0f} MB"
        )
    first, second = (results[f"{mb} MB, disk"] for mb in (args.host_mb, more))
    step = (second["RssAnon"] - first["RssAnon"]) / 1e6
    print(f"{more - args.host_mb} MB more for rows take {step:.0f} MB more")
    tiers = {k: v for k, v in first.items() if k.startswith("tiers/")}
    for name, value in tiers.items():
        print(f"  {name} {value}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
