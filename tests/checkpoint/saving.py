"""Steps to save."""

FILES = {"a.bin": b"abc", "deep/er/b.bin": bytes(range(200)), "deep/empty": b""}


def fill(directory, files=FILES):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def save(folder, step, details=None, files=FILES, **how):
    fill(folder.begin(step), files)
    folder.commit(step, {} if details is None else details, **how)
