"""A step of the demo: a process of its own, its progress drawn, its reports handed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Event = dict[str, Any]


class StepFailed(RuntimeError):
    """A process of the demo did not do its part; the message is what it said."""


class Step:
    """Runs tools/demo_process.py with `request`.  Leaving the `with` block ends the process."""

    def __init__(self, console: Console, title: str, request: dict[str, Any]) -> None:
        console.print(f"\n[bold]{title}[/bold]")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on leaving; never fills up
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.demo_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request))
        self._process.stdin.close()
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True)
        self._task = self._bars.add_task(f"starting process {self._process.pid}", total=None)

    def next(self, kind: str) -> Event:
        """Waits for the next report that is not progress; StepFailed unless it is a `kind`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: Event = json.loads(line)
            if event["event"] == kind:
                return event
            if event["event"] != "progress":
                raise StepFailed(f"expected {kind!r}, got {event}")
            self._bars.update(
                self._task,
                description=event["what"],
                completed=event["done"],
                total=event["total"],
            )
        self._errors.seek(0)
        code = self._process.wait()
        raise StepFailed(f"ended with {code} before {kind!r}:\n{self._errors.read().strip()}")

    def kill(self) -> int:
        """SIGKILL, which no program can notice or delay; the process id that is gone."""
        self._process.send_signal(signal.SIGKILL)
        code = self._process.wait()
        if code != -signal.SIGKILL:
            raise StepFailed(f"the process had already ended with {code}")
        return self._process.pid

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
        if error is not None:
            self._process.kill()
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.seek(0)
        problem = self._errors.read().strip()
        self._errors.close()
        if error is None and code not in (0, -signal.SIGKILL):
            raise StepFailed(f"ended with {code}:\n{problem}")
