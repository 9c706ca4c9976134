"""Numbered datagrams: the verdict on known orders, and real ones over loopback."""

import itertools
import select
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.datagrams import (
    Tally,
    echo,
    judge,
    received,
    receiver,
    return_echoes,
    round_trips_s,
    send,
    tally,
)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([0, 1, 2, 3], Tally(4, 0, 0, 0)),
        ([], Tally(4, 4, 0, 0)),
        ([0, 2, 3], Tally(4, 1, 0, 0)),
        ([3, 0, 1, 2], Tally(4, 0, 0, 1)),  # one overtook three
        ([1, 2, 3, 0], Tally(4, 0, 0, 1)),  # one was overtaken by three
        ([0, 1, 1, 3, 0], Tally(4, 1, 2, 0)),  # a late copy is a copy, not out of order
        ([3, 2, 1, 0], Tally(4, 0, 0, 3)),
    ],
)
def test_the_verdict_on_known_orders(numbers: list[int], found: Tally) -> None:
    assert judge(4, numbers) == found


def test_what_the_receiver_dropped_was_not_lost_on_the_way() -> None:
    assert judge(10, [0, 1, 2], receiver_dropped=5).lost == 2


@given(st.permutations(range(7)), st.integers(min_value=0, max_value=7))
def test_reordering_is_the_least_that_must_be_taken_out(numbers: list[int], kept: int) -> None:
    arrived = numbers[:kept]
    in_order = max(
        size
        for size in range(kept + 1)
        if any(list(some) == sorted(some) for some in itertools.combinations(arrived, size))
    )
    assert judge(7, arrived) == Tally(7, 7 - kept, 0, kept - in_order)


def test_datagrams_over_loopback_all_arrive_in_order() -> None:
    with receiver("127.0.0.1") as sink:
        send(sink.getsockname(), 2000, 50_000)
        assert tally(sink, 2000) == Tally(2000, 0, 0, 0)


def test_a_receiver_whose_buffer_overflows_is_not_taken_for_a_lossy_path() -> None:
    with receiver("127.0.0.1") as sink:
        sink.setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
        send(sink.getsockname(), 500, 1e9)
        found = tally(sink, 500)
        assert found.lost == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_round_trips_are_those_of_the_path(host: str) -> None:
    with receiver(host) as echoer:
        threading.Thread(target=echo, args=(echoer,), daemon=True).start()
        rtts_s = round_trips_s(echoer.getsockname(), every_s=0.001, span_s=0.1)
        assert len(rtts_s) >= 3
        assert 0 < min(rtts_s) < 0.01


def test_what_the_echoing_process_waits_for_is_not_of_the_path() -> None:
    """It wakes up a tenth of a second late each time; the path is loopback."""
    never, held_s = threading.Event(), 0.1
    with receiver("127.0.0.1") as echoer:

        def echo_late() -> None:
            while select.select([echoer], [], [], 3 * held_s)[0]:
                never.wait(held_s)
                return_echoes(echoer)

        late = threading.Thread(target=echo_late)
        late.start()
        rtts_s = round_trips_s(echoer.getsockname(), every_s=1.5 * held_s, span_s=3 * held_s)
        late.join()
    assert 0 < min(rtts_s) < held_s


def test_a_datagram_that_is_read_late_came_when_it_came() -> None:
    with receiver("127.0.0.1") as sink, socket.socket(type=socket.SOCK_DGRAM) as sender:
        before_s = time.monotonic()
        sender.sendto(bytes(64), sink.getsockname())
        select.select([sink], [], [])
        there_s = time.monotonic()
        threading.Event().wait(0.3)
        ((_, arrival_s, address),) = received(sink)
        assert before_s <= arrival_s < (there_s + time.monotonic()) / 2
        assert address == ("127.0.0.1", sender.getsockname()[1])


def test_a_path_that_returns_nothing_is_said_to() -> None:
    with receiver("127.0.0.1") as silent, pytest.raises(TimeoutError, match="too few echoes"):
        round_trips_s(silent.getsockname(), every_s=0.001, span_s=0.01, patience_s=0.05)
