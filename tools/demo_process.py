"""One process of the demo: does with the real model what a request says, and reports.

Every process here could be a user's own program.  Owns no figures and no comparison: tools/demo.py
does the telling.

Requests (one JSON object on the standard input; the reports are JSON lines on the standard output):
    {"do": "converse", "store", "name", "history": [token...], "turns": [text...], "linger": bool,
     "codecs": {"keys", "values"}}
    {"do": "cold", "prompt": [token...], "prompt_cache": file}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tools import real_model

MAX_ANSWER_TOKENS = 64
PREFILL_TOKENS = 256  # how often the progress bar moves; the same in every process compared


def report(event: str, **facts: Any) -> None:
    """One line for tools/demo.py, at once."""
    print(json.dumps({"event": event, **facts}), flush=True)


def load() -> tuple[Any, Any, Path]:
    """The model, its tokenizer and its folder."""
    folder = real_model.model_folder(
        lambda what, done, total: report("progress", what=what, done=done, total=total)
    )
    report("progress", what="loading the model", done=0, total=1)
    model, tokenizer = real_model.load()
    report("progress", what="loading the model", done=1, total=1)
    return model, tokenizer, folder


class Answer:
    """A greedy answer of one paragraph: its tokens, text and the time to the first token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.first_token_s = 0.0

    def read(self, responses: Iterable[Any], started: float) -> None:
        for response in responses:
            if not self.tokens:
                self.first_token_s = time.perf_counter() - started
            self.tokens.append(int(response.token))
            self.text += response.text
            if "\n\n" in self.text:
                return


def generate(model: Any, tokenizer: Any, tokens: list[int], cache: Any) -> Iterator[Any]:
    from mlx_lm import stream_generate

    def progress(done: int, total: int) -> None:
        report("progress", what=f"reading {total:,} tokens", done=done, total=total)

    return stream_generate(
        model,
        tokenizer,
        tokens,
        prompt_cache=cache,
        max_tokens=MAX_ANSWER_TOKENS,
        prefill_step_size=PREFILL_TOKENS,
        prompt_progress_callback=progress,
    )


def converse(request: dict[str, Any]) -> None:
    """Takes the turns of a conversation in a tqstore session, saves after each, and says so."""
    import tqstore
    import tqstore.mlx_lm

    model, tokenizer, weights = load()
    history: list[int] = request["history"]
    started = time.perf_counter()  # opening and resuming are part of the wait for the first token
    with (
        tqstore.Store.open(request["store"]) as store,
        tqstore.mlx_lm.session(
            store, model, request["name"], weights=weights, **request["codecs"]
        ) as chat,
    ):
        for turn in request["turns"]:
            prompt = history + tokenizer.encode(turn, add_special_tokens=not history)
            rest = chat.feed(prompt)
            answer = Answer()
            answer.read(chat.follow(generate(model, tokenizer, rest, chat.cache)), started)
            history = prompt + answer.tokens
            report(
                "answered",
                text=answer.text,
                tokens=answer.tokens,
                history=history,
                prompt_tokens=len(prompt),
                reused_tokens=chat.reused_tokens,
                reason=chat.reason,
                ttft_s=answer.first_token_s,
            )
            started = time.perf_counter()
            saved = chat.save()
            report(
                "saved",
                seconds=time.perf_counter() - started,
                nbytes=saved.nbytes_written,
                num_cached=chat.num_cached,
            )
            started = time.perf_counter()
        if request["linger"]:
            linger()


def linger() -> None:
    """Waits to be killed, in the middle of the session."""
    time.sleep(600)
    raise SystemExit("nobody killed this process")


def cold(request: dict[str, Any]) -> None:
    """What there is without tqstore: mlx-lm's own cache reads everything, and saves everything."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache

    model, tokenizer, _ = load()
    prompt: list[int] = request["prompt"]
    started = time.perf_counter()
    cache = make_prompt_cache(model)
    answer = Answer()
    answer.read(generate(model, tokenizer, prompt, cache), started)
    file = Path(request["prompt_cache"])
    save_prompt_cache(str(file), cache)
    whole = next(entry for entry in cache if isinstance(entry, KVCache))
    report(
        "cold",
        text=answer.text,
        tokens=answer.tokens,
        ttft_s=answer.first_token_s,
        prompt_cache_nbytes=file.stat().st_size,
        # every layer's keys and values of every token, in the model's own dtype
        dense_nbytes=len(cache) * token_nbytes(whole) * whole.offset,
        dense_dtype=str(whole.keys.dtype).removeprefix("mlx.core."),
        num_cached=whole.offset,
    )


def token_nbytes(layer: Any) -> int:
    """Bytes of one token's keys and values in one dense layer."""
    arrays = (layer.keys, layer.values)  # [1, heads, capacity, head_dim]
    return sum(int(array.nbytes // array.shape[2]) for array in arrays)


ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {"converse": converse, "cold": cold}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    ACTIONS[asked["do"]](asked)
