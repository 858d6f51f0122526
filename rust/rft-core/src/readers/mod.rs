//! Every format of input as rows for the one parser: JSON lines, a JSON array, text, CSV, Parquet and Arrow; plain, packed,
//! or inside an archive.
//!
//! What a file is, its first bytes say; where they cannot (text, CSV), its name does. A row of columns reaches the parser
//! as a JSON object of the columns that the format needs, so all formats share one parser and its messages; its "line" is
//! its number, from 1.

mod archive;
mod arrow;
mod columns;
mod csv;
mod json;
mod parquet;
#[cfg(feature = "remote")]
pub mod remote;
pub(crate) mod stream;

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use arrow_array::RecordBatch;
use serde_json::{Map, Value};

pub use archive::{Member, members};
pub use json::refusal;

use self::arrow::ArrowStream;
use self::columns::Rows;
use self::csv::CsvRows;
use self::parquet::ParquetFile;
use self::stream::{Stream, broken};
use crate::detect;
use crate::error::{Error, Kind, Result};
use crate::example::Parser;
use crate::format::Format;
use crate::jsonl::{self, Block, Layout};
use crate::spec::{FormatChoice, Remote, Source};

/// Rows that decide a format.
const SAMPLE_ROWS: usize = 100;

/// Batches of columns, in the order of the file.
trait Batches: Send {
    fn next_batch(&mut self) -> Result<Option<RecordBatch>>;
    /// Of the file's length, the share that is done.
    fn progress(&self) -> u64;
    /// Bytes that were read.
    fn bytes_taken(&self) -> u64;
    fn finish(self: Box<Self>) -> Result<(u64, u64)>;
}

/// A file, row by row.
pub struct Reader(Kinds);

enum Kinds {
    Lines(Box<jsonl::Reader>),
    Csv(Box<CsvRows>),
    Columns(Box<ColumnRows>),
}

struct ColumnRows {
    batches: Box<dyn Batches>,
    rows: Option<Rows>,
    /// Next row of `rows`.
    at: usize,
    /// Rows given so far.
    given: u64,
    /// No format fits: every column is shown, for the message.
    lenient: bool,
    done: bool,
}

/// What a source holds, opened as far as its kind.
enum Opened {
    Parquet(ParquetFile),
    Arrow(ArrowStream),
    Csv(Box<CsvRows>),
    Lines(Stream),
}

impl Reader {
    /// Opens a file, or a member of an archive, and decides which of its columns are read.
    ///
    /// # Errors
    /// It cannot be opened, is not what its name says, is an archive itself, or its head is damaged.
    pub fn open(source: &Source) -> Result<Reader> {
        let choose = |names: Vec<String>| choose_columns(source, &names);
        Ok(Reader(match open(source)? {
            Opened::Lines(stream) => {
                Kinds::Lines(Box::new(jsonl::Reader::new(stream, Path::new(source.file()), source.shown())?))
            }
            Opened::Csv(rows) => {
                let columns = choose(rows.names())?;
                Kinds::Csv(Box::new(rows.project(&columns)))
            }
            Opened::Parquet(file) => {
                let columns = choose(file.names())?;
                let batches = Box::new(file.batches(&columns, Columns::possible(source))?);
                Kinds::Columns(Box::new(ColumnRows::new(batches, columns.all)))
            }
            Opened::Arrow(stream) => {
                let columns = choose(stream.names())?;
                let batches = Box::new(stream.project(&columns));
                Kinds::Columns(Box::new(ColumnRows::new(batches, columns.all)))
            }
        }))
    }

    /// How rows are cut; everything but text holds a JSON object a row.
    pub fn layout(&self) -> Layout {
        match &self.0 {
            Kinds::Lines(reader) => reader.layout(),
            Kinds::Csv(_) | Kinds::Columns(_) => Layout::Lines,
        }
    }

    /// How much of the file (of its own, packed bytes) is done: for a progress bar.
    pub fn bytes_read(&self) -> u64 {
        match &self.0 {
            Kinds::Lines(reader) => reader.bytes_read(),
            Kinds::Csv(rows) => rows.progress(),
            Kinds::Columns(rows) => rows.batches.progress(),
        }
    }

    /// Bytes that were read from the file: fewer than it has where columns are left out.
    pub fn bytes_taken(&self) -> u64 {
        match &self.0 {
            Kinds::Columns(rows) => rows.batches.bytes_taken(),
            _ => self.bytes_read(),
        }
    }

