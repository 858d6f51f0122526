//! The prepared set on disk: whole documents as ids, a trained bit each, where they came from; in shards.
//!
//! The layout is told in `docs/store-format.md`. The manifest is written last, so a folder without one is no set.

mod layout;
mod lock;
mod manifest;
mod read;
mod shard;
mod verify;
mod window;
mod write;

pub use layout::{BLOCK_BYTES, HEADER_BYTES};
pub use lock::Lock;
pub use manifest::{Manifest, ShardRecord, SourceRecord};
pub use read::Store;
pub use shard::{Ids, Shard};
pub use verify::{Problem, Verified, verify};
pub use window::{Window, WindowWriter, Windows};
pub use write::{Begun, Document, Layout, PART, Writer};

/// Name of the manifest in a set's folder.
pub const MANIFEST: &str = "manifest.json";

/// Shards are closed once their tokens and weights take this many bytes: two of them are in memory while a set is
/// written, and a run that was killed loses at most that much work.
pub const SHARD_BYTES: u64 = 64 << 20;
