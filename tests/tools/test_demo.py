"""The demo: how a step reports, fails and is killed; and the whole of it on the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from tools import demo, demo_step, readme_figures, real_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys, time
request = json.load(sys.stdin)
for event in request["events"]:
    print(json.dumps(event), flush=True)
if request.get("fail"):
    sys.exit(request["fail"])
if request.get("linger"):
    time.sleep(60)
"""


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step whose process says the events it is given."""
    popen = subprocess.Popen

    def started(_command: list[str], **options: Any) -> subprocess.Popen[str]:
        return popen([sys.executable, "-c", PROGRAM], **options)

    monkeypatch.setattr(demo_step.subprocess, "Popen", started)
    console = Console(file=StringIO())

    def step(*events: dict[str, Any], **request: Any) -> demo_step.Step:
        return demo_step.Step(console, "a step", {"events": events, **request})

    return step


PROGRESS = {"event": "progress", "what": "reading", "done": 1, "total": 2}


def test_a_step_hands_on_its_reports_in_order(step_of: Any) -> None:
    with step_of(PROGRESS, {"event": "answered", "n": 1}, PROGRESS, {"event": "saved"}) as step:
        assert step.next("answered")["n"] == 1
        assert step.next("saved") == {"event": "saved"}


def test_a_report_that_was_not_due_fails_the_step(step_of: Any) -> None:
    with (
        pytest.raises(demo_step.StepFailed, match="expected 'saved'"),
        step_of({"event": "answered"}) as step,
    ):
        step.next("saved")


def test_a_process_that_ends_early_fails_the_step_with_its_words(step_of: Any) -> None:
    with (
        pytest.raises(demo_step.StepFailed, match=r"(?s)before 'saved'.*out of paper"),
        step_of(PROGRESS, fail="out of paper") as step,
    ):
        step.next("saved")


def test_a_process_that_fails_at_the_end_fails_the_step(step_of: Any) -> None:
    with (
        pytest.raises(demo_step.StepFailed, match="ended with 3"),
        step_of({"event": "saved"}, fail=3) as step,
    ):
        step.next("saved")


def test_a_kill_is_a_kill(step_of: Any) -> None:
    with step_of({"event": "saved"}, linger=True) as step:
        step.next("saved")
        pid = step.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_the_default_document_is_long() -> None:
    assert len(demo.default_document().split()) > 1_500


@pytest.mark.parametrize(
    ("one", "other", "equal"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1)]
)
def test_common_prefix(one: list[int], other: list[int], equal: int) -> None:
    assert demo.common_prefix(one, other) == equal


FIGURES = {
    "cold_ttft_s": 8.0,
    "resume_ttft_s": 0.5,
    "tokens_reused": 2_000,
    "bytes_on_disk": 10 << 20,
    "bytes_dense": 50 << 20,
    "bytes_prompt_cache": 20 << 20,
    "identical": True,
    "prompt_tokens": 2_010,
    "stored_tokens": 2_020,
    "dense_dtype": "float32",
    "save_s": 0.1,
    "same_as_dense": 3,
    "answer_tokens": 4,
    "keys": "prod4",
    "values": "int8",
}


def test_the_readme_takes_its_figures_from_the_demo() -> None:
    demo.Figures(**FIGURES)  # the names are the demo's
    text = f"above\n{readme_figures.BEGIN}old 1 s\n{readme_figures.END}below\n"
    once = readme_figures.replaced(text, FIGURES)
    assert "old 1 s" not in once
    assert once.startswith("above\n")
    assert once.endswith("below\n")
    assert "| 8.00 s | 0.50 s (16x sooner) |" in once
    assert readme_figures.replaced(once, FIGURES) == once
    assert "NOT equal" in readme_figures.replaced(text, {**FIGURES, "identical": False})


def test_the_readme_has_the_markers() -> None:
    readme_figures.replaced(readme_figures.README.read_text(), FIGURES)
    with pytest.raises(ValueError, match="lacks the lines"):
        readme_figures.replaced("nothing", FIGURES)


def run_demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.demo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_a_store_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    run = run_demo("--store", tmp_path)
    assert run.returncode == 2
    assert "not empty" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.xdist_group("real_model")
@pytest.mark.skipif(not real_model.is_available(), reason="the `model` extra is not installed")
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    words = demo.default_document().split(" ")
    (tmp_path / "document").write_text(" ".join(words[:400]))
    run = run_demo(
        "--document",
        tmp_path / "document",
        "--store",
        tmp_path / "store",
        "--json",
        tmp_path / "figures",
        "--keys",
        "uni6",
        "--values",
        "uni6",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["identical"] is True
    # all but the last token of the first answer and the second question
    assert figures["tokens_reused"] > figures["prompt_tokens"] - 20
    assert figures["bytes_on_disk"] < figures["bytes_dense"] / 2
    assert (figures["keys"], figures["values"]) == ("uni6", "uni6")
    assert "SIGKILL" in run.stdout
    assert "key_codes" in run.stdout
