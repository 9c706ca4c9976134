"""Clocks, power, temperature, memory and throttling of the GPUs during a measurement, by NVML.

Absent without a driver or without the extra ``gpu`` (nvidia-ml-py); that is said, not guessed.
Only what this machine's driver shows is sampled: an engine on another host has none here. Units:
Hz, W, degrees Celsius, bytes; throttle reasons are NVML's bit mask of those that slow a GPU down
(power cap, heat, hardware), idling not counted.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from netem.access import own_addresses
from netem.rtnetlink import Rtnetlink

PERIOD_S = 0.2
#: nvmlClocksEventReasonGpuIdle, ...ApplicationsClocksSetting and ...SyncBoost slow nothing down.
_HARMLESS_REASONS = 0x1 | 0x2 | 0x10


@dataclass(frozen=True, slots=True)
class GpuSample:
    """All GPUs at one instant: means over them, but the hottest, and reasons of any."""

    mono_ns: int
    sm_clock_hz: float
    memory_clock_hz: float
    power_w: float
    temperature_c: float
    memory_used_bytes: int
    throttle_reasons: int


class Gpus:
    """Context manager: a thread that samples, unless there is a reason not to. ``absent`` says why
    there is nothing to sample."""

    def __init__(
        self, wanted: bool = True, unwanted_because: str = "the engine is emulated"
    ) -> None:
        self._wanted, self._because = wanted, unwanted_because
        self._nvml: Any = None  # the module, which publishes no types
        self._handles: list[Any] = []
        self._samples: list[GpuSample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.absent: str | None = None
        self.driver: str | None = None
        self.names: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        if not self._wanted:
            self.absent = self._because
            return self
        try:
            import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed (pip install 'prfaas-bench[gpu]')"
            return self
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.absent = f"no NVIDIA driver answers ({error})"
            return self
        self._nvml = pynvml
        self.driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self.names = tuple(_text(pynvml.nvmlDeviceGetName(one)) for one in self._handles)
        self._thread = threading.Thread(target=self._sample, name="nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._nvml.nvmlShutdown()

    def between(self, start_mono_ns: int, end_mono_ns: int) -> GpuSample | None:
        """What the samples of a span come to; None where there are none."""
        return combined([s for s in self._samples if start_mono_ns <= s.mono_ns <= end_mono_ns])

    def _sample(self) -> None:
        while not self._stop.is_set():
            try:
                self._samples.append(self._now())
            except self._nvml.NVMLError as error:
                self.absent = f"NVML stopped answering ({error})"
                return
            self._stop.wait(PERIOD_S)

    def _now(self) -> GpuSample:
        nvml, handles = self._nvml, self._handles
        reasons = 0
        for one in handles:
            reasons |= nvml.nvmlDeviceGetCurrentClocksThrottleReasons(one)
        return GpuSample(
            time.monotonic_ns(),
            1e6 * fmean(nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_SM) for one in handles),
            1e6 * fmean(nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_MEM) for one in handles),
            1e-3 * fmean(nvml.nvmlDeviceGetPowerUsage(one) for one in handles),
            max(nvml.nvmlDeviceGetTemperature(one, nvml.NVML_TEMPERATURE_GPU) for one in handles),
            max(nvml.nvmlDeviceGetMemoryInfo(one).used for one in handles),
            reasons & ~_HARMLESS_REASONS,
        )


def combined(samples: Sequence[GpuSample]) -> GpuSample | None:
    """Means, and the worst of temperature, memory and reasons."""
    if not samples:
        return None
    reasons = 0
    for one in samples:
        reasons |= one.throttle_reasons
    return GpuSample(
        samples[-1].mono_ns,
        fmean(one.sm_clock_hz for one in samples),
        fmean(one.memory_clock_hz for one in samples),
        fmean(one.power_w for one in samples),
        max(one.temperature_c for one in samples),
        max(one.memory_used_bytes for one in samples),
        reasons,
    )


def elsewhere(urls: Sequence[str]) -> str | None:
    """Why this machine's GPUs say nothing of the engines at ``urls``; None where all are here."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        if not _is_here(host):
            return f"the engine is on another host ({host})"
    return None


def _is_here(host: str) -> bool:
    """Whether a name or address is this machine's; one that nobody resolves is not."""
    try:
        found = {str(told[4][0]).partition("%")[0] for told in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    addresses = {ipaddress.ip_address(one) for one in found}
    if any(one.is_loopback for one in addresses):
        return True
    with Rtnetlink() as route:
        return not addresses.isdisjoint(own_addresses(route))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
