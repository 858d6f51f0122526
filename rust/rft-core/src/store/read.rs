//! A set: its manifest and its shards as one row of documents.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::shard::{Ids, Shard, TrainedRuns, damaged};
use super::{Manifest, ShardRecord};
use crate::error::{Error, Result};

/// Sets up to this size are hashed whole when they are opened (some ten milliseconds); larger ones by [`Store::verify`].
const VERIFY_BYTES: u64 = 256 << 20;

/// A prepared set. Read-only, shared by threads. A range of tokens that is handed in lies in one document.
pub struct Store {
    path: PathBuf,
    manifest: Manifest,
    manifest_text: String,
    shards: Vec<Shard>,
    /// First document of each shard, and their number at the end.
    documents: Vec<usize>,
    /// First token of each shard, and their number at the end.
    tokens: Vec<usize>,
}

impl Store {
    /// Opens a set and checks it against its manifest: sizes, headers, footers and offsets always, hashes up to 256 MiB.
    pub fn open(path: &Path) -> Result<Store> {
        let store = Store::open_unhashed(path)?;
        if store.manifest.shards.iter().map(|record| record.bytes).sum::<u64>() <= VERIFY_BYTES {
            store.verify()?;
        }
        Ok(store)
    }

    /// The same without hashes, for whoever has taken them.
    pub(super) fn open_unhashed(path: &Path) -> Result<Store> {
        let (manifest, manifest_text) = Manifest::read(path)?;
        let (mut shards, mut documents, mut tokens) = (Vec::new(), vec![0], vec![0]);
        for (index, record) in manifest.shards.iter().enumerate() {
            let shard = Shard::open(&path.join(&record.file))?;
            check_record(&manifest, record, index, &shard)?;
            documents.push(documents[index] + shard.num_documents());
            tokens.push(tokens[index] + shard.num_tokens());
            shards.push(shard);
        }
        let store = Store { path: path.to_path_buf(), manifest, manifest_text, shards, documents, tokens };
        store.check_sums()?;
        Ok(store)
    }

    fn check_sums(&self) -> Result<()> {
        let (documents, tokens) = (self.num_documents(), self.tokens.last().copied().unwrap_or_default());
        let trained: u64 = self.manifest.shards.iter().map(|record| record.trained_tokens).sum();
        let sums = (documents as u64, tokens as u64, trained);
        let stated = (self.manifest.documents, self.manifest.tokens, self.manifest.trained_tokens);
        if sums != stated {
            return Err(damaged(&self.path, "its shards do not hold what the manifest says"));
        }
        if documents >= u32::MAX as usize {
            return Err(damaged(&self.path, "it holds more documents than can be numbered"));
        }
        Ok(())
    }

    /// Compares the hash of every file with the manifest. [`super::verify`] tells which part of a file is damaged.
    pub fn verify(&self) -> Result<()> {
        for (record, shard) in self.manifest.shards.iter().zip(&self.shards) {
            if record.xxh3 != format!("{:016x}", shard.hash()) {
                return Err(damaged(shard.path(), "its content is not what was written"));
            }
        }
        Ok(())
    }

    /// The set's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the set holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest as it stands on disk.
    pub fn manifest_text(&self) -> &str {
        &self.manifest_text
    }

    /// Its files, in order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Number of documents.
    pub fn num_documents(&self) -> usize {
        self.documents.last().copied().unwrap_or_default()
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        self.manifest.tokens
    }

    /// Whether tokens have weights of their own.
    pub fn has_weights(&self) -> bool {
        self.shards.iter().any(Shard::has_weights)
    }

    /// The shard of a document, and the document's number in it.
    fn place(&self, document: usize) -> (usize, usize) {
        // A set of one shard is the common case; else the last shard that begins at or before the document.
        let index = if self.shards.len() == 1 {
            0
        } else {
            self.documents[1..self.shards.len()].partition_point(|first| *first <= document)
        };
        (index, document - self.documents[index])
    }

