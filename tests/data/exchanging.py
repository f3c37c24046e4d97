"""Processes of tests: threads of one, which exchange bytes when all of them have come."""

import threading
from concurrent.futures import ThreadPoolExecutor


class Threads:
    """An exchange between threads; the longest message is noted.

    Args:
      processes: how many there are.
    """

    def __init__(self, processes):
        self._barrier = threading.Barrier(processes, timeout=20)
        self._sent = [[] for _ in range(processes)]
        self.most_bytes = self.calls = 0

    def exchange_of(self, process):
        """The exchange of one of them."""

        def exchange(messages):
            self._sent[process] = messages
            self._barrier.wait()
            received = [messages[process] for messages in self._sent]
            if process == 0:
                self.calls += 1
                self.most_bytes = max(len(m) for sent in self._sent for m in sent)
            self._barrier.wait()
            return received

        return exchange

    def run(self, work):
        """Runs `work(process, exchange)` in all; gives what they return, or raises what
        the first that failed has raised."""
        processes = range(len(self._sent))
        with ThreadPoolExecutor(len(processes)) as pool:
            jobs = [pool.submit(work, p, self.exchange_of(p)) for p in processes]
        self.errors = [job.exception() for job in jobs]
        return [job.result() for job in jobs]
