//! Whole files to flat ids, on several threads.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memchr::memchr;

use super::Tokenizer;
use crate::error::{Error, Kind, Result};

/// The ids of many documents, one behind the other.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Documents {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where each document's ids end.
    pub ends: Vec<u64>,
}

/// Ids, in two bytes each where the vocabulary allows.
#[derive(Debug, PartialEq, Eq)]
pub enum Ids {
    /// All ids of the vocabulary are below 65,536.
    U16(Vec<u16>),
    /// They are not.
    U32(Vec<u32>),
}

/// The documents of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct FileIds {
    /// The ids of all, one behind the other.
    pub ids: Ids,
    /// Where each document's ids end.
    pub ends: Vec<u64>,
}

/// Text that one thread takes at a time.
const PART: usize = 1 << 20;

impl Tokenizer {
    /// Ids of the documents in a text, which lie between separator bytes (none behind the last); added tokens are
    /// recognised. Memory beside the ids: about 10 MB a thread and the ids of some MiB of text.
    ///
    /// # Errors
    /// A document that is no UTF-8, by its number from 0.
    pub fn encode_documents(&self, data: &[u8], separator: u8, threads: usize) -> Result<Documents> {
        let mut scratch = self.scratch();
        let mut documents = Documents::default();
        if threads <= 1 {
            documents.ids.reserve(data.len() / 4);
            self.encode_part(data, separator, &mut scratch, &mut documents).map_err(|at| broken(at as u64))?;
            return Ok(documents);
        }
        let parts = parts(data, separator);
        let next = AtomicUsize::new(0);
        let done: Vec<Mutex<Option<std::result::Result<Documents, usize>>>> =
            parts.iter().map(|_| Mutex::new(None)).collect();
        let work = |mut scratch| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(&(start, end)) = parts.get(index) else { return };
                let mut made = Documents::default();
                made.ids.reserve((end - start) / 3);
                let result = self.encode_part(&data[start..end], separator, &mut scratch, &mut made).map(|()| made);
                if let Ok(mut slot) = done[index].lock() {
                    *slot = Some(result);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(parts.len()) {
                scope.spawn(|| work(self.scratch()));
            }
            work(scratch);
        });
        let made: Vec<std::result::Result<Documents, usize>> =
            done.into_iter().filter_map(|slot| slot.into_inner().ok().flatten()).collect();
        documents.ids.reserve(made.iter().flatten().map(|part| part.ids.len()).sum());
        for part in made {
            let part = part.map_err(|at| broken(documents.ends.len() as u64 + at as u64))?;
            let before = documents.ids.len() as u64;
            documents.ids.extend_from_slice(&part.ids);
            documents.ends.extend(part.ends.iter().map(|end| before + end));
        }
        Ok(documents)
    }

    /// [`Tokenizer::encode_documents`] of a file.
    ///
    /// # Errors
    /// The same, and a file that cannot be read.
    pub fn encode_file(&self, path: &Path, separator: u8, threads: usize) -> Result<FileIds> {
        let place = path.display().to_string();
        let data = std::fs::read(path).map_err(|e| Error::new(Kind::Data, &place, e))?;
        let Documents { ids, ends } = self.encode_documents(&data, separator, threads)?;
        let ids = if self.top_id() <= u32::from(u16::MAX) {
            Ids::U16(ids.into_iter().map(|id| id as u16).collect())
        } else {
            Ids::U32(ids)
        };
        Ok(FileIds { ids, ends })
    }

    /// Fails with the number of the document that is no text.
    fn encode_part(
        &self,
        part: &[u8],
        separator: u8,
        scratch: &mut super::Scratch,
        documents: &mut Documents,
    ) -> std::result::Result<(), usize> {
        let mut rest = part;
        loop {
            let end = memchr(separator, rest).unwrap_or(rest.len());
            let number = documents.ends.len();
            let text = std::str::from_utf8(&rest[..end]).map_err(|_| number)?;
            self.encode_ids_into(text, scratch, &mut documents.ids).map_err(|_| number)?;
            documents.ends.push(documents.ids.len() as u64);
            if end == rest.len() {
                return Ok(());
            }
            rest = &rest[end + 1..];
        }
    }
}

/// Stretches of whole documents, each without the separator behind it.
fn parts(data: &[u8], separator: u8) -> Vec<(usize, usize)> {
    let (mut parts, mut start) = (Vec::new(), 0);
    loop {
        let from = (start + PART).min(data.len());
        match memchr(separator, &data[from..]) {
            Some(found) => {
                parts.push((start, from + found));
                start = from + found + 1;
            }
            None => {
                parts.push((start, data.len()));
                return parts;
            }
        }
    }
}

fn broken(number: u64) -> Error {
    Error::new(Kind::Tokenizer, "", format!("document {number} is no UTF-8 text, or longer than 4 GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_documents() {
        let data = [b"abc\0".repeat(600_000), b"end".to_vec()].concat();
        let parts = parts(&data, 0);
        assert!(parts.len() > 1);
        for (before, after) in parts.iter().zip(&parts[1..]) {
            assert_eq!(before.1 + 1, after.0);
            assert_eq!(data[before.1], 0);
        }
        assert_eq!(parts[parts.len() - 1].1, data.len());
    }
}
