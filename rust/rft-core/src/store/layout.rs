//! The bytes of a shard's header and footer.

use xxhash_rust::xxh3::xxh3_64;

use crate::spec::FORMAT_VERSION;

/// Length of the header.
pub const HEADER_BYTES: usize = 4096;
/// Length of the blocks that have a hash each; the first begins behind the header, the last ends at the footer.
pub const BLOCK_BYTES: usize = 4 << 20;
/// Sections and the footer begin at multiples of this.
pub(super) const ALIGNMENT: usize = 64;

const HEADER_MAGIC: &[u8; 8] = b"RFTSHARD";
const FOOTER_MAGIC: &[u8; 8] = b"RFTFOOT\0";
const ENTRY_BYTES: usize = 64;
const FOOTER_FIXED: usize = 16;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of a token id: 2 or 4.
    pub token_bytes: u32,
    /// Number of the shard, from 0.
    pub index: u32,
    /// Ids are below this.
    pub vocab_size: u32,
    /// Documents in the shard.
    pub documents: u64,
    /// Tokens in the shard.
    pub tokens: u64,
    /// Tokens with a trained bit.
    pub trained_tokens: u64,
    /// Where the footer begins.
    pub footer_start: u64,
    /// Length of the footer.
    pub footer_bytes: u64,
    /// Content key of the set.
    pub key: u128,
    /// xxh3-64 of tokenizer.json.
    pub tokenizer: u64,
    /// xxh3-64 of the chat template; 0 without one.
    pub template: u64,
    /// Version of the Unicode tables, as text.
    pub unicode: String,
}

/// A section, as the footer lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it holds.
    pub name: String,
    /// How: u16, u32, u64, f32, bits, spans or json.
    pub encoding: String,
    /// Where it begins in the file.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
    /// Number of elements.
    pub count: u64,
    /// xxh3-64 of its bytes.
    pub xxh3: u64,
}

/// What the footer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The sections, in the order of the file.
    pub sections: Vec<Entry>,
    /// xxh3-64 of each block.
    pub blocks: Vec<u64>,
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn text_at(bytes: &[u8], at: usize, length: usize) -> Result<String, String> {
    let field = &bytes[at..at + length];
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(length);
    let name = std::str::from_utf8(&field[..end]).map_err(|_| "a name in it is no text".to_string())?;
    if field[end..].iter().any(|byte| *byte != 0) {
        return Err("a name in it is not padded with zeros".into());
    }
    Ok(name.to_string())
}

/// The next multiple of the alignment.
pub(super) fn aligned(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

impl Header {
    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, HEADER_MAGIC);
        for (at, value) in [(8, FORMAT_VERSION), (12, self.token_bytes), (16, self.index), (20, self.vocab_size)] {
            put(&mut bytes, at, &value.to_le_bytes());
        }
        for (at, value) in [
            (24, self.documents),
            (32, self.tokens),
            (40, self.trained_tokens),
            (48, self.footer_start),
            (56, self.footer_bytes),
            (80, self.tokenizer),
            (88, self.template),
        ] {
            put(&mut bytes, at, &value.to_le_bytes());
        }
        put(&mut bytes, 64, &self.key.to_be_bytes());
        let unicode = self.unicode.as_bytes();
        put(&mut bytes, 96, &unicode[..unicode.len().min(16)]);
        let hash = xxh3_64(&bytes[..HEADER_BYTES - 8]);
        put(&mut bytes, HEADER_BYTES - 8, &hash.to_le_bytes());
        bytes
    }

    /// Reads a header. The error is the end of a sentence about the file.
    pub fn parse(file: &[u8]) -> Result<Header, String> {
        let Some(bytes) = file.get(..HEADER_BYTES) else {
            return Err(format!("{} bytes long, its header alone takes {HEADER_BYTES}", file.len()));
        };
        if bytes[..8] != *HEADER_MAGIC {
            return Err("it does not begin as a shard does".into());
        }
        if xxh3_64(&bytes[..HEADER_BYTES - 8]) != u64_at(bytes, HEADER_BYTES - 8) {
            return Err("its header is not what was written".into());
        }
        let version = u32_at(bytes, 8);
        if version != FORMAT_VERSION {
            return Err(format!("format version {version}, this build reads version {FORMAT_VERSION}"));
        }
        if bytes[112..HEADER_BYTES - 8].iter().any(|byte| *byte != 0) {
            return Err("the unused part of its header is not zero".into());
        }
        let key = bytes[64..80].iter().fold(0, |key: u128, byte| key << 8 | u128::from(*byte));
        Ok(Header {
            token_bytes: u32_at(bytes, 12),
            index: u32_at(bytes, 16),
            vocab_size: u32_at(bytes, 20),
            documents: u64_at(bytes, 24),
            tokens: u64_at(bytes, 32),
            trained_tokens: u64_at(bytes, 40),
            footer_start: u64_at(bytes, 48),
            footer_bytes: u64_at(bytes, 56),
            key,
            tokenizer: u64_at(bytes, 80),
            template: u64_at(bytes, 88),
            unicode: text_at(bytes, 96, 16)?,
        })
    }
}

