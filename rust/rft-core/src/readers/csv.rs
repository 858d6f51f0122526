//! CSV and TSV: the first line names the columns; quotes as in RFC 4180, so a cell may hold line ends.
//!
//! A cell is text, but where a column holds numbers or JSON (`loss_weight`, `messages`, `tools`) it is read as such.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use super::stream::{Stream, broken};
use super::{Columns, json};
use crate::error::{Error, Kind, Result};
use crate::jsonl::Block;
use crate::row_error::RowError;

pub(super) struct CsvRows {
    path: PathBuf,
    shown: String,
    input: Stream,
    /// The byte between cells.
    delimiter: u8,
    /// Line of what comes next.
    line: u64,
    /// Cells of the current record, one after another, and where each ends.
    cells: Vec<u8>,
    ends: Vec<usize>,
    /// Lines of the current record.
    lines: u64,
    /// Whether it goes over several lines with an odd number of quotes: inside a cell they are doubled.
    unclosed: bool,
    names: Vec<String>,
    /// Key and number of each wanted column, and whether a cell may be JSON.
    wanted: Vec<(Vec<u8>, usize, bool)>,
}

/// Where in a cell the next byte is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    /// In a cell that did not begin with a quote, or behind its quotes: a quote is a sign like others.
    Plain,
    Quoted,
    /// Behind a quote in a quoted cell: it ended, or the quote is one of two.
    Quote,
}

/// Adds cells of a record to `cells` and `ends`, up to its end or that of the bytes. How many bytes are taken, and whether the
/// record ended: with a line end (`\r` alone is one; of `\r\n` the second is left).
fn cut(bytes: &[u8], delimiter: u8, place: &mut Place, cells: &mut Vec<u8>, ends: &mut Vec<usize>) -> (usize, bool) {
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        match *place {
            Place::Quoted => {
                let end = memchr::memchr(b'"', &bytes[at..]).map_or(bytes.len(), |offset| at + offset);
                cells.extend_from_slice(&bytes[at..end]);
                at = end;
                if at < bytes.len() {
                    *place = Place::Quote;
                    at += 1;
                }
                continue;
            }
            Place::Start if byte == b'"' => *place = Place::Quoted,
            Place::Quote if byte == b'"' => {
                cells.push(byte);
                *place = Place::Quoted;
            }
            _ if byte == delimiter => {
                ends.push(cells.len());
                *place = Place::Start;
            }
            _ if byte == b'\n' || byte == b'\r' => {
                ends.push(cells.len());
                return (at + 1, true);
            }
            _ => {
                let rest = &bytes[at..];
                let end = memchr::memchr3(delimiter, b'\n', b'\r', rest).unwrap_or(rest.len());
                cells.extend_from_slice(&rest[..end]);
                *place = Place::Plain;
                at += end;
                continue;
            }
        }
        at += 1;
    }
    (at, false)
}

impl CsvRows {
    pub(super) fn open(mut input: Stream, tabs: bool, path: &Path, shown: &str) -> Result<CsvRows> {
        if input.head().starts_with(&[0xef, 0xbb, 0xbf]) {
            input.read_exact(&mut [0; 3]).map_err(|e| broken(shown, 1, path, &e))?;
        }
        let mut rows = CsvRows {
            path: path.to_path_buf(),
            shown: shown.to_string(),
            input,
            delimiter: if tabs { b'\t' } else { b',' },
            line: 1,
            cells: Vec::new(),
            ends: Vec::new(),
            lines: 1,
            unclosed: false,
            names: Vec::new(),
            wanted: Vec::new(),
        };
        let place = |line: u64| format!("{shown}:{line}");
        let line = rows.next_record()?.unwrap_or(1);
        for index in 0..rows.ends.len() {
            let name = std::str::from_utf8(rows.cell(index))
                .map_err(|_| Error::new(Kind::Data, place(line), "the names of the columns are not UTF-8"))?
                .to_string();
            if rows.names.contains(&name) {
                return Err(Error::new(Kind::Data, place(line), format!("two columns are called {name:?}"))
                    .wanted("a first line that names each column once"));
            }
            rows.names.push(name);
        }
        Ok(rows)
    }

    fn cell(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.cells[start..self.ends[index]]
    }

    /// Reads on to the next record and gives the line on which it begins.
    fn next_record(&mut self) -> Result<Option<u64>> {
        loop {
            let bytes = self.input.fill_buf().map_err(|e| broken(&self.shown, self.line, &self.path, &e))?;
            let blank = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            if blank == 0 {
                break;
            }
            self.line += memchr::memchr_iter(b'\n', &bytes[..blank]).count() as u64;
            self.input.consume(blank);
        }
        let first = self.line;
        self.cells.clear();
        self.ends.clear();
        let (mut place, mut quotes) = (Place::Start, 0);
        loop {
            let bytes = self.input.fill_buf().map_err(|e| broken(&self.shown, self.line, &self.path, &e))?;
            if bytes.is_empty() {
                if matches!(place, Place::Start) && self.ends.is_empty() {
                    return Ok(None);
                }
                if quotes % 2 == 1 && self.line > first {
                    let problem = format!(
                        "a quote that opens in this row is closed nowhere: all {} lines from here to the file's end are one cell",
                        self.line - first
                    );
                    return Err(Error::new(Kind::Data, format!("{}:{first}", self.shown), problem)
                        .wanted("cells with a quote at both ends, and quotes inside them doubled")
                        .remedy("mend the row"));
                }
                self.ends.push(self.cells.len());
                self.end_record(first, quotes);
                return Ok(Some(first));
            }
            let (taken, ended) = cut(bytes, self.delimiter, &mut place, &mut self.cells, &mut self.ends);
            self.line += memchr::memchr_iter(b'\n', &bytes[..taken]).count() as u64;
            quotes += memchr::memchr_iter(b'"', &bytes[..taken]).count();
            self.input.consume(taken);
            if ended {
                self.end_record(first, quotes);
                return Ok(Some(first));
            }
        }
    }

