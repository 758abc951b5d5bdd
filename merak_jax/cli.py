"""The command line: `merak-jax draw` and `merak-jax simulate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from merak_jax.schedules.draw import draw, draw_text
from merak_jax.schedules.greedy import Times
from merak_jax.schedules.registry import SCHEDULES, make_schedule, make_table
from merak_jax.schedules.simulate import Timeline, simulate
from merak_jax.schedules.task import Schedule, ScheduleError
from merak_jax.schedules.tick_table import TickTable
from merak_jax.schedules.ticks import FORMS

_EXAMPLES = {
    "simulate": "example: merak-jax simulate --schedule shifted_critical_path --stages 4 --microbatches 8 --recompute 1",
    "draw": "example: merak-jax draw --schedule zb_h1 --stages 4 --microbatches 8 --form switched --out timeline.svg",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0, or 2 for a schedule or an option that cannot be."""
    options = _parser().parse_args(arguments)
    try:
        names = options.schedule.split(",")
        timelines = [_timeline(name, options, _chunks(name, names, options)) for name in names]
        if options.command == "draw" and options.out:
            draw(timelines, options.out)
    except (ScheduleError, ImportError, OSError) as error:
        print(f"merak-jax {options.command}: {error}", file=sys.stderr)
        return 2
    if options.json:
        found = [_summary(timeline) for timeline in timelines]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    elif options.command == "draw" and options.out:
        print("\n".join([*map(str, timelines), f"written to {options.out}"]))
    else:
        print("\n\n".join(map(_table if options.command == "simulate" else draw_text, timelines)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="merak-jax", description="Pipeline schedules: how long they take, and pictures of them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{simulate,draw}")
    for name, what in (
        ("simulate", "how long a step takes, how much of it is idle, and what each stage holds"),
        ("draw", "the timeline of a step: SVG, PNG, a trace file for Perfetto, or text"),
    ):
        command = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=_EXAMPLES[name],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add = command.add_argument
        add("--schedule", default="1f1b", metavar="NAME", help=", ".join(SCHEDULES) + "; several with commas between")
        add("--stages", type=int, default=4, metavar="P", help="pipeline stages")
        add("--microbatches", type=int, default=8, metavar="M", help="microbatches of a step")
        add("--chunks", type=int, metavar="V", help="chunks of each stage (interleaved, search)")
        add("--forward", type=float, default=1.0, metavar="TIME", help="time of one F of one stage")
        add("--backward", type=float, default=2.0, metavar="TIME", help="time of one B, which is Bi and W")
        add("--weight-gradient", type=float, metavar="TIME", help="time of W alone; by default half of B")
        add("--recompute", type=float, default=0.0, metavar="TIME", help="time of one recomputation")
        add(
            "--tensor", type=float, default=0.0, metavar="TIME", help="time of the tensor-parallel collectives of one F"
        )
        add("--hidden", type=float, default=0.0, metavar="SHARE", help="share of that time behind computation")
        add("--hop", type=float, default=0.0, metavar="TIME", help="time from a stage to the next one")
        add("--form", choices=("free", *FORMS), default="free", help="stages at their own pace, or the program's ticks")
        add("--json", action="store_true", help="print makespan, bubble, in_flight and per_stage as JSON")
        if name == "draw":
            add("--out", metavar="FILE", help="ends in .svg, .png or .json (a trace); without it, text")
    return parser


def _chunks(name: str, names: Sequence[str], options: argparse.Namespace) -> int | None:
    """The chunks asked for; of several schedules, only those that can have several get them."""
    alone = len(names) == 1 or name not in SCHEDULES
    return options.chunks if alone or SCHEDULES[name].chunks else None


def _timeline(name: str, options: argparse.Namespace, chunks: int | None) -> Timeline:
    sizes, recompute = (options.stages, options.microbatches), options.recompute > 0
    weight = options.backward / 2 if options.weight_gradient is None else options.weight_gradient
    times = Times(
        options.forward,
        options.backward - weight,
        weight,
        options.recompute,
        options.hop,
        options.tensor,
        options.hidden,
    )
    schedule: Schedule | TickTable
    if options.form == "free":
        schedule = make_schedule(name, *sizes, chunks, recompute=recompute, times=times)
    else:
        schedule = make_table(name, options.form, chunks, *sizes, recompute=recompute, times=times)
    return simulate(
        schedule,
        forward=options.forward,
        backward=options.backward,
        weight_gradient=options.weight_gradient,
        recompute=options.recompute,
        tensor=options.tensor,
        hidden=options.hidden,
        hop=options.hop,
    )


def _summary(timeline: Timeline) -> dict:
    held = timeline.in_flight()
    return {
        "schedule": timeline.name,
        "makespan": round(timeline.makespan, 9),
        "bubble": round(timeline.bubble_share, 9),
        "in_flight": held,
        "per_stage": [
            {
                "stage": stage,
                "busy": round(busy, 9),
                "idle": round(timeline.makespan - busy, 9),
                "in_flight": held[stage],
            }
            for stage, busy in enumerate(timeline.busy())
        ],
    }


def _table(timeline: Timeline) -> str:
    lines = [str(timeline), "stage      busy      idle  in flight"]
    for row in _summary(timeline)["per_stage"]:
        lines.append(f"{row['stage']:5}{row['busy']:10.4g}{row['idle']:10.4g}{row['in_flight']:11}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