    /// Up to `max_rows` rows, and no more once they take `max_bytes`; none at the end.
    pub fn next_block(&mut self, max_rows: usize, max_bytes: usize) -> Result<Option<Block>> {
        let mut block = Block::default();
        Ok(if self.next_into(&mut block, max_rows, max_bytes)? { Some(block) } else { None })
    }

    /// The same in memory that is there: replaces the rows of `block`; false at the end.
    pub fn next_into(&mut self, block: &mut Block, max_rows: usize, max_bytes: usize) -> Result<bool> {
        block.clear();
        match &mut self.0 {
            Kinds::Lines(reader) => reader.next_rows(block, max_rows, max_bytes)?,
            Kinds::Csv(rows) => rows.next_rows(block, max_rows, max_bytes)?,
            Kinds::Columns(rows) => rows.next_rows(block, max_rows, max_bytes)?,
        }
        Ok(!block.is_empty())
    }

    /// Reads what is left and gives what [`hash`] gives: the xxh3-64 of the bytes and the length of the file.
    pub fn finish(self) -> Result<(u64, u64)> {
        match self.0 {
            Kinds::Lines(reader) => reader.finish(),
            Kinds::Csv(rows) => rows.finish(),
            Kinds::Columns(rows) => rows.batches.finish(),
        }
    }
}

impl ColumnRows {
    fn new(batches: Box<dyn Batches>, lenient: bool) -> ColumnRows {
        ColumnRows { batches, rows: None, at: 0, given: 0, lenient, done: false }
    }

    fn next_rows(&mut self, block: &mut Block, max_rows: usize, max_bytes: usize) -> Result<()> {
        let mut row = Vec::new();
        while !self.done && block.len() < max_rows && block.bytes() < max_bytes {
            match &self.rows {
                Some(rows) if self.at < rows.len() => {
                    row.clear();
                    rows.write(self.at, self.lenient, &mut row);
                    self.at += 1;
                    self.given += 1;
                    block.push(self.given, &row);
                }
                _ => {
                    self.rows = None; // before the next batch is made: one at a time in memory
                    let batch = self.batches.next_batch()?;
                    self.done = batch.is_none();
                    self.rows = batch.as_ref().map(Rows::new);
                    self.at = 0;
                }
            }
        }
        Ok(())
    }
}

/// xxh3-64 that stands for what is read of a source, and the length of the file. Of Parquet the columns that a format may
/// need and the footer count; of everything else all bytes (those of the member, unpacked, inside an archive).
pub fn hash(source: &Source) -> Result<(u64, u64)> {
    let path = Path::new(&source.path);
    if let Some(name) = &source.member
        && let Some(known) = archive::hash(path, name)?
    {
        return Ok(known);
    }
    let mut raw = raw(source)?;
    let head = head(&mut raw).map_err(|e| broken(source.shown(), 1, path, &e))?;
    if head.starts_with(parquet::MAGIC) {
        return parquet_file(source, head, raw)?.hash(&Columns::possible(source));
    }
    stream::hash_of(io::Cursor::new(head).chain(raw), path, source.shown())
}

/// Bytes that a source takes on disk.
pub fn size(source: &Source) -> u64 {
    if let Some(remote) = &source.remote {
        return remote.bytes;
    }
    match &source.member {
        None => std::fs::metadata(&source.path).map_or(0, |m| m.len()),
        Some(name) => archive::find(Path::new(&source.path), name).map_or(0, |member| member.packed()),
    }
}

/// The source as a file of this disk, fetched if it is not one, and what to hold while a fetched one is read: its room in the
/// cache is not given to others before. `poll` ends the wait by its error.
pub fn local(source: &Source, poll: &dyn Fn() -> Result<()>) -> Result<(Source, Option<std::fs::File>)> {
    let Some(remote) = &source.remote else { return Ok((source.clone(), None)) };
    let path = fetch_one(remote, poll)?;
    let name = source.name.clone().unwrap_or_else(|| remote.url.clone());
    let bytes = std::fs::metadata(&path).map_or(0, |found| found.len());
    if bytes != remote.bytes {
        let problem = format!("it has {bytes} bytes now, and had {} when the run began", remote.bytes);
        return Err(Error::new(Kind::Data, name, problem).remedy("train on data that nothing writes to"));
    }
    let in_use = in_use(&path);
    let path = path.to_string_lossy().into_owned();
    Ok((Source { path, remote: None, name: Some(name), ..source.clone() }, in_use))
}

