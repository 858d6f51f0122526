//! Windows: the shards of a set that is made while it is used, so that never more than a few of them are on disk.
//!
//! The folder holds the shards that are complete and not yet used up, each with its note as a set under way has, and beside
//! them `end.json` or `failed.json` once there will be no more.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::shard::damaged;
use super::write::{Buffer, note_name, read_note, remove_if_there, shard_name, write_shard, write_whole};
use super::{Document, Layout, Manifest, Shard, SourceRecord, Store};
use crate::error::{Error, Kind, Result};
use crate::spec::FORMAT_VERSION;

const END: &str = "end.json";
const FAILED: &str = "failed.json";

/// Writes windows, one file after another.
pub struct WindowWriter {
    folder: PathBuf,
    layout: Layout,
    buffer: Buffer,
    next: u64,
    totals: [u64; 3],
}

impl WindowWriter {
    /// Goes on at window `next`, behind documents of these totals (documents, tokens, trained tokens).
    pub fn new(folder: &Path, layout: Layout, next: u64, totals: [u64; 3]) -> WindowWriter {
        let buffer = Buffer::new(layout.shard_bytes);
        WindowWriter { folder: folder.to_path_buf(), layout, buffer, next, totals }
    }

    /// Appends a document.
    ///
    /// # Errors
    /// As of a set's writer.
    pub fn push(&mut self, document: &Document) -> Result<()> {
        self.layout.check(document)?;
        self.totals[2] += self.buffer.push(document, self.layout.token_bytes() == 4);
        self.totals[0] += 1;
        self.totals[1] += document.ids.len() as u64;
        Ok(())
    }

    /// Whether it is time for [`WindowWriter::cut`].
    pub fn is_full(&self) -> bool {
        self.buffer.is_full(self.layout.shard_bytes)
    }

    /// Whether the window that fills holds no document.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Number of the window that fills.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Documents, tokens and trained tokens since window 0.
    pub fn totals(&self) -> [u64; 3] {
        self.totals
    }

    /// Completes the window. `state`: what it takes to go on behind it.
    pub fn cut(&mut self, state: Value) -> Result<()> {
        let index = u32::try_from(self.next).map_err(|_| {
            Error::new(Kind::Argument, "stream", "more windows than can be numbered").remedy("start a new run")
        })?;
        write_shard(&self.folder, &self.layout, &self.buffer, index, Some(state))?;
        self.buffer.clear();
        self.next += 1;
        Ok(())
    }
}

/// A complete window.
pub struct Window {
    /// Its documents, as a set of one shard.
    pub store: Store,
    /// xxh3-64 of its file.
    pub xxh3: String,
    /// What it takes to go on behind it.
    pub state: Value,
}

/// The folder of windows, as who uses them up sees it.
#[derive(Clone, Debug)]
pub struct Windows {
    folder: PathBuf,
    key: String,
    /// Files that rows come from, for messages.
    sources: Vec<String>,
}

impl Windows {
    /// The windows of a key in a folder.
    pub fn new(folder: &Path, key: &str, sources: Vec<String>) -> Windows {
        Windows { folder: folder.to_path_buf(), key: key.to_string(), sources }
    }

    /// A window, once it is complete.
    ///
    /// # Errors
    /// It is damaged, or of other data.
    pub fn open(&self, index: u64) -> Result<Option<Window>> {
        let number = index as usize;
        if !self.folder.join(note_name(number)).exists() {
            return Ok(None);
        }
        let path = self.folder.join(shard_name(number));
        let note = read_note(&self.folder, number, &self.key)
            .ok_or_else(|| damaged(&path, "it is not what was written, or of other data"))?;
        let shard = Shard::open(&path)?;
        let source = |path: &String| SourceRecord { path: path.clone(), bytes: 0, xxh3: String::new() };
        let manifest = Manifest {
            format: "rft-store".into(),
            format_version: FORMAT_VERSION,
            key: self.key.clone(),
            documents: note.shard.documents,
            tokens: note.shard.tokens,
            trained_tokens: note.shard.trained_tokens,
            vocab_size: shard.header().vocab_size,
            token_bytes: shard.header().token_bytes,
            shards: vec![note.shard.clone()],
            sources: self.sources.iter().map(source).collect(),
            counts: Value::Null,
            inputs: Value::Null,
        };
        let store = Store::of_shard(&self.folder, manifest, shard);
        Ok(Some(Window { store, xxh3: note.shard.xxh3, state: note.state }))
    }

    /// Removes a window that nobody needs any more. Who has it mapped keeps it.
    pub fn remove(folder: &Path, index: u64) -> Result<()> {
        remove_if_there(&folder.join(note_name(index as usize)))?;
        remove_if_there(&folder.join(shard_name(index as usize)))
    }

    /// Says that window `windows` will not come: the data ends before it.
    pub fn end(folder: &Path, windows: u64) -> Result<()> {
        write_whole(folder, END, json!({"windows": windows}).to_string().as_bytes())
    }

    /// Says why there will be no more.
    pub fn fail(folder: &Path, error: &Error) -> Result<()> {
        let Error { kind, place, problem, wanted, remedy } = error;
        let told = json!({"kind": kind.name(), "place": place, "problem": problem, "wanted": wanted, "remedy": remedy});
        write_whole(folder, FAILED, told.to_string().as_bytes())
    }

    /// How many windows there are in all, once that is known.
    ///
    /// # Errors
    /// What keeps the windows from being made.
    pub fn known_end(&self) -> Result<Option<u64>> {
        let read =
            |name: &str| -> Option<Value> { serde_json::from_slice(&fs::read(self.folder.join(name)).ok()?).ok() };
        if let Some(told) = read(FAILED) {
            let text = |name: &str| told[name].as_str().unwrap_or_default().to_string();
            let kind = Kind::from_name(&text("kind")).unwrap_or(Kind::Io);
            return Err(Error::new(kind, text("place"), text("problem")).wanted(text("wanted")).remedy(text("remedy")));
        }
        Ok(read(END).and_then(|told| told["windows"].as_u64()))
    }
}
