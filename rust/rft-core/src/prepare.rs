//! Files -> a prepared set: read, render, tokenise and mask block by block, in the order of the files.
//!
//! Rows of a block are worked on in parallel by a pool of threads that lives only as long as the call; what is written
//! does not depend on their number.

use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::counts::{Counts, Note};
use crate::detect;
use crate::error::{Error, Kind, Result};
use crate::example::{Format, Parser, Reason, RowError};
use crate::jsonl::{Block, Layout, Reader};
use crate::key;
use crate::rows::{Outcome, Renderer, Rows};
use crate::spec::{FormatChoice, OnError, Source, Spec};
use crate::store::{Document, SourceRecord, Writer};

const BLOCK_ROWS: usize = 1024;
const BLOCK_BYTES: usize = 8 << 20;
/// Rows that decide a format.
const SAMPLE_ROWS: usize = 100;

/// What the caller hears and may say while a set is made.
pub trait Observer {
    /// After every block. An error stops the preparation.
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> Result<()>;
}

/// Makes the set at `out` and returns the counts.
///
/// # Errors
/// The first bad row under `on_error = fail`; no trained token at all; whatever reading or writing meets.
pub fn prepare(spec: &Spec, out: &Path, renderer: Option<&dyn Renderer>, observer: &mut dyn Observer) -> Result<Json> {
    let threads = match spec.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("rft-prepare-{index}"))
        .build()
        .map_err(|e| Error::new(Kind::Io, "prepare", format!("cannot start threads: {e}")))?;
    let rows = Rows::new(spec, renderer)?;
    let mut writer = Writer::new(out, spec.tokenizer.vocab_size)?;
    let mut counts = Counts::default();
    let total = spec.sources.iter().map(|source| std::fs::metadata(&source.path).map_or(0, |m| m.len())).sum();
    let (mut hashes, mut records, mut done) = (Vec::new(), Vec::new(), 0u64);
    for (index, source) in spec.sources.iter().enumerate() {
        let mut reader = Reader::open(Path::new(&source.path), source.shown())?;
        let mut first = reader.next_block(BLOCK_ROWS, BLOCK_BYTES)?;
        let (parser, evidence) = choose_parser(source, &reader, first.as_ref())?;
        rows.check_template(&parser, source, &evidence)?;
        counts.begin_source(source, parser.format(), &evidence);
        while let Some(block) = match first.take() {
            Some(block) => Some(block),
            None => reader.next_block(BLOCK_ROWS, BLOCK_BYTES)?,
        } {
            let outcomes = rows.block(&pool, &parser, reader.layout(), &block)?;
            for (number, outcome) in outcomes.into_iter().enumerate() {
                let line = block.row(number).0;
                record(spec, &mut writer, &mut counts, index, line, outcome)?;
            }
            observer.progress(done + reader.bytes_read(), total, counts.read())?;
        }
        let (hash, bytes) = reader.finish()?;
        let hash = key::hex(hash);
        key::check(source, &hash)?;
        done += bytes;
        records.push(SourceRecord { path: source.path.clone(), bytes, xxh3: hash.clone() });
        hashes.push(hash);
    }
    let key = key::of_inputs(&key::inputs(spec, &hashes));
    let report = counts.to_json(&writer, rows.tokenizer().control().is_empty());
    if writer.trained_tokens() == 0 {
        return Err(counts.nothing_trained(spec));
    }
    writer.finish(&key, records, report.clone())?;
    Ok(report)
}

/// The parser of a file, and the sentence that says why it is this one.
fn choose_parser(source: &Source, reader: &Reader, block: Option<&Block>) -> Result<(Parser, String)> {
    let (format, evidence) = match (reader.layout(), source.format) {
        (Layout::Text, FormatChoice::Auto | FormatChoice::Fixed(Format::Text)) => {
            (Format::Text, "a text file: each line is a document, all of it trained on".to_string())
        }
        (Layout::Text, FormatChoice::Fixed(format)) => {
            let problem = format!("a .txt file cannot hold rows of format {}", format.name());
            return Err(Error::new(Kind::Data, source.shown(), problem).wanted("JSON lines, or format = \"text\""));
        }
        (_, FormatChoice::Fixed(format)) => (format, "as the config says".to_string()),
        (_, FormatChoice::Auto) => {
            let Some(block) = block else {
                return Err(Error::new(Kind::Data, source.shown(), "the file holds no rows"));
            };
            let samples = block.rows().take(SAMPLE_ROWS).map(|(line, bytes)| (line, detect::sample_row(bytes)));
            let (mut rows, mut lines, mut broken): (Vec<Map<String, Json>>, Vec<u64>, _) = (vec![], vec![], None);
            for (line, sample) in samples {
                match sample {
                    Ok(row) => {
                        rows.push(row);
                        lines.push(line);
                    }
                    Err(error) => broken = broken.or(Some((line, error))),
                }
            }
            if let (Some((line, error)), []) = (broken, rows.as_slice()) {
                return Err(row_error(source, line, &error));
            }
            let line = lines.first().map_or(1, |line| *line);
            detect::detect(&rows, source).map_err(|e| row_error(source, line, &e))?
        }
    };
    let parser = Parser::new(format, source)
        .map_err(|problem| Error::new(Kind::Data, format!("{}, [fields]", source.shown()), problem))?;
    Ok((parser, evidence))
}

fn row_error(source: &Source, line: u64, error: &RowError) -> Error {
    let field = if error.field.is_empty() { String::new() } else { format!(", field \"{}\"", error.field) };
    let kind = if error.reason == Reason::TemplateError { Kind::Template } else { Kind::Data };
    Error::new(kind, format!("{}:{line}{field}", source.shown()), &error.problem)
        .wanted(error.wanted.clone())
        .remedy(error.remedy.clone())
}

/// Writes a kept row's documents, counts a dropped one, or stops.
fn record(
    spec: &Spec,
    writer: &mut Writer,
    counts: &mut Counts,
    index: usize,
    line: u64,
    outcome: Outcome,
) -> Result<()> {
    let source = &spec.sources[index];
    match outcome {
        Outcome::Kept(documents) => {
            counts.keep(&documents);
            for tokens in &documents {
                let document = Document {
                    ids: &tokens.ids,
                    trained: &tokens.trained,
                    weights: tokens.weights.as_deref(),
                    source: index as u32,
                    line,
                };
                writer.push(&document).map_err(|mut e| {
                    if e.place.is_empty() || e.kind == Kind::Tokenizer {
                        e.place = format!("{}:{line}", source.shown());
                    }
                    e
                })?;
            }
            Ok(())
        }
        Outcome::Dropped(error) if error.reason.is_error() && spec.on_error == OnError::Fail => {
            Err(row_error(source, line, &error))
        }
        Outcome::Dropped(error) => {
            let note = Note { place: format!("{}:{line}", source.shown()), text: error.problem.clone() };
            counts.drop_row(&error, note);
            Ok(())
        }
    }
}
