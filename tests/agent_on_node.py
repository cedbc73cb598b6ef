"""Run on each node of a test: save, start an agent, meet the others in the shared folder, and protect.

python agent_on_node.py NUMBER ADDRESS LOCAL SHARED PLAN      PLAN: JSON, see `main`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fivefold.checkpoint.agent_client import Agent
from fivefold.checkpoint.store import LocalStore
from generations import saved_state

__all__ = ["main"]

KEY = b"k" * 32
WAIT_S = 60.0


def _wait_for(path: Path) -> str:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


def _tell(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def main() -> None:
    """`lengths` by member, `scheme`, and options of the agent."""
    number, (address, local, shared, text) = int(sys.argv[1]), sys.argv[2:]
    plan, meeting = json.loads(text), Path(shared)
    state = saved_state(plan["lengths"], scheme=plan["scheme"])
    state.put(LocalStore(Path(local), "r").root, number)
    with Agent(Path(local), "r", KEY, host=address, **plan["options"]) as agent:
        _tell(meeting / f"address-{number}", json.dumps(agent.address))
        known = {
            n: tuple(json.loads(_wait_for(meeting / f"address-{n}")))
            for n in range(len(plan["lengths"]))
        }
        agent.peers(known).result(WAIT_S)
        result = agent.protect(state.manifest.name).result(WAIT_S)
        _tell(meeting / f"result-{number}", result.problem or str(len(result.redundancy)))
        wrong = agent.verify(state.manifest.name).result(WAIT_S)
        _tell(meeting / f"wrong-{number}", str(wrong))
        _wait_for(meeting / "end")


if __name__ == "__main__":
    main()
