"""Show that a training run that is killed with SIGKILL ends exactly where an uninterrupted one does.

Trains `train_gpt.py` on two ranks twice: once undisturbed; once killed in the middle of a step and in the middle
of a save, with a fresh torchrun for each life. Then compares every loss and the final weights, bit by bit.

Exit codes: 0 equal; 1 not equal; 2 a life ended in a way it should not have.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import demo_report as report
from demo_lives import Killer, Life, Line, Run, kill_mid_save, kill_mid_step, live, sweep
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from relight.units import format_bytes

MAX_LIVES = 8
VICTIM = 1


class UnexpectedEndError(Exception):
    """A life failed by itself, or a kill never found its instant."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to write to (%(default)s)")
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("script_args", nargs="*", help="more options for train_gpt.py, after --")
    args = parser.parse_args()
    if args.steps < 12:
        parser.error("--steps must be 12 or more: two kills and a few saves have to fit in")
    return args


def make_run(args: argparse.Namespace, name: str) -> Run:
    folder = args.out.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script_args = ("--batch", "16", "--context", "32", *args.script_args)
    return Run(folder=folder, steps=args.steps, every=args.steps // 6, script_args=script_args)


def train(run: Run, title: str, kills: list[Killer], progress: Progress) -> list[Life]:
    """Run lives until one ends by itself; each kill of `kills` has to hit what it aims at."""
    task = progress.add_task(title, total=run.steps, at="", loss="")
    lives: list[Life] = []
    said_resumed: list[int] = []

    def show(line: Line) -> None:
        if lives and lives[-1].kill and not said_resumed:
            said_resumed.append(line.step)
            took = line.at - lives[-1].kill.at
            progress.console.print(f"  goes on from step {line.step - 1}, {took:.1f} s later")
        if line.rank == 0:
            at = f"step {line.step}/{run.steps}"
            progress.update(task, completed=line.step, at=at, loss=f"loss {line.loss:.3f}")

    while len(lives) < MAX_LIVES:
        life = live(run, len(lives) + 1, kills[0] if kills else None, show)
        lives.append(life)
        said_resumed.clear()
        if life.kill is None:
            break
        aim = life.kill.cut or "a save, which was complete already: once more"
        progress.console.print(f"  [red]SIGKILL[/] to rank {life.kill.rank} in the middle of {aim}")
        if life.kill.cut:
            kills.pop(0)
    if lives[-1].exit_code != 0 or kills:
        why = (
            f"exit code {lives[-1].exit_code}" if lives[-1].exit_code else "a kill found no instant to strike"
        )
        raise UnexpectedEndError(f"{title}: life {len(lives)}: {why}; see {run.output_file(len(lives))}")
    return lives


def summarize(run: Run, straight: list[Life], equality: report.Equality) -> Table:
    beside, last = report.stalls_seconds(run, report.run_events(run))
    middle_ms, most_ms = 1000 * statistics.median(beside), 1000 * max(beside)
    step_ms = 1000 * report.step_seconds(straight)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row(
        "losses compared", f"{equality.num_compared}, {equality.num_replayed} of them of repeated steps"
    )
    table.add_row("checkpoint", f"{format_bytes(report.checkpoint_bytes(run))}, every {run.every} steps")
    table.add_row(
        "stall per checkpoint",
        f"{middle_ms:.1f} ms, at most {most_ms:.1f} ms; a step takes {step_ms:.0f} ms",
    )
    table.add_row("stall of the last one", f"{1000 * max(last):.1f} ms: no next step to copy beside")
    return table


def summarize_resumes(run: Run, killed: list[Life]) -> Table:
    events = report.run_events(run)
    resumes = [report.resume_of(dead, heir, events) for dead, heir in itertools.pairwise(killed)]
    table = Table("", box=None, padding=(0, 2))
    for dead in killed[:-1]:
        table.add_column(dead.kill.cut, justify="right")
    for rows in zip(*(resume.parts for resume in resumes), strict=True):
        seconds = [f"{took:.2f}" if took is not None else "?" for _, took in rows]
        table.add_row(f"  {rows[0][0]}", *seconds)
    table.add_row("  in all", *(f"[bold]{resume.first_step:.2f}[/]" for resume in resumes))
    table.add_row("resumed from", *(f"step {resume.from_step} ({resume.source})" for resume in resumes))
    table.add_row("steps done again", *(str(resume.num_repeated) for resume in resumes))
    return table


def present(console: Console, image: Path, runs: Sequence[Run], lives: Sequence[list[Life]]) -> bool:
    """Show what came of the two runs, the uninterrupted one first; return whether they are equal."""
    (straight_run, killed_run), (straight, killed) = runs, lives
    equality = report.compare(straight_run, straight, killed_run, killed)
    report.draw_png(image, straight, killed)
    sys.stdout.write(f"\n{report.draw_terminal(straight, killed)}\n\n")
    console.print(summarize(killed_run, straight, equality), "")
    console.print("  seconds from SIGKILL to the next step")
    console.print(summarize_resumes(killed_run, killed), "")
    console.print(f"loss curve: {image}")
    if not equality.holds:
        console.print(f"differing losses (rank, step): {equality.differing}; missing: {equality.missing}")
        console.print(f"same weights: {equality.same_weights}")
    verdict = "[green]yes[/]" if equality.holds else "[red]no[/]"
    console.print(f"[bold]bitwise equal to the uninterrupted run: {verdict}[/]")
    return equality.holds


def main() -> int:
    args = parse_args()
    console = Console(highlight=False)
    began = time.monotonic()
    runs = straight_run, killed_run = make_run(args, "uninterrupted"), make_run(args, "killed")
    console.print(
        f"[bold]relight demo[/]: a byte-level GPT, 10.7 million parameters, on 2 ranks\n"
        f"{args.steps} steps, a checkpoint every {killed_run.every}"
    )
    texts = [TextColumn(f"{{task.{field}}}") for field in ("description", "fields[at]", "fields[loss]")]
    columns = (texts[0], BarColumn(), *texts[1:], TimeElapsedColumn())
    kills = [kill_mid_step(VICTIM, args.steps * 5 // 12), kill_mid_save(VICTIM, killed_run.every * 4)]
    try:
        with Progress(*columns, console=console) as progress:
            straight = train(straight_run, "uninterrupted run", [], progress)
            killed = train(killed_run, "killed run", kills, progress)
        is_equal = present(console, args.out / "loss.png", runs, (straight, killed))
    except UnexpectedEndError as error:
        console.print(f"[red]{error}[/]")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        for run in runs:
            sweep(run)
            if not args.keep:
                shutil.rmtree(run.checkpoints, ignore_errors=True)
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all[/]")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
