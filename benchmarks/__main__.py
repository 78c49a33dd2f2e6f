"""The command `python -m benchmarks`."""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Measure training and sampling beside plain Hugging Face and the paper's own recipe.

Variants take turns in one process. Every ratio is the median of ratios within a round, and each suite measures one variant
twice as an A/A control. A CPU is measured in process time on one thread, a GPU in wall time after a synchronize.

FOLDER will hold bench.json, bench.md and bench.png; Ctrl-C keeps the measurements made so far. All suites take half an hour on
a CPU. With --profile every variant except whole training runs is called once under torch's profiler, and nothing is measured.
"""


def main(arguments: Sequence[str]) -> int:
    """Parse the arguments and run the suites; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="suites to run; default: all")
    parser.add_argument("--quick", action="store_true", help="small shapes and three rounds: two minutes, no verdicts")
    parser.add_argument("--device", default="cpu", help="cpu, on one thread, or cuda")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of every measurement; at least 11")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="FOLDER", help="where the results go")
    parser.add_argument("--profile", action="store_true", help="write FOLDER/profile.md instead of measurements")
    parser.add_argument("--list", action="store_true", help="list the suites and exit")
    args = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, which also counts memory, prints lines otherwise
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a missing kernel on a CPU
    try:
        return _run(args, shlex.join(["python", "-m", "benchmarks", *arguments]))
    except ValueError as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace, command: str) -> int:
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from benchmarks import profile, report, suites
    from benchmarks.timing import Measurement

    if args.list:
        for name, suite in suites.SUITES.items():
            print(f"{name:<12}{(suite.__doc__ or '').splitlines()[0]}")
        return 0
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"`--out` must be a folder. Got {args.out}, which is a file.")
    names = suites.chosen(args.suites, is_profiled=args.profile)
    session = suites.session_for(args.device, quick=args.quick, rounds=args.rounds, is_profiled=args.profile)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    results = suites.run(session, names, lambda name: print(f"Measuring {name} …", file=sys.stderr))
    if args.profile:
        try:
            list(results)
        finally:
            if session.profiles:
                profile.save(session.profiles, args.out, command)
                print(f"Wrote {args.out / profile.FILE}.")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    measurements: list[Measurement] = []
    try:
        for measurement in results:
            measurements.append(measurement)
            report.save(report.Report.of(session, measurements, command, is_complete=False), args.out)
    except KeyboardInterrupt:
        if measurements:
            console.print(report.table(report.Report.of(session, measurements, command, is_complete=False)))
        left = f"The measurements so far are in {args.out / report.JSON}." if measurements else "Nothing was measured."
        print(f"Interrupted. {left}", file=sys.stderr)
        raise
    whole = report.Report.of(session, measurements, command)
    report.save(whole, args.out)
    report.draw(whole, args.out)
    console.print(report.table(whole))
    print(f"Wrote {args.out / report.JSON}, {report.MARKDOWN} and {report.PLOT}.")
    if whole.is_full:
        console.print(report.table(whole, judged_only=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
