"""Variants of a benchmark, each in a process of its own."""

import json
import os
import subprocess


def run_worker(name: str, command: list[str], platform: str) -> dict:
    """Runs a variant; returns the JSON object that it prints last."""
    env = {**os.environ, "JAX_PLATFORMS": platform}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
