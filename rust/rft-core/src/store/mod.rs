//! The prepared set on disk: whole documents as ids, a trained bit each, where they came from.
//!
//! The layout is told in `docs/store-format.md`. The manifest is written last, so a folder without one is no set.

mod manifest;
mod read;
mod write;

pub use manifest::{Manifest, Section, SourceRecord};
pub use read::{Ids, Store};
pub use write::{Document, Writer};

/// Name of the manifest in a set's folder.
pub const MANIFEST: &str = "manifest.json";
