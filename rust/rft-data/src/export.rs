//! A prepared set as Parquet or Arrow: a row a document, as Hugging Face `datasets` and its trainers take it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use arrow_array::{ArrayRef, Float32Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use rft_core::plan::Plan;
use rft_core::store::Store;
use rft_core::{Error, Kind, Result};
use serde::Serialize;

use crate::Poll;

/// Rows of a batch: bounded in tokens too, since list offsets are 32 bits wide and memory should stay small.
const BATCH_DOCUMENTS: usize = 8192;
const BATCH_TOKENS: usize = 4 << 20;
/// The label of a token that is not trained on.
const NO_LABEL: i32 = -100;

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct Exported {
    /// The file.
    pub file: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Rows in it.
    pub documents: u64,
    /// Ids in it.
    pub tokens: u64,
}

/// A file that remembers what went wrong with it: the writers of both formats hand on a text.
struct Watched {
    file: File,
    failed: Arc<Mutex<Option<io::Error>>>,
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).inspect_err(|error| {
            let mut failed = self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            *failed = Some(io::Error::new(error.kind(), error.to_string()));
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

enum Output {
    Arrow(Box<FileWriter<Watched>>),
    Parquet(Box<ArrowWriter<Watched>>),
}

impl Output {
    fn write(&mut self, batch: &RecordBatch) -> std::result::Result<(), String> {
        match self {
            Output::Arrow(writer) => writer.write(batch).map_err(|e| e.to_string()),
            Output::Parquet(writer) => writer.write(batch).map_err(|e| e.to_string()),
        }
    }

    fn finish(self) -> std::result::Result<Watched, String> {
        match self {
            Output::Arrow(mut writer) => {
                writer.finish().map_err(|e| e.to_string())?;
                writer.into_inner().map_err(|e| e.to_string())
            }
            Output::Parquet(writer) => writer.into_inner().map_err(|e| e.to_string()),
        }
    }
}

/// Writes the set at `set` to `to`, under another name until it is whole.
///
/// # Errors
/// No set, a file that is there without `force`, an ending that is neither, a full disk.
pub fn export(set: &Path, to: &Path, force: bool, poll: Poll) -> Result<Exported> {
    check(to, force)?;
    let store = Store::open(set)?;
    store.verify()?;
    let rows = Rows { count: store.num_documents(), length: &|index| store.length(index) as usize };
    let schema = schema(store.has_weights());
    let file = write_to(to, &rows, &schema, &|range| batch(&store, range, &schema), poll)?;
    Ok(Exported { documents: store.num_documents() as u64, tokens: store.num_tokens(), ..file })
}

/// Writes the packs of a plan: input_ids, labels (those of a document's first token are -100; not shifted), weights where the
/// set has any, seq_lengths.
///
/// # Errors
/// As of [`export`].
pub fn export_packs(plan: &Plan, to: &Path, force: bool, poll: Poll) -> Result<Exported> {
    check(to, force)?;
    let rows = Rows { count: plan.num_packs(), length: &|index| plan.pack_tokens()[index] as usize };
    let schema = pack_schema(plan.store().has_weights());
    let file = write_to(to, &rows, &schema, &|range| pack_batch(plan, range, &schema), poll)?;
    Ok(Exported { documents: plan.num_packs() as u64, tokens: plan.num_tokens(), ..file })
}

/// What is written, a row at a time.
struct Rows<'a> {
    count: usize,
    /// Tokens of a row.
    length: &'a dyn Fn(usize) -> usize,
}

type Batch<'a> = &'a dyn Fn(std::ops::Range<usize>) -> std::result::Result<RecordBatch, ArrowError>;

fn ending_of(to: &Path) -> String {
    to.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}

fn check(to: &Path, force: bool) -> Result<()> {
    let (place, ending) = (to.display().to_string(), ending_of(to));
    if ending != "parquet" && ending != "arrow" {
        return Err(Error::new(Kind::Argument, place, "the ending says no format").wanted(".parquet or .arrow"));
    }
    if to.exists() && !force {
        return Err(Error::new(Kind::Argument, place, "the file is there already").remedy("--force writes over it"));
    }
    Ok(())
}

fn write_to(to: &Path, rows: &Rows, schema: &SchemaRef, batch: Batch, poll: Poll) -> Result<Exported> {
    let ending = ending_of(to);
    let temporary = to.with_extension(format!("{ending}.tmp-{}", std::process::id()));
    let written = write(rows, schema, batch, &temporary, ending == "parquet", poll).and_then(|()| {
        fs::rename(&temporary, to).map_err(|e| Error::io(to, "writing", &e))?;
        fs::metadata(to).map_err(|e| Error::io(to, "reading", &e))
    });
    match written {
        Ok(data) => Ok(Exported { file: to.to_path_buf(), bytes: data.len(), documents: 0, tokens: 0 }),
        Err(mut error) => {
            let _ = fs::remove_file(&temporary);
            if error.place == temporary.display().to_string() {
                error.place = to.display().to_string();
            }
            if error.kind == Kind::Full {
                error.remedy = "free some space, or write it to another disk (--to)".into();
            }
            Err(error)
        }
    }
}

fn write(rows: &Rows, schema: &SchemaRef, batch: Batch, path: &Path, parquet: bool, poll: Poll) -> Result<()> {
    let failure = Arc::new(Mutex::new(None));
    let file = File::create(path).map_err(|e| Error::io(path, "writing", &e))?;
    let file = Watched { file, failed: failure.clone() };
    let made = if parquet {
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            // Ids and labels have more values than a dictionary helps with.
            .set_dictionary_enabled(false)
            .set_column_dictionary_enabled("source".into(), true)
            .build();
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(|e| e.to_string());
        writer.map(|writer| Output::Parquet(Box::new(writer)))
    } else {
        FileWriter::try_new(file, schema).map(|writer| Output::Arrow(Box::new(writer))).map_err(|e| e.to_string())
    };
    let failed = |problem: String| {
        let failure = failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match failure.as_ref() {
            Some(error) => Error::io(path, "writing", error),
            None => Error::new(Kind::Io, path.display().to_string(), problem),
        }
    };
    let mut output = made.map_err(&failed)?;
    let mut first = 0;
    while first < rows.count {
        poll()?;
        let (mut end, mut tokens) = (first, 0);
        while end < rows.count && end - first < BATCH_DOCUMENTS && (tokens < BATCH_TOKENS || end == first) {
            tokens += (rows.length)(end);
            end += 1;
        }
        let batch = batch(first..end).map_err(|e| failed(e.to_string()))?;
        output.write(&batch).map_err(&failed)?;
        first = end;
    }
    let file = output.finish().map_err(&failed)?;
    file.file.sync_all().map_err(|e| Error::io(path, "writing", &e))
}

fn list_of(kind: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("item", kind, false)))
}

