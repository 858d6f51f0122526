"""Types of the Rust extension (rust/rft-py). Thin: arguments in, plain arrays and JSON out, GIL released."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__version__: str

class NativeError(Exception):
    """Every failure of the core: `where`, `problem`, `wanted`, `do` as in rft.errors.RftError, and `kind`.

    kind: data, template, tokenizer, store, io, full (the disk), or argument (a fault of the caller).
    """

    kind: str
    where: str
    problem: str
    wanted: str
    do: str

def prepare(
    spec: str,
    out: str,
    on_progress: Callable[[int, int, int], None] | None = None,
    render: Callable[[list[str]], list[tuple[str, list[tuple[int, int]]] | str]] | None = None,
) -> str:
    """Read, render, tokenise and mask the sources of `spec` (JSON) into the store folder `out`, unless it is there.

    Waits for another process that writes there, and goes on where a killed one stopped. Returns the counts as
    JSON, with `written` (False: it was there) and `resumed_rows` (done by the killed one). on_progress(bytes_read, bytes_total, rows). render: in place of minijinja; takes a block of conversations (JSON each)
    and gives for each the text and the trained spans (character offsets), or a string that is the error.
    """

def store_key(spec: str) -> str:
    """Content key (hex) of what `prepare(spec, ...)` would write: xxh3 of files' content, tokenizer, template, options, format version."""

def key_inputs(spec: str) -> str:
    """What goes into the key, as JSON: one entry an input with its hash."""

