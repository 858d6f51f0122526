//! Writes a set, shard by shard, into `NAME.part` beside its place, and moves it there in one step.
//!
//! A thread of its own writes a shard while it fills: tokens come first in the file and are written as they come, so that
//! little is left to do when the last row is there. Behind each complete shard goes a note with the caller's state at that
//! point: a run that was killed goes on from the last one.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::layout::{ALIGNMENT, BLOCK_BYTES, Entry, Footer, HEADER_BYTES, Header, aligned};
use super::lock::Lock;
use super::manifest::{check_seal, sealed};
use super::shard::{Origin, Shard};
use super::{MANIFEST, Manifest, ShardRecord, SourceRecord, Store};
use crate::error::{Error, Kind, Result};
use crate::spec::FORMAT_VERSION;

/// What the name of an unfinished set ends with.
pub const PART: &str = ".part";

/// One document to write.
pub struct Document<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// First token and end of each run of trained tokens, ascending.
    pub trained: &'a [[u32; 2]],
    /// A loss factor for each; none = 1 each.
    pub weights: Option<&'a [f32]>,
    /// Index of the source.
    pub source: u32,
    /// Line in it, from 1.
    pub line: u64,
}

/// What all shards of a set have in common.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Content key, 32 hex digits.
    pub key: String,
    /// Ids are below this.
    pub vocab_size: u32,
    /// xxh3-64 of tokenizer.json.
    pub tokenizer: u64,
    /// xxh3-64 of the chat template; 0 without one.
    pub template: u64,
    /// Version of the tokenizer's Unicode tables.
    pub unicode: String,
    /// A shard is closed once its tokens and weights take this much.
    pub shard_bytes: u64,
}

impl Layout {
    pub(super) fn token_bytes(&self) -> u32 {
        if self.vocab_size <= 1 << 16 { 2 } else { 4 }
    }

    /// Refuses what no shard can hold.
    pub(super) fn check(&self, document: &Document) -> Result<()> {
        let ids = document.ids;
        if let Some(id) = ids.iter().max().filter(|id| **id >= self.vocab_size) {
            let problem =
                format!("the tokenizer gives id {id}, but the model has {} rows of embeddings", self.vocab_size);
            return Err(Error::new(Kind::Tokenizer, "tokenizer.json", problem)
                .remedy("use the model's own tokenizer, or name the new tokens in model.add_tokens"));
        }
        if ids.len() >= u32::MAX as usize / 2 {
            let problem = format!("a document of {} tokens is more than a set can hold", ids.len());
            return Err(Error::new(Kind::Data, "", problem));
        }
        debug_assert!(document.trained.iter().all(|[start, end]| start < end && *end as usize <= ids.len()));
        Ok(())
    }
}

/// What [`Writer::begin`] found.
pub enum Begun {
    /// The set is there and whole.
    Complete(Box<Store>),
    /// It has to be written; with the state at its last complete shard, if an earlier run left one.
    Write(Box<Writer>, Option<Value>),
}

/// The note behind a complete shard.
#[derive(Serialize, Deserialize)]
pub(super) struct Note {
    pub key: String,
    pub shard: ShardRecord,
    pub state: Value,
}

/// A set on its way to disk. Dropped before [`Writer::finish`], it leaves its complete shards for the next run.
pub struct Writer {
    place: PathBuf,
    folder: PathBuf,
    layout: Layout,
    shard: Box<Buffer>,
    records: Vec<ShardRecord>,
    /// Shards handed to the thread or written.
    num_shards: u32,
    work: Option<Sender<Work>>,
    done: Receiver<Result<(Box<Buffer>, ShardRecord)>>,
    thread: Option<JoinHandle<()>>,
    totals: [u64; 3],
    _lock: Lock,
}

/// What the thread that writes is handed.
enum Work {
    /// The next tokens of the shard that fills.
    Tokens(Vec<u8>),
    /// The rest of it, its number, and what its note says.
    Close(Box<Buffer>, u32, Option<Value>),
}

