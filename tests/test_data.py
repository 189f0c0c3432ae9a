"""Reading text, learning a vocabulary on it, and cutting it into batches."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.data import (
    IGNORED,
    Batch,
    Encoded,
    Text,
    TokenStream,
    build_vocabulary,
    encode,
    read_text,
)
from piper_owner.errors import ConfigError, DataError

PROSE = "the owner steps the one copy, and the replica follows the owner\n" * 40


def text_of(content: str) -> Text:
    return Text(content=content, source="a test", num_files=1, truncated=False)


class TestReadText:
    def test_file_is_taken_byte_for_byte(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        file.write_bytes("first\r\nsecond \u00e9\n".encode())
        text = read_text(file)
        assert text.content == "first\r\nsecond \u00e9\n"
        assert (text.source, text.num_files, text.truncated) == (str(file), 1, False)

    def test_byte_order_mark_is_dropped(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        file.write_bytes(b"\xef\xbb\xbfabc")
        assert read_text(file).content == "abc"

    def test_folder_is_read_in_order_without_hidden_and_binary_files(self, tmp_path: Path) -> None:
        for name, content in {
            "b.txt": b"2",
            "a/z.txt": b"1",
            "c/d/deep.txt": b"3",
            ".hidden": b"no",
            ".git/config": b"no",
            "binary.bin": b"n\0o",
            "latin.txt": b"n\xe9o",
            "empty.txt": b"",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
        (tmp_path / "a" / "loop").symlink_to(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        text = read_text(tmp_path)
        assert (text.content, text.num_files, text.truncated) == ("123", 3, False)

    def test_standard_library_is_program_text_and_repeatable(self) -> None:
        text = read_text(None, limit_bytes=300_000)
        assert len(text.content.encode()) in range(299_997, 300_001)
        assert text.truncated
        assert "from abc import ABCMeta" in text.content
        assert text == read_text(None, limit_bytes=300_000)
        assert text.digest == hashlib.blake2b(text.content.encode(), digest_size=16).hexdigest()

    def test_standard_library_has_no_tests_and_no_installed_packages(self) -> None:
        text = read_text(None)
        assert "class TaskGroup:" in text.content  # asyncio
        assert "import torch" not in text.content  # of an installed package
        assert "class TestCase(unittest.TestCase)" not in text.content
        assert text.num_files > 200

    @pytest.mark.parametrize(
        ("content", "limit", "expected", "truncated"),
        [
            ("abcdef", 3, "abc", True),
            ("abcdef", 6, "abcdef", False),
            ("ab\u00e9", 3, "ab", True),
            ("ab\u00e9", 4, "ab\u00e9", False),
        ],
    )
    def test_limit_keeps_whole_characters(
        self, tmp_path: Path, content: str, limit: int, expected: str, truncated: bool
    ) -> None:
        (tmp_path / "a.txt").write_bytes(content.encode())
        for path in (tmp_path, tmp_path / "a.txt"):
            text = read_text(path, limit_bytes=limit)
            assert (text.content, text.truncated) == (expected, truncated)

    def test_limit_ends_a_folder_between_files(self, tmp_path: Path) -> None:
        for name in "abc":
            (tmp_path / name).write_text(name * 4)
        text = read_text(tmp_path, limit_bytes=8)
        assert (text.content, text.num_files, text.truncated) == ("aaaabbbb", 2, True)

    def test_limit_counts_bytes_over_a_folder(self, tmp_path: Path) -> None:
        for name in "abc":
            (tmp_path / name).write_bytes("\u00e9\u00e9".encode())
        text = read_text(tmp_path, limit_bytes=6)
        assert (text.content, text.num_files, text.truncated) == ("\u00e9" * 3, 2, True)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b" \n\t", "is empty"),
            (b"abc\0def", "binary"),
            ("ab".encode("utf-16"), "UTF-16"),
            (b"caf\xe9 au lait", "not UTF-8"),
            (b"cut \xc3", "not UTF-8"),
        ],
    )
    def test_file_that_is_no_text(self, tmp_path: Path, content: bytes, words: str) -> None:
        file = tmp_path / "odd.txt"
        file.write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            read_text(file)
        assert str(file) in str(caught.value)
        assert "give" in str(caught.value)

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"gone\.txt does not exist; give"):
            read_text(tmp_path / "gone.txt")

    def test_path_through_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("abc")
        with pytest.raises(DataError, match=r"a\.txt/b cannot be read"):
            read_text(tmp_path / "a.txt" / "b")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_unreadable_file_and_folder(self, tmp_path: Path) -> None:
        inner = tmp_path / "inner"
        inner.mkdir()
        (inner / "a.txt").write_text("abc")
        (inner / "a.txt").chmod(0)
        for path in (inner / "a.txt", inner):
            with pytest.raises(DataError, match=r"a\.txt cannot be read"):
                read_text(path)
        inner.chmod(0)
        try:
            with pytest.raises(DataError, match="inner cannot be read"):
                read_text(tmp_path)
        finally:
            inner.chmod(0o700)

    @pytest.mark.parametrize("content", [None, b"", b"\0\0"])
    def test_folder_without_text(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match="holds no text") as caught:
            read_text(tmp_path)
        assert str(tmp_path) in str(caught.value)

    def test_socket_is_refused_at_once(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "s"))
            with pytest.raises(DataError, match="neither a file nor a folder"):
                read_text(tmp_path / "s")

    def test_limit_of_nothing(self) -> None:
        with pytest.raises(ConfigError, match="limit_bytes=0"):
            read_text(None, limit_bytes=0)


class TestVocabulary:
    def test_round_trip_and_range(self, tmp_path: Path) -> None:
        encoded = build_vocabulary(text_of(PROSE), 300, cache_dir=tmp_path)
        assert encoded.tokens.dtype == np.int32
        assert encoded.tokens.ndim == 1
        assert int(encoded.tokens.max()) < encoded.tokenizer.get_vocab_size() <= 300
        assert encoded.tokens.size < len(PROSE) / 2
        assert encoded.tokenizer.decode(encoded.tokens.tolist()) == PROSE

    @settings(max_examples=25, deadline=None)
    @given(content=st.text(max_size=200), vocab_size=st.integers(256, 400))
    def test_any_text_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, content: str, vocab_size: int
    ) -> None:
        cache = tmp_path_factory.mktemp("cache")
        encoded = build_vocabulary(text_of(content), vocab_size, cache_dir=cache)
        assert encoded.tokenizer.decode(encoded.tokens.tolist(), skip_special_tokens=False) == content
        assert all(0 <= token < vocab_size for token in encoded.tokens.tolist())

    def test_text_longer_than_a_piece_with_and_without_line_ends(self, tmp_path: Path) -> None:
        for content in (PROSE * 60, "abcd" * 50_000):
            encoded = build_vocabulary(text_of(content), 256, cache_dir=tmp_path)
            assert encoded.tokenizer.decode(encoded.tokens.tolist()) == content

    def test_pieces_do_not_cut_words(self, tmp_path: Path) -> None:
        content = PROSE * 60
        encoded = build_vocabulary(text_of(content), 300, cache_dir=tmp_path)
        assert encoded.tokens.tolist() == encoded.tokenizer.encode(content).ids

    def test_every_byte_is_a_token_even_one_that_the_text_lacks(self, tmp_path: Path) -> None:
        tokenizer = build_vocabulary(text_of(PROSE), 256, cache_dir=tmp_path).tokenizer
        assert tokenizer.get_vocab_size() == 256
        other = "".join(map(chr, range(1, 0x180)))
        assert tokenizer.decode(tokenizer.encode(other).ids) == other

    @pytest.mark.parametrize("vocab_size", [0, 255])
    def test_too_small(self, tmp_path: Path, vocab_size: int) -> None:
        with pytest.raises(ConfigError, match="at least 256"):
            encode(text_of(PROSE), vocab_size, cache_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_cache_is_read_and_private(self, tmp_path: Path) -> None:
        cache = tmp_path / "below" / "cache"
        made = encode(text_of(PROSE), 300, cache_dir=cache)
        (file,) = cache.iterdir()
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        # A file that says something else, and says it properly, is believed: it was read.
        with np.load(file) as stored:
            planted = dict(stored)
        planted["tokens"] = np.array([1, 2, 3], dtype=np.int32)
        np.savez(file, **planted)
        assert encode(text_of(PROSE), 300, cache_dir=cache).tolist() == [1, 2, 3] != made.tolist()

    def test_cache_depends_on_text_and_size(self, tmp_path: Path) -> None:
        encode(text_of(PROSE), 300, cache_dir=tmp_path)
        encode(text_of(PROSE), 301, cache_dir=tmp_path)
        encode(text_of(PROSE + "!"), 300, cache_dir=tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.parametrize(
        "damage", ["empty", "cut", "flipped", "other", "out of range", "wrong dtype", "bad vocabulary"]
    )
    def test_damaged_cache_is_made_again(self, tmp_path: Path, damage: str) -> None:
        made = encode(text_of(PROSE), 300, cache_dir=tmp_path)
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        with np.load(file) as stored:
            arrays = dict(stored)
        match damage:
            case "empty":
                file.write_bytes(b"")
            case "cut":
                file.write_bytes(whole[: len(whole) // 2])
            case "flipped":
                middle = len(whole) // 2
                file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
            case "other":
                file.write_bytes(b"not an archive")
            case "out of range":
                np.savez(file, tokens=np.array([300], dtype=np.int32), tokenizer=arrays["tokenizer"])
            case "wrong dtype":
                np.savez(file, tokens=np.array([1.5]), tokenizer=arrays["tokenizer"])
            case "bad vocabulary":
                np.savez(file, tokens=arrays["tokens"], tokenizer=np.zeros(9, dtype=np.uint8))
        assert encode(text_of(PROSE), 300, cache_dir=tmp_path).tolist() == made.tolist()
        with np.load(file) as stored:
            assert stored["tokens"].tolist() == made.tolist()
        assert [entry.name for entry in tmp_path.iterdir()] == [file.name]

    def test_folder_that_cannot_be_used_is_done_without(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
        tokens = encode(text_of(PROSE), 300, cache_dir=blocked / "cache")
        assert tokens.tolist() == encode(text_of(PROSE), 300, cache_dir=tmp_path / "cache").tolist()

    def test_tokens_cannot_be_changed(self, tmp_path: Path) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="read-only"):
                encode(text_of(PROSE), 300, cache_dir=tmp_path)[0] = 1

    def test_processes_at_once_agree(self, tmp_path: Path) -> None:
        code = (
            "import hashlib, sys\n"
            "from pathlib import Path\n"
            "from piper_owner.data import encode, read_text\n"
            "tokens = encode(read_text(None, limit_bytes=200_000), 512, cache_dir=Path(sys.argv[1]))\n"
            "print(hashlib.sha256(tokens.tobytes()).hexdigest())\n"
        )
        command = [sys.executable, "-W", "error", "-c", code]
        # Two share a cache and race for it; the third makes its own, so all three are compared anew.
        caches = [tmp_path / "shared", tmp_path / "shared", tmp_path / "own"]
        runs = [subprocess.Popen([*command, str(cache)], stdout=subprocess.PIPE) for cache in caches]
        outputs = [run.communicate(timeout=120)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0]
        assert len(set(outputs)) == 1
        assert len(list((tmp_path / "shared").iterdir())) == 1

    def test_encoded_is_frozen(self, tmp_path: Path) -> None:
        encoded = build_vocabulary(text_of(PROSE), 256, cache_dir=tmp_path)
        assert isinstance(encoded, Encoded)
        with pytest.raises(AttributeError):
            encoded.tokens = encoded.tokens  # type: ignore[misc]


class TestTokenStream:
    @given(
        size=st.integers(2, 200),
        microbatches=st.integers(1, 5),
        microbatch_size=st.integers(1, 3),
        length=st.integers(1, 20),
        step=st.integers(0, 10**12),
    )
    def test_every_sequence_reads_on_in_its_part_of_the_text(
        self, size: int, microbatches: int, microbatch_size: int, length: int, step: int
    ) -> None:
        tokens = np.arange(size, dtype=np.int32)
        shape = (microbatches, microbatch_size, length)
        if size < length + 1:
            with pytest.raises(DataError, match=f"only {size} tokens"):
                TokenStream(
                    tokens, microbatches=microbatches, microbatch_size=microbatch_size, sequence_length=length
                )
            return
        stream = TokenStream(
            tokens, microbatches=microbatches, microbatch_size=microbatch_size, sequence_length=length
        )
        batch = stream.batch(step)
        assert batch.ids.shape == batch.labels.shape == shape
        assert batch.ids.dtype == batch.labels.dtype == np.int64
        sequences = microbatches * microbatch_size
        for index in range(sequences):
            start = index * size // sequences + step * length
            expected = [(start + offset) % size for offset in range(length + 1)]
            assert batch.ids.reshape(sequences, length)[index].tolist() == expected[:-1]
            assert batch.labels.reshape(sequences, length)[index].tolist() == expected[1:]
        assert batch.num_tokens == sequences * length

    def test_known_batches(self) -> None:
        stream = TokenStream(
            np.arange(10, dtype=np.int32), microbatches=2, microbatch_size=1, sequence_length=3
        )
        assert stream.batch(0).ids.tolist() == [[[0, 1, 2]], [[5, 6, 7]]]
        assert stream.batch(0).labels.tolist() == [[[1, 2, 3]], [[6, 7, 8]]]
        assert stream.batch(1).ids.tolist() == [[[3, 4, 5]], [[8, 9, 0]]]
        assert stream.batch(1).labels.tolist() == [[[4, 5, 6]], [[9, 0, 1]]]

    def test_batches_do_not_share_memory_with_the_text(self) -> None:
        tokens = np.arange(4, dtype=np.int64)
        stream = TokenStream(tokens, microbatches=1, microbatch_size=1, sequence_length=3)
        stream.batch(0).ids[:] = 9
        assert tokens.tolist() == [0, 1, 2, 3]
        assert stream.batch(0).ids.tolist() == [[[0, 1, 2]]]

    def test_ignored_labels_do_not_count(self) -> None:
        labels = np.array([[[1, IGNORED, 2]]])
        assert Batch(ids=labels, labels=labels).num_tokens == 2

    @pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
    def test_sizes_below_one(self, sizes: tuple[int, int, int]) -> None:
        with pytest.raises(ConfigError, match="at least 1"):
            TokenStream(
                np.arange(9), microbatches=sizes[0], microbatch_size=sizes[1], sequence_length=sizes[2]
            )

    def test_negative_step(self) -> None:
        stream = TokenStream(np.arange(9), microbatches=1, microbatch_size=1, sequence_length=3)
        with pytest.raises(ConfigError, match="step -1"):
            stream.batch(-1)
