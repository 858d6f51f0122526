//! Arrow IPC: streams (the cache files of `datasets` among them) and files, which are a stream between two marks.
//!
//! Read front to back, so packed files and members of archives go the same way. Only wanted columns are decoded.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::FileDecoder;
use arrow_ipc::{Block, MessageHeader, root_as_message};

use super::stream::Stream;
use super::{Batches, Columns, guarded};
use crate::error::{Error, Result};

pub(super) const FILE_MAGIC: &[u8] = b"ARROW1";
/// Before each message of a stream.
pub(super) const MESSAGE_MAGIC: &[u8] = &[0xff; 4];
/// Metadata of a message: a schema of some thousand columns takes less than one MiB.
const MOST_METADATA: u32 = 1 << 28;

/// A stream with its schema read.
pub(super) struct ArrowStream {
    path: PathBuf,
    shown: String,
    input: Stream,
    decoder: FileDecoder,
    names: Vec<String>,
    given: u64,
}

/// A message with its body: `bytes` as the decoder wants them, `metadata` bytes before the body.
struct Whole {
    kind: MessageHeader,
    bytes: Vec<u8>,
    metadata: i32,
    body: i64,
}

impl ArrowStream {
    pub(super) fn open(mut input: Stream, path: &Path, shown: &str) -> Result<ArrowStream> {
        let is_file = input.head().starts_with(FILE_MAGIC);
        let first = guarded(shown, "Arrow", || {
            if is_file {
                take(&mut input, 8, &mut Vec::new())?;
            }
            let mut size = next_u32(&mut input)?;
            // A file may fill up to 64 bytes before its first message.
            for _ in 0..14 {
                if !is_file || size != Some(0) {
                    break;
                }
                size = next_u32(&mut input)?;
            }
            message_of(size, &mut input)
        })?;
        let (decoder, names) = guarded(shown, "Arrow", || {
            let first = first.as_ref().ok_or("it holds no schema")?;
            let message = root_as_message(&first.bytes[8..]).map_err(|e| e.to_string())?;
            let schema = message.header_as_schema().ok_or("it does not begin with a schema")?;
            let schema = Arc::new(fb_to_schema(schema));
            let names = schema.fields().iter().map(|field| field.name().clone()).collect();
            Ok((FileDecoder::new(schema, message.version()), names))
        })?;
        Ok(ArrowStream { path: path.to_path_buf(), shown: shown.to_string(), input, decoder, names, given: 0 })
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    pub(super) fn project(mut self, columns: &Columns) -> ArrowStream {
        let wanted = (0..self.names.len()).filter(|index| columns.wants(&self.names[*index])).collect();
        self.decoder = self.decoder.with_projection(wanted);
        self
    }
}

impl Batches for ArrowStream {
    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        let place = format!("{}:{}", self.shown, self.given + 1);
        let (input, decoder) = (&mut self.input, &mut self.decoder);
        let batch = guarded(&place, "Arrow", || {
            while let Some(Whole { kind, bytes, metadata, body }) = next_message(input)? {
                let block = Block::new(0, metadata, body);
                let buffer = Buffer::from_vec(bytes);
                match kind {
                    MessageHeader::RecordBatch => {
                        let batch = decoder.read_record_batch(&block, &buffer).map_err(|e| e.to_string())?;
                        if batch.is_some() {
                            return Ok(batch);
                        }
                    }
                    MessageHeader::DictionaryBatch => {
                        decoder.read_dictionary(&block, &buffer).map_err(|e| e.to_string())?;
                    }
                    other => return Err(format!("a message of kind {other:?} among the rows")),
                }
            }
            Ok(None)
        })?;
        self.given += batch.as_ref().map_or(0, |batch| batch.num_rows() as u64);
        Ok(batch)
    }

    fn progress(&self) -> u64 {
        self.input.bytes_read()
    }

    fn bytes_taken(&self) -> u64 {
        self.input.bytes_read()
    }

    fn finish(self: Box<Self>) -> Result<(u64, u64)> {
        self.input.finish().map_err(|e| Error::io(&self.path, "reading", &e))
    }
}

/// The next message, none at the end of the stream. Memory grows with what is there, not with what is promised.
fn next_message(input: &mut Stream) -> std::result::Result<Option<Whole>, String> {
    let size = next_u32(input)?;
    message_of(size, input)
}

/// The message that begins with this word.
fn message_of(first: Option<u32>, input: &mut Stream) -> std::result::Result<Option<Whole>, String> {
    let Some(mut size) = first else { return Ok(None) };
    if size == u32::MAX {
        size = next_u32(input)?.ok_or("it is cut short")?;
    }
    if size == 0 {
        return Ok(None);
    }
    if size > MOST_METADATA {
        return Err(format!("a message of {size} bytes of metadata"));
    }
    let mut bytes = Vec::with_capacity(8 + size.min(1 << 20) as usize);
    bytes.extend_from_slice(MESSAGE_MAGIC);
    bytes.extend_from_slice(&size.to_le_bytes());
    take(input, u64::from(size), &mut bytes)?;
    let message = root_as_message(&bytes[8..]).map_err(|e| e.to_string())?;
    let (kind, body) = (message.header_type(), message.bodyLength());
    let length = u64::try_from(body).map_err(|_| format!("a message of {body} bytes"))?;
    take(input, length, &mut bytes)?;
    Ok(Some(Whole { kind, bytes, metadata: size as i32 + 8, body }))
}

fn next_u32(input: &mut Stream) -> std::result::Result<Option<u32>, String> {
    let mut word = Vec::with_capacity(4);
    input.take(4).read_to_end(&mut word).map_err(|e: io::Error| e.to_string())?;
    match word.first_chunk::<4>() {
        Some(word) => Ok(Some(u32::from_le_bytes(*word))),
        None if word.is_empty() => Ok(None),
        None => Err("it is cut short".into()),
    }
}

fn take(input: &mut Stream, length: u64, bytes: &mut Vec<u8>) -> std::result::Result<(), String> {
    let found = input.take(length).read_to_end(bytes).map_err(|e| e.to_string())?;
    if (found as u64) < length { Err("it is cut short".into()) } else { Ok(()) }
}
