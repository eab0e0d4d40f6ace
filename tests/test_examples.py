"""The example, the demo's judgement and the README: what a newcomer runs first does what it says."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_gpt.py"
TINY = shlex.split("--width 32 --depth 1 --heads 2 --context 16 --batch 4 --text-bytes 65536")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder whose runs keep their shared memory inside it."""
    arena = tmp_path / "arena"
    arena.mkdir()
    monkeypatch.setenv("RELIGHT_ARENA_DIR", str(arena))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(place, name, *options, steps=6):
    command = [sys.executable, str(TRAIN), "--steps", str(steps), *TINY, "--checkpoints", str(place / name)]
    files = ["--log-file", str(place / f"{name}.jsonl"), "--digest-file", str(place / f"{name}.sha256")]
    return [*command, *files, *options]


def losses(place, name):
    log = place / f"{name}.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(line["step"], line["bits"]) for line in lines]


def weights(place, name):
    return (place / f"{name}.sha256").read_text()


def test_example_is_under_150_lines():
    assert len(TRAIN.read_text().splitlines()) < 150


def test_plain_example_needs_torch_alone(place):
    hide = "import runpy, sys; sys.modules['relight'] = None; del sys.argv[0]"
    command = train(place, "plain", "--plain")
    run = f"{hide}; runpy.run_path(sys.argv[0], run_name='__main__')"
    subprocess.run([command[0], "-c", run, *command[1:]], check=True)
    assert [step for step, _ in losses(place, "plain")] == [1, 2, 3, 4, 5, 6]
    assert not (place / "plain").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.multiprocess
def test_killed_example_ends_like_the_uninterrupted_one(place):
    subprocess.run(train(place, "straight", "--every", "2", "--workers", "1"), check=True)
    killed = train(place, "killed", "--every", "2", "--workers", "1")
    with subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(losses(place, "killed")) >= 3)
        process.send_signal(signal.SIGKILL)
    num_before = len(losses(place, "killed"))
    resumed = subprocess.run(killed, check=True, capture_output=True, text=True)
    first = losses(place, "killed")[num_before][0]
    assert first > 1
    assert re.search(rf"step {first - 1}\b.*\bram\b", resumed.stderr)
    assert set(losses(place, "killed")) == set(losses(place, "straight"))
    assert weights(place, "killed") == weights(place, "straight")


def wait_for(is_so):
    deadline = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def readme_blocks(language):
    return [body for kind, body in BLOCK.findall((ROOT / "README.md").read_text()) if kind == language]


def run_script(folder):
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_readme_script_ends_the_same_after_a_kill_and_its_commands_work(place):
    (script,) = readme_blocks("python")
    for name in ("straight", "killed"):
        (place / name).mkdir()
        (place / name / "first.py").write_text(script)
    with subprocess.Popen([sys.executable, "first.py"], cwd=place / "killed") as process:
        wait_for(lambda: list((place / "killed").glob("runs/first/step-*/manifest.json")))
        process.send_signal(signal.SIGKILL)
    assert run_script(place / "killed") == run_script(place / "straight")
    lines = [
        line for body in readme_blocks("sh") for line in body.splitlines() if line.startswith("relight ")
    ]
    ends = {line: run_command(line, place / "killed") for line in lines}
    assert ends == {line: 1 if "exits with 1" in line else 0 for line in lines}
    assert len(lines) >= 6


def run_command(line, folder):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        shlex.split(line, comments=True), cwd=folder, env=environment, check=False
    ).returncode


def test_readme_names_only_targets_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make (\w+)", "\n".join(readme_blocks("sh"))))
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.fixture
def demo(monkeypatch):
    """The demo's modules, imported as `python examples/demo.py` does."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("demo_report"), importlib.import_module("demo_lives")
    for name in ("demo_report", "demo_lives"):
        sys.modules.pop(name)


def make_lives(lives_module, spans, bits=lambda rank, step: f"{rank}{step}"):
    made = []
    for number, (first, last) in enumerate(spans, start=1):
        life = lives_module.Life(number=number, started_at=0.0)
        life.lines += [
            lives_module.Line(step=step, rank=rank, loss=1.0, bits=bits(rank, step), at=float(step), pid=1)
            for step in range(first, last + 1)
            for rank in range(2)
        ]
        made.append(life)
    return made


def make_runs(lives_module, place, digests=("same", "same")):
    runs = []
    for name, digest in zip(("straight", "killed"), digests, strict=True):
        (place / name).mkdir()
        runs.append(lives_module.Run(folder=place / name, steps=6, every=2))
        if digest:
            runs[-1].digest_file.write_text(digest)
    return runs


def test_demo_finds_runs_equal_when_every_loss_and_the_weights_are(demo, place):
    report, lives = demo
    straight, killed = make_runs(lives, place)
    found = report.compare(straight, make_lives(lives, [(1, 6)]), killed, make_lives(lives, [(1, 4), (3, 6)]))
    assert (found.holds, found.num_compared, found.num_replayed) == (True, 16, 4)


def test_demo_finds_one_other_bit_in_one_replayed_step(demo, place):
    report, lives = demo
    straight, killed = make_runs(lives, place)
    ends = make_lives(lives, [(1, 4)]) + make_lives(
        lives, [(3, 6)], lambda rank, step: "off" if (rank, step) == (1, 4) else f"{rank}{step}"
    )
    found = report.compare(straight, make_lives(lives, [(1, 6)]), killed, ends)
    assert (found.holds, found.differing) == (False, ((1, 4),))


def test_demo_finds_a_step_that_was_never_run(demo, place):
    report, lives = demo
    straight, killed = make_runs(lives, place)
    found = report.compare(straight, make_lives(lives, [(1, 6)]), killed, make_lives(lives, [(1, 3), (5, 6)]))
    assert (found.holds, found.missing) == (False, ((0, 4), (1, 4)))


@pytest.mark.parametrize("digests", [("one", "other"), ("", ""), ("same", "")])
def test_demo_finds_other_or_missing_weights(demo, place, digests):
    report, lives = demo
    straight, killed = make_runs(lives, place, digests)
    found = report.compare(straight, make_lives(lives, [(1, 6)]), killed, make_lives(lives, [(1, 6)]))
    assert not found.holds


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_demo_shows_equality(place):
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(place / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "bitwise equal to the uninterrupted run: yes" in shown.stdout
    assert (place / "out" / "loss.png").stat().st_size > 10_000
    assert list((place / "arena").glob("*/*")) == []