    /// The shard of a range of tokens, and the range in it; none for an empty range.
    fn within(&self, range: Range<usize>) -> Option<(&Shard, Range<usize>)> {
        if range.is_empty() {
            return None;
        }
        let index = if self.shards.len() == 1 {
            0
        } else {
            self.tokens[1..self.shards.len()].partition_point(|first| *first <= range.start)
        };
        let base = self.tokens[index];
        Some((&self.shards[index], range.start - base..range.end - base))
    }

    /// Where a document lies among the tokens.
    pub fn range(&self, document: usize) -> Range<usize> {
        let (index, document) = self.place(document);
        let (range, base) = (self.shards[index].range(document), self.tokens[index]);
        range.start + base..range.end + base
    }

    /// Length of a document.
    pub fn length(&self, document: usize) -> u32 {
        let (index, document) = self.place(document);
        self.shards[index].range(document).len() as u32
    }

    /// Ids of a range of tokens.
    pub fn ids(&self, range: Range<usize>) -> Ids<'_> {
        match self.within(range) {
            Some((shard, range)) => shard.ids(range),
            None => Ids::Wide(&[]),
        }
    }

    /// The trained bit of a token. For more than one see [`Store::trained_runs`].
    pub fn is_trained(&self, token: usize) -> bool {
        self.count_trained(token..token + 1) == 1
    }

    /// Number of trained bits in a range of tokens.
    pub fn count_trained(&self, range: Range<usize>) -> u32 {
        self.within(range).map_or(0, |(shard, range)| shard.count_trained(range))
    }

    /// The maximal runs of trained tokens inside a range, counted from the range's start.
    pub fn trained_runs(&self, range: Range<usize>) -> TrainedRuns<'_> {
        self.within(range).map_or(TrainedRuns::none(), |(shard, range)| shard.trained_runs(range))
    }

    /// The trained bits of the 64 tokens from `token` on, lowest first. Bits behind the document's end mean nothing.
    pub fn trained_bits(&self, token: usize) -> u64 {
        self.within(token..token + 1).map_or(0, |(shard, range)| shard.trained_bits(range.start))
    }

    /// The weights of a range of tokens, little-endian; none where every token of its shard weighs 1.
    pub fn weights(&self, range: Range<usize>) -> Option<&[[u8; 4]]> {
        self.within(range).and_then(|(shard, range)| shard.weights(range))
    }

    /// The weight of a token; 1 where its shard has none.
    pub fn weight(&self, token: usize) -> f32 {
        let weights = self.weights(token..token + 1);
        weights.and_then(<[_]>::first).map_or(1.0, |bytes| f32::from_le_bytes(*bytes))
    }

    /// File and line (from 1) that a document came from.
    pub fn origin(&self, document: usize) -> (&str, u64) {
        let (index, document) = self.place(document);
        let (source, line) = self.shards[index].origin(document);
        let path = self.manifest.sources.get(source as usize).map_or("", |source| source.path.as_str());
        (path, line)
    }
}

/// A shard is the one that the manifest means.
fn check_record(manifest: &Manifest, record: &ShardRecord, index: usize, shard: &Shard) -> Result<()> {
    let header = shard.header();
    let told = |problem: &str| Err::<(), Error>(damaged(shard.path(), problem));
    if shard.bytes().len() as u64 != record.bytes {
        return told(&format!("{} bytes long, the manifest says {}", shard.bytes().len(), record.bytes));
    }
    if format!("{:032x}", header.key) != manifest.key || header.index as usize != index {
        return told("it is a shard of another set, or another one of this set");
    }
    let of_file = (header.documents, header.tokens, header.trained_tokens, shard.has_weights(), header.token_bytes);
    let stated = (record.documents, record.tokens, record.trained_tokens, record.weights, manifest.token_bytes);
    if of_file == stated { Ok(()) } else { told("it does not hold what the manifest says") }
}
