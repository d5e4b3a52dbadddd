"""A chat with a real model: killed, resumed in another process, and proved to go on the same.

Owns the story and its figures; each step of it runs in a process of its own (tools/demo_step.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.demo_step import Event, Step, StepFailed
from tqstore.presets import DEFAULT_PRESET, preset_codecs

SESSION = "demo"
QUESTIONS = ("What is a block?", "What happens if a name is bound in a block?")
MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """What `--json` writes.  Seconds run from asking to the first token, resuming included."""

    cold_ttft_s: float
    resume_ttft_s: float
    tokens_reused: int
    bytes_on_disk: int
    bytes_dense: int
    bytes_prompt_cache: int
    identical: bool
    prompt_tokens: int
    stored_tokens: int
    dense_dtype: str
    save_s: float
    same_as_dense: int
    answer_tokens: int
    keys: str
    values: str

    @property
    def succeeded(self) -> bool:
        return self.identical and self.tokens_reused > 0


class Demo:
    """The story, told on `console`; the files it needs lie in `folder`, the sessions in `store`."""

    def __init__(
        self, console: Console, folder: Path, store: Path, document: str, codecs: dict[str, str]
    ) -> None:
        self.console = console
        self.codecs = codecs
        self.folder = folder
        self.store = store
        self.turns = [turn(QUESTIONS[0], document), turn(QUESTIONS[1])]

    def tell(self) -> Figures:
        first, saved = self.answer_and_die()
        resumed = self.resume(first["history"])
        uninterrupted = self.run_through()
        cold = self.read_again(resumed)
        expected = [first["tokens"], resumed["tokens"]]
        identical = [answered["tokens"] for answered in uninterrupted] == expected
        return Figures(
            cold_ttft_s=cold["ttft_s"],
            resume_ttft_s=resumed["ttft_s"],
            tokens_reused=resumed["reused_tokens"],
            bytes_on_disk=nbytes_below(self.store),
            bytes_dense=cold["dense_nbytes"],
            bytes_prompt_cache=cold["prompt_cache_nbytes"],
            identical=identical,
            prompt_tokens=resumed["prompt_tokens"],
            stored_tokens=cold["num_cached"],
            dense_dtype=cold["dense_dtype"],
            save_s=saved["seconds"],
            same_as_dense=common_prefix(cold["tokens"], resumed["tokens"]),
            answer_tokens=len(resumed["tokens"]),
            **self.codecs,
        )

    def answer_and_die(self) -> tuple[Event, Event]:
        """A process that is killed the moment its save is acknowledged."""
        title = "1. A process reads a document, answers, saves the session, and is killed"
        request = self.conversation(self.store, self.turns[:1], [], linger=True)
        with Step(self.console, title, request) as step:
            answered = step.next("answered")
            saved = step.next("saved")
            pid = step.kill()
        self.show(QUESTIONS[0], answered)
        self.console.print(
            f"  Saved {saved['num_cached']:,} tokens in {saved['seconds'] * 1e3:.0f} ms "
            f"({saved['nbytes'] / MIB:.1f} MiB were still to write), then SIGKILL to process {pid}."
        )
        return answered, saved

    def resume(self, history: list[int]) -> Event:
        """Another process, which has only the store and the transcript."""
        title = "2. A new process resumes the session and asks on"
        request = self.conversation(self.store, self.turns[1:], history, linger=False)
        with Step(self.console, title, request) as step:
            answered = step.next("answered")
            step.next("saved")
        self.show(QUESTIONS[1], answered)
        self.console.print(
            f"  Reused {answered['reused_tokens']:,} of {answered['prompt_tokens']:,} tokens."
        )
        return answered

    def run_through(self) -> list[Event]:
        """The same conversation in one process and a store of its own, never stopped."""
        title = "3. For comparison: the whole conversation in one process, uninterrupted"
        request = self.conversation(self.folder / "uninterrupted", self.turns, [], linger=False)
        answers = []
        with Step(self.console, title, request) as step:
            for question in QUESTIONS:
                answers.append(step.next("answered"))
                step.next("saved")
                self.show(question, answers[-1])
        return answers

    def read_again(self, resumed: Event) -> Event:
        """Without tqstore: the stock cache, which has to read all of the conversation again."""
        title = "4. For comparison: mlx-lm's own cache, which reads everything again"
        prompt = resumed["history"][: resumed["prompt_tokens"]]
        file = str(self.folder / "prompt_cache.safetensors")
        request = {"do": "cold", "prompt": prompt, "prompt_cache": file}
        with Step(self.console, title, request) as step:
            answered = step.next("cold")
        self.show(QUESTIONS[1], answered)
        return answered

    def conversation(
        self, store: Path, turns: list[str], history: list[int], *, linger: bool
    ) -> dict[str, Any]:
        return {
            "do": "converse",
            "store": str(store),
            "name": SESSION,
            "turns": turns,
            "history": history,
            "linger": linger,
            "codecs": self.codecs,
        }

    def show(self, question: str, answered: Event) -> None:
        """Model text goes out as it is: it may hold what looks like markup."""
        text = " ".join(answered["text"].split())
        self.console.print(f"  {question}", style="cyan", markup=False)
        self.console.print(
            f"  {text}  ({answered['ttft_s']:.2f} s to its first token)", markup=False
        )

    def inspect_page(self) -> None:
        """What the command line shows of one page of the session."""
        command = ["inspect", SESSION, "--page", "0"]
        self.console.print(f"\n[bold]5. tqstore {' '.join(command)}[/bold]")
        sys.stdout.flush()  # what follows is written by the command itself
        run = subprocess.run(
            [sys.executable, "-m", "tqstore.cli", *command],
            env={
                **os.environ,
                "TQSTORE_HOME": str(self.store),
                "COLUMNS": str(self.console.width),
            },
        )
        if run.returncode != 0:
            raise StepFailed(f"tqstore inspect ended with {run.returncode}")


def turn(question: str, before: str = "") -> str:
    return f"{before}\n\nQuestion: {question}\n\nAnswer:"


def default_document() -> str:
    """Python's own reference on names and scopes, about 2,000 tokens, on every machine.

    Each paragraph becomes one line, and the model answers in paragraphs.
    """
    paragraphs = topics["execmodel"].split("\n\n")
    return "\n\n".join(
        part if part.startswith("   ") else " ".join(part.split()) for part in paragraphs
    )


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    equal = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        equal += 1
    return equal


def nbytes_below(folder: Path) -> int:
    """Bytes of every file of the store, whatever it is for."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def figures_table(figures: Figures) -> Table:
    table = Table(title="\nWhat it is worth", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("note")
    cold, resumed = figures.cold_ttft_s, figures.resume_ttft_s
    disk = figures.bytes_on_disk
    table.add_row("first token, cold", f"{cold:.2f} s", "mlx-lm reads the conversation again")
    table.add_row("first token, resumed", f"{resumed:.2f} s", f"{cold / resumed:.1f}x sooner")
    table.add_row(
        "tokens reused", f"{figures.tokens_reused:,}", f"of a prompt of {figures.prompt_tokens:,}"
    )
    packed = f"every file of the store; keys {figures.keys}, values {figures.values}"
    table.add_row("bytes on disk", mebibytes(disk), packed)
    table.add_row(
        f"dense cache, {figures.dense_dtype}",
        mebibytes(figures.bytes_dense),
        f"{figures.bytes_dense / disk:.1f}x more: all layers, {figures.stored_tokens:,} tokens",
    )
    table.add_row(
        "mlx-lm save_prompt_cache",
        mebibytes(figures.bytes_prompt_cache),
        f"{figures.bytes_prompt_cache / disk:.1f}x: windowed layers' last tokens only",
    )
    table.add_row(
        "same as uninterrupted",
        "[green]yes[/green]" if figures.identical else "[red]NO[/red]",
        "token for token, both answers",
    )
    table.add_row(
        "same as unpacked",
        f"{figures.same_as_dense} of {figures.answer_tokens}",
        "first tokens of the second answer, against mlx-lm's exact cache",
    )
    return table


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FOLDER",
        help="keep the store here (default: a temporary one)",
    )
    parser.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="the text to read (default: Python's reference)",
    )
    packed = preset_codecs(DEFAULT_PRESET)
    parser.add_argument("--keys", default=packed.keys, help=f"their codec (default: {packed.keys})")
    parser.add_argument(
        "--values", default=packed.values, help=f"their codec (default: {packed.values})"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # In a file or a pipe there is no width to keep to.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    document = options.document.read_text() if options.document else default_document()
    if options.store and options.store.exists() and any(options.store.iterdir()):
        console.print(f"{options.store} is not empty: choose a new folder for --store", style="red")
        return 2
    codecs = {"keys": options.keys, "values": options.values}
    with tempfile.TemporaryDirectory(prefix="tqstore-demo-") as name:
        folder = Path(name)
        demo = Demo(console, folder, options.store or folder / "store", document, codecs)
        try:
            figures = demo.tell()
            demo.inspect_page()
        except StepFailed as failure:
            console.print(f"\nthe demo failed: {failure}", style="red", markup=False)
            return 1
    console.print(figures_table(figures))
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return 0 if figures.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
