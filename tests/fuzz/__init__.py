"""A fuzzer of nets: random nets under random layouts, against one process that shares no code with them.

    nets, blocks/, losses, events, data    the grammar: plain torch, built from JSON, alike on both sides
    cases                                  a case: net, layout, plan, batches, what happens between steps
    worker, pool                           the case under its layout, in processes that stay
    judge                                  the case in one process, by fivefold/train/verify/one_process.py
    compare                                exact, refused, told, wrong
    shrink, campaign, sweep, __main__      minimal cases, many cases, every feature alone, the command
    faults, choose                         what is broken on purpose; the fixed cases of the test suite
    found/                                 every case that was ever found: they stay tests

Run it with `make fuzz`, or `PYTHONPATH=tests python -m fuzz --help`.
"""
