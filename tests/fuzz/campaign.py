"""Many cases: generated and judged ahead in a thread, run, counted; the bad ones are made small."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.cases import Case, label, random_case, tags
from fuzz.compare import OUTCOMES, Outcome
from fuzz.drawing import paths
from fuzz.judge import Judge, Rejected
from fuzz.runner import Runner, checked
from fuzz.shrink import cause, shrunk
from fuzz.sweep import sweep

__all__ = ["FOUND", "Campaign", "Source", "Wanted", "name_of", "save"]

FOUND = Path(__file__).parent / "found"
_PLAIN = {"conv", "dense", "conv.bias", "input.image", "input.tokens", "input.vector", "input.volume",
          "loss.mse", "returns.tensor", "takes.one"}  # fmt: skip


@dataclass
class Wanted:
    """Which cases, and how many."""

    seed: int = 0
    cases: int = 100
    minutes: float = 0.0
    """0: as long as it takes"""
    only: tuple[str, ...] = ()
    """tags that every case has"""
    layout: dict[str, int] | None = None
    shrink: int = 20
    """how many bad cases are made small"""
    jobs: int = 1
    sweep: bool = False
    """instead of random cases, every feature alone"""
    stop: bool = False
    """whether the first bad case ends it"""
    fault: str = ""
    """what is broken on purpose, as `worker.run` takes it"""


class Source:
    """Valid cases with what is true of them, made ahead in a thread. Those that are not valid are counted."""

    def __init__(self, wanted: Wanted) -> None:
        self.rejected: Counter[str] = Counter()
        self._wanted = wanted
        self._made: queue.Queue[Any] = queue.Queue(maxsize=4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._make, name="cases", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Case, dict[str, Any]]]:
        while (made := self._made.get()) is not None:
            yield made
        self._made.put(None)  # for the next who asks

    def _make(self) -> None:
        judge = Judge()
        try:
            valid = 0
            for case in self._drawn():
                if self._stop.is_set() or valid >= self._wanted.cases:
                    break
                try:
                    self._put((case, checked(judge, case)))
                    valid += 1
                except Rejected as why:
                    self.rejected[_general(str(why))] += 1
        finally:
            judge.close()
            self._put(None)

    def _put(self, made: Any) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._made.put(made, timeout=0.5)
                return

    def _drawn(self) -> Iterator[Case]:
        if self._wanted.sweep:
            layout = self._wanted.layout
            every = sweep() if layout is None else sweep((layout,))
            yield from (c for c in every if all(tag in tags(c) for tag in self._wanted.only))
            return
        for number in itertools.count():
            if self._stop.is_set():
                return
            try:
                case = random_case(self._wanted.seed * 1_000_000 + number, self._wanted.layout)
            except Exception as problem:  # noqa: BLE001 - not valid in one process
                self.rejected[_general(f"{type(problem).__name__}: {problem}")] += 1
                continue
            if all(tag in tags(case) for tag in self._wanted.only):
                yield case

    def close(self) -> None:
        """Stop making cases."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._made.get(timeout=0.1)
        self._thread.join()


def _general(text: str) -> str:
    return re.sub(r"[\d.]+(e[+-]\d+)?", "#", text.partition("\n")[0])[:90]


