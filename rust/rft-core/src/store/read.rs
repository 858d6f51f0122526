//! A set, memory-mapped.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use xxhash_rust::xxh3::xxh3_64;

use super::{Manifest, Section};
use crate::error::{Error, Kind, Result};

/// Sets up to this size are hashed whole when they are opened (a few milliseconds); larger ones by [`Store::verify`].
const VERIFY_BYTES: u64 = 256 << 20;

/// Token ids as they are stored.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// For vocabularies up to 65,536.
    Narrow(&'a [[u8; 2]]),
    /// For all others.
    Wide(&'a [[u8; 4]]),
}

impl Ids<'_> {
    /// Number of ids.
    pub fn len(&self) -> usize {
        match self {
            Ids::Narrow(ids) => ids.len(),
            Ids::Wide(ids) => ids.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the ids, converted.
    pub fn copy_to<T: From<u32>>(&self, out: &mut [T]) {
        match self {
            Ids::Narrow(ids) => {
                for (to, id) in out.iter_mut().zip(*ids) {
                    *to = T::from(u32::from(u16::from_le_bytes(*id)));
                }
            }
            Ids::Wide(ids) => {
                for (to, id) in out.iter_mut().zip(*ids) {
                    *to = T::from(u32::from_le_bytes(*id));
                }
            }
        }
    }

    /// The ids.
    pub fn to_vec(&self) -> Vec<u32> {
        let mut ids = vec![0; self.len()];
        self.copy_to(&mut ids);
        ids
    }
}

/// A file's bytes; an empty file cannot be mapped.
struct Bytes(Option<Mmap>);

impl Bytes {
    fn open(folder: &Path, section: &Section) -> Result<Bytes> {
        let path = folder.join(&section.file);
        let file = File::open(&path).map_err(|e| Error::io(&path, "opening a file of the prepared set", &e))?;
        let length = file.metadata().map_err(|e| Error::io(&path, "reading", &e))?.len();
        if length != section.bytes {
            return Err(damaged(&path, &format!("{length} bytes long, the manifest says {}", section.bytes)));
        }
        if length == 0 {
            return Ok(Bytes(None));
        }
        // SAFETY: a set is never changed in place: it is written elsewhere, renamed, and removed as a whole; a removed
        // file stays readable while it is mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, "mapping", &e))?;
        Ok(Bytes(Some(map)))
    }

    fn get(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

fn damaged(path: &Path, problem: &str) -> Error {
    Error::new(Kind::Store, path.display().to_string(), format!("the prepared set is damaged: {problem}"))
        .remedy("delete this prepared set; it is made again from the data")
}

/// A prepared set. Read-only, shared by threads.
pub struct Store {
    path: PathBuf,
    manifest: Manifest,
    manifest_text: String,
    tokens: Bytes,
    mask: Bytes,
    offsets: Vec<u64>,
    origins: Bytes,
    weights: Option<Bytes>,
}

impl Store {
    /// Opens a set and checks it against its manifest: sizes and offsets always, hashes up to 256 MiB.
    pub fn open(path: &Path) -> Result<Store> {
        let (manifest, manifest_text) = Manifest::read(path)?;
        let section = |name: &str| {
            manifest.sections.get(name).ok_or_else(|| damaged(path, &format!("the manifest has no section {name:?}")))
        };
        let open = |name: &str| Bytes::open(path, section(name)?);
        let (tokens, mask, offsets, origins) = (open("tokens")?, open("mask")?, open("offsets")?, open("origins")?);
        let weights = manifest.sections.get("weights").map(|section| Bytes::open(path, section)).transpose()?;
        let offsets: Vec<u64> =
            offsets.get().as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let store =
            Store { path: path.to_path_buf(), manifest, manifest_text, tokens, mask, offsets, origins, weights };
        store.check_shape()?;
        if store.manifest.sections.values().map(|section| section.bytes).sum::<u64>() <= VERIFY_BYTES {
            store.verify()?;
        }
        Ok(store)
    }

    fn check_shape(&self) -> Result<()> {
        let (documents, tokens) = (self.manifest.documents, self.manifest.tokens);
        let width = match self.manifest.sections.get("tokens").map(|section| section.dtype.as_str()) {
            Some("u16") => 2,
            Some("u32") => 4,
            _ => return Err(damaged(&self.path, "tokens are neither u16 nor u32")),
        };
        let sized = self.tokens.get().len() as u64 == tokens.saturating_mul(width)
            && self.mask.get().len() as u64 == tokens.div_ceil(8)
            && self.offsets.len() as u64 == documents.saturating_add(1)
            && self.origins.get().len() as u64 == documents.saturating_mul(16)
            && self.weights.as_ref().is_none_or(|weights| weights.get().len() as u64 == tokens.saturating_mul(4));
        let ordered = self.offsets.first() == Some(&0)
            && self.offsets.last() == Some(&tokens)
            && self.offsets.windows(2).all(|pair| pair[0] <= pair[1] && pair[1] - pair[0] < u64::from(u32::MAX));
        if sized && ordered && documents < u64::from(u32::MAX) {
            Ok(())
        } else {
            Err(damaged(&self.path, "its files do not fit each other"))
        }
    }

    /// Compares the hash of every file with the manifest.
    pub fn verify(&self) -> Result<()> {
        for (name, section) in &self.manifest.sections {
            let offsets: Vec<u8>;
            let bytes = match name.as_str() {
                "tokens" => self.tokens.get(),
                "mask" => self.mask.get(),
                "origins" => self.origins.get(),
                "weights" => self.weights.as_ref().map(Bytes::get).unwrap_or_default(),
                "offsets" => {
                    offsets = self.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
                    &offsets
                }
                _ => continue,
            };
            if section.xxh3 != format!("{:016x}", xxh3_64(bytes)) {
                return Err(damaged(&self.path.join(&section.file), "its content is not what was written"));
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

    /// Number of documents.
    pub fn num_documents(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> u64 {
        self.manifest.tokens
    }

    /// Whether tokens have weights of their own.
    pub fn has_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Where a document lies among the tokens.
    pub fn range(&self, document: usize) -> Range<usize> {
        self.offsets[document] as usize..self.offsets[document + 1] as usize
    }

    /// Length of a document.
    pub fn length(&self, document: usize) -> u32 {
        (self.offsets[document + 1] - self.offsets[document]) as u32
    }

    /// Ids of a range of tokens.
    pub fn ids(&self, range: Range<usize>) -> Ids<'_> {
        let bytes = self.tokens.get();
        if bytes.len() as u64 == self.manifest.tokens * 2 {
            Ids::Narrow(&bytes.as_chunks::<2>().0[range])
        } else {
            Ids::Wide(&bytes.as_chunks::<4>().0[range])
        }
    }

    /// The trained bit of a token.
    pub fn is_trained(&self, token: usize) -> bool {
        self.mask.get()[token / 8] >> (token % 8) & 1 == 1
    }

    /// The trained bits of the 64 tokens from one on, its own lowest; 0 behind the end of the set.
    pub fn trained_bits(&self, token: usize) -> u64 {
        let (mask, shift) = (self.mask.get(), token % 8);
        let mut bytes = [0; 16];
        let from = mask.get(token / 8..).unwrap_or_default();
        let count = from.len().min(9);
        bytes[..count].copy_from_slice(&from[..count]);
        (u128::from_le_bytes(bytes) >> shift) as u64
    }

    /// Number of trained bits in a range of tokens.
    pub fn count_trained(&self, range: Range<usize>) -> u32 {
        let (mask, Range { start, end }) = (self.mask.get(), range);
        if start >= end {
            return 0;
        }
        let (first, last) = (start / 8, (end - 1) / 8);
        let low = 0xffu8 << (start % 8);
        let high = 0xffu8 >> (7 - (end - 1) % 8);
        if first == last {
            return (mask[first] & low & high).count_ones();
        }
        let (words, rest) = mask[first + 1..last].as_chunks::<8>();
        let middle: u32 = words.iter().map(|word| u64::from_le_bytes(*word).count_ones()).sum();
        let tail: u32 = rest.iter().map(|byte| byte.count_ones()).sum();
        (mask[first] & low).count_ones() + middle + tail + (mask[last] & high).count_ones()
    }

    /// The weight of a token; 1 where the set has none.
    pub fn weight(&self, token: usize) -> f32 {
        match &self.weights {
            None => 1.0,
            Some(weights) => {
                weights.get().as_chunks::<4>().0.get(token).map_or(1.0, |bytes| f32::from_le_bytes(*bytes))
            }
        }
    }

    /// File and line (from 1) that a document came from.
    pub fn origin(&self, document: usize) -> (&str, u64) {
        let fields = self.origins.get().as_chunks::<8>().0;
        let (source, line) = (u64::from_le_bytes(fields[2 * document]), u64::from_le_bytes(fields[2 * document + 1]));
        let path = self.manifest.sources.get(source as usize).map_or("", |source| source.path.as_str());
        (path, line)
    }
}
