//! What is done to bytes from outside: each must give a result or an error, never a panic. The same functions are called by
//! the fuzzer (`fuzz_targets/`) and, on the corpus that it keeps, by `cargo test` (`tests/core/fuzz.rs`).

use std::collections::BTreeMap;
use std::path::Path;

use rft_core::example::Parser;
use rft_core::format::Format;
use rft_core::jsonl::Layout;
use rft_core::readers::{Reader, members, refusal};
use rft_core::spec::Source;
use rft_core::store::{HEADER_BYTES, Manifest, Shard, Store, verify};
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

/// The part of a shard's header that says something; zeros follow, and the header's own hash.
const SAID_BYTES: usize = 112;

/// A set of one shard: a byte of choices, what the header says, and what follows the header in the file. The choices are
/// which hashes and lengths are made to fit again, so that what lies behind the checks of these is reached too.
pub fn shard(data: &[u8]) {
    let Some((choices, content)) = data.split_first() else { return };
    let Some((said, rest)) = content.split_at_checked(SAID_BYTES) else { return };
    let mut file = said.to_vec();
    file.resize(HEADER_BYTES, 0);
    file.extend(rest);
    mend(&mut file, *choices);
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("data-00000.rft");
    if std::fs::write(&path, &file).is_err() {
        return;
    }
    look_at(&path);
    if let Some(text) = manifest(&file)
        && std::fs::write(folder.path().join("manifest.json"), text).is_ok()
    {
        let found = verify(folder.path());
        let opened = Store::open(folder.path());
        assert!(opened.is_ok() || !found.problems.is_empty(), "what is found whole can be opened");
    }
}

fn mend(file: &mut [u8], choices: u8) {
    let end = file.len();
    let found = file.windows(8).rposition(|window| window == b"RFTFOOT\0");
    if let Some(footer) = found.filter(|footer| end - footer >= 24) {
        let sections = u32::from_le_bytes([file[footer + 8], file[footer + 9], file[footer + 10], file[footer + 11]]);
        if choices & 1 != 0 {
            for entry in (0..sections.min(16) as usize).map(|index| footer + 16 + 64 * index) {
                let number = |at: usize| Some(u64::from_le_bytes(*file.get(at..)?.first_chunk()?) as usize);
                let place = number(entry + 24).zip(number(entry + 32)).filter(|_| entry + 64 <= end - 8);
                let content = place.and_then(|(start, bytes)| file.get(start..start.checked_add(bytes)?));
                if let Some(hash) = content.map(xxh3_64) {
                    file[entry + 48..entry + 56].copy_from_slice(&hash.to_le_bytes());
                }
            }
            let block = xxh3_64(&file[HEADER_BYTES..footer.max(HEADER_BYTES)]);
            file[end - 16..end - 8].copy_from_slice(&block.to_le_bytes());
        }
        if choices & 2 != 0 {
            let hash = xxh3_64(&file[footer..end - 8]);
            file[end - 8..].copy_from_slice(&hash.to_le_bytes());
        }
        if choices & 4 != 0 {
            file[48..56].copy_from_slice(&(footer as u64).to_le_bytes());
            file[56..64].copy_from_slice(&((end - footer) as u64).to_le_bytes());
        }
    }
    if choices & 8 != 0 {
        let hash = xxh3_64(&file[..HEADER_BYTES - 8]);
        file[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&hash.to_le_bytes());
    }
}

/// The manifest of a set that this file would be the only shard of.
fn manifest(file: &[u8]) -> Option<String> {
    let shard = |at: usize| u64::from_le_bytes(*file[at..].first_chunk().unwrap_or(&[0; 8]));
    let (documents, tokens, trained_tokens) = (shard(24), shard(32), shard(40));
    let given = json!({"format": "rft-store", "format_version": file[8], "documents": documents, "tokens": tokens,
        "key": file[64..80].iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        "trained_tokens": trained_tokens, "vocab_size": shard(16) >> 32, "token_bytes": file[12],
        "shards": [{"file": "data-00000.rft", "bytes": file.len(), "xxh3": format!("{:016x}", xxh3_64(file)),
            "documents": documents, "tokens": tokens, "trained_tokens": trained_tokens, "weights": shard(8) >> 63 == 1}],
        "sources": [{"path": "a.jsonl", "bytes": 1, "xxh3": "0"}], "counts": {}, "inputs": {}});
    serde_json::from_value::<Manifest>(given).ok()?.to_text().ok()
}

fn look_at(path: &Path) {
    let Ok(shard) = Shard::open(path) else { return };
    for document in 0..shard.num_documents().min(100) {
        let range = shard.range(document);
        if range.len() < 1 << 20 {
            assert_eq!(shard.ids(range.clone()).to_vec().len(), range.len());
            let runs: Vec<_> = shard.trained_runs(range.clone()).collect();
            let trained: usize = runs.iter().map(|run| run.len()).sum();
            assert_eq!(shard.count_trained(range.clone()) as usize, trained, "the runs are what is counted");
            let bits = shard.trained_bits(range.start);
            for token in 0..range.len().min(64) {
                let inside = runs.iter().any(|run| run.contains(&token));
                assert_eq!(bits >> token & 1 == 1, inside, "the bits are what the runs say");
            }
            let _ = (shard.weights(range), shard.origin(document));
        }
    }
}