fn schema(weights: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new("input_ids", list_of(DataType::Int32), false),
        Field::new("labels", list_of(DataType::Int32), false),
    ];
    if weights {
        fields.push(Field::new("weights", list_of(DataType::Float32), false));
    }
    fields.push(Field::new("source", DataType::Utf8, false));
    fields.push(Field::new("line", DataType::Int64, false));
    Arc::new(Schema::new(fields))
}

fn pack_schema(weights: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new("input_ids", list_of(DataType::Int32), false),
        Field::new("labels", list_of(DataType::Int32), false),
    ];
    if weights {
        fields.push(Field::new("weights", list_of(DataType::Float32), false));
    }
    fields.push(Field::new("seq_lengths", list_of(DataType::Int32), false));
    Arc::new(Schema::new(fields))
}

fn pack_batch(
    plan: &Plan,
    packs: std::ops::Range<usize>,
    schema: &SchemaRef,
) -> std::result::Result<RecordBatch, ArrowError> {
    let store = plan.store();
    let (mut ids, mut labels, mut weights, mut lengths) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut tokens_of, mut pieces_of) = (Vec::new(), Vec::new());
    for pack in packs {
        let (first, before) = (ids.len(), lengths.len());
        for piece in plan.pack(pack) {
            let (range, start) = (plan.tokens_of(piece), ids.len());
            ids.extend(store.ids(range.clone()).to_vec().into_iter().map(|id| id as i32));
            labels.resize(ids.len(), NO_LABEL);
            for run in store.trained_runs(range.clone()) {
                // Nothing stands before a document's first token that could predict it.
                let run = start + run.start.max(1)..start + run.end;
                if !run.is_empty() {
                    labels[run.clone()].copy_from_slice(&ids[run]);
                }
            }
            if store.has_weights() {
                match store.weights(range) {
                    Some(own) => weights.extend(own.iter().map(|weight| f32::from_le_bytes(*weight))),
                    None => weights.resize(ids.len(), 1.0),
                }
            }
            lengths.push(piece.length as i32);
        }
        tokens_of.push(ids.len() - first);
        pieces_of.push(lengths.len() - before);
    }
    let list = |kind: DataType, of: &[usize], values: ArrayRef| -> ArrayRef {
        let offsets = OffsetBuffer::from_lengths(of.iter().copied());
        Arc::new(ListArray::new(Arc::new(Field::new("item", kind, false)), offsets, values, None))
    };
    let mut columns = vec![
        list(DataType::Int32, &tokens_of, Arc::new(Int32Array::from(ids))),
        list(DataType::Int32, &tokens_of, Arc::new(Int32Array::from(labels))),
    ];
    if store.has_weights() {
        columns.push(list(DataType::Float32, &tokens_of, Arc::new(Float32Array::from(weights))));
    }
    columns.push(list(DataType::Int32, &pieces_of, Arc::new(Int32Array::from(lengths))));
    RecordBatch::try_new(schema.clone(), columns)
}

