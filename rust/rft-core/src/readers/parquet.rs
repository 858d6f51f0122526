//! Parquet: only the columns that are needed are read and hashed.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use xxhash_rust::xxh3::Xxh3;

use super::{Batches, Columns, guarded};
use crate::error::{Error, Kind, Result};

pub(super) const MAGIC: &[u8] = b"PAR1";
/// Rows of a batch take about this much.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ROWS: u64 = 1024;
/// Read ahead of a page's header, which has about a hundred bytes.
const HEADER_BYTES: usize = 512;

/// A file that counts what is read of it.
#[derive(Clone)]
struct Counted {
    file: Arc<File>,
    len: u64,
    read: Arc<AtomicU64>,
}

impl Counted {
    fn exactly(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it points past the end of the file"));
        }
        let mut buffer = vec![0; length];
        self.file.read_exact_at(&mut buffer, start)?;
        self.read.fetch_add(length as u64, Ordering::Relaxed);
        Ok(buffer)
    }
}

struct At {
    counted: Counted,
    at: u64,
}

impl Read for At {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.counted.file.read_at(buffer, self.at)?;
        self.at += n as u64;
        self.counted.read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

impl Length for Counted {
    fn len(&self) -> u64 {
        self.len
    }
}

impl ChunkReader for Counted {
    type T = BufReader<At>;

