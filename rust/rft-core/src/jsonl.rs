//! Files to rows: lines of JSON or of text, or the elements of one JSON array; plain, gzip or zstd.
//!
//! Compression is told by the first bytes, not by the name. A byte-order mark, CRLF ends and blank lines are fine.
//! Memory is bounded by one block and the longest row.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::readers::stream::{READ_BYTES, Stream, broken, read_some};

/// Rows that lie one after another in a buffer of their own.
#[derive(Debug, Default)]
pub struct Block {
    data: Vec<u8>,
    rows: Vec<(u64, Range<usize>)>,
}

impl Block {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Line (from 1) and bytes of each row, without the line's end.
    pub fn rows(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.rows.iter().map(|(line, range)| (*line, &self.data[range.clone()]))
    }

    /// Line and bytes of one row.
    pub fn row(&self, index: usize) -> (u64, &[u8]) {
        let (line, range) = &self.rows[index];
        (*line, &self.data[range.clone()])
    }

    /// Bytes of all rows.
    pub(crate) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Removes the rows and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.data.clear();
        self.rows.clear();
    }

    /// Bytes of memory that it holds.
    pub(crate) fn capacity(&self) -> usize {
        self.data.capacity() + self.rows.capacity() * size_of::<(u64, Range<usize>)>()
    }

    pub(crate) fn push(&mut self, line: u64, bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend_from_slice(bytes);
        self.rows.push((line, start..self.data.len()));
    }
}

/// How a file is cut into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A JSON object a line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// A text a line.
    Text,
}

/// A file, row by row.
pub struct Reader {
    path: PathBuf,
    shown: String,
    input: Stream,
    layout: Layout,
    buffer: Vec<u8>,
    /// Start of what is not yet handed out.
    start: usize,
    /// Line number at `start`.
    line: u64,
    at_end: bool,
    done: bool,
    array: ArrayScan,
}

#[derive(Default)]
struct ArrayScan {
    opened: bool,
    closed: bool,
}

impl Reader {
    /// Rows of what is already open. `path` says by its name whether lines are texts.
    pub(crate) fn new(input: Stream, path: &Path, shown: &str) -> Result<Reader> {
        let mut reader = Reader {
            path: path.to_path_buf(),
            shown: shown.to_string(),
            input,
            layout: Layout::Lines,
            buffer: Vec::new(),
            start: 0,
            line: 1,
            at_end: false,
            done: false,
            array: ArrayScan::default(),
        };
        reader.begin()?;
        Ok(reader)
    }

    /// How the file is cut into rows.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes of the file read so far (compressed ones where it is compressed).
    pub fn bytes_read(&self) -> u64 {
        self.input.bytes_read()
    }