@dataclass
class Campaign:
    """What came of many cases. `tell` is called with every line of progress."""

    wanted: Wanted
    tell: Callable[[str], None] = print
    outcomes: Counter[str] = field(default_factory=Counter[str])
    by_tag: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    by_layout: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    bad: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: Counter[str] = field(default_factory=Counter[str])
    alone: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """of a sweep: features -> layout -> outcome"""
    rejected: int = 0
    seconds: float = 0.0
    _lock: Any = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Run all cases, then make the bad ones small."""
        start = time.monotonic()
        until = start + 60 * self.wanted.minutes if self.wanted.minutes else float("inf")
        source = Source(self.wanted)
        try:
            workers = [
                threading.Thread(target=self._consume, args=(source, until), daemon=True)
                for _ in range(self.wanted.jobs)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            source.close()
        self.rejected = sum(source.rejected.values())
        self.seconds = time.monotonic() - start
        self._make_small()

    def _consume(self, source: Source, until: float) -> None:
        with Runner() as runner:
            for case, truth in source:
                outcome = runner.run(case, truth, self.wanted.fault)
                if outcome.kind in ("hang", "crash", "traceback", "wrong"):
                    again = runner.run(case, truth, self.wanted.fault)
                    if outcome.kind == "hang" and not again.bad:
                        self.tell(f"over the time limit, then {again.kind}: seed {case['seed']}")
                        outcome = again
                    elif again.kind != outcome.kind:
                        outcome = Outcome(
                            outcome.kind, f"{outcome.text} (then {again.kind})", outcome.details
                        )
                with self._lock:
                    self._count(case, outcome)
                if time.monotonic() > until or (self.wanted.stop and self.bad):
                    return

    def _count(self, case: Case, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        for tag in tags(case):
            self.by_tag.setdefault(tag, Counter())[outcome.kind] += 1
        self.by_layout.setdefault(label(case), Counter())[outcome.kind] += 1
        if self.wanted.sweep:
            told = {t for t in tags(case) if t not in _PLAIN} - {"input.image"} or {"nothing else"}
            row = self.alone.setdefault(", ".join(sorted(told)), {})
            row[label(case)] = f"{outcome.kind}: {outcome.text}" if outcome.text else outcome.kind
        if outcome.kind == "refused":
            self.refused[_general(re.sub(r"'[^']*'", "'...'", outcome.text))] += 1
        if outcome.bad:
            self.bad.append({"case": case, "outcome": outcome})
            self.tell(f"{outcome.kind}: seed {case['seed']}, {label(case)}: {outcome.text[:150]}")
        count = sum(self.outcomes.values())
        if count % 50 == 0:
            shares = ", ".join(f"{self.outcomes[o]} {o}" for o in OUTCOMES if self.outcomes[o])
            self.tell(f"{count} of {self.wanted.cases}: {shares}")

    def _make_small(self) -> None:
        """Shrink one bad case of each cause and layout first, then others, as far as wanted."""
        kinds: Counter[str] = Counter()
        ranked: list[tuple[int, int, dict[str, Any]]] = []
        for number, one in enumerate(self.bad):
            kind = f"{cause(one['outcome'])} {sorted(one['case']['layout'])}"
            ranked.append((kinds[kind], number, one))
            kinds[kind] += 1
        if self.wanted.fault:
            return
        chosen = sorted(ranked, key=lambda each: each[:2])[: self.wanted.shrink]
        with Runner(limit_s=8.0) as runner:
            for number, (_, _, one) in enumerate(chosen):
                self.tell(f"shrinking {number + 1} of {len(chosen)}")
                one["case"], one["outcome"] = shrunk(one["case"], one["outcome"], runner.tried)
                one["file"] = save(one["case"], one["outcome"])
                self.tell(f"  {one['file']}: {one['outcome'].text[:150]}")

    def report(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "seed": self.wanted.seed,
            "cases": sum(self.outcomes.values()),
            "rejected": self.rejected,
            "seconds": round(self.seconds, 1),
            "outcomes": {o: self.outcomes[o] for o in OUTCOMES},
            "alone": self.alone,
            "by_layout": {k: dict(v) for k, v in sorted(self.by_layout.items())},
            "by_tag": {k: dict(v) for k, v in sorted(self.by_tag.items())},
            "refused": dict(self.refused.most_common()),
            "bad": [
                {
                    "kind": one["outcome"].kind,
                    "text": one["outcome"].text,
                    "layout": label(one["case"]),
                    "file": one.get("file", ""),
                    "case": one["case"],
                }
                for one in self.bad
            ],
        }


def name_of(case: Case, outcome: Outcome) -> str:
    """A name that says what the case is about."""
    blocks = list(
        dict.fromkeys(
            ".".join([name, *(v for v in args.values() if isinstance(v, str))])
            for _, name, args in paths(case["net"])
        )
    )
    extra = [e["do"] for step in case["steps"] for e in step.get("events", ())]
    loss = [case["loss"]["name"]] if case["loss"]["name"] != "mse" else []
    io = [case["net"].get(k, p) for k, p in (("takes", "one"), ("returns", "tensor"))]
    io = [each for each, plain in zip(io, ("one", "tensor"), strict=True) if each != plain]
    kinds = [axis if axis in ("data", "pipe") else "tiles" for axis in case["layout"]]
    axes = list(dict.fromkeys(kinds)) or ["alone"]
    words = [outcome.kind, *blocks[:4], *loss, *io, *dict.fromkeys(extra), *axes]
    if schedule := case["plan"].get("pipeline.schedule"):
        words.append(schedule)
    return "-".join(word.replace("_", "") for word in words)


def save(case: Case, outcome: Outcome, folder: Path = FOUND) -> str:
    """Write a case that was found; its name. A second one of the same name is the same thing."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name_of(case, outcome)}.json"
    if not file.exists():
        told = {"found": f"{outcome.kind}: {outcome.text}"[:200], **case}
        file.write_text(json.dumps(told, indent=1) + "\n")
    return file.name
