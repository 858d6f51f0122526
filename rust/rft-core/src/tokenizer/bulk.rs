//! Whole files to flat ids, on several threads.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use memchr::{memchr, memrchr};

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

/// Text that one thread takes at a time. With its ids it fits the second-level cache; and what the last thread is still at
/// when the others are done is at most this.
const PART: usize = 1 << 18;

impl Tokenizer {
    /// Ids of the documents in a text, which lie between separator bytes (none behind the last); added tokens are
    /// recognised. Memory beside the ids: a scratch and some MiB of text a thread.
    ///
    /// # Errors
    /// A document that is no UTF-8, by its number from 0.
    pub fn encode_documents(&self, data: &[u8], separator: u8, threads: usize) -> Result<Documents> {
        self.encode_parts(Parts::new(data, separator), data.len(), threads, "")
    }

    /// [`Tokenizer::encode_documents`] of a file, which is read along the way.
    ///
    /// # Errors
    /// The same, and a file that cannot be read.
    pub fn encode_file(&self, path: &Path, separator: u8, threads: usize) -> Result<FileIds> {
        let place = path.display().to_string();
        let file = File::open(path).map_err(|e| Error::new(Kind::Data, &place, e))?;
        let size = file.metadata().map_err(|e| Error::new(Kind::Data, &place, e))?.len() as usize;
        let Documents { ids, ends } = self.encode_parts(Parts::new(file, separator), size, threads, &place)?;
        let ids = if self.top_id() <= u32::from(u16::MAX) {
            Ids::U16(ids.into_iter().map(|id| id as u16).collect())
        } else {
            Ids::U32(ids)
        };
        Ok(FileIds { ids, ends })
    }

    fn encode_parts<R: Read + Send>(
        &self,
        parts: Parts<R>,
        size: usize,
        threads: usize,
        place: &str,
    ) -> Result<Documents> {
        // The ids of most text take no more than this.
        let mut documents = Documents { ids: Vec::with_capacity(size / 3), ends: Vec::new() };
        let unread = |e| Error::new(Kind::Data, place, e);
        if threads <= 1 {
            let (mut parts, mut part) = (parts, Vec::new());
            return self.with_scratch(|scratch| {
                while parts.next(&mut part).map_err(unread)? {
                    self.encode_part(&part, parts.separator, scratch, &mut documents)
                        .map_err(|at| broken(place, at as u64))?;
                }
                Ok(documents)
            });
        }
        let separator = parts.separator;
        let reader = Mutex::new((parts, 0usize));
        let joined = Mutex::new(Joined { documents, ..Joined::default() });
        let work = || -> std::io::Result<()> {
            self.with_scratch(|scratch| {
                let (mut part, mut own) = (Vec::new(), Documents::default());
                loop {
                    let Ok(mut reader) = reader.lock() else { return Ok(()) };
                    if !reader.0.next(&mut part)? {
                        return Ok(());
                    }
                    let index = reader.1;
                    reader.1 += 1;
                    drop(reader);
                    own.ids.reserve(part.len() / 3);
                    let result = self.encode_part(&part, separator, scratch, &mut own);
                    let result = result.map(|()| std::mem::take(&mut own));
                    if let Ok(mut joined) = joined.lock() {
                        joined.take(index, result);
                        own = joined.spare.pop().unwrap_or_default();
                    }
                }
            })
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            let ended = |other: ScopedJoinHandle<'_, _>| other.join().unwrap_or_else(|panic| resume_unwind(panic));
            others.into_iter().map(ended).fold(mine, |all, other| all.and(other))
        })
        .map_err(unread)?;
        let joined = joined.into_inner().unwrap_or_else(PoisonError::into_inner);
        match joined.broken {
            Some(number) => Err(broken(place, number)),
            None => Ok(joined.documents),
        }
    }

    /// Fails with the number of the document that is no text.
    fn encode_part(
        &self,
        part: &[u8],
        separator: u8,
        scratch: &mut super::Scratch,
        documents: &mut Documents,
    ) -> std::result::Result<(), usize> {
        let (mut start, mut number) = (0, documents.ends.len());
        let result = loop {
            let end = memchr(separator, &part[start..]).map_or(part.len(), |length| start + length);
            let Ok(text) = std::str::from_utf8(&part[start..end]) else { break Err(number) };
            if let (Ok(fast), Some(scratch)) = (&self.fast, &mut scratch.0)
                && super::check_size(text).is_ok()
            {
                fast.add(part, start, text, scratch, &mut documents.ids);
            } else if self.encode_ids_into(text, scratch, &mut documents.ids).is_ok() {
                documents.ends.push(documents.ids.len() as u64);
            } else {
                break Err(number);
            }
            if end == part.len() {
                break Ok(());
            }
            (start, number) = (end + 1, number + 1);
        };
        if let (Ok(fast), Some(scratch)) = (&self.fast, &mut scratch.0) {
            fast.finish(part, scratch, &mut documents.ids, &mut documents.ends);
        }
        result
    }
}

