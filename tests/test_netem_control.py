"""Helpers that die, fall silent or meet a broken path: one paragraph, in bounded time."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from own_children import own_children

from netem.check import measure_path
from netem.control import helper
from netem.link import LinkError, symmetric
from netem.testlink import open_link

WAY = {"rate_bytes_per_s": 25e6, "delay_s": 0.01, "limit_bytes": 1 << 20}
WINDOW = {"warm_up_s": 0.1, "bulk_s": 0.1}
RELAY = {"near_to_far": WAY, "far_to_near": WAY}


def one_paragraph(failure: pytest.ExceptionInfo[LinkError]) -> str:
    said = str(failure.value)
    assert "\n" not in said
    assert "Traceback" not in said
    assert 'File "' not in said
    return said


def test_a_helper_that_cannot_start_says_its_error_in_one_line() -> None:
    with (
        pytest.raises(LinkError) as failure,
        helper("the link relay", ["netem.relay"], {"near_to_far": WAY}),
    ):
        pass
    said = one_paragraph(failure)
    assert said == "the link relay ended with status 1 while starting: KeyError: 'far_to_near'"


def test_a_helper_that_dies_of_a_request_names_the_request() -> None:
    with helper("the link relay", ["netem.relay"], RELAY) as (relay, _):
        with pytest.raises(LinkError) as failure:
            relay.ask({"op": "listen", "host": "127.0.0.1", "port": 1, "server_site": []})
        assert "status 1 while answering 'listen': TypeError: " in one_paragraph(failure)


def test_a_helper_that_was_killed_is_reported_every_time() -> None:
    with helper("the link relay", ["netem.relay"], RELAY) as (relay, _):
        relay.process.kill()
        for _ in range(3):
            with pytest.raises(LinkError) as failure:
                relay.ask({"op": "counters"})
            assert "status -9 while answering 'counters'" in one_paragraph(failure)


def test_a_helper_that_is_stopped_is_not_waited_for() -> None:
    with helper("the link relay", ["netem.relay"], RELAY, timeout_s=3.0) as (relay, _):
        relay.process.send_signal(signal.SIGSTOP)
        with pytest.raises(LinkError) as failure:
            relay.ask({"op": "counters"})
        assert "no answer within 3 s while answering 'counters'" in one_paragraph(failure)
        with pytest.raises(LinkError, match="status -9"):
            relay.ask({"op": "counters"})


def test_a_helper_that_talks_nonsense_is_ended(tmp_path: Path) -> None:
    module = tmp_path / "babbler.py"
    module.write_text("import sys\nprint('hello')\nsys.stdin.read()\n")

    def in_its_folder(argv: Sequence[str], **options: Any) -> Any:
        assert argv[0] == sys.executable
        return psutil.Popen([argv[0], str(module)], **options)

    with (
        pytest.raises(LinkError) as failure,
        helper("the babbler", ["babbler"], {}, popen=in_its_folder),
    ):
        pass
    assert "the babbler said 'hello' while starting" in one_paragraph(failure)


def test_a_probe_names_its_site_and_what_it_was_measuring() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with helper("the link probe in site near", ["netem.probe"], {"host": "127.0.0.1"}) as (
        probe,
        _,
    ):
        with pytest.raises(LinkError) as failure:
            probe.ask({"op": "rate", "peer": ["127.0.0.1", port], "flows": 2} | WINDOW)
        said = one_paragraph(failure)
        assert said.startswith("the link probe in site near: measuring the rate of 2 connections")
        assert f"127.0.0.1:{port}" in said
        assert "ConnectionRefusedError" in said


def test_a_relay_that_dies_under_a_measurement_is_one_paragraph() -> None:
    """Whoever notices first, probe or relay, says so."""
    with open_link(symmetric("test", 25e6, 0.01), "relay") as link:
        (relay,) = own_children()
        # Past the start of the probes, so that they measure when it dies.
        threading.Timer(0.8, os.kill, (relay.pid, signal.SIGKILL)).start()
        with pytest.raises(LinkError) as failure:
            measure_path(link.path)
        said = one_paragraph(failure)
        assert "in site" in said or "between the sites ended" in said
        with pytest.raises(LinkError, match="between the sites ended with status -9"):
            link.counters()
