"""Advice on a placement: small rules, each of which is silent or says what, why, and what to do.

To add one: a function that takes a `Situation`, a line in `RULES`, and a test of both its answers.
"""

from __future__ import annotations

from fivefold.launch.advice.cores import (
    all_on_one_core,
    more_threads_than_cores,
    one_core_mask,
    quota_below_mask,
    workers_on_cores,
)
from fivefold.launch.advice.finding import LaunchFinding, Rule
from fivefold.launch.advice.gpus import gpu_far, gpu_not_used, torch_unusable
from fivefold.launch.advice.network import locked_memory, loopback_address, network_plugin
from fivefold.launch.advice.node import few_open_files, little_memory, small_shm, swap_in_use
from fivefold.launch.situation import Situation

__all__ = ["RULES", "LaunchFinding", "advise"]

RULES: dict[str, Rule] = {
    "torch-unusable": torch_unusable,
    "gpu-not-used": gpu_not_used,
    "gpu-far": gpu_far,
    "all-on-one-core": all_on_one_core,
    "one-core-mask": one_core_mask,
    "more-threads-than-cores": more_threads_than_cores,
    "workers-on-trainers-cores": workers_on_cores,
    "quota-below-mask": quota_below_mask,
    "loopback-address": loopback_address,
    "network-plugin": network_plugin,
    "low-memory-lock": locked_memory,
    "small-shm": small_shm,
    "few-open-files": few_open_files,
    "little-memory": little_memory,
    "swap-in-use": swap_in_use,
}
"""All rules by the id of what they find, the dearest losses first."""


def advise(job: Situation) -> tuple[LaunchFinding, ...]:
    """What all rules find."""
    return tuple(found for rule in RULES.values() if (found := rule(job)))
