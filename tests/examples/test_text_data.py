"""The example's text loader: fixed order, held-out part apart, shapes, folders, clear errors."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "examples" / "text_data.py"


@pytest.fixture(scope="module")
def text_data():
    spec = importlib.util.spec_from_file_location("text_data", PATH)
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks the module up by name while it is being executed.
    sys.modules["text_data"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["text_data"]


TEXT = bytes(i % 90 for i in range(900)) + bytes(100 + i % 90 for i in range(100))


def test_a_batch_holds_tokens_and_the_next_tokens(text_data):
    batch = text_data.TextData(TEXT, batch=4, length=16).train_batch(0)
    assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == {
        "tokens": ((4, 16), np.int32),
        "targets": ((4, 16), np.int32),
    }
    np.testing.assert_array_equal(batch["targets"], (batch["tokens"] + 1) % 90)


def test_order_is_fixed_by_seed_and_step_alone(text_data):
    def tokens(seed, step):
        return text_data.TextData(TEXT, batch=4, length=16, seed=seed).train_batch(step)["tokens"]

    data = text_data.TextData(TEXT, batch=4, length=16, seed=1)
    later_first = [data.train_batch(step)["tokens"] for step in (3, 0)]
    np.testing.assert_array_equal(later_first[0], tokens(1, 3))
    np.testing.assert_array_equal(later_first[1], tokens(1, 0))
    assert not np.array_equal(tokens(1, 0), tokens(1, 1))
    assert not np.array_equal(tokens(1, 0), tokens(2, 0))


def test_the_held_out_tenth_is_never_trained_on(text_data):
    data = text_data.TextData(TEXT, batch=8, length=16)
    assert len(data.held_out_part) == 100
    for step in range(100):
        assert data.train_batch(step)["targets"].max() < 100
    assert min(batch["tokens"].min() for batch in data.held_out_batches(4)) >= 100


def test_training_reaches_the_first_and_the_last_window(text_data):
    data = text_data.TextData(bytes(range(200)), batch=8, length=16)
    batches = [data.train_batch(step) for step in range(300)]
    assert min(batch["tokens"].min() for batch in batches) == 0
    assert max(batch["targets"].max() for batch in batches) == 179


def test_held_out_windows_are_full_batches_and_no_row_comes_twice(text_data):
    data = text_data.TextData(bytes(i % 251 for i in range(20_000)), batch=4, length=16)
    batches = data.held_out_batches(5)
    assert [batch["tokens"].shape for batch in batches] == [(4, 16)] * 5
    rows = np.concatenate([batch["tokens"] for batch in batches])
    assert len(np.unique(rows, axis=0)) == 20


def test_a_short_held_out_part_gives_one_smaller_batch(text_data):
    batches = text_data.TextData(TEXT, batch=64, length=16).held_out_batches(5)
    assert [batch["tokens"].shape for batch in batches] == [(6, 16)]


def test_the_default_text_is_long_english(text_data):
    text = text_data.read_text()
    assert len(text) > 200_000
    assert text.count(b" the ") > 1000


def test_a_folder_joins_its_text_files_in_sorted_order(text_data, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("second é")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zeros.bin").write_bytes(b"ab\0cd")
    assert text_data.read_text(tmp_path) == "first\n\nsecond é".encode()


def test_a_file_is_read_as_it_is(text_data, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    assert text_data.read_text(tmp_path / "a.txt") == b"one\r\ntwo"


def test_each_mistake_has_one_clear_line(text_data, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("missing", "no such file or folder"),
        ("empty.txt", "the file is empty"),
        ("binary", "not a readable UTF-8 text file"),
        ("folder", "no UTF-8 text file in the folder"),
    ]:
        with pytest.raises(text_data.DataError, match=message) as error:
            text_data.read_text(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(text_data.DataError, match="has 100 bytes; windows of 16 tokens need about 170"):
        text_data.TextData(bytes(100), batch=4, length=16)
