"""Equal models have equal fingerprints in every process; any change to a model shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.mlx_lm import tiny_models
from tqstore.errors import InvalidInput, NotFound
from tqstore.mlx_lm import remembered
from tqstore.mlx_lm.fingerprint import fingerprint

module = import_module("tqstore.mlx_lm.fingerprint")  # the package has a function of that name

DTYPES = [
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.uint8,
    mx.int8,
    mx.uint16,
    mx.int16,
    mx.uint32,
    mx.int32,
    mx.uint64,
    mx.int64,
    mx.bool_,
    mx.complex64,
]


class Holder(nn.Module):
    """A model of one parameter."""

    def __init__(self, array, **settings):
        super().__init__()
        self.weight = array
        for name, value in settings.items():
            setattr(self, name, value)


def sums(array: mx.array) -> list[int]:
    return [int(value.item()) for value in module._word_sums(array, module._weights(array.nbytes))]


def oracle_sums(data: bytes) -> list[int]:
    """The same digest in Python's integers, from the definition."""
    data += b"\0" * (-len(data) % 4)
    words = np.frombuffer(data, "<u4")

    def mixed(counter: int) -> int:
        value = (counter + 0x9E3779B9) & 0xFFFFFFFF
        value = ((value ^ (value >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        value = ((value ^ (value >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return value ^ (value >> 16)

    total = 0
    for index, word in enumerate(words.tolist()):
        weight = (mixed(2 * index) | mixed(2 * index + 1) << 32) | 1
        total += word * weight
    return [total % (1 << 64)] if len(words) else []


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 64, 1001])
def test_word_sums_equal_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert sums(mx.array(data)) == oracle_sums(data.tobytes())


def test_word_sums_over_several_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_WORDS", 16)
    monkeypatch.setattr(module, "EVAL_NBYTES", 128)
    data = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    whole = sums(mx.array(data))
    assert whole == [oracle_sums(data[at : at + 64].tobytes())[0] for at in range(0, 200, 64)]
    assert len({fingerprint(Holder(mx.array(np.roll(data, shift)))) for shift in range(200)}) == 200


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_and_told_apart(dtype):
    numbers = np.random.default_rng(1).integers(0, 2, 33)
    array = mx.array(numbers).astype(dtype)
    one = fingerprint(Holder(array))
    assert one == fingerprint(Holder(mx.array(numbers).astype(dtype)))
    assert one != fingerprint(Holder(array.reshape(3, 11)))
    flipped = numbers.copy()
    flipped[32] ^= 1  # the last element, beyond the last whole word of narrow types
    assert one != fingerprint(Holder(mx.array(flipped).astype(dtype)))


def test_equal_bytes_of_another_dtype_differ():
    array = mx.array([1.0, 2.0], mx.float32)
    assert fingerprint(Holder(array)) != fingerprint(Holder(array.view(mx.uint32)))


def test_signs_exchanged_between_elements_show():
    """The top bit alone: what sums of 32-bit products cannot tell."""
    seen = set()
    for index in range(64):
        signs = np.ones(64, np.float32)
        signs[index] = -1
        seen.add(fingerprint(Holder(mx.array(signs))))
    assert len(seen) == 64


def test_exchanged_elements_rows_and_transposes_show():
    weight = mx.random.normal((8, 8), key=mx.random.key(0))
    rows = mx.array([1, 0, *range(2, 8)])
    variants = [weight, weight[rows], weight[:, rows], weight.T, weight[::-1], weight * 1.0000001]
    assert len({fingerprint(Holder(variant)) for variant in variants}) == len(variants)
    assert fingerprint(Holder(weight.T.T)) == fingerprint(Holder(weight))


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_rebuilt_model_is_equal_and_use_does_not_change_it(name):
    model = tiny_models.build(name)
    before = fingerprint(model)
    assert before == fingerprint(tiny_models.build(name))
    tiny_models.greedy(model, make_prompt_cache(model), [1, 2, 3], 3)
    assert fingerprint(model) == before
    model.eval()
    model.freeze()
    assert fingerprint(model) == before


def test_any_parameter_config_or_kind_shows():
    base = fingerprint(tiny_models.build("llama"))
    others = {fingerprint(tiny_models.build("llama", seed=1))}
    model = tiny_models.build("llama")
    for name, array in tree_flatten(model.parameters()):
        changed = array.flatten()
        changed[-1] = changed[-1] + 1
        model.update(tree_unflatten([(name, changed.reshape(array.shape))]))
        others.add(fingerprint(model))
        model.update(tree_unflatten([(name, array)]))
    assert fingerprint(model) == base
    model.args.rope_theta = 1.0
    others.add(fingerprint(model))
    assert base not in others
    assert len(others) == 2 + len(tree_flatten(model.parameters()))


def test_quantized_models():
    plain = fingerprint(tiny_models.build("qwen3"))
    seen = {plain}
    for bits in (4, 8):
        model = tiny_models.build("qwen3")
        nn.quantize(model, group_size=32, bits=bits)
        seen.add(fingerprint(model))
    assert len(seen) == 3


def test_adapters_change_it_by_weights_and_by_scale():
    seen = {fingerprint(tiny_models.build("llama"))}
    for scale in (1.0, 2.0):
        model = tiny_models.build("llama")
        mx.random.seed(7)
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": scale, "dropout": 0.0})
        seen.add(fingerprint(model))
        key = "model.layers.2.self_attn.q_proj.lora_b"
        lora_b = dict(tree_flatten(model.parameters()))[key]
        model.update(tree_unflatten([(key, lora_b + 1)]))
        seen.add(fingerprint(model))
    assert len(seen) == 5


def test_another_process_agrees():
    """Nothing depends on hash seeds, addresses or evaluation order."""
    script = (
        "from tests.mlx_lm import tiny_models; from tqstore.mlx_lm.fingerprint import fingerprint\n"
        "print(fingerprint(tiny_models.build('falcon-h1')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "123", "PATH": "/usr/bin:/bin"},
    )
    assert out.stdout.strip() == fingerprint(tiny_models.build("falcon-h1"))


def test_where_a_model_came_from_is_not_what_it_is():
    one, other = tiny_models.build("gemma3n"), tiny_models.build("gemma3n")
    one.args.text_config = {**one.args.text_config, "_name_or_path": "/models/one"}
    other.args.text_config = {**other.args.text_config, "_name_or_path": "two"}
    assert fingerprint(one) == fingerprint(other)


def test_unreadable_settings_and_wrong_types_are_refused():
    with pytest.raises(InvalidInput, match="not str"):
        fingerprint("a model")  # type: ignore[arg-type]
    model = tiny_models.build("llama")
    model.args.rope_scaling = {"f": len}
    with pytest.raises(InvalidInput, match=r"config\.rope_scaling\.f"):
        fingerprint(model)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """(folder, model) as if just loaded; every whole fingerprint computed is counted."""
    monkeypatch.setenv("TQSTORE_CACHE", str(tmp_path / "cache"))
    model = tiny_models.build("qwen3")
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, model)
    return folder, model


def save(folder: Path, model: nn.Module) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    old = time.time() - 100
    os.utime(folder / "model.safetensors", (old, old))


@pytest.fixture
def whole_reads(monkeypatch):
    calls = []

    def counted(model):
        calls.append(model)
        return fingerprint(model)

    monkeypatch.setattr(remembered, "fingerprint", counted)
    return calls


def test_remembered_is_the_fingerprint_and_read_once(loaded, whole_reads, tmp_path):
    folder, model = loaded
    for _ in range(3):
        assert remembered.remembered_fingerprint(model, folder) == fingerprint(model)
    assert len(whole_reads) == 1
    files = list((tmp_path / "cache" / "fingerprints").iterdir())
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("change", ["touch", "adapter", "fused", "scale", "config"])
def test_remembered_is_not_believed_after_a_change(loaded, whole_reads, change):
    folder, model = loaded
    before = remembered.remembered_fingerprint(model, folder)
    if change == "touch":
        os.utime(folder / "model.safetensors", (1e9, 1e9))
    elif change == "adapter":
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    elif change == "fused":
        layer = model.layers[1].self_attn.q_proj
        layer.weight = layer.weight + 0.01
    elif change == "scale":
        model.layers[0].self_attn.scale = 2.0
    else:
        model.args.rope_theta = 1.0
    after = remembered.remembered_fingerprint(model, folder)
    assert len(whole_reads) == 2
    assert after == fingerprint(model)
    assert (after == before) == (change == "touch")


def test_fresh_files_and_damaged_memories_are_not_believed(loaded, whole_reads, tmp_path):
    folder, model = loaded
    now = time.time()
    os.utime(folder / "model.safetensors", (now, now))
    for _ in range(2):
        remembered.remembered_fingerprint(model, folder)
    assert len(whole_reads) == 2
    save(folder, model)
    expected = remembered.remembered_fingerprint(model, folder)
    (file,) = (tmp_path / "cache" / "fingerprints").iterdir()
    good = file.read_bytes()
    for bad in (b"", good[:-1], b"0" * 64 + good[64:], good[65:129] + good[64:]):
        file.write_bytes(bad)
        assert remembered.remembered_fingerprint(model, folder) == expected
    assert len(whole_reads) == 7


def test_a_cache_folder_that_cannot_be_made_only_costs_time(loaded, whole_reads, tmp_path):
    folder, model = loaded
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        assert remembered.remembered_fingerprint(model, folder) == fingerprint(model)
    assert len(whole_reads) == 2


def test_a_folder_without_weights_is_refused(loaded, tmp_path):
    with pytest.raises(NotFound, match=r"no \.safetensors"):
        remembered.remembered_fingerprint(loaded[1], tmp_path)