/// Bytes of tokens that are written at a time.
const CHUNK: usize = 4 << 20;

/// A shard in memory.
#[derive(Default)]
pub(super) struct Buffer {
    /// Tokens that are not handed on yet, and bytes of those that are.
    tokens: Vec<u8>,
    handed: u64,
    /// Memory of tokens that were written, for those to come.
    spare: Vec<Vec<u8>>,
    spans: Vec<[u32; 2]>,
    offsets: Vec<u64>,
    lines: Vec<u32>,
    weights: Vec<u8>,
    origins: Vec<Origin>,
    trained: u64,
}

impl Buffer {
    /// With room for so many bytes of tokens.
    pub(super) fn new(room: u64) -> Buffer {
        let mut buffer = Buffer::default();
        // Asked for at once, so that it is never copied to grow; the system gives pages only as they are written.
        buffer.tokens.reserve(room as usize + room as usize / 16);
        buffer.clear();
        buffer
    }

    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.handed = 0;
        self.spans.clear();
        self.offsets.clear();
        self.offsets.push(0);
        self.lines.clear();
        self.weights.clear();
        self.origins.clear();
        self.trained = 0;
    }

    fn num_tokens(&self) -> u64 {
        self.offsets.last().copied().unwrap_or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Whether its tokens and weights take so many bytes.
    pub(super) fn is_full(&self, shard_bytes: u64) -> bool {
        self.handed + (self.tokens.len() + self.weights.len()) as u64 >= shard_bytes
    }

    /// The tokens that are not handed on yet.
    fn hand_on(&mut self) -> Vec<u8> {
        self.handed += self.tokens.len() as u64;
        let mut empty = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(CHUNK + CHUNK / 4));
        empty.clear();
        std::mem::replace(&mut self.tokens, empty)
    }

    /// Appends a document; the number of its trained tokens.
    pub(super) fn push(&mut self, document: &Document, wide: bool) -> u64 {
        let trained = self.trained;
        self.append(document, wide);
        self.trained - trained
    }

    fn append(&mut self, document: &Document, wide: bool) {
        let Document { ids, trained, weights, source, line } = document;
        let base = self.num_tokens();
        // Resized first: a plain loop over chunks becomes a copy, extending by an iterator of bytes does not.
        let at = self.tokens.len();
        if wide {
            self.tokens.resize(at + ids.len() * 4, 0);
            for (to, id) in self.tokens[at..].as_chunks_mut::<4>().0.iter_mut().zip(*ids) {
                *to = id.to_le_bytes();
            }
        } else {
            self.tokens.resize(at + ids.len() * 2, 0);
            for (to, id) in self.tokens[at..].as_chunks_mut::<2>().0.iter_mut().zip(*ids) {
                *to = (*id as u16).to_le_bytes();
            }
        }
        for [start, end] in *trained {
            let (start, end) = (start + base as u32, end + base as u32);
            self.trained += u64::from(end - start);
            match self.spans.last_mut() {
                Some(last) if last[1] == start => last[1] = end,
                _ => self.spans.push([start, end]),
            }
        }
        // The section begins with the first document that has weights; those before it weigh 1.
        if !self.weights.is_empty() || weights.is_some() {
            let ones = 1f32.to_le_bytes();
            self.weights.extend(std::iter::repeat_n(ones, base as usize - self.weights.len() / 4).flatten());
            match weights {
                Some(weights) => self.weights.extend(weights.iter().flat_map(|weight| weight.to_le_bytes())),
                None => self.weights.extend(std::iter::repeat_n(ones, ids.len()).flatten()),
            }
        }
        self.offsets.push(base + ids.len() as u64);
        match self.origins.last_mut() {
            Some(last) if last.source == *source && line - last.line_base <= u64::from(u32::MAX) => last.documents += 1,
            _ => {
                let line_base = if *line <= u64::from(u32::MAX) { 0 } else { *line };
                self.origins.push(Origin { documents: 1, source: *source, line_base });
            }
        }
        let line_base = self.origins.last().map_or(0, |origin| origin.line_base);
        self.lines.push((line - line_base) as u32);
    }

    /// The trained bits: as spans where these are shorter.
    fn mask(&self) -> (&'static str, u64, Vec<u8>) {
        let tokens = self.num_tokens();
        let bytes = tokens.div_ceil(8) as usize;
        if self.spans.len() * 8 < bytes {
            let spans = self.spans.iter().flatten().flat_map(|bound| bound.to_le_bytes()).collect();
            return ("spans", self.spans.len() as u64, spans);
        }
        let mut bits = vec![0u8; bytes];
        for [start, end] in &self.spans {
            let (start, end) = (*start as usize, *end as usize);
            for bit in start..end.min(start.next_multiple_of(8)) {
                bits[bit / 8] |= 1 << (bit % 8);
            }
            if end > start.next_multiple_of(8) {
                bits[start.div_ceil(8)..end / 8].fill(0xff);
                for bit in end / 8 * 8..end {
                    bits[bit / 8] |= 1 << (bit % 8);
                }
            }
        }
        ("bits", tokens, bits)
    }

    fn meta(&self) -> Result<Vec<u8>> {
        let mut meta = Vec::new();
        for origin in &self.origins {
            serde_json::to_writer(&mut meta, origin).map_err(|e| Error::new(Kind::Store, "meta", e))?;
            meta.push(b'\n');
        }
        Ok(meta)
    }
}

