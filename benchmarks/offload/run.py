"""What helpers are worth: idle cores and other nodes that augment and evaluate for a trainer.

    python benchmarks/offload/run.py --parts jpeg-32

measures the named parts in rounds in which contenders take turns, prints their tables with the bound beside
each figure, keeps the results and renews README.md. Fewer than 7 rounds are not kept. The trainer has core 0
and one thread, helpers have core 1: extra hardware.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import augmentation
import bystanders
import epochs
import peers
import report
import stream
from places import HERE
from workload import WORKS


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=report.ORDER, default=report.ORDER)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each contender")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds to wait for others that disturb a round",
    )
    of_augmentation(parser.add_argument_group("augmentation", f"parts {', '.join(WORKS)}"))
    group = parser.add_argument_group("validation", f"parts {', '.join(epochs.PARTS)}")
    group.add_argument("--epochs", type=int, default=2, help="of a block")
    group.add_argument("--half", type=float, default=1.0, help="seconds of a part alone")
    group = parser.add_argument_group("peers")
    group.add_argument("--peers", nargs="+", choices=peers.PEERS, default=tuple(peers.PEERS))
    group.add_argument("--peers-at", type=Path, help="folder that keeps their environments")
    group = parser.add_argument_group("stream")
    group.add_argument("--runs", type=int, default=100, help="with faults, in all")
    group.add_argument("--batches", type=int, default=60, help="of each")
    return parser.parse_args()


def of_augmentation(group: Any) -> None:
    """Options of its parts."""
    group.add_argument("--seconds", type=float, default=2.0, help="of a block")
    names = tuple(augmentation.TITLES)
    group.add_argument("--contenders", nargs="+", choices=names, default=names)
    group.add_argument("--quotas", nargs="+", type=int, help="percent of core 1 for helpers")
    group.add_argument("--photos", type=int, default=64, help="JPEG files that are made")


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    bystanders.PATIENCE_S = asked.patience
    return report.PAGE.publish(asked.parts, lambda part: measured(asked, part), asked.results)


def measured(asked: argparse.Namespace, part: str) -> dict[str, Any]:
    """One part."""
    if part in (*WORKS, augmentation.PAIR):
        return augmentation.measured(asked, part)
    if part in epochs.PARTS:
        return epochs.measured(asked, part)
    return {"stream": stream, "peers": peers}[part].measured(asked)


if __name__ == "__main__":
    sys.exit(main())