    fn get_read(&self, start: u64) -> std::result::Result<Self::T, ParquetError> {
        Ok(BufReader::with_capacity(HEADER_BYTES, At { counted: self.clone(), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> std::result::Result<Bytes, ParquetError> {
        Ok(self.exactly(start, length)?.into())
    }
}

/// A file with its footer read.
pub(super) struct ParquetFile {
    path: PathBuf,
    shown: String,
    input: Counted,
    metadata: ArrowReaderMetadata,
}

impl ParquetFile {
    pub(super) fn open(file: File, path: &Path, shown: &str) -> Result<ParquetFile> {
        let len = file.metadata().map_err(|e| Error::io(path, "reading", &e))?.len();
        let input = Counted { file: Arc::new(file), len, read: Arc::default() };
        let metadata = guarded(shown, "Parquet", || {
            let plain = ArrowReaderMetadata::load(&input, ArrowReaderOptions::new()).map_err(|e| e.to_string())?;
            // Texts as views into the pages: no copy, and no limit of 2 GiB for the texts of a batch.
            let viewed = Schema::new_with_metadata(views(plain.schema().fields()), plain.schema().metadata().clone());
            let options = ArrowReaderOptions::new().with_schema(Arc::new(viewed));
            Ok(ArrowReaderMetadata::try_new(plain.metadata().clone(), options).unwrap_or(plain))
        })?;
        Ok(ParquetFile { path: path.to_path_buf(), shown: shown.to_string(), input, metadata })
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.schema().fields().iter().map(|field| field.name().clone()).collect()
    }

    fn roots(&self, columns: &Columns) -> Vec<usize> {
        (0..self.metadata.schema().fields().len())
            .filter(|index| columns.wants(self.metadata.schema().field(*index).name()))
            .collect()
    }

    fn mask(&self, columns: &Columns) -> ProjectionMask {
        ProjectionMask::roots(self.metadata.parquet_schema(), self.roots(columns))
    }

    /// Where the wanted columns lie in the file: (begin and end of each chunk, their bytes when unpacked).
    fn chunks(&self, mask: &ProjectionMask) -> Result<(Vec<Range<u64>>, u64)> {
        let (mut ranges, mut unpacked) = (Vec::new(), 0u64);
        for group in self.metadata.metadata().row_groups() {
            for (leaf, chunk) in group.columns().iter().enumerate() {
                if !mask.leaf_included(leaf) {
                    continue;
                }
                let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
                let begin = u64::try_from(start.min(chunk.data_page_offset())).ok();
                let length = u64::try_from(chunk.compressed_size()).ok();
                let range = begin.zip(length).and_then(|(begin, length)| Some(begin..begin.checked_add(length)?));
                match range.filter(|range| range.end <= self.input.len) {
                    Some(range) => ranges.push(range),
                    None => return Err(damaged(&self.shown, "a column lies outside the file")),
                }
                unpacked = unpacked.saturating_add(chunk.uncompressed_size().max(0) as u64);
            }
        }
        Ok((ranges, unpacked))
    }

    /// xxh3-64 over the wanted columns and the footer, which has the places and sizes of all others; length of the file.
    pub(super) fn hash(&self, columns: &Columns) -> Result<(u64, u64)> {
        let (ranges, _) = self.chunks(&self.mask(columns))?;
        let read = |start, length| self.input.exactly(start, length).map_err(|e| Error::io(&self.path, "reading", &e));
        let mut hash = Xxh3::new();
        let tail = read(self.input.len.saturating_sub(8), 8)?;
        let footer = tail.first_chunk::<4>().map_or(0, |size| u64::from(u32::from_le_bytes(*size))) + 8;
        let footer = self.input.len.saturating_sub(footer)..self.input.len;
        for range in ranges.into_iter().chain([footer]) {
            let mut at = range.start;
            while at < range.end {
                let length = (range.end - at).min(1 << 20);
                hash.update(&read(at, length as usize)?);
                at += length;
            }
        }
        Ok((hash.digest(), self.input.len))
    }

    /// The rows of the wanted columns, in batches; `hashed` are those that count in the hash.
    pub(super) fn batches(self, columns: &Columns, hashed: Columns) -> Result<ParquetBatches> {
        let mask = self.mask(columns);
        let (_, unpacked) = self.chunks(&mask)?;
        let rows: i64 = self.metadata.metadata().row_groups().iter().map(|group| group.num_rows().max(0)).sum();
        let rows = rows.max(0) as u64;
        let batch_rows = (BATCH_BYTES / (unpacked / rows.max(1)).max(1)).clamp(1, BATCH_ROWS);
        let reader = guarded(&self.shown, "Parquet", || {
            ParquetRecordBatchReaderBuilder::new_with_metadata(self.input.clone(), self.metadata.clone())
                .with_projection(mask)
                .with_batch_size(batch_rows as usize)
                .build()
                .map_err(|e| e.to_string())
        })?;
        let schema = reader.schema();
        let none = schema.fields().is_empty();
        Ok(ParquetBatches { file: self, hashed, reader, rows, given: 0, none })
    }
}

/// A Parquet file's rows.
pub(super) struct ParquetBatches {
    file: ParquetFile,
    hashed: Columns,
    reader: ParquetRecordBatchReader,
    rows: u64,
    given: u64,
    /// No column is wanted.
    none: bool,
}

impl Batches for ParquetBatches {
    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if self.none {
            return Ok(None);
        }
        let (reader, given) = (&mut self.reader, self.given);
        let place = format!("{}:{}", self.file.shown, given + 1);
        let batch = guarded(&place, "Parquet", || reader.next().transpose().map_err(|e| e.to_string()))?;
        self.given += batch.as_ref().map_or(0, |batch| batch.num_rows() as u64);
        Ok(batch)
    }

    fn progress(&self) -> u64 {
        (self.file.input.len as f64 * self.given as f64 / self.rows.max(1) as f64) as u64
    }

    fn bytes_taken(&self) -> u64 {
        self.file.input.read.load(Ordering::Relaxed)
    }

    fn finish(self: Box<Self>) -> Result<(u64, u64)> {
        self.file.hash(&self.hashed)
    }
}

fn damaged(shown: &str, problem: &str) -> Error {
    Error::new(Kind::Data, shown, format!("the Parquet file is damaged: {problem}")).remedy("fetch or write it again")
}

/// The same fields with every text as a view.
fn views(fields: &Fields) -> Fields {
    fields.iter().map(view).collect()
}

fn view(field: &FieldRef) -> FieldRef {
    let kind = match field.data_type() {
        DataType::Utf8 => DataType::Utf8View,
        DataType::List(inner) => DataType::List(view(inner)),
        DataType::LargeList(inner) => DataType::LargeList(view(inner)),
        DataType::FixedSizeList(inner, size) => DataType::FixedSizeList(view(inner), *size),
        DataType::Struct(inner) => DataType::Struct(views(inner)),
        _ => return field.clone(),
    };
    Arc::new(Field::clone(field).with_data_type(kind))
}
