//! Zip and tar archives, read in place: nothing is ever unpacked into a folder.
//!
//! An archive with a name that would leave its folder, a link, a device or a sparse file in it is refused whole, with the
//! member's name: such archives are made to do harm, or by tools that nobody checks.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tar::EntryType;

use super::stream::{READ_BYTES, Stream, broken, read_some};
use crate::error::{Error, Kind, Result};

/// Members that are looked at.
const MOST_MEMBERS: usize = 100_000;
/// A member may unpack to this many times its packed size, once that is more than `FREE_BYTES`: text packs 3 to 30 times.
const MOST_TIMES: u64 = 200;
const FREE_BYTES: u64 = 1 << 30;

/// A file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its path in the archive.
    pub name: String,
    /// Bytes when unpacked, as the archive says.
    pub size: u64,
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Start in the unpacked tar.
    Tar(u64),
    Zip {
        start: u64,
        packed: u64,
        method: Method,
        crc: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Stored,
    Deflated,
    Zstd,
}

impl Member {
    /// Bytes in the archive (unpacked ones for a tar, which is packed as a whole).
    pub(super) fn packed(&self) -> u64 {
        match self.place {
            Place::Tar(_) => self.size,
            Place::Zip { packed, .. } => packed,
        }
    }
}

/// Whether a file begins as a zip or a tar does.
pub(super) fn looks_like_one(head: &[u8]) -> bool {
    is_zip(head) || head.get(257..262) == Some(b"ustar")
}

fn is_zip(head: &[u8]) -> bool {
    head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06")
}

/// Every file of an archive, in its order.
///
/// # Errors
/// It is damaged, or holds a member that is refused.
pub fn members(path: &Path) -> Result<Vec<Member>> {
    table(path).map(|table| table.members.clone())
}

/// The member of this name.
pub(super) fn find(path: &Path, name: &str) -> Result<Member> {
    let table = table(path)?;
    table.numbers.get(name).map(|number| table.members[*number].clone()).ok_or_else(|| {
        Error::new(Kind::Data, path.display().to_string(), format!("the archive has no member {name:?}"))
    })
}

/// The members of an archive, in its order, and the number of each by its name.
struct Table {
    members: Vec<Member>,
    numbers: HashMap<String, usize>,
}

/// The table of the archive asked for last is remembered: sources name one member after another.
fn table(path: &Path) -> Result<Arc<Table>> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, "opening", &e))?;
    let state = (path.to_path_buf(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec(), meta.ctime_nsec());
    let mut last = LAST.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((known, table)) = &*last
        && *known == state
    {
        return Ok(table.clone());
    }
    let (mut members, mut numbers) = (Vec::new(), HashMap::new());
    visit(path, &mut |member| {
        numbers.insert(member.name.clone(), members.len());
        members.push(member);
        Ok(())
    })?;
    let table = Arc::new(Table { members, numbers });
    *last = Some((state, table.clone()));
    Ok(table)
}

/// Path, inode, length and times of an archive.
type State = (PathBuf, u64, u64, i64, i64, i64);
static LAST: Mutex<Option<(State, Arc<Table>)>> = Mutex::new(None);

/// The bytes of a member.
pub(super) fn open(path: &Path, name: &str) -> Result<Box<dyn Read + Send>> {
    let member = find(path, name)?;
    let mut file = File::open(path).map_err(|e| Error::io(path, "opening", &e))?;
    let told = |e: &io::Error| broken(&path.display().to_string(), 1, path, e);
    match member.place {
        Place::Tar(start) => {
            let packed = Stream::new(Box::new(file)).map_err(|e| told(&e))?;
            let input: Box<dyn Read + Send> = if packed.is_packed() {
                let mut packed = packed;
                skip(&mut packed, start).map_err(|e| told(&e))?;
                Box::new(packed)
            } else {
                // A plain tar: straight to the member, or its thousandth one would cost a thousand times the first.
                let mut file = File::open(path).map_err(|e| Error::io(path, "opening", &e))?;
                file.seek(SeekFrom::Start(start)).map_err(|e| told(&e))?;
                Box::new(file)
            };
            Ok(Box::new(Whole { input: input.take(member.size), left: member.size, crc: None }))
        }
        Place::Zip { start, packed, method, crc } => {
            file.seek(SeekFrom::Start(start)).map_err(|e| told(&e))?;
            let raw = io::BufReader::with_capacity(READ_BYTES, file.take(packed));
            let unpacked: Box<dyn Read + Send> = match method {
                Method::Stored => Box::new(raw),
                Method::Deflated => Box::new(flate2::bufread::DeflateDecoder::new(raw)),
                Method::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(raw).map_err(|e| told(&e))?),
            };
            let crc = Some((crc32fast::Hasher::new(), crc));
            // One byte more than it should have, so that a member that goes on is noticed.
            Ok(Box::new(Whole { input: unpacked.take(member.size.saturating_add(1)), left: member.size, crc }))
        }
    }
}

