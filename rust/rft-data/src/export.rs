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
    let place = to.display().to_string();
    let ending = to.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if ending != "parquet" && ending != "arrow" {
        return Err(Error::new(Kind::Argument, place, "the ending says no format").wanted(".parquet or .arrow"));
    }
    if to.exists() && !force {
        return Err(Error::new(Kind::Argument, place, "the file is there already").remedy("--force writes over it"));
    }
    let store = Store::open(set)?;
    store.verify()?;
    let temporary = to.with_extension(format!("{ending}.tmp-{}", std::process::id()));
    let written = write(&store, &temporary, ending == "parquet", poll).and_then(|()| {
        fs::rename(&temporary, to).map_err(|e| Error::io(to, "writing", &e))?;
        fs::metadata(to).map_err(|e| Error::io(to, "reading", &e))
    });
    match written {
        Ok(data) => Ok(Exported {
            file: to.to_path_buf(),
            bytes: data.len(),
            documents: store.num_documents() as u64,
            tokens: store.num_tokens(),
        }),
        Err(error) => {
            let _ = fs::remove_file(&temporary);
            Err(error)
        }
    }
}

fn write(store: &Store, path: &Path, parquet: bool, poll: Poll) -> Result<()> {
    let schema = schema(store.has_weights());
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
        FileWriter::try_new(file, &schema).map(|writer| Output::Arrow(Box::new(writer))).map_err(|e| e.to_string())
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
    while first < store.num_documents() {
        poll()?;
        let (mut end, mut tokens) = (first, 0);
        while end < store.num_documents() && end - first < BATCH_DOCUMENTS && (tokens < BATCH_TOKENS || end == first) {
            tokens += store.length(end) as usize;
            end += 1;
        }
        let batch = batch(store, first..end, &schema).map_err(|e| failed(e.to_string()))?;
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
