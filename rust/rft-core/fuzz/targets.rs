//! What is done to bytes from outside: each must give a result or an error, never a panic. The same functions are called by
//! cargo-fuzz (`fuzz_targets/`) and, on a corpus made in the test and some thousand mutations of it, by `cargo test` (`tests/core/fuzz.rs`).

use std::collections::BTreeMap;
use std::path::Path;

use rft_core::example::Parser;
use rft_core::format::Format;
use rft_core::jsonl::Layout;
use rft_core::readers::{Reader, members, refusal};
use rft_core::spec::Source;
use rft_core::store::{HEADER_BYTES, Shard, verify};
use rft_core::template::Template;
use rft_core::tokenizer::Tokenizer;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

/// File names by which bytes are read in another way.
pub const NAMES: [&str; 7] = ["a.jsonl", "a.txt", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.zip"];
/// Formats as configs name them.
const FORMATS: [&str; 6] = ["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"];

/// A file of rows: the first byte chooses name and format, the rest is its content.
pub fn rows(data: &[u8]) {
    let Some((choice, content)) = data.split_first() else { return };
    let (name, format) =
        (NAMES[usize::from(*choice) % NAMES.len()], FORMATS[usize::from(*choice) / 16 % FORMATS.len()]);
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join(name);
    if std::fs::write(&path, content).is_err() {
        return;
    }
    let inside = match members(&path) {
        Ok(found) if name == "a.zip" => found.into_iter().take(4).map(|member| Some(member.name)).collect(),
        _ => vec![None],
    };
    for member in inside {
        let given = json!({"path": path, "member": member, "format": format});
        let Ok(source) = serde_json::from_value::<Source>(given) else { continue };
        read(&source);
    }
}

fn read(source: &Source) {
    let Ok(mut reader) = Reader::open(source) else { return };
    let parsers: Vec<Parser> =
        FORMATS.iter().filter_map(|name| Parser::new(Format::from_name(name)?, source).ok()).collect();
    let mut last = 0;
    while let Ok(Some(block)) = reader.next_block(50, 1 << 20) {
        for (line, bytes) in block.rows() {
            assert!(line >= last, "lines never fall"); // a lone CR ends a record of CSV, and no line
            last = line;
            for parser in &parsers {
                let parsed = parser.parse(bytes, reader.layout());
                // A line of text may begin with any byte; refused rows come from the readers of columns.
                let refused = reader.layout() != Layout::Text && refusal(bytes).is_some();
                assert!(!refused || parsed.is_err(), "a refused row is never kept");
            }
        }
    }
    let _ = reader.finish();
}

/// A tokenizer.json.
pub fn tokenizer(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(tokenizer) = Tokenizer::new(text) {
        for sample in ["", "Hello, world! <|end|> 123", "é\u{301} 日本 😀\n\t  x", "\0\u{ffff}"] {
            let _ = tokenizer.encode(sample);
            let _ = tokenizer.encode_text(sample);
        }
    }
}

/// A chat template, then 0xff, then a conversation as JSON.
pub fn template(data: &[u8]) {
    let mut parts = data.splitn(2, |byte| *byte == 0xff);
    let (Some(source), chat) = (parts.next(), parts.next().unwrap_or(b"")) else { return };
    let Ok(source) = std::str::from_utf8(source) else { return };
    let Ok(template) = Template::new(source, &BTreeMap::new()) else { return };
    let usual = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let chat = serde_json::from_slice(chat).unwrap_or(usual);
    for prompt in [false, true] {
        if let Ok(rendered) = template.render_json(&chat, prompt) {
            for (start, end) in rendered.spans {
                assert!(start <= end && rendered.text.get(start..end).is_some(), "spans are slices of the text");
            }
        }
    }
}

/// A shard of a prepared set. The first byte says whether header and footer get a fresh checksum, so that what lies behind
/// the checksums is reached too.
pub fn shard(data: &[u8]) {
    let Some((choice, content)) = data.split_first() else { return };
    let mut content = content.to_vec();
    if choice & 2 != 0 {
        seal_footer(&mut content);
    }
    if choice & 1 != 0 && content.len() >= HEADER_BYTES {
        let hash = xxh3_64(&content[..HEADER_BYTES - 8]);
        content[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&hash.to_le_bytes());
    }
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("data-00000.rft");
    if std::fs::write(&path, &content).is_ok() {
        look_at(&path);
        let _ = verify(folder.path());
    }
}

fn look_at(path: &Path) {
    let Ok(shard) = Shard::open(path) else { return };
    for document in 0..shard.num_documents().min(100) {
        let range = shard.range(document);
        if range.len() < 1 << 20 {
            assert_eq!(shard.ids(range.clone()).to_vec().len(), range.len());
            let trained: usize = shard.trained_runs(range.clone()).map(|run| run.len()).sum();
            assert!(trained <= range.len());
            let _ = (shard.weights(range), shard.origin(document));
        }
    }
}

/// The footer ends with its own checksum; the last bytes of the file are its.
fn seal_footer(content: &mut [u8]) {
    let Some(start) = content.windows(8).rposition(|window| window == b"RFTFOOT\0") else { return };
    let end = content.len();
    if end - start > 8 {
        let hash = xxh3_64(&content[start..end - 8]);
        content[end - 8..].copy_from_slice(&hash.to_le_bytes());
    }
}