/// A member that must have the length and the checksum that the archive states.
struct Whole<R> {
    input: R,
    left: u64,
    crc: Option<(crc32fast::Hasher, u32)>,
}

impl<R: Read> Read for Whole<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wrong = |problem| Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        let n = self.input.read(buffer)?;
        if n as u64 > self.left {
            return wrong("the member is longer than the archive says");
        }
        self.left -= n as u64;
        if let Some((crc, _)) = &mut self.crc {
            crc.update(&buffer[..n]);
        }
        if n == 0 && !buffer.is_empty() {
            if self.left > 0 {
                return wrong("the member is shorter than the archive says");
            }
            if let Some((crc, wanted)) = &self.crc
                && crc.clone().finalize() != *wanted
            {
                return wrong("the member's checksum is not the archive's");
            }
        }
        Ok(n)
    }
}

fn skip(input: &mut impl Read, mut bytes: u64) -> io::Result<()> {
    let mut sink = vec![0; READ_BYTES];
    while bytes > 0 {
        let most = bytes.min(READ_BYTES as u64) as usize;
        match read_some(input, &mut sink[..most])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => bytes -= n as u64,
        }
    }
    Ok(())
}

/// Hands each file to `see`.
fn visit(path: &Path, see: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let shown = path.display().to_string();
    let mut file = File::open(path).map_err(|e| Error::io(path, "opening", &e))?;
    let mut head = Vec::with_capacity(4);
    (&mut file).take(4).read_to_end(&mut head).map_err(|e| Error::io(path, "reading", &e))?;
    file.rewind().map_err(|e| Error::io(path, "reading", &e))?;
    let mut names = HashSet::new();
    let mut checked = |member: Member| -> Result<()> {
        if names.len() >= MOST_MEMBERS {
            return Err(refused(&shown, &member.name, &format!("the archive has more than {MOST_MEMBERS} members")));
        }
        if !names.insert(member.name.clone()) {
            return Err(refused(&shown, &member.name, TWO_OF_A_NAME));
        }
        see(member)
    };
    if is_zip(&head) { visit_zip(file, path, &mut checked) } else { visit_tar(file, path, &mut checked) }
}

fn visit_zip(file: File, path: &Path, see: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let shown = path.display().to_string();
    let told = |e: &zip::result::ZipError| {
        Error::new(Kind::Data, &shown, format!("the zip archive is damaged: {e}")).remedy("fetch or write it again")
    };
    let mut archive = zip::ZipArchive::new(io::BufReader::new(file)).map_err(|e| told(&e))?;
    let listed = listed(path, archive.central_directory_start()).map_err(|e| Error::io(path, "reading", &e))?;
    if listed.len() > archive.len() {
        // The library keeps the last of those with one name.
        let mut names = HashSet::new();
        let twice = listed.into_iter().find(|name| !names.insert(name.clone())).unwrap_or_default();
        let twice = String::from_utf8_lossy(&twice).into_owned();
        return Err(refused(&shown, &twice, TWO_OF_A_NAME));
    }
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|e| told(&e))?;
        let name = entry.name().to_string();
        check_name(&shown, &name)?;
        // Upper half of the attributes: the file type of Unix, where the archive comes from there.
        let kind = entry.unix_mode().map_or(0, |mode| mode & 0o170_000);
        if !matches!(kind, 0 | 0o100_000 | 0o040_000) {
            return Err(refused(&shown, &name, "a link or a device"));
        }
        if entry.is_dir() {
            continue;
        }
        if entry.encrypted() {
            return Err(refused(&shown, &name, "it is encrypted"));
        }
        let method = match entry.compression() {
            zip::CompressionMethod::Stored => Method::Stored,
            zip::CompressionMethod::DEFLATE => Method::Deflated,
            zip::CompressionMethod::ZSTD => Method::Zstd,
            other => return Err(refused(&shown, &name, &format!("packed with {other}, which is not read"))),
        };
        let (size, packed, crc) = (entry.size(), entry.compressed_size(), entry.crc32());
        if size > FREE_BYTES && size / MOST_TIMES > packed {
            return Err(refused(&shown, &name, &format!("it unpacks to more than {MOST_TIMES} times its size")));
        }
        let Some(start) = entry.data_start() else {
            return Err(refused(&shown, &name, "the archive does not say where it lies"));
        };
        drop(entry);
        see(Member { name, size, place: Place::Zip { start, packed, method, crc } })?;
    }
    Ok(())
}

