//! Zip and tar archives, read in place: nothing is ever unpacked into a folder.
//!
//! An archive with a name that would leave its folder, a link, a device or a sparse file in it is refused whole, with the
//! member's name: such archives are made to do harm, or by tools that nobody checks.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use tar::EntryType;
use xxhash_rust::xxh3::Xxh3;

use super::parquet;
use super::stream::{self, READ_BYTES, Stream, broken, read_some};
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
    /// xxh3-64 of its bytes, where they passed when the archive was listed (a packed tar) and all of them count.
    hash: Option<u64>,
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

/// Path, inode, length and times of an archive.
type State = (PathBuf, u64, u64, i64, i64, i64);

fn state_of(path: &Path) -> Result<State> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, "opening", &e))?;
    Ok((path.to_path_buf(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec(), meta.ctime_nsec()))
}

/// Tables of the archives asked for last, of so many members in all: sources name one member after another, and every
/// source is asked for its size, its hash and its rows.
static KNOWN: Mutex<Vec<(State, Arc<Table>)>> = Mutex::new(Vec::new());
const MOST_KNOWN: usize = 4 * MOST_MEMBERS;

fn table(path: &Path) -> Result<Arc<Table>> {
    let state = state_of(path)?;
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((_, table)) = known.iter().find(|(other, _)| *other == state) {
        return Ok(table.clone());
    }
    let (mut members, mut numbers) = (Vec::new(), HashMap::new());
    visit(path, &mut |member| {
        numbers.insert(member.name.clone(), members.len());
        members.push(member);
        Ok(())
    })?;
    let table = Arc::new(Table { members, numbers });
    known.retain(|(other, _)| other.0 != state.0);
    known.push((state, table.clone()));
    let mut members: usize = known.iter().map(|(_, table)| table.members.len()).sum();
    while members > MOST_KNOWN && known.len() > 1 {
        members -= known.remove(0).1.members.len();
    }
    Ok(table)
}

/// The xxh3-64 of a member and its size, where the listing of the archive gave them.
pub(super) fn hash(path: &Path, name: &str) -> Result<Option<(u64, u64)>> {
    let member = find(path, name)?;
    Ok(member.hash.map(|hash| (hash, member.size)))
}

/// A packed tar that is read member by member: unpacking goes on where the last one ended.
struct Unpacking {
    state: State,
    /// Unpacked bytes before the next one.
    at: u64,
    stream: Stream,
}

static UNPACKING: Mutex<Option<Unpacking>> = Mutex::new(None);

fn unpacking() -> MutexGuard<'static, Option<Unpacking>> {
    UNPACKING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The bytes of a packed tar's member, and those that are left of the member.
struct TarMember {
    unpacking: Option<Unpacking>,
    left: u64,
    /// Whether other members come behind it.
    goes_on: bool,
}

impl TarMember {
    fn open(path: &Path, start: u64, size: u64) -> Result<TarMember> {
        let state = state_of(path)?;
        let behind = |member: &Member| matches!(member.place, Place::Tar(other) if other > start);
        let goes_on = table(path)?.members.last().is_some_and(behind);
        let told = |e: &io::Error| broken(&path.display().to_string(), 1, path, e);
        let going = unpacking().take_if(|going| going.state == state && going.at <= start);
        let mut going = match going {
            Some(going) => going,
            None => {
                let file = File::open(path).map_err(|e| Error::io(path, "opening", &e))?;
                Unpacking { state, at: 0, stream: Stream::new(Box::new(file)).map_err(|e| told(&e))? }
            }
        };
        skip(&mut going.stream, start - going.at).map_err(|e| told(&e))?;
        going.at = start;
        Ok(TarMember { unpacking: Some(going), left: size, goes_on })
    }
}

impl Read for TarMember {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(going) = &mut self.unpacking else { return Ok(0) };
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let result = going.stream.read(&mut buffer[..most]);
        match &result {
            Ok(n) => (going.at, self.left) = (going.at + *n as u64, self.left - *n as u64),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.goes_on = false, // what comes behind is not to be trusted
        }
        result
    }
}

impl Drop for TarMember {
    fn drop(&mut self) {
        if self.goes_on {
            *unpacking() = self.unpacking.take();
        }
    }
}

