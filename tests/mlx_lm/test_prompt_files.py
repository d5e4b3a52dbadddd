"""Prompt-cache files: every version's come in, and what goes out goes on as the session would."""

from __future__ import annotations

import contextlib
import json
import os
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from tests.mlx_lm import tiny_models
from tests.mlx_lm.tiny_models import greedy, prompt
from tools.prompt_files import (
    DIM,
    HEADS,
    KEEP,
    MAX_SIZE,
    QUANTIZED_DIM,
    TOKENS,
    feed,
    kinds,
    numbers,
)
from tqstore import CacheSpec, LayerSpec, Store
from tqstore.errors import (
    AlreadyExists,
    BackendFailed,
    Corrupt,
    Incompatible,
    InvalidInput,
    NotFound,
    TqStoreError,
)
from tqstore.mlx_lm import fingerprint, prompt_file, session
from tqstore.mlx_lm.prompt_export import export_prompt_file
from tqstore.mlx_lm.prompt_file import read_prompt_file
from tqstore.mlx_lm.prompt_import import import_prompt_file

DATA = Path(__file__).resolve().parents[1] / "data" / "prompt_files"
VERSIONS = ["0.28.0", "0.31.3", "0.32.2"]
MODEL = "5e" * 32
TOLD = list(range(100, 100 + TOKENS))
EXACT: dict[str, Any] = {"keys": "exact", "values": "exact", "page_tokens": 4, "recent_tokens": 2}
IS_OLD = hasattr(KVCache(), "meta_state")  # the installed mlx-lm is older than 0.32
SMALL: dict[str, Any] = {"page_tokens": 16, "recent_tokens": 8}


def file_of(number: str, kind: str) -> Path:
    return DATA / f"{number}-{kind}.safetensors"


@pytest.fixture
def store(store_dir):
    with Store.open(store_dir) as opened:
        yield opened


def test_there_is_a_file_of_every_kind_and_version() -> None:
    names = {f"{number}-{kind}.safetensors" for number in VERSIONS for kind in kinds()}
    assert {path.name for path in DATA.iterdir()} == names