const TWO_OF_A_NAME: &str = "the archive has two members of this name";

/// The names in a zip's directory, as they stand there.
fn listed(path: &Path, start: u64) -> io::Result<Vec<Vec<u8>>> {
    let mut file = io::BufReader::with_capacity(READ_BYTES, File::open(path)?);
    file.seek(SeekFrom::Start(start))?;
    let mut names = Vec::new();
    let mut head = [0; 46];
    while file.read_exact(&mut head).is_ok() && head.starts_with(b"PK\x01\x02") {
        let length = |at: usize| u64::from(u16::from_le_bytes([head[at], head[at + 1]]));
        let mut name = Vec::new();
        (&mut file).take(length(28)).read_to_end(&mut name)?;
        names.push(name);
        io::copy(&mut (&mut file).take(length(30) + length(32)), &mut io::sink())?;
    }
    Ok(names)
}

fn visit_tar(file: File, path: &Path, see: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let shown = path.display().to_string();
    let told = |e: &io::Error| {
        Error::new(Kind::Data, &shown, format!("the tar archive is damaged or cut short: {e}"))
            .remedy("fetch or write it again")
    };
    let packed = file.metadata().map_err(|e| Error::io(path, "reading", &e))?.len();
    let stream = Stream::new(Box::new(file)).map_err(|e| told(&e))?;
    let mut archive = tar::Archive::new(stream);
    for entry in archive.entries().map_err(|e| told(&e))? {
        let entry = entry.map_err(|e| told(&e))?;
        let name = match std::str::from_utf8(&entry.path_bytes()) {
            Ok(name) => name.trim_start_matches("./").to_string(),
            Err(_) => String::from_utf8_lossy(&entry.path_bytes()).into_owned(),
        };
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader) {
            continue;
        }
        if kind == EntryType::Directory && name.is_empty() {
            continue; // "./"
        }
        check_name(&shown, &name)?;
        match kind {
            EntryType::Regular | EntryType::Continuous => {}
            EntryType::Directory => continue,
            EntryType::Symlink | EntryType::Link => return Err(refused(&shown, &name, "a link")),
            EntryType::GNUSparse => return Err(refused(&shown, &name, "a sparse file")),
            _ => return Err(refused(&shown, &name, "no ordinary file")),
        }
        let (size, start) = (entry.size(), entry.raw_file_position());
        if size > FREE_BYTES && size / MOST_TIMES > packed {
            return Err(refused(&shown, &name, &format!("it unpacks to more than {MOST_TIMES} times the archive")));
        }
        see(Member { name, size, place: Place::Tar(start) })?;
    }
    Ok(())
}

/// A name must stay inside the folder that the archive stands for, on every system.
fn check_name(shown: &str, name: &str) -> Result<()> {
    let absolute = name.starts_with(['/', '\\']) || name.as_bytes().get(1) == Some(&b':');
    let problem = if name.is_empty() || name.contains('\0') {
        "a name that no file has"
    } else if absolute {
        "an absolute name"
    } else if name.split(['/', '\\']).any(|part| part == "..") {
        "a name that leaves the archive's folder"
    } else {
        return Ok(());
    };
    Err(refused(shown, name, problem))
}

fn refused(shown: &str, name: &str, problem: &str) -> Error {
    Error::new(Kind::Data, shown, format!("member {name:?}: {problem}"))
        .wanted("an archive of ordinary files with names of their own")
        .remedy("unpack it with care, and give the folder of its data files")
}