    /// Adds up to `max_rows` rows to an empty block, and no more once they take `max_bytes`; none at the end.
    pub(crate) fn next_rows(&mut self, block: &mut Block, max_rows: usize, max_bytes: usize) -> Result<()> {
        while block.len() < max_rows && block.data.len() < max_bytes {
            let more = match self.layout {
                Layout::Array => self.next_element(block)?,
                Layout::Lines | Layout::Text => self.next_line(block)?,
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// Reads what is left and gives the xxh3-64 of the file's own bytes and their number.
    pub fn finish(self) -> Result<(u64, u64)> {
        let Reader { input, shown, line, path, .. } = self;
        input.finish().map_err(|e| broken(&shown, line, &path, &e))
    }

    /// Skips a byte-order mark and finds the layout.
    fn begin(&mut self) -> Result<()> {
        while self.buffer.len() < 3 && self.fill()? {}
        if self.buffer.starts_with(&[0xef, 0xbb, 0xbf]) {
            self.buffer.drain(..3);
        }
        if is_text_name(&self.path) {
            self.layout = Layout::Text;
            return Ok(());
        }
        let mut at = 0;
        loop {
            match self.buffer[at..].iter().position(|b| !b.is_ascii_whitespace()) {
                Some(offset) => {
                    if self.buffer[at + offset] == b'[' {
                        self.layout = Layout::Array;
                    }
                    return Ok(());
                }
                None => {
                    at = self.buffer.len();
                    if !self.fill()? {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn next_line(&mut self, block: &mut Block) -> Result<bool> {
        let mut searched = self.start;
        loop {
            let end = match memchr::memchr(b'\n', &self.buffer[searched..]) {
                Some(offset) => searched + offset,
                None => {
                    let unsearched = self.buffer.len() - self.start;
                    if self.fill()? {
                        searched = self.start + unsearched;
                        continue;
                    }
                    if self.start == self.buffer.len() {
                        return Ok(false);
                    }
                    self.buffer.len()
                }
            };
            let bytes = &self.buffer[self.start..end];
            let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
            let blank = bytes.iter().all(u8::is_ascii_whitespace);
            if !blank {
                block.push(self.line, bytes);
            }
            self.start = (end + 1).min(self.buffer.len());
            self.line += 1;
            if !blank {
                return Ok(true);
            }
            searched = self.start;
        }
    }

    /// The byte at `at`, reading on if need be.
    fn peek(&mut self, at: &mut usize) -> Result<Option<u8>> {
        while *at >= self.buffer.len() {
            let ahead = *at - self.start;
            if !self.fill()? {
                return Ok(None);
            }
            *at = self.start + ahead;
        }
        Ok(Some(self.buffer[*at]))
    }

    fn next_element(&mut self, block: &mut Block) -> Result<bool> {
        if self.done {
            return Ok(false);
        }
        // Up to the element: white space, the opening bracket, commas.
        loop {
            let mut at = self.start;
            let Some(byte) = self.peek(&mut at)? else {
                if self.array.closed {
                    self.done = true;
                    return Ok(false);
                }
                return Err(self.array_error("the file ends inside its JSON array"));
            };
            match byte {
                b'\n' => self.line += 1,
                b' ' | b'\t' | b'\r' => {}
                b'[' if !self.array.opened => self.array.opened = true,
                _ if self.array.closed => return Err(self.array_error("there is text after the JSON array")),
                b',' => {}
                b']' => self.array.closed = true,
                _ => break,
            }
            self.start += 1;
        }
        let line = self.line;
        let end = self.element_end()?;
        let bytes = &self.buffer[self.start..end];
        self.line += memchr::memchr_iter(b'\n', bytes).count() as u64;
        block.push(line, bytes.trim_ascii_end());
        self.start = end;
        Ok(true)
    }

    /// The end of the element that begins at `start`: where its brackets close, or the next comma or bracket.
    fn element_end(&mut self) -> Result<usize> {
        let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
        let mut at = self.start;
        loop {
            let Some(byte) = self.peek(&mut at)? else {
                return Err(self.array_error("the file ends inside its JSON array"));
            };
            if in_string {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    b'"' => in_string = false,
                    _ => {}
                }
            } else {
                match byte {
                    b'"' => in_string = true,
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' if depth > 0 => {
                        depth -= 1;
                        if depth == 0 {
                            return Ok(at + 1);
                        }
                    }
                    b',' | b']' if depth == 0 => return Ok(at),
                    _ => {}
                }
            }
            at += 1;
        }
    }

    fn array_error(&self, problem: &str) -> Error {
        Error::new(Kind::Data, format!("{}:{}", self.shown, self.line), problem)
            .wanted("one JSON array of objects, or a JSON object a line")
    }

    /// Reads more into the buffer, dropping what was handed out; false at the end. Moves `start`.
    fn fill(&mut self) -> Result<bool> {
        if self.at_end {
            return Ok(false);
        }
        if self.start > 0 && self.start >= self.buffer.len() / 2 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        let held = self.buffer.len();
        self.buffer.resize(held + READ_BYTES, 0);
        let n = read_some(&mut self.input, &mut self.buffer[held..])
            .map_err(|e| broken(&self.shown, self.line, &self.path, &e))?;
        self.buffer.truncate(held + n);
        self.at_end = n == 0;
        Ok(n > 0)
    }
}

/// Whether a name says that a line is a text: `.txt`, also under `.gz` and `.zst`.
pub fn is_text_name(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    name.ends_with(".txt")
}
