//! Bytes of a file or of an archive's member, unpacked as they come: gzip and zstd are told by their first bytes.

use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use flate2::bufread::GzDecoder;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Kind, Result};

pub(crate) const READ_BYTES: usize = 1 << 18;
/// What is looked at to tell what a file is: a header of tar.
const HEAD_BYTES: u64 = 512;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Hash and count of the (compressed) bytes, taken as they pass.
#[derive(Default)]
struct Tap {
    hash: Xxh3,
    bytes: u64,
}

struct Tapped {
    raw: Box<dyn Read + Send>,
    tap: Arc<Mutex<Tap>>,
}

fn lock(tap: &Mutex<Tap>) -> MutexGuard<'_, Tap> {
    tap.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Read for Tapped {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.raw.read(buffer)?;
        let mut tap = lock(&self.tap);
        tap.hash.update(&buffer[..n]);
        tap.bytes += n as u64;
        Ok(n)
    }
}

/// Unpacked bytes, with the hash of the packed ones.
pub(crate) struct Stream {
    input: BufReader<Box<dyn Read + Send>>,
    head: Vec<u8>,
    tap: Arc<Mutex<Tap>>,
    packed: bool,
}

impl Stream {
    /// Looks at the first bytes and unpacks where they say so.
    pub(crate) fn new(raw: Box<dyn Read + Send>) -> io::Result<Stream> {
        let tap = Arc::new(Mutex::new(Tap::default()));
        let mut raw = BufReader::with_capacity(READ_BYTES, Tapped { raw, tap: tap.clone() });
        let magic = fill(&mut raw)?;
        let (mut input, packed): (Box<dyn Read + Send>, bool) = if magic.starts_with(&GZIP) {
            (Box::new(Gzip::new(raw)), true)
        } else if magic.starts_with(&ZSTD) {
            (Box::new(zstd::stream::read::Decoder::with_buffer(raw)?), true)
        } else {
            (Box::new(raw), false)
        };
        let mut head = Vec::with_capacity(HEAD_BYTES as usize);
        (&mut input).take(HEAD_BYTES).read_to_end(&mut head)?;
        let input: Box<dyn Read + Send> = Box::new(io::Cursor::new(head.clone()).chain(input));
        Ok(Stream { input: BufReader::with_capacity(READ_BYTES, input), head, tap, packed })
    }

    /// Whether the bytes come through gzip or zstd.
    pub(crate) fn is_packed(&self) -> bool {
        self.packed
    }

    /// The first bytes, up to 512; they are still to be read.
    pub(crate) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Packed bytes read so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        lock(&self.tap).bytes
    }

    /// Reads what is left and gives the xxh3-64 of the packed bytes and their number.
    pub(crate) fn finish(mut self) -> io::Result<(u64, u64)> {
        let mut sink = vec![0u8; READ_BYTES];
        // A reader of rows may stop before the end; the hash has to cover all.
        while read_some(&mut self.input, &mut sink)? > 0 {}
        let tap = lock(&self.tap);
        Ok((tap.hash.digest(), tap.bytes))
    }
}

/// The members of a gzip file, one after another. Zeros behind the last are no data: tapes and block devices pad with them,
/// and gzip(1) passes over them too.
struct Gzip {
    member: GzDecoder<BufReader<Tapped>>,
    ended: bool,
}

impl Gzip {
    fn new(raw: BufReader<Tapped>) -> Gzip {
        Gzip { member: GzDecoder::new(raw), ended: false }
    }

    /// Whether another member follows.
    fn goes_on(&mut self) -> io::Result<bool> {
        let raw = self.member.get_mut();
        let mut padded = false;
        loop {
            let bytes = fill(raw)?;
            let Some(first) = bytes.iter().position(|byte| *byte != 0) else {
                let count = bytes.len();
                if count == 0 {
                    return Ok(false);
                }
                padded = true;
                raw.consume(count);
                continue;
            };
            if padded || first > 0 {
                let problem = "zeros behind a member of gzip, and then something else";
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            return Ok(true);
        }
    }
}

impl Read for Gzip {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while !self.ended && !buffer.is_empty() {
            let n = self.member.read(buffer)?;
            if n > 0 {
                return Ok(n);
            }
            if self.goes_on()? {
                let raw = self.member.get_mut();
                let nothing = Tapped { raw: Box::new(io::empty()), tap: raw.get_ref().tap.clone() };
                let raw = std::mem::replace(raw, BufReader::with_capacity(0, nothing));
                self.member.reset(raw);
            } else {
                self.ended = true;
            }
        }
        Ok(0)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.input.read(buffer)
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        fill(&mut self.input)
    }

    fn consume(&mut self, amount: usize) {
        self.input.consume(amount);
    }
}

/// Whether a file begins as gzip or zstd does; it is at its start before and after.
pub(crate) fn is_packed(file: &mut (impl Read + Seek)) -> io::Result<bool> {
    let mut magic = Vec::with_capacity(4);
    file.take(4).read_to_end(&mut magic)?;
    file.rewind()?;
    Ok(magic.starts_with(&GZIP) || magic.starts_with(&ZSTD))
}

fn fill<R: Read>(input: &mut BufReader<R>) -> io::Result<&[u8]> {
    while let Err(error) = input.fill_buf() {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(input.buffer())
}

/// `read` that goes on after a signal.
pub(crate) fn read_some(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A failure while reading, as a fault of the data where the bytes are wrong.
pub(crate) fn broken(shown: &str, line: u64, path: &Path, error: &io::Error) -> Error {
    let unpacking = error.raw_os_error().is_none(); // zstd says "other" of what it cannot unpack
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
            damaged(shown, line, error)
        }
        io::ErrorKind::Other if unpacking => damaged(shown, line, error),
        _ => Error::io(path, "reading", error),
    }
}

fn damaged(shown: &str, line: u64, error: &io::Error) -> Error {
    let problem = format!("the compressed file is damaged or cut short: {error}");
    Error::new(Kind::Data, format!("{shown}:{line}"), problem).remedy("fetch or write the file again")
}

/// xxh3-64 and length of the bytes of a reader. `shown`: how messages call what it reads from `path`.
pub(crate) fn hash_of(mut input: impl Read, path: &Path, shown: &str) -> Result<(u64, u64)> {
    let (mut hash, mut bytes) = (Xxh3::new(), 0u64);
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match read_some(&mut input, &mut buffer).map_err(|e| broken(shown, 1, path, &e))? {
            0 => return Ok((hash.digest(), bytes)),
            n => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}