def pack(
    lengths: NDArray[np.uint32], capacity: int, packing: str, seed: int = 0, epoch: int = 0, shuffle: bool = True
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Items (bin after bin) and where each bin starts (and the end), as `Plan` packs a set of these lengths."""

def deal(costs: NDArray[np.uint64], ranks: int, each: int) -> list[list[int | None]]:
    """For each rank its `each` packs of a step, dearest first, so that the ranks' sums are even; None = filler."""

def source_hashes(spec: str) -> list[str]:
    """xxh3-64 (hex) of each source's content; those that name it in `xxh3` are not read."""

def data_command(arguments: list[str]) -> tuple[int, str, str]:
    """`rft-data` with these arguments: exit code, what goes to stdout, what goes to stderr."""

def archive_members(path: str) -> list[tuple[str, int]]:
    """Name and unpacked size of every file in a zip or tar, in its order. Refuses names that leave it, links, devices."""

def masked_rows(spec: str, fill: bool = True) -> list[list[tuple[str, list[tuple[int, int]]]] | str]:
    """What the chats of the first source become, without tokens: text and trained spans (character offsets) of each document
    of a row, or why the row is left out. The text of control tokens that a row spells holds U+FDD0. fill: as in `prepare`;
    else every chat is rendered for itself."""

def fetch_remote(
    urls: list[str], cache: str, limit: int, on_progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Files with the content of these URLs (s3, gs, az, http, https), fetched into `cache` where it has them not.

    limit: bytes that the cache may take; the files used longest ago go first. on_progress(bytes done, bytes in all).
    Credentials come from the environment.
    """

def list_remote(folder: str) -> list[tuple[str, int]]:
    """URL and size of every object below a folder of s3://, gs:// or az://, sorted."""

def measure_rows(spec: str, repeats: int = 1, fill: bool = True) -> tuple[int, int, int, int, str, list[float]]:
    """Rows of the first source -> masked text, and no further, for benchmarks: rows, chats made, bytes of text, of trained
    text, a digest of texts and spans, and the CPU seconds of each repeat on one thread. fill: as in `prepare`; else every
    chat is rendered for itself."""

class Template:
    """A compiled chat template (minijinja)."""

    def __init__(self, source: str, special: dict[str, str] | dict[str, str | None]) -> None: ...
    @property
    def tagged(self) -> bool:
        """Whether the template says itself what is generated."""
    def render(self, conversation: str, add_generation_prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Text and generation spans (character offsets) of one conversation, given as JSON {messages, tools?, ...}."""

class Tokenizer:
    """A tokenizer.json, as the data path uses it."""

    def __init__(self, json: str, unicode: int = 16) -> None:
        """unicode: version of the tables that split patterns read, 16 or 17; 17 only where our engine runs."""
    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids; added tokens are recognised, no post-processing."""
    def encode_text(self, text: str) -> NDArray[np.uint32]:
        """Ids of ordinary text: control tokens spelled in it stay text."""
    @property
    def engine(self) -> tuple[bool, str]:
        """Whether our engine runs, and else why the tokenizers library does (in words that follow "because")."""
    def encode_file(
        self, path: str | Path, separator: int, threads: int
    ) -> tuple[NDArray[np.uint16] | NDArray[np.uint32], NDArray[np.uint64]]:
        """Ids of the documents in a file, which lie between separator bytes, one behind the other; where each ends.

        uint16 where all ids of the vocabulary fit. Added tokens are recognised.
        """
    def decode(self, ids: NDArray[np.uint32]) -> str: ...
    def tokens(self, ids: NDArray[np.uint32]) -> list[str]:
        """Each id's own text, for display; bytes that are no UTF-8 alone become U+FFFD."""

class Store:
    """A prepared set, memory-mapped and checked against its manifest."""

    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def manifest(self) -> str:
        """The text of manifest.json (docs/store-format.md)."""
    @property
    def has_weights(self) -> bool:
        """Whether tokens have weights of their own: then `Stream.submit` wants a buffer for them."""
    def verify(self) -> None:
        """Compares the hash of every file with the manifest; opening does so for sets up to 256 MiB."""
    def lengths(self) -> NDArray[np.uint32]: ...
    def trained(self) -> NDArray[np.uint32]:
        """Tokens of each document that carry a trained bit."""
    def document(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_], NDArray[np.float32] | None]:
        """Ids, trained bits, weights of one document."""
    def origin(self, index: int) -> tuple[str, int]:
        """File and line (from 1) that the document came from."""

class Plan:
    """Which pieces of which documents make which pack: the same on every rank; a function of its arguments alone."""

    def __init__(
        self,
        store: Store,
        seq_len: int,
        packing: str,
        overlong: str,
        seed: int,
        epoch: int,
        shuffle: bool = True,
        windows: bool = False,
    ) -> None:
        """windows: each shard is shuffled and packed for itself, one behind the other."""
    @property
    def windows(self) -> list[int]:
        """First pack of each window; empty where the order is over the whole set."""
    @property
    def hash(self) -> str: ...
    @property
    def num_packs(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_label_tokens(self) -> int: ...
    @property
    def fill(self) -> float:
        """Tokens over packs x seq_len; for packing "none" over the padded lengths of single rows."""
    @property
    def counts(self) -> dict[str, int]:
        """documents, split_documents, pieces, truncated_documents, truncated_tokens, dropped_documents, dropped_tokens, unlabelled_documents, unlabelled_tokens.

        Tokens of the set = num_tokens + truncated_tokens + dropped_tokens + unlabelled_tokens.
        """
    def pack(self, index: int) -> list[tuple[int, int, int]]:
        """(document, start, length) of each piece of a pack."""
    def pack_tokens(self) -> NDArray[np.uint32]: ...
    def pack_labels(self) -> NDArray[np.uint32]:
        """Labels (after the shift) of each pack."""

class Stream:
    """This rank's micro-batches, filled ahead by one thread into buffers that the caller owns.

    Buffers: ids, labels, positions i64 [capacity]; cu_seqlens i32 [capacity + 1]; weights f32 [capacity] or None.
    They must stay alive and untouched from `submit` until `take` has returned that slot and the caller is done.
    """

    def __init__(
        self,
        packs: Plan | Feed,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        packs_per_step: int,
        start_step: int,
        pad_id: int,
        capacity: int,
        first_pack: int = 0,
        balance: bool = True,
    ) -> None: ...
    @property
    def num_steps(self) -> int | None:
        """Steps of the epoch; None over a feed."""
    def wait(self, seconds: float) -> bool:
        """Whether `take` would return at once; waits for that, but no longer than this."""
    def submit(self, slot: int, ids: int, labels: int, positions: int, cu_seqlens: int, weights: int | None) -> None:
        """Hand over a slot by the addresses of its buffers; the thread fills the next micro-batch into it."""
    def take(self) -> tuple[int, bool, int, tuple[int, ...], tuple[int, ...], int, int, float, bool] | None:
        """The next micro-batch, in order: slot, last (of its step), tokens (T), lengths (of all documents, fill-up included),
        pack_tokens (real tokens of each pack), num_tokens, num_label_tokens, label_weight, weighted (whether weights may differ
        from 1). None at the end. Raises what the thread met."""
    def close(self) -> None: ...

class Feed:
    """One reader's packs out of the windows of an epoch, which a `Producer` makes in a folder (of another process, maybe)."""

    def __init__(
        self,
        spec: str,
        folder: str,
        *,
        key: str,
        seq_len: int,
        packing: str,
        overlong: str,
        seed: int,
        epoch: int,
        shuffle: bool,
        reader: int,
        cursor: str | None = None,
    ) -> None:
        """key: as `stream_key` gave it when the run began. reader: its number among those of the folder, from 0. cursor: where to begin, as `cursor` gave it."""
    def cursor(self, pack: int) -> str | None:
        """JSON of the last place at or before a pack from which to go on."""
    def done(self, pack: int) -> None:
        """Packs before this one are done with: their windows may be removed."""
    def share(self, pack: int) -> float:
        """Share of the sources' bytes that went into the packs before this one."""
    def counts(self, pack: int) -> str | None:
        """What was read, kept and dropped for the windows up to that of the pack before this one, as JSON like a manifest's."""
    def totals(self) -> dict[str, int]:
        """Over the windows opened: windows, packs, tokens, label_tokens, and the counts of `Plan`."""

class Producer:
    """Prepares the sources of a spec as windows in a folder, on threads of its own, and removes those that all readers have used."""

    def __init__(
        self,
        spec: str,
        folder: str,
        *,
        key: str,
        cursor: str | None = None,
        ahead: int,
        readers: int,
        first_wait: float,
        render: Callable[[list[str]], list[tuple[str, list[tuple[int, int]]] | str]] | None = None,
    ) -> None:
        """ahead: windows made ahead of the slowest reader. first_wait: seconds before the second attempt at a source that fails."""
    def status(self) -> dict[str, Any]:
        """bytes, bytes_total, rows, windows, trouble (what is wrong with a source that is tried again, or None)."""
    def stop(self) -> None: ...

def stream_key(spec: str) -> str:
    """Key of what `Producer` makes of a spec: of the files' content it holds only their sizes and ETags."""

def remote_states(urls: list[str]) -> list[tuple[int, str]]:
    """Size and ETag (or time of change) of each URL."""
