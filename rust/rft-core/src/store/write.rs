//! Writes a set into a folder beside its place, makes everything durable, and moves it there in one step.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::{MANIFEST, Manifest, Section, SourceRecord};
use crate::error::{Error, Kind, Result};
use crate::spec::FORMAT_VERSION;

/// A file of the set on its way.
struct Part {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
    dtype: &'static str,
    width: u64,
}

impl Part {
    fn new(folder: &Path, name: &str, dtype: &'static str, width: u64) -> Result<Part> {
        let path = folder.join(name);
        let file = File::create_new(&path).map_err(|e| Error::io(&path, "creating a file of the prepared set", &e))?;
        Ok(Part { path, file: BufWriter::with_capacity(1 << 18, file), hash: Xxh3::new(), bytes: 0, dtype, width })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io(&self.path, "writing the prepared set", &e))
    }

    fn finish(self) -> Result<Section> {
        let failed = |e: &std::io::Error| Error::io(&self.path, "writing the prepared set", e);
        let file = self.file.into_inner().map_err(|e| failed(e.error()))?;
        file.sync_all().map_err(|e| failed(&e))?;
        Ok(Section {
            file: self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            dtype: self.dtype.into(),
            count: self.bytes / self.width,
            bytes: self.bytes,
            xxh3: format!("{:016x}", self.hash.digest()),
        })
    }
}

/// One document to write.
pub struct Document<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// A trained bit for each.
    pub trained: &'a [bool],
    /// A loss factor for each; none = 1 each.
    pub weights: Option<&'a [f32]>,
    /// Index of the source.
    pub source: u32,
    /// Line in it, from 1.
    pub line: u64,
}

/// A set on its way to disk. Dropped before [`Writer::finish`], it leaves nothing behind.
pub struct Writer {
    place: PathBuf,
    folder: Temporary,
    tokens: Part,
    mask: Part,
    offsets: Part,
    origins: Part,
    weights: Option<Part>,
    vocab_size: u32,
    documents: u64,
    num_tokens: u64,
    trained_tokens: u64,
    /// Bits of the mask that do not fill a byte yet.
    bits: u8,
    scratch: Vec<u8>,
}

static SERIAL: AtomicU64 = AtomicU64::new(0);

impl Writer {
    /// Starts a set that will lie at `place`.
    pub fn new(place: &Path, vocab_size: u32) -> Result<Writer> {
        let folder = Temporary::beside(place)?;
        let (dtype, width) = if vocab_size <= 1 << 16 { ("u16", 2) } else { ("u32", 4) };
        let mut writer = Writer {
            place: place.to_path_buf(),
            tokens: Part::new(&folder.path, "tokens.bin", dtype, width)?,
            mask: Part::new(&folder.path, "mask.bin", "u8", 1)?,
            offsets: Part::new(&folder.path, "offsets.bin", "u64", 8)?,
            origins: Part::new(&folder.path, "origins.bin", "u64", 8)?,
            weights: None,
            folder,
            vocab_size,
            documents: 0,
            num_tokens: 0,
            trained_tokens: 0,
            bits: 0,
            scratch: Vec::new(),
        };
        writer.offsets.put(&0u64.to_le_bytes())?;
        Ok(writer)
    }