#[cfg(feature = "remote")]
use remote::in_use;

#[cfg(not(feature = "remote"))]
fn in_use(_: &Path) -> Option<std::fs::File> {
    None
}

#[cfg(feature = "remote")]
fn fetch_one(remote: &Remote, poll: &dyn Fn() -> Result<()>) -> Result<std::path::PathBuf> {
    let files =
        remote::fetch(std::slice::from_ref(&remote.url), Path::new(&remote.cache), remote.limit, &mut |_, _| poll())?;
    files.into_iter().next().ok_or_else(|| Error::new(Kind::Io, &remote.url, "nothing was fetched"))
}

#[cfg(not(feature = "remote"))]
fn fetch_one(remote: &Remote, _: &dyn Fn() -> Result<()>) -> Result<std::path::PathBuf> {
    Err(Error::new(Kind::Data, &remote.url, "this build reads only this disk").remedy("download it first"))
}

/// How a name alone decides what is read, as a word for keys; content decides everything else.
pub fn read_as(source: &Source) -> &'static str {
    let name = Path::new(source.file());
    match (jsonl::is_text_name(name), table_name(name)) {
        (true, _) => "text",
        (_, Some(true)) => "tsv",
        (_, Some(false)) => "csv",
        _ => "content",
    }
}

/// The bytes of a source, packed or not.
fn raw(source: &Source) -> Result<Box<dyn Read + Send>> {
    let path = Path::new(&source.path);
    match &source.member {
        None => Ok(Box::new(File::open(path).map_err(|e| Error::io(path, "opening", &e))?)),
        Some(name) => archive::open(path, name),
    }
}

/// The first bytes, taken.
fn head(raw: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(8);
    raw.take(8).read_to_end(&mut head)?;
    Ok(head)
}

fn open(source: &Source) -> Result<Opened> {
    let (path, shown) = (Path::new(&source.path), source.shown());
    let told = |e: &io::Error| broken(shown, 1, path, e);
    let mut raw = raw(source)?;
    let first = head(&mut raw).map_err(|e| told(&e))?;
    if first.starts_with(parquet::MAGIC) {
        return Ok(Opened::Parquet(parquet_file(source, first, raw)?));
    }
    let stream = Stream::new(Box::new(io::Cursor::new(first).chain(raw))).map_err(|e| told(&e))?;
    let head = stream.head();
    if head.starts_with(parquet::MAGIC) && stream.is_packed() {
        return Err(Error::new(Kind::Data, shown, "a Parquet file inside gzip or zstd")
            .wanted("the Parquet file itself: its columns are packed already")
            .remedy("unpack it"));
    }
    if head.starts_with(b"version https://git-lfs") {
        return Err(Error::new(Kind::Data, shown, "a Git LFS pointer, not the data").remedy("git lfs pull"));
    }
    if archive::looks_like_one(head) {
        let problem = if source.member.is_some() { "an archive inside an archive" } else { "an archive" };
        return Err(Error::new(Kind::Data, shown, problem).wanted("data files").remedy("unpack it"));
    }
    if head.starts_with(arrow::FILE_MAGIC) || head.starts_with(arrow::MESSAGE_MAGIC) {
        return Ok(Opened::Arrow(ArrowStream::open(stream, path, shown)?));
    }
    let name = source.file().to_lowercase();
    for (endings, kind) in [(&[".parquet"][..], "Parquet"), (&[".arrow", ".feather"][..], "Arrow IPC")] {
        if endings.iter().any(|ending| name.ends_with(ending)) {
            let problem = if head.is_empty() { "an empty file".to_string() } else { format!("no {kind} file") };
            return Err(Error::new(Kind::Data, shown, problem)
                .wanted(format!("what its name says: {kind}"))
                .remedy("fetch or write it again, or name it for what it is"));
        }
    }
    match table_name(Path::new(source.file())) {
        Some(tabs) => Ok(Opened::Csv(Box::new(CsvRows::open(stream, tabs, path, shown)?))),
        None => Ok(Opened::Lines(stream)),
    }
}