/// The bytes of a member.
pub(super) fn open(path: &Path, name: &str) -> Result<Box<dyn Read + Send>> {
    let member = find(path, name)?;
    let mut file = File::open(path).map_err(|e| Error::io(path, "opening", &e))?;
    let told = |e: &io::Error| broken(&path.display().to_string(), 1, path, e);
    match member.place {
        Place::Tar(start) => {
            // Straight to the member, or its thousandth one would cost a thousand times the first.
            let input: Box<dyn Read + Send> = if stream::is_packed(&mut file).map_err(|e| told(&e))? {
                Box::new(TarMember::open(path, start, member.size)?)
            } else {
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
    let mut head = Vec::with_capacity(512);
    (&mut file).take(512).read_to_end(&mut head).map_err(|e| Error::io(path, "reading", &e))?;
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
    let zip = is_zip(&head)
        || !looks_like_one(&head) && ends_as_zip(&mut file).map_err(|e| Error::io(path, "reading", &e))?;
    if zip { visit_zip(file, path, &mut checked) } else { visit_tar(file, path, &mut checked) }
}

/// Whether a file that begins otherwise is a zip: one that unpacks itself begins with a program. Its end says so: the
/// directory's record, with nothing but the comment behind it whose length it states. The file is at its start afterwards.
fn ends_as_zip(file: &mut File) -> io::Result<bool> {
    const RECORD: usize = 22;
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(length.saturating_sub(RECORD as u64 + u64::from(u16::MAX))))?;
    file.read_to_end(&mut end)?;
    file.rewind()?;
    let is_record = |window: (usize, &[u8])| {
        let (at, record) = window;
        let comment = usize::from(u16::from_le_bytes([record[20], record[21]]));
        record.starts_with(b"PK\x05\x06") && at + RECORD + comment == end.len()
    };
    Ok(end.windows(RECORD).enumerate().any(is_record))
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
        see(Member { name, size, place: Place::Zip { start, packed, method, crc }, hash: None })?;
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
    // All of a packed tar is unpacked to list it: the hashes, which the key needs, are taken in the same pass.
    let hashes = stream.is_packed();
    let mut archive = tar::Archive::new(stream);
    for entry in archive.entries().map_err(|e| told(&e))? {
        let mut entry = entry.map_err(|e| told(&e))?;
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
        let hash = if hashes { hash_of_member(&mut entry).map_err(|e| told(&e))? } else { None };
        see(Member { name, size, place: Place::Tar(start), hash })?;
    }
    Ok(())
}

/// The xxh3-64 of a member's bytes; none of a Parquet file, of which only some count.
fn hash_of_member(entry: &mut impl Read) -> io::Result<Option<u64>> {
    let mut head = Vec::with_capacity(parquet::MAGIC.len());
    entry.take(parquet::MAGIC.len() as u64).read_to_end(&mut head)?;
    if head == parquet::MAGIC {
        return Ok(None);
    }
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; READ_BYTES]);
    hash.update(&head);
    loop {
        match read_some(entry, &mut buffer)? {
            0 => return Ok(Some(hash.digest())),
            n => hash.update(&buffer[..n]),
        }
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn packed_tar(folder: &Path, members: &[(&str, Vec<u8>)]) -> PathBuf {
        let path = folder.join("rows.tar.gz");
        let packed = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        let mut archive = tar::Builder::new(packed);
        for (name, content) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, content.as_slice()).unwrap();
        }
        archive.into_inner().unwrap().finish().unwrap();
        path
    }

    fn read(path: &Path, name: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        open(path, name).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn members_of_a_packed_tar_come_in_any_order_and_in_its_own_from_one_pass() {
        let folder = tempfile::tempdir().unwrap();
        let content = |seed: u32| (0..100_000u32).map(|at| (at.wrapping_mul(seed) >> 7) as u8).collect::<Vec<u8>>();
        let members = [("a", content(3)), ("b", Vec::new()), ("c", content(5)), ("d", content(7))];
        let path = packed_tar(folder.path(), &members);
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0, 3]] {
            for index in order {
                assert_eq!(read(&path, members[index].0), members[index].1, "{order:?}");
            }
        }
        for (name, content) in &members {
            assert_eq!(hash(&path, name).unwrap(), Some((xxhash_rust::xxh3::xxh3_64(content), content.len() as u64)));
        }
        // Where the first of them ended, the next goes on; behind the last nothing is kept.
        let state = state_of(&path).unwrap();
        let kept = || unpacking().as_ref().filter(|going| going.state == state).map(|going| going.at);
        read(&path, "a");
        let Place::Tar(start) = find(&path, "a").unwrap().place else { panic!("it is a tar") };
        assert_eq!(kept(), Some(start + 100_000));
        let mut part = [0; 10];
        open(&path, "c").unwrap().read_exact(&mut part).unwrap();
        let Place::Tar(start) = find(&path, "c").unwrap().place else { panic!("it is a tar") };
        assert!(kept() >= Some(start + 10));
        assert_eq!(read(&path, "d"), members[3].1);
        assert_eq!(kept(), None);
    }
}