impl Writer {
    /// Takes the place: waits for whoever writes there, and finds what is there already.
    ///
    /// `waiting` is called every now and then while another process writes; its error ends the wait.
    pub fn begin(place: &Path, layout: Layout, waiting: &mut dyn FnMut() -> Result<()>) -> Result<Begun> {
        let parent = parent_of(place);
        fs::create_dir_all(parent).map_err(|e| Error::io(parent, "creating the folder of prepared sets", &e))?;
        let lock = loop {
            match Lock::try_take(place)? {
                Some(lock) => break lock,
                None => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
            waiting()?;
        };
        if let Ok(store) = Store::open(place)
            && store.manifest().key == layout.key
        {
            return Ok(Begun::Complete(Box::new(store)));
        }
        let folder = part_of(place)?;
        if Store::open(&folder).is_ok_and(|store| store.manifest().key == layout.key) {
            // The last run was stopped between its manifest and the move.
            publish(&folder, place)?;
            return Ok(Begun::Complete(Box::new(Store::open(place)?)));
        }
        fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "creating a temporary folder", &e))?;
        let (records, state) = find_complete(&folder, &layout.key)?;
        let (work, jobs) = channel();
        let (results, done) = channel();
        let thread = {
            let (folder, layout) = (folder.clone(), layout.clone());
            std::thread::Builder::new()
                .name("rft-write".into())
                .spawn(move || {
                    // Whoever hands on tokens or waits for a shard hears it.
                    if let Err(error) = write_shards(&folder, &layout, &jobs, &results) {
                        let _ = results.send(Err(error));
                    }
                })
                .map_err(|e| Error::io(place, "starting a thread", &e))?
        };
        let totals = records.iter().fold([0; 3], add);
        let shard = Buffer::new(CHUNK as u64);
        let writer = Writer {
            place: place.to_path_buf(),
            folder,
            layout,
            shard: Box::new(shard),
            num_shards: records.len() as u32,
            records,
            work: Some(work),
            done,
            thread: Some(thread),
            totals,
            _lock: lock,
        };
        Ok(Begun::Write(Box::new(writer), state))
    }

    /// Appends a document.
    ///
    /// # Errors
    /// An id that the vocabulary does not have, a document or a number of documents that cannot be told (no place).
    pub fn push(&mut self, document: &Document) -> Result<()> {
        self.layout.check(document)?;
        if self.totals[0] >= u64::from(u32::MAX) - 1 {
            return Err(Error::new(Kind::Data, "", "more documents than a set can number")
                .remedy("prepare the data in several sets"));
        }
        let trained = self.shard.push(document, self.layout.token_bytes() == 4);
        self.totals[0] += 1;
        self.totals[1] += document.ids.len() as u64;
        self.totals[2] += trained;
        if self.shard.tokens.len() >= CHUNK {
            let tokens = self.shard.hand_on();
            return self.send(Work::Tokens(tokens));
        }
        Ok(())
    }

    /// Whether it is time for [`Writer::cut`].
    pub fn is_full(&self) -> bool {
        self.shard.is_full(self.layout.shard_bytes)
    }

    /// Closes the shard. `state`: what the caller needs to go on from here.
    pub fn cut(&mut self, state: Value) -> Result<()> {
        self.hand_over(Some(state))
    }

    fn hand_over(&mut self, state: Option<Value>) -> Result<()> {
        // One shard is completed while the next one fills: what the thread has is taken back first.
        let empty = if self.num_shards as usize > self.records.len() {
            self.take_back()?
        } else {
            Box::new(Buffer::new(CHUNK as u64))
        };
        let full = std::mem::replace(&mut self.shard, empty);
        self.shard.clear();
        self.send(Work::Close(full, self.num_shards, state))?;
        self.num_shards += 1;
        Ok(())
    }

    /// Hands work to the thread; its error where it ended.
    fn send(&mut self, work: Work) -> Result<()> {
        if self.work.as_ref().is_some_and(|thread| thread.send(work).is_ok()) {
            return Ok(());
        }
        loop {
            self.take_back()?;
        }
    }

    fn take_back(&mut self) -> Result<Box<Buffer>> {
        let (buffer, record) = self.done.recv().map_err(|_| self.lost())??;
        self.records.push(record);
        Ok(buffer)
    }

    fn lost(&self) -> Error {
        Error::new(Kind::Store, self.place.display().to_string(), "the thread that writes ended early")
    }

    /// Tokens so far.
    pub fn num_tokens(&self) -> u64 {
        self.totals[1]
    }

    /// Documents so far.
    pub fn num_documents(&self) -> u64 {
        self.totals[0]
    }

    /// Tokens with a trained bit so far.
    pub fn trained_tokens(&self) -> u64 {
        self.totals[2]
    }

    /// Complete shards, as far as they are known.
    pub fn complete_shards(&self) -> usize {
        self.records.len()
    }

    /// The shards that an earlier run left.
    pub fn shards(&self) -> impl Iterator<Item = Result<Shard>> + '_ {
        self.records.iter().map(|record| Shard::open(&self.folder.join(&record.file)))
    }

    /// Makes everything durable, writes the manifest last, and moves the set to its place.
    pub fn finish(mut self, sources: Vec<SourceRecord>, counts: Value, inputs: Value) -> Result<()> {
        if !self.shard.lines.is_empty() {
            self.hand_over(None)?;
        }
        while self.records.len() < self.num_shards as usize {
            self.take_back()?;
        }
        let manifest = Manifest {
            format: "rft-store".into(),
            format_version: FORMAT_VERSION,
            key: self.layout.key.clone(),
            documents: self.totals[0],
            tokens: self.totals[1],
            trained_tokens: self.totals[2],
            vocab_size: self.layout.vocab_size,
            token_bytes: self.layout.token_bytes(),
            shards: self.records.clone(),
            sources,
            counts,
            inputs,
        };
        write_whole(&self.folder, MANIFEST, manifest.to_text()?.as_bytes())?;
        publish(&self.folder, &self.place)
    }

    /// Ends without a set and leaves nothing for the next run.
    pub fn discard(mut self) {
        self.stop();
        let _ = fs::remove_dir_all(&self.folder);
    }

    fn stop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop();
        let is_kept = |name: &str| self.folder.join(name).exists();
        if !is_kept(&note_name(0)) && !is_kept(MANIFEST) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn add(sums: [u64; 3], record: &ShardRecord) -> [u64; 3] {
    [sums[0] + record.documents, sums[1] + record.tokens, sums[2] + record.trained_tokens]
}

