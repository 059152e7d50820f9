"""`aiodist check`: targets, exit codes, output, and that the printed command repeats a failure."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist._runtime.stacks import can_read_other_threads
from aiodist._tools.cli import main
from tests.tools.command import interrupt_command, run_command, usage_error

PROGRAM = '''
"""Programs to check."""
import asyncio
import sys

import numpy as np

import settings
from aiodist import CollectiveMismatchError, MirroredStrategy, ReduceOp, get_replica_context

first = []

async def train(steps=3, rate=0.5):
    ctx = get_replica_context()
    for step in range(steps):
        await asyncio.sleep(60 * ctx.replica_id_in_sync_group)
        await ctx.all_reduce(ReduceOp.MEAN, {"w": np.ones(settings.size), "b": 1.0})
    await ctx.all_gather(np.ones(ctx.replica_id_in_sync_group + 1), 0)
    print("rate", rate)

async def race():
    ctx = get_replica_context()
    await ctx.barrier()
    first.append(ctx.replica_id_in_sync_group)
    if first[0] == ctx.replica_id_in_sync_group != 0:
        await ctx.all_reduce("SUM", 1.0)
    await ctx.barrier()

async def other_size():
    ctx = get_replica_context()
    await ctx.all_reduce("SUM", np.ones(2 + (ctx.replica_id_in_sync_group == 1)))

async def caught():
    try:
        await other_size()
    except CollectiveMismatchError:
        pass

async def stuck():
    if get_replica_context().replica_id_in_sync_group == 1:
        await asyncio.Event().wait()
    await get_replica_context().barrier()

async def fails():
    raise LookupError("no such key")

async def cancelled():
    raise asyncio.CancelledError("main task")

async def amain():
    await MirroredStrategy(["CPU:0", "CPU:1"]).run(train)
    await MirroredStrategy(["CPU:0", "CPU:1"]).run(train)

def main():
    print(sys.argv[1:], __file__.endswith("program.py"), __name__, sys.path[0] in __file__)
    return asyncio.run(amain())

def exits():
    main()
    sys.exit(int(sys.argv[1]))

async def waits_in_a_thread():
    import queue
    await asyncio.to_thread(queue.Queue().get)

def on_trio():
    import trio
    trio.run(amain)

def endless():
    async def spin():
        print("spinning", flush=True)
        while True:
            await asyncio.sleep(0)
    asyncio.run(MirroredStrategy(["CPU:0", "CPU:1"]).run(spin))

async def computes():
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as a program may; the check ends its steps by another signal
    while True:
        pass

if __name__ == "__main__":
    raise SystemExit("the program was run directly")
'''
SCRIPT = """
import asyncio
from program import amain

async def size():
    return 2

SIZE = asyncio.run(size())

async def step():
    await amain()

