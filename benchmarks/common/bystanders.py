"""What others compute while we measure. Rounds that they disturb are measured again.

The criterion is the processors' time of others, never a contender's figure, so nothing is chosen by its
outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

LIMIT = 0.05
"""share of the cores that others may use in a round"""
PATIENCE_S = float(os.environ.get("BENCHMARK_PATIENCE_S", "60"))
"""how long to wait for others after they have disturbed a round; 0 takes rounds as they come, as tests do"""
SHORTEST_S = 1.0
"""shorter rounds are not judged: the kernel counts others' time in ticks"""


class Bystanders:
    """Counts rounds and the share of the cores that others used in them.

    `own_s` gives the processor time of everything that is being measured, in seconds.
    """

    def __init__(self, rounds: int, own_s: Callable[[], float]) -> None:
        self.disturbed = 0
        self._spare = rounds
        self._own_s = own_s
        self._cores = os.cpu_count() or 1
        self._used_s = self._wall_s = 0.0
        self._mark = self._now()

    def begin(self) -> None:
        """A round begins."""
        self._mark = self._now()

    def were_quiet(self) -> bool:
        """Whether the round that ends now counts. At most as many as were asked for do not."""
        wall_s, used_s = self._since_mark()
        share = used_s / (wall_s * self._cores)
        judged = PATIENCE_S > 0 and wall_s > SHORTEST_S
        if judged and share > LIMIT and self.disturbed < self._spare:
            self.disturbed += 1
            print(f"others used {share:.0%} of the cores: this round is measured again", flush=True)
            self._wait()
            return False
        self._used_s += max(used_s, 0.0)
        self._wall_s += wall_s
        return True

    def told(self) -> dict[str, float]:
        """For the result."""
        share = self._used_s / (self._wall_s * self._cores) if self._wall_s else 0.0
        return {"used_by_others": round(share, 3), "disturbed_rounds": self.disturbed}

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            self.begin()
            time.sleep(2.0)
            wall_s, used_s = self._since_mark()
            if used_s < LIMIT * wall_s * self._cores:
                return

    def _since_mark(self) -> tuple[float, float]:
        now = self._now()
        return now[0] - self._mark[0], now[1] - self._mark[1]

    def _now(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return time.monotonic(), busy_s - self._own_s()
