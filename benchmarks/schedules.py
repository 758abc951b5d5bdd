"""Makespans of every schedule: stages at their own pace, and in the program's ticks.

    python benchmarks/schedules.py --json

Times are F=1, B=2 (Bi=W=1) and, with full recomputation, R=1. `search` looks, for stages at their own pace and for each form of
ticks, for an order with two chunks at most; "search, 1 chunk" with one. A tick form is merged, paired or switched.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from merak_jax.schedules.greedy import Times
from merak_jax.schedules.registry import SCHEDULES, make_schedule, make_table
from merak_jax.schedules.search import search, timeline
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import ScheduleError
from merak_jax.schedules.ticks import FORMS


def rows(stages: int, microbatches: int, recompute: float) -> list[dict]:
    """One row per schedule: its makespans, and the microbatches (times chunks) in flight."""
    found = []
    for name in SCHEDULES:
        if name == "search":
            continue
        try:
            schedule = make_schedule(name, stages, microbatches, recompute=recompute > 0)
        except ScheduleError as error:
            found.append({"schedule": name, "refused": str(error)})
            continue
        tables = {form: make_table(name, form, None, stages, microbatches, recompute=recompute > 0) for form in FORMS}
        found.append(_row(name, simulate(schedule, recompute=recompute), tables, recompute))
    times = Times(recompute=recompute)
    for chunks in (1, 2):
        orders = {form: search(stages, microbatches, times, num_chunks=chunks, form=form) for form in ("free", *FORMS)}
        name = "search" if chunks == 2 else "search, 1 chunk"
        makespans = {form: timeline(order, times, form).makespan for form, order in orders.items()}
        held = timeline(orders["free"], times).in_flight()
        named = {form: order.name for form, order in orders.items()}
        found.append({"schedule": name, **makespans, "in_flight": held, "found": named})
    return found


def _row(name: str, free, tables, recompute: float) -> dict:
    ticks = {form: simulate(table, recompute=recompute).makespan for form, table in tables.items()}
    return {"schedule": name, "free": free.makespan, **ticks, "in_flight": free.in_flight()}


def main() -> int:
    """Print the makespans; the exit status is 1 where `search` is worse than a named schedule, at its own pace or in ticks."""
    parser = argparse.ArgumentParser(description="Makespans of every schedule.")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    options = parser.parse_args()
    cases = []
    for stages in (4, 8):
        for microbatches in (stages, 2 * stages, 4 * stages):
            for recompute in (0.0, 1.0):
                made = rows(stages, microbatches, recompute)
                named = [row for row in made[:-2] if "free" in row]
                cases.append(
                    {
                        "stages": stages,
                        "microbatches": microbatches,
                        "recompute": recompute,
                        "search_is_best": all(
                            made[-1][form] <= min(row[form] for row in named) + 1e-9 for form in ("free", *FORMS)
                        ),
                        "best_ticks": min(row[form] for row in made for form in FORMS if form in row),
                        "rows": made,
                    }
                )
    if options.json:
        print(json.dumps(cases, indent=1))
    else:
        for case in cases:
            print(f"\nP={case['stages']} M={case['microbatches']} R={case['recompute']:g}")
            print(f"{'':24}{'free':>9}" + "".join(f"{form:>9}" for form in FORMS) + "  in flight")
            for row in case["rows"]:
                if "refused" in row:
                    print(f"{row['schedule']:24}{row['refused']}")
                    continue
                times = "".join(f"{row[form]:9.4g}" for form in ("free", *FORMS))
                print(f"{row['schedule']:24}{times}  {row['in_flight']}")
    return 0 if all(case["search_is_best"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