    fn end_record(&mut self, first: u64, quotes: usize) {
        self.lines = (self.line - first).max(1);
        self.unclosed = self.lines > 1 && quotes % 2 == 1;
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    pub(super) fn project(mut self, columns: &Columns) -> CsvRows {
        let named = |(index, name): (usize, &String)| {
            let mut key = Vec::new();
            json::string(name, &mut key);
            key.push(b':');
            (key, index, columns.is_json(name))
        };
        self.wanted = self.names.iter().enumerate().filter(|(_, name)| columns.wants(name)).map(named).collect();
        self
    }

    /// Appends up to `max_rows` rows.
    pub(super) fn next_rows(&mut self, block: &mut Block, max_rows: usize, max_bytes: usize) -> Result<()> {
        let mut row = Vec::new();
        while block.len() < max_rows && block.bytes() < max_bytes {
            let Some(line) = self.next_record()? else { return Ok(()) };
            row.clear();
            self.write(&mut row);
            if !row.is_empty() {
                block.push(line, &row);
            }
        }
        Ok(())
    }

    fn write(&self, row: &mut Vec<u8>) {
        let cells = self.ends.len();
        if cells == 1 && self.names.len() > 1 && self.cell(0).trim_ascii().is_empty() {
            return; // a line of spaces
        }
        if self.unclosed {
            let problem =
                format!("an odd number of quotes in the {} lines that it takes: one is not closed", self.lines);
            json::refuse(
                &RowError::bad("", problem, "cells with a quote at both ends, and quotes inside them doubled"),
                row,
            );
            return;
        }
        if cells != self.names.len() {
            let problem = format!("{cells} cells, the first line names {} columns", self.names.len());
            json::refuse(&RowError::bad("", problem, "as many cells as columns, with quotes around commas"), row);
            return;
        }
        row.push(b'{');
        for (number, (key, index, may_be_json)) in self.wanted.iter().enumerate() {
            let cell = self.cell(*index);
            if number > 0 {
                row.push(b',');
            }
            row.extend_from_slice(key);
            match may_be_json {
                true if cell.trim_ascii().is_empty() => row.extend_from_slice(b"null"),
                true if !cell.trim_ascii_start().starts_with(b"\"")
                    && serde_json::from_slice::<IgnoredAny>(cell).is_ok() =>
                {
                    row.extend_from_slice(cell);
                }
                _ => {
                    row.push(b'"');
                    json::escaped(cell, row);
                    row.push(b'"');
                }
            }
        }
        row.push(b'}');
    }

    pub(super) fn progress(&self) -> u64 {
        self.input.bytes_read()
    }

    pub(super) fn finish(self) -> Result<(u64, u64)> {
        let CsvRows { input, shown, line, path, .. } = self;
        input.finish().map_err(|e| broken(&shown, line, &path, &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records as the csv-core crate cuts them.
    fn truth(mut bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
        let mut core = csv_core::ReaderBuilder::new().build();
        let (mut cells, mut ends, mut records) = ([0; 256], [0; 64], Vec::new());
        let (mut filled, mut ended) = (0, 0);
        loop {
            let (result, taken, written, number) = core.read_record(bytes, &mut cells[filled..], &mut ends[ended..]);
            bytes = &bytes[taken..];
            (filled, ended) = (filled + written, ended + number);
            match result {
                csv_core::ReadRecordResult::Record => {
                    let starts = std::iter::once(0).chain(ends[..ended].iter().copied());
                    records.push(starts.zip(&ends[..ended]).map(|(start, end)| cells[start..*end].to_vec()).collect());
                    (filled, ended) = (0, 0);
                }
                csv_core::ReadRecordResult::End => return records,
                csv_core::ReadRecordResult::InputEmpty => {}
                _ => panic!("larger than the test's buffers"),
            }
        }
    }

    /// The same by `cut`, in pieces of `step` bytes.
    fn ours(bytes: &[u8], step: usize) -> Vec<Vec<Vec<u8>>> {
        let (mut cells, mut ends, mut place, mut records) = (Vec::new(), Vec::new(), Place::Start, Vec::new());
        let mut put = |cells: &mut Vec<u8>, ends: &mut Vec<usize>| {
            let starts = std::iter::once(0).chain(ends.iter().copied());
            records.push(starts.zip(ends.iter()).map(|(start, end)| cells[start..*end].to_vec()).collect());
            cells.clear();
            ends.clear();
        };
        let mut at = 0;
        while at < bytes.len() {
            if matches!(place, Place::Start) && ends.is_empty() && matches!(bytes[at], b'\n' | b'\r') {
                at += 1; // as `next_record` passes over blank lines
                continue;
            }
            let piece = &bytes[at..(at + step).min(bytes.len())];
            let (taken, ended) = cut(piece, b',', &mut place, &mut cells, &mut ends);
            at += taken;
            if ended {
                put(&mut cells, &mut ends);
                place = Place::Start;
            }
        }
        if !matches!(place, Place::Start) || !ends.is_empty() {
            ends.push(cells.len());
            put(&mut cells, &mut ends);
        }
        records
    }

    #[test]
    fn records_are_those_of_csv_core() {
        let mut state = 7u64;
        let mut pick = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..5_000 {
            let bytes: Vec<u8> = (0..pick(40)).map(|_| b"ab\"\",,\n\r "[pick(9) as usize]).collect();
            let step = 1 + pick(6) as usize;
            assert_eq!(ours(&bytes, step), truth(&bytes), "{:?} by {step}", String::from_utf8_lossy(&bytes));
        }
    }
}
