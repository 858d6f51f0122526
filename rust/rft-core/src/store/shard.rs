//! One shard, memory-mapped.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::layout::{Entry, Footer, HEADER_BYTES, Header};
use crate::error::{Error, Kind, Result};

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

/// A line of the section `meta`: documents that follow one another in the shard and come from one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Origin {
    /// Number of documents.
    pub documents: u64,
    /// Index into the manifest's sources.
    pub source: u32,
    /// Added to each of the documents' lines.
    pub line_base: u64,
}

/// How trained bits are stored.
enum Mask {
    Bits(Range<usize>),
    Spans(Range<usize>),
}

/// One file of a set. Positions count from the shard's first token and document.
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    header: Header,
    footer: Footer,
    tokens: Range<usize>,
    mask: Mask,
    offsets: Range<usize>,
    lines: Range<usize>,
    weights: Option<Range<usize>>,
    /// First document and origin of each line of `meta`.
    origins: Vec<(u64, Origin)>,
}

pub(super) fn damaged(path: &Path, problem: &str) -> Error {
    Error::new(Kind::Store, path.display().to_string(), format!("the prepared set is damaged: {problem}"))
        .remedy("delete this prepared set; it is made again from the data")
}

impl Shard {
    /// Maps a shard and checks header, footer, and that its sections fit each other; not the sections' content.
    pub fn open(path: &Path) -> Result<Shard> {
        let file = File::open(path).map_err(|e| Error::io(path, "opening a file of the prepared set", &e))?;
        let length = file.metadata().map_err(|e| Error::io(path, "reading", &e))?.len();
        if length < HEADER_BYTES as u64 {
            return Err(damaged(path, &format!("{length} bytes long, its header alone takes {HEADER_BYTES}")));
        }
        // SAFETY: a set is never changed in place: it is written elsewhere, renamed, and removed as a whole; a removed
        // file stays readable while it is mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "mapping", &e))?;
        Shard::of_map(path, map).map_err(|problem| damaged(path, &problem))
    }

    fn of_map(path: &Path, map: Mmap) -> std::result::Result<Shard, String> {
        let header = Header::parse(&map)?;
        let footer = Footer::parse(&map, &header)?;
        let (tokens, documents) = (header.tokens, header.documents);
        let entry = |name: &str| footer.sections.iter().find(|entry| entry.name == name);
        let section = |name: &str, encoding: &str, count: u64, width: u64| {
            let entry = entry(name).ok_or_else(|| format!("it has no section {name}"))?;
            let fits =
                entry.encoding == encoding && entry.count == count && Some(entry.bytes) == count.checked_mul(width);
            if fits { Ok(range(entry)) } else { Err(format!("its section {name} does not fit its header")) }
        };
        let encoding = match header.token_bytes {
            2 => "u16",
            4 => "u32",
            _ => return Err("its ids have neither 2 nor 4 bytes".into()),
        };
        let mask_entry = entry("mask").ok_or("it has no section mask")?;
        let mask = match mask_entry.encoding.as_str() {
            "bits" if mask_entry.count == tokens && mask_entry.bytes == tokens.div_ceil(8) => {
                Mask::Bits(range(mask_entry))
            }
            "spans" => Mask::Spans(section("mask", "spans", mask_entry.count, 8)?),
            _ => return Err("its section mask does not fit its header".into()),
        };
        let meta = entry("meta").filter(|entry| entry.encoding == "json").ok_or("it has no section meta")?;
        let mut shard = Shard {
            path: path.to_path_buf(),
            tokens: section("tokens", encoding, tokens, u64::from(header.token_bytes))?,
            mask,
            offsets: section("doc_offsets", "u64", documents.checked_add(1).ok_or("too many documents")?, 8)?,
            lines: section("lines", "u32", documents, 4)?,
            weights: entry("weights").map(|_| section("weights", "f32", tokens, 4)).transpose()?,
            origins: Vec::new(),
            header: header.clone(),
            footer: footer.clone(),
            map,
        };
        shard.origins = shard.read_origins(range(meta))?;
        shard.check_order()?;
        Ok(shard)
    }

