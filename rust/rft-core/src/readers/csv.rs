//! CSV and TSV: the first line names the columns; quotes as in RFC 4180, so a cell may hold line ends.
//!
//! A cell is text, but where a column holds numbers or JSON (`loss_weight`, `messages`, `tools`) it is read as such.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use csv_core::{ReadRecordResult, ReaderBuilder};

use super::stream::{Stream, broken};
use super::{Columns, json};
use crate::error::{Error, Kind, Result};
use crate::jsonl::Block;
use crate::row_error::RowError;

pub(super) struct CsvRows {
    path: PathBuf,
    shown: String,
    input: Stream,
    core: csv_core::Reader,
    /// Line of what comes next.
    line: u64,
    /// Cells of the current record, one after another, and where each ends.
    cells: Vec<u8>,
    ends: Vec<usize>,
    len: usize,
    /// Lines of the current record.
    lines: u64,
    /// Whether it goes over several lines with an odd number of quotes: inside a cell they are doubled.
    unclosed: bool,
    names: Vec<String>,
    /// Key and number of each wanted column, and whether a cell may be JSON.
    wanted: Vec<(Vec<u8>, usize, bool)>,
}

impl CsvRows {
    pub(super) fn open(mut input: Stream, tabs: bool, path: &Path, shown: &str) -> Result<CsvRows> {
        if input.head().starts_with(&[0xef, 0xbb, 0xbf]) {
            input.read_exact(&mut [0; 3]).map_err(|e| broken(shown, 1, path, &e))?;
        }
        let core = ReaderBuilder::new().delimiter(if tabs { b'\t' } else { b',' }).build();
        let mut rows = CsvRows {
            path: path.to_path_buf(),
            shown: shown.to_string(),
            input,
            core,
            line: 1,
            cells: vec![0; 1 << 12],
            ends: vec![0; 64],
            len: 0,
            lines: 1,
            unclosed: false,
            names: Vec::new(),
            wanted: Vec::new(),
        };
        let place = |line: u64| format!("{shown}:{line}");
        let line = rows.next_record()?.unwrap_or(1);
        for index in 0..rows.len {
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
        let told = |line: u64, e: &std::io::Error| broken(&self.shown, line, &self.path, e);
        loop {
            let bytes = self.input.fill_buf().map_err(|e| told(self.line, &e))?;
            let blank = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            if blank == 0 {
                break;
            }
            self.line += memchr::memchr_iter(b'\n', &bytes[..blank]).count() as u64;
            self.input.consume(blank);
        }
        let first = self.line;
        let (mut filled, mut ended, mut quotes) = (0, 0, 0);
        loop {
            let bytes = self.input.fill_buf().map_err(|e| told(self.line, &e))?;
            let (result, taken, written, ends) =
                self.core.read_record(bytes, &mut self.cells[filled..], &mut self.ends[ended..]);
            let at_end = bytes.is_empty();
            self.line += memchr::memchr_iter(b'\n', &bytes[..taken]).count() as u64;
            quotes += memchr::memchr_iter(b'"', &bytes[..taken]).count();
            self.input.consume(taken);
            (filled, ended) = (filled + written, ended + ends);
            if at_end && quotes % 2 == 1 && self.line > first {
                let problem = format!(
                    "a quote that opens in this row is closed nowhere: all {} lines from here to the file's end are one cell",
                    self.line - first
                );
                return Err(Error::new(Kind::Data, format!("{}:{first}", self.shown), problem)
                    .wanted("cells with a quote at both ends, and quotes inside them doubled")
                    .remedy("mend the row"));
            }
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull => self.cells.resize(self.cells.len() * 2, 0),
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::Record => {
                    self.len = ended;
                    self.lines = (self.line - first).max(1);
                    self.unclosed = self.lines > 1 && quotes % 2 == 1;
                    return Ok(Some(first));
                }
                ReadRecordResult::End => return Ok(None),
            }
        }
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
        let cells = self.len;
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
                true if serde_json::from_slice::<serde_json::Value>(cell).is_ok_and(|value| !value.is_string()) => {
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