@pytest.mark.parametrize("number", VERSIONS)
class TestReading:
    def read(self, number: str, kind: str) -> list[Any]:
        file = read_prompt_file(file_of(number, kind))
        assert file.metadata == {"model": "a/b", "tokenizer_config": "{}", "with.dots": "x"}
        assert ("before" in file.layout.value) == (number < "0.32")
        return list(file.entries)

    def test_full(self, number: str) -> None:
        one, trimmed = self.read(number, "full")
        for layer, entry in enumerate((one, trimmed)):
            assert (entry.entry, entry.offset, entry.window, entry.bits) == (
                layer,
                TOKENS,
                None,
                None,
            )
            assert mx.array_equal(entry.keys, numbers(layer, 0, TOKENS)[0])
            assert mx.array_equal(entry.values, numbers(layer, 1, TOKENS)[0])

    @pytest.mark.parametrize(
        ("kind", "max_size", "keep", "positions"),
        [
            ("ring", MAX_SIZE, 0, range(TOKENS - MAX_SIZE, TOKENS)),
            ("ring-kept", MAX_SIZE, KEEP, [0, 1, *range(TOKENS - MAX_SIZE + KEEP, TOKENS)]),
            ("ring-prefilled", MAX_SIZE, 0, range(TOKENS)),
            ("ring-short", 64, KEEP, range(TOKENS)),
        ],
    )
    def test_rings_are_put_in_order(self, number, kind, max_size, keep, positions) -> None:
        entry = self.read(number, kind)[0]
        assert (entry.window, entry.keep, entry.offset) == (max_size - keep, keep, TOKENS)
        rows = mx.array(list(positions))
        assert mx.array_equal(entry.keys, numbers(0, 0, TOKENS)[0][:, rows])
        assert mx.array_equal(entry.values, numbers(0, 1, TOKENS)[0][:, rows])

    def test_quantized_is_decoded(self, number: str) -> None:
        (entry,) = self.read(number, "quantized")
        assert (entry.bits, entry.offset, entry.num_kept) == (8, TOKENS, TOKENS)
        wanted = numbers(0, 0, TOKENS, QUANTIZED_DIM)
        coded = mx.quantize(wanted, group_size=32, bits=8)
        decoded = mx.dequantize(*coded, group_size=32, bits=8)[0]
        assert mx.array_equal(entry.keys, decoded)
        assert 0 < float(mx.abs(entry.keys - wanted[0]).max()) < 0.05

    def test_own_states_are_kept(self, number: str) -> None:
        own, dense = self.read(number, "hybrid")
        assert type(own.leaf).__name__ == "ArraysCache"
        assert mx.array_equal(own.leaf[0], mx.arange(12, dtype=mx.float32).reshape(1, 3, 4))
        assert own.leaf[1].dtype == mx.bfloat16
        assert mx.array_equal(own.leaf[1], -mx.arange(6).reshape(1, 6).astype(mx.bfloat16))
        assert mx.array_equal(dense.keys, numbers(1, 0, TOKENS)[0])

    def test_parts_of_a_list(self, number: str) -> None:
        if number < "0.31":
            with pytest.raises(InvalidInput, match="CacheList"):
                read_prompt_file(file_of(number, "list"))
            return
        dense, own = self.read(number, "list")
        assert (dense.entry, dense.part, own.entry, own.part) == (0, 0, 0, 1)
        assert mx.array_equal(dense.values, numbers(0, 1, TOKENS)[0])
        assert own.leaf[0].shape == (1, 3, 4)

    def test_chunked(self, number: str) -> None:
        if number < "0.32":
            with pytest.raises(InvalidInput, match="forgot"):
                read_prompt_file(file_of(number, "chunked"))
            return
        own, _ = self.read(number, "chunked")
        kept = own.leaf.keys[:, :, : own.leaf.offset - own.leaf.start_position]
        assert (own.leaf.offset, own.leaf.start_position) == (TOKENS, TOKENS - MAX_SIZE)
        assert mx.array_equal(kept, numbers(0, 0, TOKENS)[:, :, -MAX_SIZE:])

    def test_import_and_export_keep_every_number(self, number, store, tmp_path) -> None:
        for kind in ("full", "ring-prefilled", "ring-short"):
            report = import_prompt_file(
                store, kind, file_of(number, kind), fingerprint=MODEL, tokens=TOLD, **EXACT
            )
            assert report.num_tokens == TOKENS
            assert report.losses == ()
            resumed = store.resume(kind)
            assert resumed.tokens == TOLD
            assert resumed.metadata["model"] == "a/b"
            before = read_prompt_file(file_of(number, kind)).entries
            for layer, entry in zip(resumed.cache.layers, before, strict=True):
                first = -(-entry.first_kept // 4) * 4
                assert mx.array_equal(layer.fetch(first).keys, numbers(layer.layer, 0, TOKENS)[0])
            out = tmp_path / f"{kind}.safetensors"
            export_prompt_file(store, kind, out)
            caches, metadata = load_prompt_cache(str(out), return_metadata=True)
            assert json.loads(metadata["tokens"]) == TOLD
            assert metadata["tokenizer_config"] == "{}"
            for cache, entry in zip(caches, before, strict=True):
                seen = cache.offset if entry.window is None else min(cache.offset, cache.max_size)
                assert cache.offset == TOKENS
                assert mx.array_equal(cache.keys[0], entry.keys[:, -seen:])
                assert mx.array_equal(cache.values[0], entry.values[:, -seen:])

    def test_quantized_says_what_it_lost(self, number, store) -> None:
        report = import_prompt_file(
            store,
            "chat",
            file_of(number, "quantized"),
            fingerprint=MODEL,
            tokens=TOLD,
            page_tokens=4,
            recent_tokens=2,
        )
        assert "8 bits" in report.losses[0]
        assert "on top" in report.losses[1]
        assert report.new_pages == (TOKENS - 2) // 4

    @pytest.mark.parametrize("kind", ["ring", "ring-kept"])
    def test_a_ring_that_lost_what_pages_need_is_refused(self, number, kind, store) -> None:
        with pytest.raises(InvalidInput, match="what left its ring is gone"):
            import_prompt_file(
                store, "chat", file_of(number, kind), fingerprint=MODEL, tokens=TOLD, **EXACT
            )
        assert store.sessions() == []


def long_ring(path: Path, keep: int) -> None:
    """41 tokens of a ring of 8 that was last filled by a chunk of 29: it still holds 36 of them."""
    ring = feed(RotatingKVCache(max_size=MAX_SIZE, keep=keep), 0, [12, 29])
    assert ring.keys.shape[2] == 36
    save_prompt_cache(str(path), [ring, feed(KVCache(), 1, [41])])


def test_a_ring_with_enough_begins_at_its_first_whole_block(store, tmp_path) -> None:
    long_ring(tmp_path / "ring.safetensors", keep=0)
    import_prompt_file(
        store,
        "chat",
        tmp_path / "ring.safetensors",
        fingerprint=MODEL,
        tokens=list(range(41)),
        **EXACT,
    )
    cache = store.resume("chat").cache
    keys, values = (numbers(0, side, 41)[0] for side in (0, 1))
    assert mx.array_equal(cache.layers[0].fetch(8).keys, keys[:, 8:])  # first kept: token 5
    with pytest.raises(NotFound, match="left the window"):
        cache.layers[0].fetch(4)
    window = slice(41 - MAX_SIZE, 41)
    queries = mx.random.normal((HEADS, 1, DIM), key=mx.random.key(2))
    scores = queries @ keys[:, window].astype(mx.float32).swapaxes(1, 2) / DIM**0.5
    wanted = mx.softmax(scores, axis=-1) @ values[:, window].astype(mx.float32)
    assert mx.allclose(cache.attend(0, queries), wanted, atol=1e-2)
    out = tmp_path / "out.safetensors"
    export_prompt_file(store, "chat", out)
    ring = load_prompt_cache(str(out))[0]
    assert mx.array_equal(ring.keys[0], keys[:, window])


def test_kept_tokens_alone_are_no_whole_block(store, tmp_path) -> None:
    long_ring(tmp_path / "ring.safetensors", keep=KEEP)
    with pytest.raises(InvalidInput, match="all from token 0 on"):
        import_prompt_file(
            store,
            "chat",
            tmp_path / "ring.safetensors",
            fingerprint=MODEL,
            tokens=list(range(41)),
            **EXACT,
        )


@pytest.mark.parametrize(("keep", "count"), [(0, 41), (KEEP, 41), (KEEP, 5), (KEEP, 8), (0, 8)])
def test_an_exported_ring_turns_as_mlx_lms_own(store, tmp_path, keep, count) -> None:
    layer = LayerSpec(
        HEADS, DIM, window=MAX_SIZE - keep, sink_tokens=keep, keys="exact", values="exact"
    )
    cache = store.new_cache(CacheSpec([layer], page_tokens=4, recent_tokens=2), model=MODEL)
    keys, values = (numbers(0, side, 50) for side in (0, 1))
    cache.append(0, keys[0, :, :count], values[0, :, :count])
    store.save("chat", cache, list(range(count)))
    path = tmp_path / "ring.safetensors"
    export_prompt_file(store, "chat", path)
    (ring,) = load_prompt_cache(str(path))
    own = feed(RotatingKVCache(max_size=MAX_SIZE, keep=keep), 0, [1] * count)
    for at in range(count, count + 9):
        given, wanted = (
            each.update_and_fetch(keys[:, :, at : at + 1], values[:, :, at : at + 1])
            for each in (ring, own)
        )
        for one, other in zip(given, wanted, strict=True):
            assert sorted(one.reshape(-1).tolist()) == sorted(other.reshape(-1).tolist())


class TestRefusals:
    PATH = file_of("0.32.2", "full")

    @pytest.mark.parametrize(
        ("given", "error", "said"),
        [
            ({"tokens": None}, InvalidInput, "which tokens"),
            ({"tokens": TOLD[1:]}, InvalidInput, "holds 21 tokens, 20 were given"),
            ({"tokens": [0.5] * TOKENS}, InvalidInput, "integers"),
            ({"fingerprint": None}, InvalidInput, "which model"),
            ({"fingerprint": "red"}, InvalidInput, "hex"),
            ({"keys": "best"}, InvalidInput, "unknown codec"),
            ({"page_tokens": 0}, InvalidInput, "page_tokens"),
        ],
    )
    def test_bad_settings(self, store, given, error, said) -> None:
        settings = {"fingerprint": MODEL, "tokens": TOLD, **EXACT, **given}
        with pytest.raises(error, match=said):
            import_prompt_file(store, "chat", self.PATH, **settings)
        assert store.sessions() == []

    def test_a_session_is_never_written_over(self, store) -> None:
        import_prompt_file(store, "chat", self.PATH, fingerprint=MODEL, tokens=TOLD, **EXACT)
        with pytest.raises(AlreadyExists, match="chat"):
            import_prompt_file(store, "chat", self.PATH, fingerprint=MODEL, tokens=TOLD, **EXACT)
        assert store.sessions()[0].sequence == 1

    def test_metadata_that_contradicts(self, store, tmp_path) -> None:
        path = tmp_path / "own.safetensors"
        import_prompt_file(store, "chat", self.PATH, fingerprint=MODEL, tokens=TOLD, **EXACT)
        export_prompt_file(store, "chat", path)
        with pytest.raises(InvalidInput, match="not those in the metadata"):
            import_prompt_file(store, "two", path, tokens=TOLD[::-1])
        with pytest.raises(Incompatible, match="model"):
            import_prompt_file(store, "two", path, fingerprint="ab" * 32)
        assert import_prompt_file(store, "two", path).num_tokens == TOKENS

    @pytest.mark.parametrize("tokens", ["no json", '{"a": 1}', "[1.5]", "[" * 5000])
    def test_tokens_in_metadata_that_are_none(self, store, tmp_path, tokens) -> None:
        path = tmp_path / "own.safetensors"
        save_prompt_cache(str(path), kinds()["full"], {"tokens": tokens})
        with pytest.raises(InvalidInput):
            import_prompt_file(store, "chat", path, fingerprint=MODEL)

    @pytest.mark.skipif(IS_OLD, reason="mlx-lm before 0.32 cannot save an empty cache")
    def test_batches_and_empty_caches(self, tmp_path) -> None:
        path = tmp_path / "own.safetensors"
        two = KVCache()
        two.update_and_fetch(mx.zeros((2, 1, 3, 4)), mx.zeros((2, 1, 3, 4)))
        save_prompt_cache(str(path), [two])
        with pytest.raises(InvalidInput, match="2 sequences"):
            read_prompt_file(path)
        save_prompt_cache(str(path), [KVCache()])
        with pytest.raises(InvalidInput, match="no keys yet"):
            read_prompt_file(path)

    def test_what_is_no_such_file(self, tmp_path) -> None:
        with pytest.raises(NotFound):
            read_prompt_file(tmp_path / "none.safetensors")
        with pytest.raises(InvalidInput, match="does not end in"):
            read_prompt_file(tmp_path / "none.npz")
        other = tmp_path / "weights.safetensors"
        mx.save_safetensors(str(other), {"layers.0.weight": mx.zeros((2, 2))})
        with pytest.raises(Corrupt, match="no caches"):
            read_prompt_file(other)
        mx.save_safetensors(
            str(other), {"0.0": mx.zeros(1)}, {"1.0": "BatchKVCache", "2.0": "", "2.1.0": "x"}
        )
        with pytest.raises(TqStoreError):
            read_prompt_file(other)

    @pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.stem)
    def test_damage_is_told(self, path: Path, tmp_path: Path) -> None:
        """Cut short or with bytes of the header exchanged: a file is read or refused, no more."""
        raw = path.read_bytes()
        copy = tmp_path / "copy.safetensors"
        for length in (0, 4, 8, 60, len(raw) // 2, len(raw) - 1):
            copy.write_bytes(raw[:length])
            with pytest.raises(Corrupt):
                read_prompt_file(copy)
        rng = random.Random(path.name)
        header = 8 + int.from_bytes(raw[:8], "little")
        for _ in range(60):
            damaged = bytearray(raw)
            damaged[rng.randrange(header)] = rng.choice(b'0123456789":,[]{}ab.')
            copy.write_bytes(damaged)
            with contextlib.suppress(TqStoreError):
                read_prompt_file(copy)


def chatted(store: Store, name: str, **codecs: str) -> tuple[Any, list[int]]:
    """A session of a tiny model, wrapped where windowed; the model and the session's tokens."""
    model = tiny_models.model(name)
    with session(store, model, "chat", **codecs, **SMALL) as chat:
        rest = chat.feed(prompt(100))
        chat.extend(greedy(model, chat.cache, rest, 21))
    return model, chat.tokens[: chat.num_cached]


@pytest.mark.parametrize(
    "name", ["qwen3", "phi3-d96", "gemma3", "qwen3-next", "falcon-h1", "llama4"]
)
def test_an_exported_file_goes_on_as_the_session_does(store, tmp_path, name) -> None:
    """mlx-lm's own loading and generating, from a file; beside it the session itself."""
    model, tokens = chatted(store, name, keys="exact", values="exact")
    path = tmp_path / "chat.safetensors"
    if name == "llama4" and IS_OLD:
        with pytest.raises(InvalidInput, match="forgets"):
            export_prompt_file(store, "chat", path, model=model, fingerprint=fingerprint(model))
        return
    report = export_prompt_file(store, "chat", path, model=model, fingerprint=fingerprint(model))
    assert report.num_tokens == len(tokens) >= 120
    assert report.nbytes == path.stat().st_size
    loaded, metadata = load_prompt_cache(str(path), return_metadata=True)
    assert json.loads(metadata["tokens"]) == tokens
    own = make_prompt_cache(model)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in own]
    with session(store, model, "chat", keys="exact", values="exact", **SMALL) as chat:
        rest = chat.feed([*tokens, 5, 6, 7])
        assert rest == [5, 6, 7]
        expected = greedy(model, chat.cache, rest, 40)
        chat.extend(expected)
    assert greedy(model, loaded, [5, 6, 7], 40) == expected


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3-next", "falcon-h1", "llama4"])
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.skipif(IS_OLD, reason="mlx-lm before 0.32 does not save all of every cache")
def test_a_file_of_mlx_lm_goes_on_in_a_session(store, tmp_path, name, with_model) -> None:
    """The oracle is the cache that was saved, going on by itself."""
    model = tiny_models.model(name)
    own, tokens = make_prompt_cache(model), prompt(100)
    model(mx.array([tokens]), cache=own)
    path = tmp_path / "own.safetensors"
    save_prompt_cache(str(path), own, {"tokens": json.dumps(tokens)})
    report = import_prompt_file(
        store,
        "chat",
        path,
        model=model if with_model else None,
        fingerprint=fingerprint(model),
        keys="exact",
        values="exact",
        **SMALL,
    )
    assert report.num_tokens == 100
    with session(store, model, "chat", keys="exact", values="exact", **SMALL) as chat:
        rest = chat.feed([*tokens, 5, 6])
        assert (chat.reused_tokens, rest) == (100, [5, 6])
        given = greedy(model, chat.cache, rest, 30)
        chat.extend(given)
    assert given == greedy(model, own, [5, 6], 30)


