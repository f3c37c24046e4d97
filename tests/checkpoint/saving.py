"""Steps to save, and failures on the way."""

import os

FILES = {"a.bin": b"abc", "deep/er/b.bin": bytes(range(200)), "deep/empty": b""}


def fill(directory, files=FILES):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def save(folder, step, details=None, files=FILES, **how):
    fill(folder.begin(step), files)
    folder.commit(step, {} if details is None else details, **how)


def names(folder):
    return sorted(p.name for p in folder.path.iterdir() if p.name != "shardjax.lock")


def fail_at(monkeypatch, name, code, at=0):
    """Has a function of `os` fail from its call number `at` on."""
    calls, real = [], getattr(os, name)

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) > at:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, function)
    return calls