/// What threads made, put together in order as it comes.
#[derive(Default)]
struct Joined {
    documents: Documents,
    /// Parts whose turn has not come.
    waiting: BTreeMap<usize, std::result::Result<Documents, usize>>,
    /// Memory for parts to come: given back to the system, it would be asked for again page by page.
    spare: Vec<Documents>,
    next: usize,
    /// The first document that is no text; nothing is joined behind it.
    broken: Option<u64>,
}

impl Joined {
    fn take(&mut self, index: usize, part: std::result::Result<Documents, usize>) {
        self.waiting.insert(index, part);
        while self.broken.is_none()
            && let Some(part) = self.waiting.remove(&self.next)
        {
            self.next += 1;
            match part {
                Ok(mut part) => {
                    let before = self.documents.ids.len() as u64;
                    self.documents.ids.extend_from_slice(&part.ids);
                    self.documents.ends.extend(part.ends.iter().map(|end| before + end));
                    part.ids.clear();
                    part.ends.clear();
                    self.spare.push(part);
                }
                Err(at) => self.broken = Some((self.documents.ends.len() + at) as u64),
            }
        }
    }
}

/// A text in stretches of whole documents.
struct Parts<R> {
    source: R,
    separator: u8,
    /// What was read of the next stretch.
    rest: Vec<u8>,
    done: bool,
}

impl<R: Read> Parts<R> {
    fn new(source: R, separator: u8) -> Parts<R> {
        Parts { source, separator, rest: Vec::new(), done: false }
    }

    /// Gives the next stretch, without the separator behind it; false where none is left.
    fn next(&mut self, part: &mut Vec<u8>) -> std::io::Result<bool> {
        if self.done {
            return Ok(false);
        }
        part.clear();
        part.append(&mut self.rest);
        loop {
            let from = part.len();
            if self.source.by_ref().take(PART as u64).read_to_end(part)? == 0 {
                self.done = true;
                return Ok(true);
            }
            if let Some(last) = memrchr(self.separator, &part[from..]) {
                self.rest.extend_from_slice(&part[from + last + 1..]);
                part.truncate(from + last);
                return Ok(true);
            }
        }
    }
}

fn broken(place: &str, number: u64) -> Error {
    Error::new(Kind::Tokenizer, place, format!("document {number} is no UTF-8 text, or longer than 4 GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_documents() {
        for data in [[b"abc\0".repeat(600_000), b"end".to_vec()].concat(), b"\0".repeat(3 << 20), Vec::new()] {
            let (mut parts, mut part, mut joined) = (Parts::new(data.as_slice(), 0), Vec::new(), Vec::new());
            let mut count = 0;
            while parts.next(&mut part).expect("memory reads") {
                if count > 0 {
                    joined.push(0);
                }
                joined.extend_from_slice(&part);
                count += 1;
            }
            assert_eq!(joined, data);
            assert!(count > usize::from(data.len() > 2 << 20));
        }
    }

    #[test]
    fn a_document_longer_than_a_part_stays_whole() {
        let data = [vec![b'x'; 5 << 19], vec![0], b"yz".to_vec()].concat();
        let (mut parts, mut part) = (Parts::new(data.as_slice(), 0), Vec::new());
        assert!(parts.next(&mut part).expect("memory reads"));
        assert_eq!(part.len(), 5 << 19);
        assert!(parts.next(&mut part).expect("memory reads"));
        assert_eq!(part, b"yz");
        assert!(!parts.next(&mut part).expect("memory reads"));
    }
}