def test_a_file_of_another_model_is_refused(store, tmp_path) -> None:
    own = make_prompt_cache(tiny_models.model("qwen3"))
    tiny_models.model("qwen3")(mx.array([prompt(20)]), cache=own)
    path = tmp_path / "own.safetensors"
    save_prompt_cache(str(path), own, {"tokens": json.dumps(prompt(20))})
    for name in ("llama", "gemma3", "falcon-h1"):
        with pytest.raises(Incompatible):
            import_prompt_file(
                store, "chat", path, model=tiny_models.model(name), fingerprint=MODEL, **SMALL
            )
    assert store.sessions() == []


def test_packed_sessions_are_exported_decoded(store, tmp_path) -> None:
    chatted(store, "qwen3", keys="prod4", values="int8")
    path = tmp_path / "chat.safetensors"
    export_prompt_file(store, "chat", path)
    cache = store.resume("chat").cache
    for layer, own in enumerate(load_prompt_cache(str(path))):
        assert mx.array_equal(own.keys[0], cache.get_keys(layer))
        assert mx.array_equal(own.values[0], cache.get_values(layer))


class TestWriting:
    def test_own_states_need_the_model(self, store, tmp_path) -> None:
        chatted(store, "qwen3-next")
        with pytest.raises(InvalidInput, match="--model"):
            export_prompt_file(store, "chat", tmp_path / "chat.safetensors")
        assert list(tmp_path.glob("*.safetensors")) == []

    def test_another_model_is_refused(self, store, tmp_path) -> None:
        chatted(store, "qwen3")
        other = tiny_models.build("qwen3", seed=9)
        with pytest.raises(Incompatible):
            export_prompt_file(
                store,
                "chat",
                tmp_path / "chat.safetensors",
                model=other,
                fingerprint=fingerprint(other),
            )

    def test_it_is_private_and_never_written_over(self, store, tmp_path) -> None:
        chatted(store, "qwen3")
        path = tmp_path / "chat.safetensors"
        old = os.umask(0)
        try:
            export_prompt_file(store, "chat", path)
        finally:
            os.umask(old)
        assert path.stat().st_mode & 0o777 == 0o600
        before = path.stat()
        with pytest.raises(AlreadyExists):
            export_prompt_file(store, "chat", path)
        assert path.stat() == before
        export_prompt_file(store, "chat", path, overwrite=True)
        assert path.stat().st_ino != before.st_ino
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.glob(".tmp-*")) == []

    def test_one_that_appears_meanwhile_stays(self, store, tmp_path, monkeypatch) -> None:
        chatted(store, "qwen3")
        path = tmp_path / "chat.safetensors"
        whole = prompt_file._fill

        def fill(*given: Any) -> int:
            path.write_bytes(b"another's")
            return whole(*given)

        monkeypatch.setattr(prompt_file, "_fill", fill)
        with pytest.raises(AlreadyExists):
            export_prompt_file(store, "chat", path)
        assert path.read_bytes() == b"another's"
        assert list(tmp_path.glob(".tmp-*")) == []

    def test_a_file_that_is_cut_short_is_never_published(
        self, store, tmp_path, monkeypatch
    ) -> None:
        chatted(store, "qwen3")
        path = tmp_path / "chat.safetensors"
        path.write_bytes(b"the one before")

        def save(name: str, *given: Any) -> None:
            save_prompt_cache(name, *given)
            os.truncate(name, os.stat(name).st_size - 100)

        monkeypatch.setattr(prompt_file, "save_prompt_cache", save)
        with pytest.raises(BackendFailed, match="whole"):
            export_prompt_file(store, "chat", path, overwrite=True)
        assert path.read_bytes() == b"the one before"
        assert list(tmp_path.glob(".tmp-*")) == []

    @pytest.mark.parametrize("place", ["none/chat.safetensors", "chat.npz"])
    def test_places_that_cannot_be(self, store, tmp_path, place) -> None:
        chatted(store, "qwen3")
        with pytest.raises((NotFound, InvalidInput)):
            export_prompt_file(store, "chat", tmp_path / place)

    def test_metadata_that_a_file_cannot_hold_is_told(self, store, tmp_path) -> None:
        chatted(store, "qwen3")
        with session(store, tiny_models.model("qwen3"), "chat", **SMALL) as chat:
            chat.save({"title": "a", "count": 3, "with.dots": "b", "7": "c"})
        path = tmp_path / "chat.safetensors"
        report = export_prompt_file(store, "chat", path)
        assert sorted(report.left_out) == ["7", "count", "with.dots"]
        assert load_prompt_cache(str(path), return_metadata=True)[1]["title"] == "a"


def test_the_installed_version_is_among_the_fixtures() -> None:
    """Else the tool has to be run with it: `python tools/prompt_files.py`."""
    assert version("mlx-lm").rsplit(".", 1)[0] in {number.rsplit(".", 1)[0] for number in VERSIONS}
