"""The store that the ranks share."""

from datetime import timedelta

from torch import distributed as dist

from .scheduler import Scheduler, Unsound


class SimulatedStore(dist.Store):
    """A store that answers every call at once; another rank may come before it."""

    def __init__(self):
        super().__init__()
        self._values = {}
        self._deleted = set()

    def _begin(self, what, key):
        scheduler = Scheduler.current
        if scheduler is not None and scheduler.task is not None:
            scheduler.interrupt()
            scheduler.task.has_asked = True
            if what:
                scheduler.note("store", what, key)
                scheduler.change(in_store=True)

    def _await(self, arrived, seconds, keys):
        def look():
            Scheduler.current.task.has_asked = True
            return arrived()

        self._begin("", "")
        if not Scheduler.current.wait(look, seconds):
            raise dist.DistStoreError(f"wait timeout for {keys}")

    def set(self, key, value):
        self._begin("set", key)
        self._values[key] = bytes(value)

    def add(self, key, amount):
        self._begin("add" if amount else "", key)
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def compare_set(self, key, expected, value):
        self._begin("compare_set", key)
        if self._values.get(key, b"") == bytes(expected):
            self._values[key] = bytes(value)
        return self._values.get(key, bytes(expected))

    def get(self, key):
        def is_there():
            if key in self._deleted - self._values.keys():
                raise Unsound(f"{key} is read after it was deleted: a real store would wait")
            return key in self._values

        self._await(is_there, 300.0, key)
        return self._values[key]

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def check(self, keys):
        self._begin("", "")
        return all(key in self._values for key in keys)

    def wait(self, keys, timeout=timedelta(seconds=300)):
        self._await(lambda: all(key in self._values for key in keys), timeout.total_seconds(), keys)

    def deleteKey(self, key):  # torch's name
        self._begin("delete", key)
        self._deleted.add(key)
        return self._values.pop(key, None) is not None

    delete_key = deleteKey

    def has_extended_api(self):
        return True
