"""Byte-level text batches in a fixed order: a pure function of the text, the seed and the step number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

VOCABULARY = 256
HELD_OUT_FRACTION = 0.1


class DataError(ValueError):
    """The text cannot be read, or is too short for one window."""


def read_text(path: str | Path | None = None) -> bytes:
    """The UTF-8 bytes of a file, of all text files below a folder, or of Python's own help topics (None).

    A folder's files are joined in sorted order; hidden files and files that aren't UTF-8 text are left out.
    Raises DataError when nothing is there to read.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    path = Path(path)
    if path.is_dir():
        names = sorted(name for name in path.rglob("*") if _is_visible_file(name, path))
        texts = [text for text in map(_text_or_none, names) if text]
        if not texts:
            raise DataError(f"no UTF-8 text file in the folder {path}")
        return b"\n\n".join(texts)
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    text = _text_or_none(path)
    if text is None:
        raise DataError(f"not a readable UTF-8 text file: {path}")
    if not text:
        raise DataError(f"the file is empty: {path}")
    return text


def _is_visible_file(name: Path, folder: Path) -> bool:
    return name.is_file() and not any(part.startswith(".") for part in name.relative_to(folder).parts)


def _text_or_none(path: Path) -> bytes | None:
    try:
        text = path.read_bytes()
        text.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in text else text


@dataclasses.dataclass(frozen=True)
class TextData:
    """Windows of `length` tokens over a text; one byte is one token, and the last tenth is held out.

    Raises DataError when the training or the held-out part is shorter than one window and its next token.
    """

    text: bytes
    batch: int
    length: int
    seed: int = 0

    def __post_init__(self):
        if len(self.held_out_part) <= self.length or len(self.train_part) <= self.length:
            needed = round((self.length + 1) / HELD_OUT_FRACTION)
            raise DataError(
                f"the text has {len(self.text)} bytes; windows of {self.length} tokens need about {needed}, "
                "so give more text or a smaller --seq"
            )

    @property
    def _split(self) -> int:
        return len(self.text) - int(len(self.text) * HELD_OUT_FRACTION)

    @property
    def train_part(self) -> bytes:
        return self.text[: self._split]

    @property
    def held_out_part(self) -> bytes:
        return self.text[self._split :]

    def train_batch(self, step: int) -> dict[str, np.ndarray]:
        """Batch number `step`: int32 "tokens" and "targets" [batch, length], targets one token further."""
        last_start = len(self.train_part) - self.length - 1
        starts = np.random.default_rng((self.seed, step)).integers(0, last_start + 1, self.batch)
        return self._windows(self.train_part, starts)

    def held_out_batches(self, limit: int) -> list[dict[str, np.ndarray]]:
        """At most `limit` batches of windows that don't overlap, spread over the held-out part, no row twice.

        Batches are full, except where the whole part has fewer than `batch` windows: then one smaller batch.
        """
        starts = np.arange(0, len(self.held_out_part) - self.length, self.length)
        number = max(1, min(limit, len(starts) // self.batch))
        rows = min(self.batch, len(starts))
        chosen = starts[np.linspace(0, len(starts) - 1, number * rows).round().astype(int)]
        return [self._windows(self.held_out_part, group) for group in chosen.reshape(number, rows)]

    def _windows(self, part: bytes, starts: np.ndarray) -> dict[str, np.ndarray]:
        codes = np.frombuffer(part, np.uint8)
        windows = codes[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)
        return {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}