impl Footer {
    pub(super) fn length(sections: usize, blocks: usize) -> usize {
        FOOTER_FIXED + sections * ENTRY_BYTES + blocks * 8 + 8
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Footer::length(self.sections.len(), self.blocks.len())];
        put(&mut bytes, 0, FOOTER_MAGIC);
        put(&mut bytes, 8, &(self.sections.len() as u32).to_le_bytes());
        put(&mut bytes, 12, &(self.blocks.len() as u32).to_le_bytes());
        for (index, entry) in self.sections.iter().enumerate() {
            let at = FOOTER_FIXED + index * ENTRY_BYTES;
            put(&mut bytes, at, entry.name.as_bytes());
            put(&mut bytes, at + 16, entry.encoding.as_bytes());
            for (offset, value) in [(24, entry.start), (32, entry.bytes), (40, entry.count), (48, entry.xxh3)] {
                put(&mut bytes, at + offset, &value.to_le_bytes());
            }
        }
        let blocks = FOOTER_FIXED + self.sections.len() * ENTRY_BYTES;
        for (index, hash) in self.blocks.iter().enumerate() {
            put(&mut bytes, blocks + index * 8, &hash.to_le_bytes());
        }
        let end = bytes.len() - 8;
        let hash = xxh3_64(&bytes[..end]);
        put(&mut bytes, end, &hash.to_le_bytes());
        bytes
    }

    /// Reads the footer of a file with this header. The error is the end of a sentence about the file.
    pub fn parse(file: &[u8], header: &Header) -> Result<Footer, String> {
        let wrong = || "its footer is not what was written".to_string();
        let start = usize::try_from(header.footer_start).map_err(|_| wrong())?;
        let stated = header.footer_start.checked_add(header.footer_bytes);
        if stated != Some(file.len() as u64) {
            return Err(format!("{} bytes long, its header says {}", file.len(), stated.unwrap_or(u64::MAX)));
        }
        let bytes = file.get(start..).ok_or_else(wrong)?;
        if bytes.len() < FOOTER_FIXED + 8
            || start < HEADER_BYTES
            || bytes[..8] != *FOOTER_MAGIC
            || xxh3_64(&bytes[..bytes.len() - 8]) != u64_at(bytes, bytes.len() - 8)
        {
            return Err(wrong());
        }
        let (sections, blocks) = (u32_at(bytes, 8) as usize, u32_at(bytes, 12) as usize);
        if bytes.len() != Footer::length(sections, blocks) || blocks != (start - HEADER_BYTES).div_ceil(BLOCK_BYTES) {
            return Err("its footer does not fit the file".into());
        }
        let section = |index: usize| {
            let entry = &bytes[FOOTER_FIXED + index * ENTRY_BYTES..][..ENTRY_BYTES];
            if u64_at(entry, 56) != 0 {
                return Err("the unused part of its section table is not zero".to_string());
            }
            Ok(Entry {
                name: text_at(entry, 0, 16)?,
                encoding: text_at(entry, 16, 8)?,
                start: u64_at(entry, 24),
                bytes: u64_at(entry, 32),
                count: u64_at(entry, 40),
                xxh3: u64_at(entry, 48),
            })
        };
        let sections = (0..sections).map(section).collect::<Result<Vec<_>, _>>()?;
        let end = bytes.len() - 8;
        let blocks = bytes[end - blocks * 8..end].as_chunks::<8>().0.iter().map(|hash| u64::from_le_bytes(*hash));
        let footer = Footer { blocks: blocks.collect(), sections };
        footer.check_places(start)?;
        Ok(footer)
    }

    /// Sections lie one after another, each at the first aligned place behind the one before it.
    fn check_places(&self, footer_start: usize) -> Result<(), String> {
        let mut next = HEADER_BYTES as u64;
        for entry in &self.sections {
            let end = entry.start.checked_add(entry.bytes).filter(|end| *end <= footer_start as u64);
            match end {
                Some(end) if entry.start == next => next = end.next_multiple_of(ALIGNMENT as u64),
                _ => return Err(format!("its section {} does not lie where it should", entry.name)),
            }
        }
        if next == footer_start as u64 { Ok(()) } else { Err("its footer does not lie behind its sections".into()) }
    }
}