pub(super) fn shard_name(index: usize) -> String {
    format!("data-{index:05}.rft")
}

pub(super) fn note_name(index: usize) -> String {
    format!("data-{index:05}.json")
}

/// The shards that an earlier run completed, and its state at the last of them; everything else is removed.
fn find_complete(folder: &Path, key: &str) -> Result<(Vec<ShardRecord>, Option<Value>)> {
    let (mut records, mut state) = (Vec::new(), None);
    while let Some(note) = read_note(folder, records.len(), key) {
        records.push(note.shard);
        state = Some(note.state);
    }
    let keep: Vec<String> = (0..records.len()).flat_map(|index| [shard_name(index), note_name(index)]).collect();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, "reading", &e))? {
        let entry = entry.map_err(|e| Error::io(folder, "reading", &e))?;
        if !keep.iter().any(|name| entry.file_name() == name.as_str()) {
            remove_if_there(&entry.path())?;
        }
    }
    Ok((records, state))
}

/// The note of a shard, if it and the shard are whole.
pub(super) fn read_note(folder: &Path, index: usize, key: &str) -> Option<Note> {
    let text = fs::read_to_string(folder.join(note_name(index))).ok()?;
    check_seal(&text).ok()?;
    let mut value: Value = serde_json::from_str(&text).ok()?;
    value.as_object_mut()?.remove("self_xxh3");
    let note: Note = serde_json::from_value(value).ok()?;
    let shard = Shard::open(&folder.join(shard_name(index))).ok()?;
    let whole = note.key == key
        && note.shard.file == shard_name(index)
        && note.shard.bytes == shard.bytes().len() as u64
        && note.shard.xxh3 == format!("{:016x}", shard.hash());
    whole.then_some(note)
}