print("once")
asyncio.run(step())
raise SystemExit("the script's own run went on")
"""


FILES = {
    "program.py": PROGRAM,
    "script.py": SCRIPT,
    "settings.py": "size = 2\n",
    "package/__init__.py": "",
    "package/module.py": "from program import train as inner\n",
    "unfinished.py": "def main(:\n",
    "broken.py": "import no_such_module_anywhere\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "package").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    path, modules = sys.path[:], set(sys.modules)
    yield tmp_path
    assert sys.path == path
    assert not {"program", "settings", "package"} & (set(sys.modules) - modules)


def check(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    """Run a check in this process; return its exit code and output."""
    code = main(["check", *shlex.split(line)])
    return code, capsys.readouterr().out


# Exit codes.


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("program.py:train --replicas 4", 0, "4 replicas agreed in 4 collectives, in 20 schedules."),
        ("package.module:inner --replicas 2", 0, "2 replicas agreed in 4 collectives"),
        ("program.py:train --replicas 1", 0, "1 replica agreed in 4 collectives, in 1 schedule (it leaves no choice)."),
        ("script.py:step --schedules 2", 0, "2 replicas agreed in 8 collectives in 2 runs, in 2 schedules."),
        ("program.py:exits -- 0", 0, "2 replicas agreed"),
        ("program.py:other_size --replicas 3", 1, "CollectiveMismatchError: replicas disagree at collective #0"),
        ("program.py:caught --replicas 3", 1, "CollectiveMismatchError: replicas disagree at collective #0"),
        ("program.py:stuck --replicas 3", 1, "DeadlockError: nothing can run any more"),
        pytest.param(
            "program.py:endless --timeout 0.1",
            1,
            "check program.py:endless --timeout 0.1 --replay 0/\n",
            marks=pytest.mark.leaves_tasks,  # on a busy machine the limit passes before its task begins
        ),
        ("program.py:fails --replicas 3", 3, "LookupError: no such key"),
        ("program.py:cancelled", 3, "CancelledError: main task\n\nFound in the default order.\n"),
        ("program.py:exits -- 7", 3, "SystemExit: 7\nthe target ended with exit code 7\n\nFound"),
        ("broken:main", 3, "import no_such_module_anywhere\nModuleNotFoundError: No module named"),
    ],
)
def test_check_ends_with_a_code(capsys: pytest.CaptureFixture[str], line: str, code: int, message: str) -> None:
    ended, output = check(capsys, line)
    assert message in output
    assert ended == code


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: TARGET"),
        ("script.py", "expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, got 'script.py'; it has size, step\n"),
        ("program.py:train_ --replicas 2", "program has no function 'train_'; did you mean 'train'?"),
        ("'pro gram:train'", "expected FILE.py:FUNCTION"),
        ("nowhere.py:train", "there is no file 'nowhere.py'"),
        ("nowhere:train", "there is no module 'nowhere' in "),
        ("package.nowhere:train", "there is no module 'package.nowhere' in "),
        ("program.py:nothing", "program has no function 'nothing'; it has train, race,"),
        ("program.py:train", "a replica function needs --replicas"),
        ("program.py:on_trio", "runs on an event loop that the target chose itself"),
        ("program.py:train --schedules 0", "--schedules: expected"),
        ("program.py:train --timeout nan", "--timeout: expected a number of seconds above 0, got 'nan'"),
        ("program.py:train --replay 17-", "--replay: expected a schedule such as 0/17-,40:2"),
        ("program.py:train --replicas 2 -- epochs=3", "cannot be called with -- epochs=3"),
    ],
)
def test_bad_usage_gives_one_line_and_code_2(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert message in usage_error(capsys, "check", *shlex.split(line))


# The target's surroundings.


def test_target_runs_as_if_it_were_run_directly(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "program.py:main -- --epochs 3")[1].startswith("['--epochs', '3'] True program True\n")


@pytest.mark.parametrize(
    ("own", "expected"),
    [("", "rate 0.5"), ("1 0.25", "rate 0.25"), ("rate=[1,2]", "rate [1, 2]"), ("rate=fast", "rate fast")],
)
def test_arguments_are_passed_to_a_function(capsys: pytest.CaptureFixture[str], own: str, expected: str) -> None:
    code, output = check(capsys, f"program.py:train --replicas 2 -- {own}")
    assert code == 0
    assert output.startswith(f"{expected}\n" * 2)
    assert output.count("rate ") == 2  # the first schedule alone prints


# The output.


def test_summary_lists_collectives_by_place_with_bytes_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = check(capsys, "program.py:train --replicas 3 --schedules 2")
    call = "all_reduce(MEAN, {'b': float, 'w': float64[2]})"
    assert [re.split(r"  +", line.strip()) for line in output.splitlines()[-3:]] == [
        ["collective", "called at", "times", "bytes", "waited", "last to arrive"],
        [call, "program.py:17 in train", "3", "216 B", "360 s", "replica 2"],
        ["all_gather(float64[*], axis=0)", "program.py:18 in train", "1", "48 B"],
    ]


def test_race_is_reported_with_its_schedule_and_a_command_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = check(capsys, "program.py:race --replicas 4 --schedules 100 --seed 3")
    assert code == 1
    assert "program.py:26 in race" in output
    found = r"Found in schedule \d+ of 100, with 1 change to the default order, in which nothing fails:"
    assert re.search(found, output)
    command = output.splitlines()[-1].removeprefix("Again:  aiodist check ")
    assert command.startswith("program.py:race --replicas 4")

    again, repeated = check(capsys, command)
    assert again == 1
    assert repeated.partition("\n\n")[0] == output.partition("\n\n")[0]
    assert repeated.splitlines()[-2:] == output.splitlines()[-2:]
    assert check(capsys, "program.py:race --replicas 4 --schedules 1")[0] == 0


def test_exception_of_the_program_is_shown_without_our_frames(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    _, output = check(capsys, "program.py:fails --replicas 2")
    assert re.findall(r'File ".*?([a-z_]+\.py)", line (\d+), in (\w+)', output) == [("program.py", "45", "fails")]
    assert "Found in the default order.\nAgain:  aiodist check program.py:fails --replicas 2 --replay 0/" in output
    _, output = check(capsys, "unfinished.py:main")
    assert output.startswith(
        f'  File "{folder}/unfinished.py", line 1\n    def main(:\n             ^\nSyntaxError: invalid syntax\n'
    )


def test_json_has_the_summary_and_the_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("check program.py:train --replicas 2 --json --schedules 4")) == 0
    printed = capsys.readouterr()
    assert printed.err == "rate 0.5\n" * 2
    agreed = json.loads(printed.out)
    assert [agreed[key] for key in ("outcome", "replicas", "runs", "seed", "schedules")] == ["agreed", 2, 1, 0, 4]
    assert [site["kind"] for site in agreed["collectives"]] == ["all_reduce", "all_gather"]
    assert agreed["collectives"][0]["last_to_come"] == {"1": 3}

    code, output = check(capsys, "program.py:other_size --replicas 3 --json")
    failure = json.loads(output)["failure"]
    assert (code, failure["error"]) == (1, "CollectiveMismatchError")
    assert (failure["report"]["reason"], failure["report"]["suspects"]) == ("shape", [1])
    assert failure["replay"] == "aiodist check program.py:other_size --replicas 3 --replay 0/"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process cannot be replaced here")
@pytest.mark.parametrize("argument", [["--seed", "5"], ["--replay", "5/"]])
def test_process_starts_again_with_string_hashes_of_the_seed(
    monkeypatch: pytest.MonkeyPatch, argument: list[str]
) -> None:
    def execve(_: str, command: list[str], variables: dict[str, str]) -> None:
        raise InterruptedError(variables["PYTHONHASHSEED"])

    monkeypatch.setattr("sys.argv", ["aiodist", "check", "program.py:train", "--replicas", "2", *argument])
    monkeypatch.setattr("os.execve", execve)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InterruptedError, match=r"^5$"):
        main()
    monkeypatch.setenv("PYTHONHASHSEED", "6")
    assert main() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are POSIX here")
def test_interruption_ends_in_one_line() -> None:
    code, output = interrupt_command("check", "program.py:endless", when="spinning")
    assert (code, output.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("program.py:waits_in_a_thread", "DeadlockError: nothing can run any more"),
        pytest.param(
            "program.py:computes --timeout 3",
            "CollectiveTimeoutError: the run has taken longer than 3 s\nReplica 0 has held up the event loop",
            marks=pytest.mark.skipif(not can_read_other_threads(), reason="frames of other threads cannot be read"),
        ),
    ],
)
def test_target_that_never_ends_does_not_keep_the_process_alive(line: str, message: str) -> None:
    ended = run_command("check", "--replicas", "2", *line.split())
    assert ended.returncode == 1
    assert ended.stdout.startswith(message)