/// Parquet is read back to front, so a member of an archive is copied to a file without a name first.
fn parquet_file(source: &Source, head: Vec<u8>, raw: Box<dyn Read + Send>) -> Result<ParquetFile> {
    let path = Path::new(&source.path);
    let file = if source.member.is_some() {
        let copy = || -> io::Result<File> {
            let mut file = tempfile::tempfile()?;
            io::copy(&mut io::Cursor::new(head).chain(raw), &mut file)?;
            Ok(file)
        };
        copy().map_err(|e| broken(source.shown(), 1, path, &e))?
    } else {
        File::open(path).map_err(|e| Error::io(path, "opening", &e))?
    };
    ParquetFile::open(file, path, source.shown())
}

/// Whether a name says CSV (false) or TSV (true), also under `.gz` and `.zst`.
fn table_name(path: &Path) -> Option<bool> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    if name.ends_with(".tsv") {
        return Some(true);
    }
    name.ends_with(".csv").then_some(false)
}

/// Calls into a library that reads bytes from outside: what it finds wrong, and any panic of it, is a fault of the file.
fn guarded<T>(place: &str, kind: &str, read: impl FnOnce() -> std::result::Result<T, String>) -> Result<T> {
    let problem = match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(problem)) => problem,
        Err(_) => "it contradicts itself".to_string(),
    };
    Err(Error::new(Kind::Data, place, format!("cannot be read as {kind}: {problem}"))
        .remedy("fetch or write the file again"))
}

/// Which columns are read.
#[derive(Clone, Debug)]
struct Columns {
    names: HashSet<String>,
    /// Those whose CSV cells may hold JSON.
    json: HashSet<String>,
    /// Every column, whatever its name.
    all: bool,
}

impl Columns {
    fn of(formats: &[Format], source: &Source, all: bool) -> Columns {
        let names = formats.iter().flat_map(|format| format.columns(source)).collect();
        let json = formats.iter().flat_map(|format| format.json_columns(source)).collect();
        Columns { names, json, all }
    }

    /// Those of every format that the source's own names allow.
    fn possible(source: &Source) -> Columns {
        match source.format {
            FormatChoice::Fixed(format) => Columns::of(&[format], source, false),
            FormatChoice::Auto => {
                let fits = |format: &Format| Parser::new(*format, source).is_ok();
                let formats: Vec<Format> = Format::ALL.into_iter().filter(fits).collect();
                let mut columns = Columns::of(&formats, source, false);
                columns.names.extend(detect::OF_OTHER_LOSSES.map(String::from));
                columns
            }
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.all || self.names.contains(name)
    }

    fn is_json(&self, name: &str) -> bool {
        self.json.contains(name)
    }
}

/// The columns of the format, found out from the first rows where the config does not say; all of them where none fits,
/// so that the message can show what is there.
fn choose_columns(source: &Source, names: &[String]) -> Result<Columns> {
    let format = match source.format {
        FormatChoice::Fixed(format) => Some(format),
        FormatChoice::Auto => {
            let rows = sample(source, Columns::possible(source))?;
            detect::detect(&rows, source).ok().map(|(format, _)| format)
        }
    };
    let formats: Vec<Format> = format.into_iter().filter(|format| format.has_columns(source, names)).collect();
    if formats.is_empty() {
        return Ok(Columns { all: true, ..Columns::possible(source) });
    }
    let mut columns = Columns::of(&formats, source, false);
    if source.format == FormatChoice::Auto && source.fields.is_empty() {
        // Where the first rows leave them empty, later ones may still be preference pairs.
        columns.names.extend(["chosen", "rejected"].map(String::from));
    }
    Ok(columns)
}

/// The first rows that can be read, of the given columns.
fn sample(source: &Source, columns: Columns) -> Result<Vec<Map<String, Value>>> {
    let mut reader = Reader(match open(source)? {
        Opened::Lines(_) => return Ok(Vec::new()),
        Opened::Csv(rows) => Kinds::Csv(Box::new(rows.project(&columns))),
        Opened::Parquet(file) => {
            Kinds::Columns(Box::new(ColumnRows::new(Box::new(file.batches(&columns, columns.clone())?), false)))
        }
        Opened::Arrow(stream) => Kinds::Columns(Box::new(ColumnRows::new(Box::new(stream.project(&columns)), false))),
    });
    let block = reader.next_block(SAMPLE_ROWS, 64 << 20)?.unwrap_or_default();
    Ok(block.rows().filter_map(|(_, bytes)| detect::sample_row(bytes).ok()).collect())
}