fn batch(
    store: &Store,
    documents: std::ops::Range<usize>,
    schema: &SchemaRef,
) -> std::result::Result<RecordBatch, ArrowError> {
    let (mut ids, mut labels, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let (mut lengths, mut sources, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    for document in documents {
        let range = store.range(document);
        let start = ids.len();
        // Ids are below 2^31: no vocabulary comes near.
        ids.extend(store.ids(range.clone()).to_vec().into_iter().map(|id| id as i32));
        labels.resize(ids.len(), NO_LABEL);
        for run in store.trained_runs(range.clone()) {
            let run = start + run.start..start + run.end;
            labels[run.clone()].copy_from_slice(&ids[run]);
        }
        if store.has_weights() {
            match store.weights(range.clone()) {
                Some(own) => weights.extend(own.iter().map(|weight| f32::from_le_bytes(*weight))),
                None => weights.resize(ids.len(), 1.0),
            }
        }
        lengths.push(range.len());
        let (source, line) = store.origin(document);
        sources.push(source);
        lines.push(line as i64);
    }
    let list = |kind: DataType, values: ArrayRef| -> ArrayRef {
        let offsets = OffsetBuffer::from_lengths(lengths.iter().copied());
        Arc::new(ListArray::new(Arc::new(Field::new("item", kind, false)), offsets, values, None))
    };
    let mut columns = vec![
        list(DataType::Int32, Arc::new(Int32Array::from(ids))),
        list(DataType::Int32, Arc::new(Int32Array::from(labels))),
    ];
    if store.has_weights() {
        columns.push(list(DataType::Float32, Arc::new(Float32Array::from(weights))));
    }
    columns.push(Arc::new(StringArray::from(sources)));
    columns.push(Arc::new(Int64Array::from(lines)));
    RecordBatch::try_new(schema.clone(), columns)
}
