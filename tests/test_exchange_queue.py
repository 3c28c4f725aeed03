"""The order in which exchanges go on, without any communication."""

import pytest
import torch

from ppe_ddp.compression import Link
from ppe_ddp.compression.compressor_reduction import ExchangeQueue
from ppe_ddp.errors import CommunicationError


class Message:
    def __init__(self):
        self.is_there = False

    def is_completed(self):
        return self.is_there

    def wait(self):
        self.is_there = True


def exchange(log, name, messages):
    for number, message in enumerate(messages):
        log.append((name, number))
        yield message
    log.append((name, "end"))


def queue_of(waited):
    def wait(message, _device):
        waited.append(message)
        message.wait()

    return ExchangeQueue(wait)


def link():
    return Link(None, 0, 2, torch.device("cpu"))


def test_rounds_of_several_buckets_alternate():
    log = []
    queue = queue_of([])
    pending = [
        queue.start(exchange(log, name, [Message(), Message()]), [link()], torch.device("cpu")) for name in "abcd"
    ]
    for one in pending:
        one.wait()
    assert log == [
        ("a", 0), ("b", 0), ("a", 1), ("c", 0), ("b", 1), ("d", 0), ("a", "end"), ("c", 1), ("b", "end"), ("d", 1),
        ("c", "end"), ("d", "end"),
    ]  # fmt: skip


def test_the_order_does_not_depend_on_when_messages_arrive():
    logs = []
    for ready in ([], [0], [1], [0, 1, 2], [2]):
        log, queue, pending = [], queue_of([]), []
        for k, name in enumerate("abc"):
            messages = [Message() for _ in range(k + 1)]
            for message in messages:
                message.is_there = k in ready
            pending.append(queue.start(exchange(log, name, messages), [link()], torch.device("cpu")))
        for one in reversed(pending):
            one.done()
            one.wait()
        logs.append(log)
    assert all(log == logs[0] for log in logs)


def test_who_asks_does_not_wait_and_advances_what_is_there():
    log, waited = [], []
    queue = queue_of(waited)
    first, second = Message(), Message()
    pending = queue.start(exchange(log, "a", [first, second]), [link()], torch.device("cpu"))
    assert not pending.done()
    assert log == [("a", 0)]
    first.is_there = True
    assert not pending.done()
    assert log == [("a", 0), ("a", 1)]
    assert not pending.done()
    second.is_there = True
    assert pending.done()
    assert log[-1] == ("a", "end")


def test_a_bucket_is_not_launched_before_the_one_two_ahead_has_its_round():
    queue = queue_of([])
    messages = [Message() for _ in range(2)]
    for name, message in zip("ab", messages, strict=True):
        assert queue.is_ready()
        queue.start(exchange([], name, [message]), [link()], torch.device("cpu"))
    assert not queue.is_ready()
    messages[0].is_there = True
    assert queue.is_ready()


def test_what_was_abandoned_is_neither_waited_for_nor_resumed():
    log, waited = [], []
    queue = queue_of(waited)
    pending = queue.start(exchange(log, "a", [Message()]), [link()], torch.device("cpu"))
    queue.abandon()
    assert pending.done()
    pending.wait()
    queue.start(exchange(log, "b", [Message()]), [link()], torch.device("cpu")).wait()
    assert log == [("a", 0), ("b", 0), ("b", "end")]
    assert len(waited) == 1


def test_an_error_that_was_only_asked_for_is_raised_by_the_wait():
    def fail(_message, _device):
        raise CommunicationError("rank 1 has failed")

    queue = ExchangeQueue(fail)
    message = Message()
    pending = [queue.start(exchange([], name, [message]), [link()], torch.device("cpu")) for name in "ab"]
    message.is_there = True
    for one in pending:
        for ask in (one.done, one.done, one.wait, one.wait):
            with pytest.raises(CommunicationError, match="rank 1 has failed"):
                ask()


def test_an_error_of_a_compressor_that_was_only_asked_for_is_raised_by_the_wait():
    def exchange_that_fails(message):
        yield message
        raise ValueError("not today")

    queue, message = queue_of([]), Message()
    pending = queue.start(exchange_that_fails(message), [link()], torch.device("cpu"))
    message.is_there = True
    for ask in (pending.done, pending.wait):
        with pytest.raises(ValueError, match="not today"):
            ask()
    queue.abandon()
    again = queue.start(exchange([], "a", [message]), [link()], torch.device("cpu"))
    again.wait()
    assert again.done()