    /// Appends a document.
    pub fn push(&mut self, document: &Document) -> Result<()> {
        let Document { ids, trained, weights, source, line } = document;
        debug_assert_eq!(ids.len(), trained.len());
        if ids.len() >= u32::MAX as usize {
            return Err(Error::new(
                Kind::Data,
                "",
                format!("a document of {} tokens is more than a set can hold", ids.len()),
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id >= self.vocab_size) {
            let problem =
                format!("the tokenizer gives id {id}, but the model has {} rows of embeddings", self.vocab_size);
            return Err(Error::new(Kind::Tokenizer, "tokenizer.json", problem)
                .remedy("use the model's own tokenizer, or name the new tokens in model.add_tokens"));
        }
        self.scratch.clear();
        if self.tokens.width == 2 {
            self.scratch.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes()));
        } else {
            self.scratch.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        self.tokens.put(&self.scratch)?;
        self.put_mask(trained)?;
        self.put_weights(ids.len(), *weights)?;
        self.num_tokens += ids.len() as u64;
        self.documents += 1;
        self.offsets.put(&self.num_tokens.to_le_bytes())?;
        self.origins.put(&u64::from(*source).to_le_bytes())?;
        self.origins.put(&line.to_le_bytes())
    }

    fn put_mask(&mut self, trained: &[bool]) -> Result<()> {
        self.scratch.clear();
        let mut filled = (self.num_tokens % 8) as u32;
        for bit in trained {
            self.bits |= u8::from(*bit) << filled;
            self.trained_tokens += u64::from(*bit);
            filled += 1;
            if filled == 8 {
                self.scratch.push(self.bits);
                (self.bits, filled) = (0, 0);
            }
        }
        self.mask.put(&self.scratch)
    }

    /// The section of weights begins with the first document that has any; those before it weigh 1.
    fn put_weights(&mut self, tokens: usize, weights: Option<&[f32]>) -> Result<()> {
        if self.weights.is_none() && weights.is_some() {
            let mut part = Part::new(&self.folder.path, "weights.bin", "f32", 4)?;
            let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), 4096).flatten().collect();
            let mut missing = self.num_tokens * 4;
            while missing > 0 {
                let n = missing.min(ones.len() as u64);
                part.put(&ones[..n as usize])?;
                missing -= n;
            }
            self.weights = Some(part);
        }
        if let Some(part) = &mut self.weights {
            self.scratch.clear();
            match weights {
                Some(weights) => self.scratch.extend(weights.iter().flat_map(|weight| weight.to_le_bytes())),
                None => self.scratch.extend(std::iter::repeat_n(1f32.to_le_bytes(), tokens).flatten()),
            }
            part.put(&self.scratch)?;
        }
        Ok(())
    }

    /// Tokens so far.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Documents so far.
    pub fn num_documents(&self) -> u64 {
        self.documents
    }

    /// Tokens with a trained bit so far.
    pub fn trained_tokens(&self) -> u64 {
        self.trained_tokens
    }

    /// Makes everything durable, writes the manifest last, and moves the set to its place.
    pub fn finish(mut self, key: &str, sources: Vec<SourceRecord>, counts: serde_json::Value) -> Result<()> {
        if !self.num_tokens.is_multiple_of(8) {
            let last = [self.bits];
            self.mask.put(&last)?;
        }
        let mut sections = BTreeMap::new();
        let parts =
            [("tokens", self.tokens), ("mask", self.mask), ("offsets", self.offsets), ("origins", self.origins)];
        for (name, part) in parts.into_iter().chain(self.weights.map(|part| ("weights", part))) {
            sections.insert(name.to_string(), part.finish()?);
        }
        let manifest = Manifest {
            format: "rft-store".into(),
            format_version: FORMAT_VERSION,
            key: key.into(),
            documents: self.documents,
            tokens: self.num_tokens,
            trained_tokens: self.trained_tokens,
            vocab_size: self.vocab_size,
            sections,
            sources,
            counts,
        };
        let path = self.folder.path.join(MANIFEST);
        let failed = |e: std::io::Error| Error::io(&path, "writing the manifest", &e);
        let mut file = File::create_new(&path).map_err(failed)?;
        file.write_all(manifest.to_text()?.as_bytes()).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        sync_folder(&self.folder.path)?;
        publish(&self.folder.path, &self.place, key)
    }
}

/// A folder that is removed when it is dropped; after it was moved away there is nothing to remove.
struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Makes `NAME.tmp-PID-N` beside the place.
    fn beside(place: &Path) -> Result<Temporary> {
        let name = place
            .file_name()
            .ok_or_else(|| Error::new(Kind::Argument, place.display().to_string(), "is no folder name"))?;
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(|e| Error::io(parent, "creating the folder of prepared sets", &e))?;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}.tmp-{}-{serial}", name.to_string_lossy(), std::process::id()));
        if path.exists() {
            // Left by a process of the same number that was killed.
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, "removing an old temporary folder", &e))?;
        }
        fs::create_dir(&path).map_err(|e| Error::io(&path, "creating a temporary folder", &e))?;
        Ok(Temporary { path })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The folder that holds a path; the current one for a bare name.
fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn sync_folder(folder: &Path) -> Result<()> {
    let opened = File::open(folder).and_then(|file| file.sync_all());
    opened.map_err(|e| Error::io(folder, "writing the prepared set", &e))
}

/// Moves a complete set to its place. A complete set of the same key that is there already stays: it holds the same.
fn publish(folder: &Path, place: &Path, key: &str) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(place, "moving the prepared set to its place", &e);
    if place.exists() {
        if Manifest::read(place).is_ok_and(|(manifest, _)| manifest.key == key) && super::Store::open(place).is_ok() {
            return fs::remove_dir_all(folder).map_err(failed);
        }
        let old = folder.with_extension("old");
        fs::rename(place, &old).map_err(failed)?;
        fs::rename(folder, place).map_err(failed)?;
        let _ = fs::remove_dir_all(old);
    } else {
        fs::rename(folder, place).map_err(failed)?;
    }
    sync_folder(parent_of(place))
}