    fn read_origins(&self, meta: Range<usize>) -> std::result::Result<Vec<(u64, Origin)>, String> {
        let mut origins = Vec::new();
        let mut first = 0u64;
        for line in self.map[meta].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let origin: Origin = serde_json::from_slice(line).map_err(|e| format!("its section meta: {e}"))?;
            origins.push((first, origin));
            first = first.checked_add(origin.documents).ok_or("its section meta counts too many documents")?;
        }
        if first == self.header.documents {
            Ok(origins)
        } else {
            Err("its section meta does not fit its header".into())
        }
    }

    /// Offsets rise from 0 to the number of tokens; so do spans, within them.
    fn check_order(&self) -> std::result::Result<(), String> {
        let offsets = self.map[self.offsets.clone()].as_chunks::<8>().0;
        let (mut last, end) = (0, self.header.tokens);
        let mut rising = offsets.first() == Some(&[0; 8]);
        for offset in offsets {
            let offset = u64::from_le_bytes(*offset);
            rising &= offset >= last && offset - last < u64::from(u32::MAX);
            last = offset;
        }
        if !rising || last != end {
            return Err("its documents do not lie one after another".into());
        }
        let mut at = None;
        for [start, stop] in self.spans().iter().map(|span| bounds(*span)) {
            if start >= stop || at.is_some_and(|at| start <= at) || stop as u64 > end {
                return Err("the spans of its mask do not lie one after another".into());
            }
            at = Some(stop);
        }
        Ok(())
    }

    /// What the header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Sections and hashes of blocks.
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// xxh3-64 of the whole file.
    pub fn hash(&self) -> u64 {
        xxh3_64(&self.map)
    }

    /// Number of documents.
    pub fn num_documents(&self) -> usize {
        self.header.documents as usize
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.header.tokens as usize
    }

    /// Whether tokens have weights of their own.
    pub fn has_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Where a document lies among the tokens.
    pub fn range(&self, document: usize) -> Range<usize> {
        let offsets = self.map[self.offsets.clone()].as_chunks::<8>().0;
        u64::from_le_bytes(offsets[document]) as usize..u64::from_le_bytes(offsets[document + 1]) as usize
    }

    /// Ids of a range of tokens.
    pub fn ids(&self, range: Range<usize>) -> Ids<'_> {
        let bytes = &self.map[self.tokens.clone()];
        if self.header.token_bytes == 2 {
            Ids::Narrow(&bytes.as_chunks::<2>().0[range])
        } else {
            Ids::Wide(&bytes.as_chunks::<4>().0[range])
        }
    }

    /// Weights of a range of tokens; none where all are 1.
    pub fn weights(&self, range: Range<usize>) -> Option<&[[u8; 4]]> {
        self.weights.as_ref().map(|weights| &self.map[weights.clone()].as_chunks::<4>().0[range])
    }

    /// Index into the manifest's sources, and line (from 1).
    pub fn origin(&self, document: usize) -> (u32, u64) {
        let line = u32::from_le_bytes(self.map[self.lines.clone()].as_chunks::<4>().0[document]);
        let after = self.origins.partition_point(|(first, _)| *first <= document as u64);
        let origin = self.origins[after - 1].1;
        (origin.source, origin.line_base + u64::from(line))
    }

    /// The spans of the mask; empty where it is bits.
    fn spans(&self) -> &[[u8; 8]] {
        match &self.mask {
            Mask::Spans(range) => self.map[range.clone()].as_chunks::<8>().0,
            Mask::Bits(_) => &[],
        }
    }

    fn bits(&self) -> Option<&[u8]> {
        match &self.mask {
            Mask::Bits(range) => Some(&self.map[range.clone()]),
            Mask::Spans(_) => None,
        }
    }

    /// The maximal runs of trained tokens inside a range, counted from the range's start.
    pub fn trained_runs(&self, range: Range<usize>) -> TrainedRuns<'_> {
        let spans = self.spans();
        let from = match &self.mask {
            Mask::Spans(_) => spans.partition_point(|span| bounds(*span)[1] <= range.start),
            Mask::Bits(_) => 0,
        };
        TrainedRuns { bits: self.bits(), spans: &spans[from..], start: range.start, at: range.start, end: range.end }
    }

    /// The trained bits of the 64 tokens from `token` on, lowest first; zeros behind the shard's end.
    pub fn trained_bits(&self, token: usize) -> u64 {
        if let Some(mask) = self.bits() {
            let mut bytes = [0; 9];
            let from = &mask[token / 8..mask.len().min(token / 8 + 9)];
            bytes[..from.len()].copy_from_slice(from);
            let [low @ .., high] = bytes;
            let shift = token % 8;
            let high = if shift == 0 { 0 } else { u64::from(high) << (64 - shift) };
            return u64::from_le_bytes(low) >> shift | high;
        }
        let runs = self.trained_runs(token..token + 64);
        runs.fold(0, |bits, run| bits | (u64::MAX >> (64 - run.len())) << run.start)
    }

    /// Number of trained bits in a range of tokens.
    pub fn count_trained(&self, range: Range<usize>) -> u32 {
        let Some(mask) = self.bits() else {
            return self.trained_runs(range).map(|run| run.len() as u32).sum();
        };
        let Range { start, end } = range;
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
}

fn range(entry: &Entry) -> Range<usize> {
    entry.start as usize..(entry.start + entry.bytes) as usize
}

fn bounds(span: [u8; 8]) -> [usize; 2] {
    let [a, b, c, d, e, f, g, h] = span;
    [u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]) as usize]
}

/// See [`Shard::trained_runs`].
pub struct TrainedRuns<'a> {
    bits: Option<&'a [u8]>,
    spans: &'a [[u8; 8]],
    start: usize,
    at: usize,
    end: usize,
}

impl TrainedRuns<'_> {
    /// Over no tokens.
    pub(super) fn none() -> TrainedRuns<'static> {
        TrainedRuns { bits: None, spans: &[], start: 0, at: 0, end: 0 }
    }
}

impl Iterator for TrainedRuns<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let (start, end) = match self.bits {
            Some(mask) => {
                let start = next_bit(mask, self.at, self.end, true);
                (start, next_bit(mask, start, self.end, false))
            }
            None => {
                let (first, rest) = self.spans.split_first()?;
                self.spans = rest;
                let [start, end] = bounds(*first);
                (start.max(self.start), end.min(self.end))
            }
        };
        if start >= end {
            self.spans = &[];
            return None;
        }
        self.at = end;
        Some(start - self.start..end - self.start)
    }
}

/// The first bit in `at..end` that is `wanted`; `end` if none is.
fn next_bit(mask: &[u8], mut at: usize, end: usize, wanted: bool) -> usize {
    let flip = if wanted { 0 } else { u64::MAX };
    while at < end {
        let word = match mask.get(at / 8..at / 8 + 8).and_then(|bytes| bytes.first_chunk::<8>()) {
            Some(word) => *word,
            None => {
                let mut word = [0; 8];
                word[..mask.len() - at / 8].copy_from_slice(&mask[at / 8..]);
                word
            }
        };
        let rest = (u64::from_le_bytes(word) ^ flip) >> (at % 8);
        if rest != 0 {
            return (at + rest.trailing_zeros() as usize).min(end);
        }
        at += 64 - at % 8;
    }
    end
}
