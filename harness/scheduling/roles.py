"""Roles on the long time scale: which stage is short for minutes, and what split would carry more.

Every role period two questions are asked. What was measured: a stage is short whose instances (or
decode slots) were busy for at least ``SHORT`` of the period, or in front of which work waited for
longer than ``QUEUE_S`` on average. What would be better: over the lengths that came in the last
periods, with t the base threshold (Eqs. 3 to 7 of arXiv 2604.15039, in means of T, not T of means),

    prfaas(t)  = min(N_prfaas / E[T_prfaas; l > t], link_target C / E[S_kv; l > t])
    local(t)   = N_p / E[T_pd; l <= t]
    decode     = N_d BS_max / E[decoding time]
    Lambda     = max over t of min(prfaas, local, decode),   for each N_p with N_p + N_d fixed

An instance changes role, one at a time, when both answers agree for ``DWELL`` periods on end: the
stage is short, and one more instance of it would carry more by ``GAIN``. A burst makes a stage
short but does not change what the lengths say, nor does it last; a quiet system converts nothing,
however little its split fits. After a conversion the base threshold is solved again; between
conversions only when a stage is short, the new base would carry more by ``GAIN`` and is another by
``BASE_GAIN``: of a few hundred lengths the best base varies by a fifth either way.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.core import Role
from harness.scheduling.demand import Demand, PrefillSeconds

FloatArray = NDArray[np.float64]

#: A stage this busy over a whole period is short.
SHORT = 0.85
#: Mean wait in front of a stage that makes it short, whatever its busy time.
QUEUE_S = 30.0
#: What another plan must carry more, as a share, to be worth the change; twice that for the way
#: back. 300 lengths at a time see up to 7 % between the case study's two best splits, which by the
#: law differ by 0.5 %: it may change to the other, but not to and fro.
GAIN = 0.05
#: Factor by which a base must be off to be replaced without a conversion.
BASE_GAIN = 1.33
#: Periods on end in which the same change must be right.
DWELL = 3
#: Periods whose lengths are looked at, and the fewest requests that say something about them.
PERIODS, FEWEST = 5, 100


@dataclass(frozen=True, slots=True)
class RolesConfig:
    """What does not change. ``longest_tokens`` is the longest prompt; ``num_slots`` the decode
    batch of an instance. ``remote_prefill_s`` is None where there is no PrfaaS cluster."""

    longest_tokens: int
    role_period_s: float
    link_target: float
    num_slots: int
    remote_prefill_s: PrefillSeconds | None
    local_prefill_s: PrefillSeconds


@dataclass(frozen=True, slots=True)
class Stages:
    """What there is and how busy it is at an instant.

    Counts are of instances in service, ``num_remote`` and ``link_bytes_per_s`` of PrfaaS clusters
    whose link is up. ``*_busy`` are the shares of instances or slots at work (0 without any),
    ``*_wait_s`` the time that a request arriving now would wait for prefill, or waits for a slot.
    """

    num_remote: int
    num_prefill: int
    num_decode: int
    link_bytes_per_s: float
    remote_busy: float
    prefill_busy: float
    decode_busy: float
    prefill_wait_s: float = 0.0
    decode_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleChange:
    """``to``: one instance of the PD cluster shall get this role. ``base_tokens``: the base
    threshold shall be this."""

    to: Role | None = None
    base_tokens: int | None = None


@dataclass(slots=True)
class _Seen:
    """Sums over the instants of one role period."""

    instants: int = 0
    remote: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    prefill_wait_s: float = 0.0
    decode_wait_s: float = 0.0

    def add(self, stages: Stages) -> None:
        self.instants += 1
        self.remote += stages.remote_busy
        self.prefill += stages.prefill_busy
        self.decode += stages.decode_busy
        self.prefill_wait_s += stages.prefill_wait_s
        self.decode_wait_s += stages.decode_wait_s

    def short(self) -> tuple[bool, bool, bool]:
        """Whether PrfaaS, local prefill and decode were short."""
        n = max(1, self.instants)
        prefill = self.prefill / n >= SHORT or self.prefill_wait_s / n > QUEUE_S
        decode = self.decode / n >= SHORT or self.decode_wait_s / n > QUEUE_S
        return self.remote / n >= SHORT, prefill, decode


class RoleControl:
    """``observe`` each arrival, ``tick`` each control period, say when one is ``converted``."""

    def __init__(self, config: RolesConfig, base_tokens: int | None) -> None:
        assert (base_tokens is None) == (config.remote_prefill_s is None)
        self._config = config
        self.base_tokens = base_tokens
        window_s = PERIODS * config.role_period_s
        self._demand = Demand(base_tokens or 1, config.longest_tokens, window_s)
        self._seen = _Seen()
        self._next_s: float | None = None
        self._wanted: Role | None = None
        self._streak = 0
        #: What the last conversion was to.
        self._last: Role | None = None
        #: A conversion is under way: nothing else is asked for until it is done.
        self.converting = False

    def observe(
        self,
        uncached_tokens: int,
        cached_tokens: int,
        kv_bytes: int,
        decode_s: float,
        now_s: float,
        remote_cached_tokens: int | None = None,
    ) -> None:
        """Count an arrival: l, the bytes that would cross, its time in a decode slot, and what
        PrfaaS has of it, or as many tokens as there are here."""
        config, remote_cached = self._config, remote_cached_tokens
        if remote_cached is None:
            remote_cached = cached_tokens
        remote, remote_new = (
            config.remote_prefill_s,
            uncached_tokens + cached_tokens - remote_cached,
        )
        self._demand.add(
            uncached_tokens,
            kv_bytes,
            remote(remote_new, remote_cached) if remote else 0.0,
            config.local_prefill_s(uncached_tokens, cached_tokens),
            decode_s,
            now_s,
        )

    def tick(self, stages: Stages, now_s: float) -> RoleChange | None:
        """What shall change, if anything; asked for once in a role period."""
        if self._next_s is None:
            self._next_s = now_s + self._config.role_period_s
        self._seen.add(stages)
        if now_s < self._next_s:
            return None
        seen, self._seen = self._seen, _Seen()
        self._next_s = now_s + self._config.role_period_s
        self._demand.expire(now_s)
        if self.converting or len(self._demand) < FEWEST:
            return None
        return self._judge(stages, seen)

    def converted(self, stages: Stages, now_s: float) -> int | None:
        """The instance has its new role, or has been lost. The base threshold solved anew."""
        self.converting = False
        self._seen, self._next_s = _Seen(), now_s + self._config.role_period_s
        self._demand.expire(now_s)
        if self.base_tokens is None or not stages.num_remote or len(self._demand) < FEWEST:
            return None
        self.base_tokens = self._plans(stages).best_threshold(stages.num_prefill)
        return self.base_tokens

    def _judge(self, stages: Stages, seen: _Seen) -> RoleChange | None:
        short = seen.short()
        plans = self._plans(stages)
        wanted = self._conversion(plans, stages, short)
        if wanted is None or wanted != self._wanted:
            self._wanted, self._streak = wanted, 0
        if wanted is not None:
            self._streak += 1
            if self._streak >= DWELL:
                self._wanted, self._streak, self.converting = None, 0, True
                self._last = wanted
                return RoleChange(to=wanted)
        # While nothing can be offloaded the short time scale keeps everything local; the base is
        # for when it can be again.
        if self.base_tokens is not None and any(short) and stages.num_remote:
            return self._rebase(plans, stages.num_prefill, self.base_tokens)
        return None

    def _rebase(self, plans: "_Plans", num_prefill: int, held_tokens: int) -> RoleChange | None:
        better = plans.best_threshold(num_prefill)
        off = max(better, held_tokens) / max(1, min(better, held_tokens))
        enough = (1 + GAIN) * plans.carried(num_prefill, held_tokens)
        if off < BASE_GAIN or plans.best(num_prefill) <= enough:
            return None
        self.base_tokens = better
        return RoleChange(base_tokens=better)

    def _conversion(
        self, plans: "_Plans", stages: Stages, short: tuple[bool, bool, bool]
    ) -> Role | None:
        """The role of which there should be one more; never below one instance of either."""
        remote_short, prefill_short, decode_short = short
        held = plans.best(stages.num_prefill)

        def pays(to: Role, num_prefill: int) -> bool:
            gain = 2 * GAIN if self._last not in (None, to) else GAIN
            return plans.best(num_prefill) > (1 + gain) * held

        prefills = (remote_short or prefill_short) and stages.num_decode > 1
        if prefills and pays("prefill", stages.num_prefill + 1):
            return "prefill"
        if decode_short and stages.num_prefill > 1 and pays("decode", stages.num_prefill - 1):
            return "decode"
        return None

    def _plans(self, stages: Stages) -> "_Plans":
        return _Plans(self._config, self._demand, stages)


class _Plans:
    """Lambda over every threshold of the bins, for any split of the PD cluster. # (bins,)"""

    def __init__(self, config: RolesConfig, demand: Demand, stages: Stages) -> None:
        self._demand = demand
        self._instances = stages.num_prefill + stages.num_decode
        requests = float(len(demand))
        # Seconds of one instance, or bytes, that a mean request takes.
        far_s = _above(demand.remote_s) / requests
        crossing = _above(demand.kv_bytes) / requests
        self._local_s = np.cumsum(demand.local_s) / requests
        with np.errstate(divide="ignore", invalid="ignore"):
            prfaas = np.where(far_s > 0, stages.num_remote / far_s, np.inf)
            link = config.link_target * stages.link_bytes_per_s / crossing
            self._remote = np.minimum(prfaas, np.where(crossing > 0, link, np.inf))
        if config.remote_prefill_s is None:
            # Nobody else prefills: only what keeps everything local carries anything.
            self._remote = np.where(far_s + crossing > 0, 0.0, np.inf)
        self._decode_s = demand.decode_s / requests / config.num_slots

    def over_thresholds(self, num_prefill: int) -> FloatArray:
        """Requests a second that a split carries, by the bin that a threshold ends."""
        num_decode = self._instances - num_prefill
        with np.errstate(divide="ignore"):
            local = np.where(self._local_s > 0, num_prefill / self._local_s, np.inf)
        decode = num_decode / self._decode_s if self._decode_s > 0 else np.inf
        return np.minimum(np.minimum(self._remote, local), decode)

    def carried(self, num_prefill: int, threshold_tokens: int) -> float:
        """With a given threshold."""
        place = self._demand.place(threshold_tokens)
        return float(self.over_thresholds(num_prefill)[place])

    def best(self, num_prefill: int) -> float:
        return float(self.over_thresholds(num_prefill).max())

    def best_threshold(self, num_prefill: int) -> int:
        """Of the thresholds that carry most the one with the most prefill capacity to spare:
        decode limits a range of them."""
        carried = self.over_thresholds(num_prefill)
        with np.errstate(divide="ignore"):
            local = np.where(self._local_s > 0, num_prefill / self._local_s, np.inf)
        spare = np.minimum(self._remote, local)
        most = carried >= carried.max() * (1 - 1e-9)
        return self._demand.upper_tokens(int(np.argmax(np.where(most, spare, -1.0))))


def _above(values: list[float] | list[int]) -> FloatArray:
    """Sum over the bins above each."""
    array = np.asarray(values, dtype=np.float64)
    total = np.cumsum(array[::-1])[::-1]
    above: FloatArray = np.append(total[1:], 0.0)
    return above