/// The thread that writes.
fn write_shards(
    folder: &Path,
    layout: &Layout,
    jobs: &Receiver<Work>,
    results: &Sender<Result<(Box<Buffer>, ShardRecord)>>,
) -> Result<()> {
    let mut open = None;
    while let Ok(work) = jobs.recv() {
        let mut file = match open.take() {
            Some(file) => file,
            None => ShardFile::create(folder)?,
        };
        match work {
            Work::Tokens(tokens) => {
                file.put_tokens(&tokens)?;
                file.written.push(tokens);
                open = Some(file);
            }
            Work::Close(mut buffer, index, state) => {
                let (record, written) = file.close(folder, layout, &buffer, index, state)?;
                buffer.spare.extend(written);
                if results.send(Ok((buffer, record))).is_err() {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Writes a shard that is in memory as a whole.
pub(super) fn write_shard(
    folder: &Path,
    layout: &Layout,
    buffer: &Buffer,
    index: u32,
    state: Option<Value>,
) -> Result<ShardRecord> {
    Ok(ShardFile::create(folder)?.close(folder, layout, buffer, index, state)?.0)
}

/// A shard's file while it is written, under another name; where that ends early it goes.
struct ShardFile {
    path: PathBuf,
    file: File,
    bytes: usize,
    /// Hash of the tokens; of the block so far; what that still lacks; hashes of the blocks before it.
    tokens: Xxh3,
    block: Xxh3,
    lacks: usize,
    blocks: Vec<u64>,
    /// The tokens that were put, which are hashed once more when the header is known.
    written: Vec<Vec<u8>>,
}

impl ShardFile {
    /// A file with room for the header, which comes last: it tells lengths.
    fn create(folder: &Path) -> Result<ShardFile> {
        let path = folder.join("data.tmp");
        let failed = |e: std::io::Error| Error::io(&path, "writing the prepared set", &e);
        let mut file = File::create(&path).map_err(failed)?;
        let there = file.seek(SeekFrom::Start(HEADER_BYTES as u64));
        let (tokens, block) = (Xxh3::new(), Xxh3::new());
        let (blocks, written) = (Vec::new(), Vec::new());
        there.map_err(failed)?;
        Ok(ShardFile { path, file, bytes: HEADER_BYTES, tokens, block, lacks: BLOCK_BYTES, blocks, written })
    }

    /// Writes tokens, and lets the disk begin with them.
    fn put_tokens(&mut self, bytes: &[u8]) -> Result<()> {
        let from = self.bytes;
        // Pieces that fit the cache, so that three passes (two hashes, one copy) read memory once.
        for piece in bytes.chunks(1 << 17) {
            self.tokens.update(piece);
            self.put(piece)?;
        }
        #[cfg(target_os = "linux")]
        {
            use std::os::fd::AsRawFd;
            let (fd, from, count) = (self.file.as_raw_fd(), from as i64, bytes.len() as i64);
            // SAFETY: the descriptor is open as long as the file; nothing of this process's memory is named. A kernel or file
            // system that refuses is no error: all is flushed at the end.
            unsafe { libc::sync_file_range(fd, from, count, libc::SYNC_FILE_RANGE_WRITE) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = from;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(1 << 17) {
            self.file.write_all(piece).map_err(|e| Error::io(&self.path, "writing the prepared set", &e))?;
            self.bytes += piece.len();
            let mut rest = piece;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(self.lacks));
                self.block.update(now);
                self.lacks -= now.len();
                rest = later;
                if self.lacks == 0 {
                    self.blocks.push(self.block.digest());
                    self.block.reset();
                    self.lacks = BLOCK_BYTES;
                }
            }
        }
        Ok(())
    }

    /// Writes the rest of a shard and makes it durable under its name, and then its note; with the memory of its tokens.
    fn close(
        mut self,
        folder: &Path,
        layout: &Layout,
        buffer: &Buffer,
        index: u32,
        state: Option<Value>,
    ) -> Result<(ShardRecord, Vec<Vec<u8>>)> {
        let name = shard_name(index as usize);
        let (encoding, count, mask) = buffer.mask();
        let offsets: Vec<u8> = buffer.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        let lines: Vec<u8> = buffer.lines.iter().flat_map(|line| line.to_le_bytes()).collect();
        let meta = buffer.meta()?;
        let (tokens, documents) = (buffer.num_tokens(), buffer.lines.len() as u64);
        let ids = if layout.token_bytes() == 2 { "u16" } else { "u32" };
        let mut sections = vec![
            ("mask", encoding, count, mask.as_slice()),
            ("doc_offsets", "u64", documents + 1, &offsets),
            ("lines", "u32", documents, &lines),
        ];
        if !buffer.weights.is_empty() {
            sections.push(("weights", "f32", tokens, &buffer.weights));
        }
        sections.push(("meta", "json", buffer.origins.len() as u64, &meta));

        let entry = |name: &str, encoding: &str, start: usize, end: usize, count: u64, xxh3: u64| Entry {
            name: name.into(),
            encoding: encoding.into(),
            start: start as u64,
            bytes: (end - start) as u64,
            count,
            xxh3,
        };
        const ZEROS: [u8; ALIGNMENT] = [0; ALIGNMENT];
        self.put_tokens(&buffer.tokens)?;
        let mut entries = vec![entry("tokens", ids, HEADER_BYTES, self.bytes, tokens, self.tokens.digest())];
        let mut parts: Vec<&[u8]> = vec![&buffer.tokens];
        for (name, encoding, count, bytes) in &sections {
            let padding = &ZEROS[..aligned(self.bytes) - self.bytes];
            self.put(padding)?;
            let start = self.bytes;
            self.put(bytes)?;
            entries.push(entry(name, encoding, start, self.bytes, *count, xxh3_64(bytes)));
            parts.extend([padding, bytes]);
        }
        let padding = &ZEROS[..aligned(self.bytes) - self.bytes];
        self.put(padding)?;
        let footer_start = self.bytes as u64;
        if self.lacks < BLOCK_BYTES {
            self.blocks.push(self.block.digest());
        }
        let footer_bytes = Footer::length(entries.len(), self.blocks.len()) as u64;
        let footer = Footer { sections: entries, blocks: std::mem::take(&mut self.blocks) }.to_bytes();
        self.put(&footer)?;
        parts.extend([padding, footer.as_slice()]);
        let key = u128::from_str_radix(&layout.key, 16).map_err(|_| {
            Error::new(Kind::Argument, "key", format!("{:?} is no number of 32 hex digits", layout.key))
        })?;
        let header = Header {
            token_bytes: layout.token_bytes(),
            index,
            vocab_size: layout.vocab_size,
            documents,
            tokens,
            trained_tokens: buffer.trained,
            footer_start,
            footer_bytes,
            key,
            tokenizer: layout.tokenizer,
            template: layout.template,
            unicode: layout.unicode.clone(),
        };
        let header = header.to_bytes();
        let failed = |e: std::io::Error| Error::io(&self.path, "writing the prepared set", &e);
        self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.write_all(&header)).map_err(failed)?;
        // The hash of the whole begins with the header; it is taken while the disk takes the file.
        let (synced, hash) = std::thread::scope(|scope| {
            let sync = scope.spawn(|| self.file.sync_all());
            let mut whole = Xxh3::new();
            whole.update(&header);
            self.written.iter().map(Vec::as_slice).chain(parts).for_each(|part| whole.update(part));
            (sync.join().unwrap_or_else(|panic| resume_unwind(panic)), whole.digest())
        });
        synced.map_err(failed)?;
        fs::rename(&self.path, folder.join(&name)).map_err(failed)?;
        sync_folder(folder)?;
        let shard = ShardRecord {
            file: name,
            bytes: self.bytes as u64,
            xxh3: format!("{hash:016x}"),
            documents,
            tokens,
            trained_tokens: buffer.trained,
            weights: !buffer.weights.is_empty(),
        };
        if let Some(state) = state {
            let note = Note { key: layout.key.clone(), shard: shard.clone(), state };
            let text = serde_json::to_string_pretty(&note).map_err(|e| Error::new(Kind::Store, "note", e))?;
            write_whole(folder, &note_name(index as usize), sealed(&text).as_bytes())?;
        }
        Ok((shard, std::mem::take(&mut self.written)))
    }
}

impl Drop for ShardFile {
    fn drop(&mut self) {
        // Where it has its own name nothing is there. The space of one that failed goes to whoever has to free some.
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes a file under another name, flushes it, gives it its name, and flushes the folder.
pub(super) fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = folder.join(format!("{name}.tmp"));
    let failed = |e: std::io::Error| Error::io(&path, "writing the prepared set", &e);
    let mut file = File::create(&path).map_err(failed)?;
    if let Err(error) = file.write_all(bytes).and_then(|()| file.sync_all()) {
        let _ = fs::remove_file(&path);
        return Err(failed(error));
    }
    fs::rename(&path, folder.join(name)).map_err(failed)?;
    sync_folder(folder)
}

pub(super) fn remove_if_there(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, "removing an old file", &e)),
        _ => Ok(()),
    }
}

/// `NAME.part` beside a place.
fn part_of(place: &Path) -> Result<PathBuf> {
    let name = place
        .file_name()
        .ok_or_else(|| Error::new(Kind::Argument, place.display().to_string(), "is no folder name"))?;
    let mut name = name.to_os_string();
    name.push(PART);
    Ok(place.with_file_name(name))
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

/// Moves a complete set to its place, without the notes; what is there is damaged or another set, and goes.
fn publish(folder: &Path, place: &Path) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(place, "moving the prepared set to its place", &e);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name != MANIFEST && !name.to_string_lossy().ends_with(".rft") {
            remove_if_there(&entry.path())?;
        }
    }
    remove_if_there(place)?;
    fs::rename(folder, place).map_err(failed)?;
    sync_folder(parent_of(place))
}
