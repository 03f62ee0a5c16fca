"""A fair lock goes to a thread that waits for it."""

from __future__ import annotations

import threading
import time

from dsv3_jax.engine.loop import FairLock

SECONDS = 30


def test_who_waits_is_next():
    for _ in range(100):
        lock, order = FairLock(), []

        def wait(lock=lock, order=order):
            with lock:
                order.append("waited")

        thread = threading.Thread(target=wait)
        with lock:
            thread.start()
            while not lock._next.locked():
                time.sleep(0)
        with lock:  # at once
            order.append("had it before")
        thread.join(SECONDS)
        assert order == ["waited", "had it before"]


def test_one_at_a_time_and_free_after_an_error():
    lock, counts = FairLock(), [0]

    def work():
        for _ in range(2000):
            with lock:
                count = counts[0]
                threading.Event().wait(0)
                counts[0] = count + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert counts == [8000]
    try:
        with lock:
            raise ValueError
    except ValueError:
        pass
    with lock:
        pass
