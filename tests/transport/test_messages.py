"""Messages wait by tag, waits end by deadline or failure."""

import threading
import time

import pytest

from kt_ray.transport.messages import Aborted, Mailbox, Message, Stalled


def test_early_and_late_messages_are_taken_by_tag() -> None:
    box = Mailbox("worker 0")
    box.put(Message(("b", 1)))
    threading.Timer(0.05, box.put, [Message(("a", 1), facts={"late": True})]).start()
    assert box.take(("a", 1), 5.0).facts == {"late": True}
    assert box.take(("b", 1), 5.0).tag == ("b", 1)


def test_deadline_names_owner_tag_and_what_is_there() -> None:
    box = Mailbox("worker 3")
    box.put(Message(("other", 9)))
    with pytest.raises(Stalled, match=r"worker 3 waited 0 s for message \('a', 1\).*other"):
        box.take(("a", 1), 0.05)


def test_failure_wakes_the_waiter_and_stays_until_cleared() -> None:
    box = Mailbox("worker 0")
    threading.Timer(0.05, box.fail, ["expert actor 1 died"]).start()
    start = time.monotonic()
    with pytest.raises(Aborted, match="expert actor 1 died"):
        box.take(("a", 1), 30.0)
    assert time.monotonic() - start < 25
    with pytest.raises(Aborted):
        box.take(("a", 2), 30.0)
    box.clear()
    box.put(Message(("a", 3)))
    assert box.take(("a", 3), 1.0).tag == ("a", 3)


def test_a_tag_is_used_once() -> None:
    box = Mailbox("worker 0")
    box.put(Message(("a", 1)))
    with pytest.raises(RuntimeError, match="second message"):
        box.put(Message(("a", 1)))


def test_the_oldest_message_of_some_kinds() -> None:
    box = Mailbox("me")
    assert box.take_first(("a", "b"), 0.0) is None
    for tag in (("c", 1), ("b", 1), ("a", 1), ("b", 2)):
        box.put(Message(tag))
    taken = [box.take_first(("a", "b"), 0.0) for _ in range(4)]
    assert [m.tag if m else None for m in taken] == [("b", 1), ("a", 1), ("b", 2), None]
    assert box.take(("c", 1), 0.0).tag == ("c", 1)
    threading.Timer(0.05, lambda: box.put(Message(("a", 9)))).start()
    found = box.take_first(("a",), None)
    assert found is not None and found.tag == ("a", 9)
    threading.Timer(0.05, lambda: box.fail("a peer died")).start()
    with pytest.raises(Aborted, match="a peer died"):
        box.take_first(("a",), None)
