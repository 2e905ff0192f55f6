"""Carry out planned runs: finished ones are read, begun ones are resumed, the rest are made.

One after the other in this process, or several at a time, each in a process of its own.
"""

import gc
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llqr.lab import machine
from llqr.lab.errors import EXIT_CODES, ConfigurationError, Diverged, RunsFailed, Stopped
from llqr.lab.number_table import spread
from llqr.lab.progress import Display
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import PlannedRun
from llqr.lab.stop import Stop
from llqr.lab.tasks import Task
from llqr.lab.tasks.task import TaskCache
from llqr.lab.training.loop import Execution, Training
from llqr.lab.writing import make_folder

SECONDS_BETWEEN_LOOKS = 0.1


def carry_out(
    planned: Sequence[PlannedRun], execution: Execution, stop: Stop, display: Display
) -> list[dict[str, Any]]:
    """The results of all runs, in their order; `Stopped` if a signal or the time limit comes first.

    A run that diverges does not stop the others; `Diverged` names all of them at the end.
    """
    for one in planned:
        RunFolder(one.path).check(one)
    tasks = TaskCache(execution.device)
    results, diverged = [], []
    for one in planned:
        result, note = _result(one), "already done"
        if result is None:
            if stop.requested:
                raise Stopped(f"Stopped by {stop.reason} before {one.label}; the same command resumes here.")
            with RunFolder(one.path).locked():
                result = _result(one)  # of the process that held the lock until now
                if result is None:
                    task = tasks.load(one.run, one.seed)
                    try:
                        result, note = _train(one, task, execution, stop, display), "done"
                    except Diverged as error:
                        diverged.append(str(error))
            gc.collect()  # a run holds graphs and tensors in reference cycles; the next one needs their memory
        if result is None:
            display.end(f"{one.label}: diverged")
            continue
        results.append(result)
        display.end(_outcome(one, result, note))
    if diverged:
        raise Diverged("\n".join(diverged))
    return results


def carry_out_together(
    planned: Sequence[PlannedRun], commands: Sequence[list[str]], jobs: int, stop: Stop, display: Display
) -> list[dict[str, Any]]:
    """The same with ``jobs`` runs at a time, each in a process of its own, started by its command.

    A run that fails does not stop the others; `RunsFailed` names those that failed at the end. On a stop every process
    leaves a checkpoint. The output of a process goes to ``output.log`` in the folder of its run.
    """
    results: dict[Path, dict[str, Any]] = {}
    failures: dict[Path, str] = {}
    running: dict[Path, tuple[PlannedRun, subprocess.Popen[bytes]]] = {}

    def done(one: PlannedRun, result: dict[str, Any], note: str) -> None:
        results[one.path] = result
        display.end(f"{_outcome(one, result, note)} ({len(results)} of {len(planned)} runs)")

    for one in planned:
        if (result := _result(one)) is not None:
            done(one, result, "already done")
    waiting = [pair for pair in zip(planned, commands, strict=True) if pair[0].path not in results]
    stopping = False
    try:
        while running or (waiting and not stopping):
            if stop.requested and not stopping:
                stopping = True
                for _, process in running.values():
                    process.terminate()
            while waiting and len(running) < jobs and not stopping:
                one, command = waiting.pop(0)
                running[one.path] = one, _start(command, RunFolder(one.path))
            for one, process in list(running.values()):
                code = process.poll()
                if code is None:
                    continue
                del running[one.path]
                if (result := _made(one)) is not None:  # also of one that was stopped after its last step
                    done(one, result, "done")
                elif code not in (EXIT_CODES[Stopped], -signal.SIGTERM):
                    why = RunFolder(one.path).last_output() if code > 0 else f"killed by signal {-code}"
                    failures[one.path] = f"{one.label} failed: {why}"
                    display.end(failures[one.path])
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:  # an error stops them, a second Ctrl-C interrupts them
        for _, process in running.values():
            process.send_signal(signal.SIGINT if stopping else signal.SIGTERM)
        for _, process in running.values():
            process.wait()
    for one in planned:
        if one.path in failures and (result := _made(one)) is not None:  # by a process that had the run in use
            del failures[one.path]
            done(one, result, "done")
    failed = "".join(f"\n{failure}" for failure in failures.values())
    count = f"{len(results)} of {len(planned)} runs are done"
    if left := [one.label for one in planned if one.path not in {*results, *failures}]:
        why = stop.reason or "a signal"
        raise Stopped(f"Stopped by {why}: {count}, left are {', '.join(left)}; the same command resumes.{failed}")
    if failures:
        raise RunsFailed(f"{count}.{failed}")
    return [results[one.path] for one in planned]


def _start(command: list[str], folder: RunFolder) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C of a terminal reaches the parent, which stops all of them once."""
    make_folder(folder.path)
    with folder.output.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def _result(planned: PlannedRun) -> dict[str, Any] | None:
    """The result of a finished run; another process may have made a run with other settings in its folder."""
    folder = RunFolder(planned.path)
    result = folder.result()
    folder.check(planned)
    return result


def _made(planned: PlannedRun) -> dict[str, Any] | None:
    """The result of a finished run; None if its folder holds a run with other settings."""
    with suppress(ConfigurationError):
        return _result(planned)
    return None


def _outcome(planned: PlannedRun, result: dict[str, Any], note: str) -> str:
    last, best = spread(result["last"]), spread(result["best"])
    return f"{planned.label}: {note}, last {result['metric']} {last}, best {best}"


def _train(planned: PlannedRun, task: Task, execution: Execution, stop: Stop, display: Display) -> dict[str, Any]:
    training = Training(planned, task, execution)
    how: dict[str, Any] = {"capture": execution.capture, "compile": execution.compile}
    if execution.shared_device:
        how |= {"shared": True}
    training.folder.begin(planned, machine.describe(execution.device) | how)
    training.resume()
    result = training.run(stop, display)
    if result is None:
        raise Stopped(
            f"{planned.label}: stopped by {stop.reason} after {training.optimizer.steps} of {training.total_steps} "
            "steps; the same command resumes from the checkpoint."
        )
    return result
