"""A conversation that survives the process: resume, feed only what is new, save on leaving.

Owns the tokens and which of them the caches hold.  Does not generate: the caller does, with
mlx-lm's own `generate_step` or `stream_generate`, on `Session.cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mlx.nn.layers.base import Module

from tqstore.errors import InvalidInput
from tqstore.format.block_hash import Tokens, as_tokens
from tqstore.mlx_lm.fingerprint import fingerprint as fingerprint_of
from tqstore.mlx_lm.model_line import UNFINISHED, ModelLine
from tqstore.mlx_lm.packed_attention import packed_attention as attending_packed
from tqstore.mlx_lm.probe import Codecs, probe
from tqstore.mlx_lm.remembered import remembered_fingerprint
from tqstore.presets import DEFAULT_PRESET
from tqstore.session import SaveReport, Store

Response = TypeVar("Response")
DRAFT_SUFFIX = "-draft"


def session(
    store: Store,
    model: Module,
    name: str,
    *,
    draft_model: Module | None = None,
    preset: str = DEFAULT_PRESET,
    keys: Codecs | None = None,
    values: Codecs | None = None,
    page_tokens: int = 64,
    recent_tokens: int = 32,
    seed: int = 0,
    rotation: str = "auto",
    memory_budget: int | None = None,
    weights: str | Path | None = None,
    fingerprint: str | None = None,
    packed_attention: bool = True,
    save_on_error: bool = False,
) -> Session:
    """The session `name` of `store` for `model`, resumed if it exists.

    `preset` (card, small, balanced, near-lossless, exact) names the codecs of keys and values;
    `keys` and `values` replace its own, one for all or one for each paged layer.
    `weights` is the folder the model was loaded from: its fingerprint is then remembered, which
    spares reading all weights again (remembered.py says when that is believed).  `fingerprint` is
    for callers who know it already.  A draft model's cache is kept beside as `<name>-draft`.
    Within the `with` block the models attend to pages packed (packed_attention.py), unless
    `packed_attention` is False: then each step decodes what it sees.
    `save_on_error` saves also when the `with` block ends by an exception; by default the previous
    checkpoint then stays the newest.

    Raises Incompatible, naming the field, if the session belongs to other weights or codecs.

    >>> with session(store, model, "chat") as chat:                      # doctest: +SKIP
    ...     rest = chat.feed(tokenizer.encode(text))
    ...     answer = stream_generate(model, tokenizer, rest, prompt_cache=chat.cache)
    ...     for response in chat.follow(answer):
    ...         print(response.text, end="")
    """

    def line(of: Module, line_name: str, digest: str) -> ModelLine:
        layout = probe(of)
        spec = layout.cache_spec(
            preset=preset,
            keys=keys,
            values=values,
            page_tokens=page_tokens,
            recent_tokens=recent_tokens,
            seed=seed,
            rotation=rotation,
        )
        return ModelLine(
            store, of, line_name, layout, spec, digest, memory_budget, packed_attention
        )

    if fingerprint is None:
        if weights is None:
            fingerprint = fingerprint_of(model)
        else:
            fingerprint = remembered_fingerprint(model, weights)
    lines = [line(model, name, fingerprint)]
    if draft_model is not None:
        _check_splittable(model, lines[0].cache)
        lines.append(line(draft_model, name + DRAFT_SUFFIX, fingerprint_of(draft_model)))
    return Session(name, lines, save_on_error=save_on_error)


def _check_splittable(model: Module, cache: list[Any]) -> None:
    """mlx-lm gives the model the first len(model.layers) caches of a list, the draft the rest."""
    layers: list[Any] = model.layers
    if len(cache) != len(layers):
        raise InvalidInput(
            f"{type(model).__name__} makes {len(cache)} caches for {len(layers)} layers, and "
            "mlx-lm's speculative decoding splits the list by layers",
            doing="opening a session with a draft model",
            remedy="Leave out draft_model",
        )


class Session:
    """A named conversation with a model.  One thread; made by `session`.

    Every line's cache holds a prefix of `tokens`.  Leaving a `with` block saves.
    """

    def __init__(self, name: str, lines: list[ModelLine], *, save_on_error: bool = False) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.metadata: dict[str, Any] = {}
        self.reused_tokens = 0
        self.reason = ""
        self._lines = lines
        self._save_on_error = save_on_error
        self._entered: list[ExitStack] = []
        self._has_failed = False  # in `follow`: own states may be ahead
        self._saved: list[int] | None = None
        self._loss = ""  # what of the checkpoint could not be taken up
        self._resume()
        self.cache: list[Any] = [entry for line in lines for entry in line.cache]

    @property
    def num_cached(self) -> int:
        """Tokens that the model's cache holds: a prefix of `tokens`."""
        return self._lines[0].num_tokens

    def feed(self, prompt: Tokens) -> list[int]:
        """Keeps the longest prefix of `prompt` that the cache holds and returns the rest.

        The rest is to be fed to the model and is never empty.  `prompt` is the whole conversation
        so far, not only what is new.  `reused_tokens` and `reason` then say how much was
        reused, and why not more.
        """
        tokens: list[int] = as_tokens(prompt).tolist()
        if not tokens:
            raise InvalidInput("an empty prompt", doing=f"feeding session {self.name!r}")
        most = len(tokens) - 1  # the model needs one token to answer to
        lost = self._settle_all()
        cached = min(line.num_tokens for line in self._lines)
        common = common_prefix(self.tokens[:cached], tokens[:most])
        kept = min(line.last_exact(common) for line in self._lines)
        why = self._rewind_all(kept)
        reused = 0 if why else kept
        self.reason = lost or why or self._why_not_more(cached, common, most, kept)
        if most - reused >= min(line.spec.page_tokens for line in self._lines):
            reused = self._match_all(tokens, reused)
        self.tokens = tokens
        for line in self._lines:
            line.kv.tell(tokens)  # ahead of the model, so that a full memory can be written out
        self.reused_tokens = reused
        self.cache[:] = [entry for line in self._lines for entry in line.cache]
        return tokens[reused:]

    def extend(self, tokens: Tokens) -> None:
        """Tells which tokens were generated after the prompt, so that they can be reused."""
        start = len(self.tokens)
        self.tokens += as_tokens(tokens).tolist()
        for line in self._lines:
            # A trim (speculative decoding) forgets what was told beyond it.
            known = min(start, line.kv.num_told)
            line.kv.tell(self.tokens[known:], known)

    def follow(self, responses: Iterable[Response]) -> Iterator[Response]:
        """Passes on what `stream_generate` or `generate_step` yields and notes the tokens.

        Closes `responses` when left early: speculative decoding then takes back what it had fed
        ahead.
        """
        try:
            for response in responses:
                token: Any = response[0] if isinstance(response, tuple) else _token_of(response)
                self.extend([int(token)])
                yield response
        except GeneratorExit:
            raise
        except BaseException:
            self._has_failed = True
            raise
        finally:
            if isinstance(responses, Generator):
                responses.close()

    def save(self, metadata: Mapping[str, Any] | None = None) -> SaveReport:
        """Writes a checkpoint of all tokens that the cache holds; durable on return.

        Raises InvalidInput if the cache holds tokens that `feed` and `extend` were not told, or
        layers are apart after a step that failed and cannot go back.
        """
        for line in self._lines:
            why = UNFINISHED if self._cannot_be_trusted else line.even_out()
            if why:
                raise InvalidInput(
                    f"{why}, and the model's own states cannot go back",
                    doing=f"saving session {self.name!r}",
                    remedy="Feed the prompt again first",
                )
            if line.num_tokens > len(self.tokens):
                raise InvalidInput(
                    f"the cache holds {line.num_tokens} tokens, only {len(self.tokens)} are known",
                    doing=f"saving session {self.name!r}",
                    remedy="Pass generated tokens to extend(), or generate through follow()",
                )
        if metadata is not None:
            self.metadata = dict(metadata)
        # The draft's first: should the second fail, the model's own last checkpoint still holds.
        for line in reversed(self._lines):
            report = line.save(self.tokens[: line.num_tokens], self.metadata)
        self._saved = self.tokens[: self.num_cached]
        return report

    def __enter__(self) -> Self:
        stack = ExitStack()
        packed = [line.model for line in self._lines if line.packed_attention]
        stack.enter_context(attending_packed(*packed))
        self._entered.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().close()
        if error is not None and not self._save_on_error:
            return
        if error is not None and self._cannot_be_trusted:
            error.add_note(f"session {self.name!r} was not saved: {UNFINISHED}")
            return
        if self.num_cached and self._saved != self.tokens[: self.num_cached]:
            self.save()

    def _resume(self) -> None:
        """Takes up the checkpoints; a draft's tokens that are not the model's are forgotten."""
        taken = self._lines[0].resume()
        self.tokens, self.metadata, self.reason = taken.tokens, taken.metadata, taken.reason
        if taken.reason:
            self._loss = taken.reason
        else:
            self._saved = list(self.tokens)
        for line in self._lines[1:]:
            drafted = line.resume().tokens
            if line.rewind(common_prefix(drafted, self.tokens)):
                line.start_anew()

    @property
    def _cannot_be_trusted(self) -> bool:
        """Whether states of a model's own may have seen more than the paged layers hold."""
        return self._has_failed and any(line.layout.own for line in self._lines)

    def _settle_all(self) -> str:
        """What a failed step left is put in order; why all was started anew, if it was."""
        cached = self.num_cached
        why = UNFINISHED if self._cannot_be_trusted else self._first(ModelLine.settle)
        if why:
            self._has_failed = True  # until all are done, should this be interrupted
            self._start_anew()
        self._has_failed = False
        return why and f"started anew from {cached} tokens: {why}"

    def _first(self, attempt: Callable[[ModelLine], str]) -> str:
        """Why `attempt` failed for the first line for which it did; empty if for none."""
        return next(filter(None, map(attempt, self._lines)), "")

    def _start_anew(self) -> None:
        for line in self._lines:
            line.start_anew()

    def _why_not_more(self, cached: int, common: int, most: int, kept: int) -> str:
        if not cached:
            return self.reason or "a new session"
        if kept < common:
            return f"the prompt differs at token {common}; whole pages up to there are reused"
        if common == most:
            return "all but the last token reused"
        if common == cached:
            loss, self._loss = self._loss, ""
            return f"all {cached} tokens of the session reused" + (loss and f", for {loss}")
        return f"the prompt differs from the session at token {common}"

    def _rewind_all(self, num_tokens: int) -> str:
        """Every line at `num_tokens`; or, where one cannot go back, every line anew and why."""
        cached = self.num_cached
        why = self._first(lambda line: line.rewind(num_tokens))
        if not why:
            return ""
        self._start_anew()
        return f"started anew: of {cached} tokens the prompt shares {num_tokens}, and {why}"

    def _match_all(self, tokens: list[int], reused: int) -> int:
        """Looks for a prefix longer than `reused` among all that is stored for these models."""
        found = [line.find(tokens) for line in self._lines]
        longest = min(match.num_tokens for match in found)
        if longest <= reused:
            return reused
        for line, match in zip(self._lines, found, strict=True):
            line.take_up(match)
        why = self._rewind_all(longest)
        self.reason = why or f"{self.reason}; {longest} tokens found in the store"
        return 0 if why else longest


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(at for at in range(length) if one[at] != other[at])


def _token_of(response: Any) -> Any:
    return response.token
