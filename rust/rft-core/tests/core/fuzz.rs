//! The fuzz targets on a small corpus and on mutations of it, for a second each: what cargo-fuzz does for longer.
//! `RFT_FUZZ_SECONDS` makes it longer.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::readers::{arrow_of, batch, gz, parquet_of, tar_of, texts, zip_of};
use crate::support::{CHATML, TAGGED, set_of, tokenizer_json};

#[path = "../../fuzz/targets.rs"]
mod targets;

/// xorshift64*, so that a failure comes again.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit.max(1)
    }
}

/// Pieces that mean something in one of the formats.
const PIECES: [&[u8]; 16] = [
    b"\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\"",
    b"\\ud800",
    b"{",
    b"[",
    b"}",
    b"]",
    b",",
    b"\n",
    b"\xef\xbb\xbf",
    b"{% generation %}",
    b"{{ messages }}",
    b"PAR1",
    b"-1e999",
];

fn mutated(seed: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(6) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 => {
                let piece = PIECES[random.below(PIECES.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            3 => {
                let end = at + random.below((bytes.len() - at).min(64) + 1);
                bytes.drain(at..end);
            }
            4 => {
                let from = random.below(other.len() + 1);
                let piece = &other[from..from + random.below((other.len() - from).min(64) + 1)];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn hold(corpus: &[Vec<u8>], target: fn(&[u8])) {
    let seconds = std::env::var("RFT_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (end, mut random) = (Instant::now() + Duration::from_secs(seconds), Random(0x9e37_79b9_7f4a_7c15));
    corpus.iter().for_each(|bytes| target(bytes));
    while Instant::now() < end {
        let (seed, other) = (random.below(corpus.len()), random.below(corpus.len()));
        let bytes = mutated(&corpus[seed], &corpus[other], &mut random);
        if let Err(panic) = std::panic::catch_unwind(|| target(&bytes)) {
            eprintln!("the input: {:?}", String::from_utf8_lossy(&bytes));
            std::panic::resume_unwind(panic);
        }
    }
}

fn chosen(choice: u8, content: &[u8]) -> Vec<u8> {
    [&[choice], content].concat()
}

#[test]
fn rows_of_any_bytes_are_read_or_refused() {
    let lines: &[u8] = b"{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": null}], \"tools\": \"[]\"}\n{\"text\": \"\\ud83d\\ude00\", \"loss_weight\": 1e3}\n\n{\"prompt\": \"a\", \"completion\": \"b\"}";
    let table =
        batch(vec![("text", texts(&["a".into(), "b\u{2028}".into()])), ("prompt", texts(&["".into(), "c".into()]))]);
    let parquet = parquet_of(&table, 1, parquet::basic::Compression::SNAPPY);
    let corpus = [
        chosen(0, lines),
        chosen(16, b"[{\"conversations\": [{\"from\": \"human\", \"value\": \"x\"}]},\n {\"instruction\": \"i\", \"output\": \"o\"}]"),
        chosen(0, &gz(lines)),
        chosen(1, b"a line\n\nanother"),
        chosen(2, b"text,loss_weight\r\n\"a, \"\"b\"\"\",1\r\nc,\"[1]\"\r\n"),
        chosen(3, b"prompt\tcompletion\na\tb\n"),
        chosen(4, &parquet),
        chosen(5, &arrow_of(&table, false)),
        chosen(5, &arrow_of(&table, true)),
        chosen(6, &zip_of(&[("a.jsonl", lines), ("b.parquet", &parquet)])),
        chosen(6, &tar_of(&[("a.jsonl", lines)])),
    ];
    hold(&corpus, targets::rows);
}

#[test]
fn a_tokenizer_of_any_bytes_is_loaded_or_refused() {
    let plain = tokenizer_json(&[("a", "b"), ("ab", "c")]);
    // Small enough that a mutation hits what matters.
    let small = json!({"version": "1.0", "added_tokens": [{"id": 2, "content": "<x>", "special": true, "single_word": false,
        "lstrip": true, "rstrip": true, "normalized": false}], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+|\\S+"}, "behavior": "Isolated", "invert": false},
        "post_processor": null, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<x>": 2, "ab": 3}, "merges": [["a", "b"]]}});
    hold(&[plain.into_bytes(), small.to_string().into_bytes()], targets::tokenizer);
}

#[test]
fn a_template_of_any_bytes_renders_or_fails() {
    let chat = b"\xff{\"messages\": [{\"role\": \"user\", \"content\": [1, {\"a\": null}]}], \"tools\": [{}]}";
    let rich = "{%- set ns = namespace(x=0) -%}{% for m in messages[::-1] if m.role != 'x' %}{{ m.content | tojson(indent=2) }}{{ m['content'].split('a')[0:2] | join(',') | trim }}{% set ns.x = ns.x + 1 %}{% if loop.index0 > 3 %}{% break %}{% endif %}{% endfor %}{{ raise_exception('no') if ns.x == 0 else ns.x // 2 }}{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{{ f('x' * 3) }}{{ strftime_now('%Y') }}";
    let corpus = [CHATML, TAGGED, rich].map(|text| [text.as_bytes(), chat].concat());
    hold(&corpus, targets::template);
}

#[test]
fn a_shard_of_any_bytes_opens_whole_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let documents =
        [(vec![1, 2, 3, 70], vec![false, true, true, false]), (vec![5], vec![true]), (vec![9; 30], vec![false; 30])];
    let mut corpus = Vec::new();
    for weights in [None, Some(0.5)] {
        let store = set_of(&folder.path().join(format!("{weights:?}")), &documents, weights);
        let shard = std::fs::read(store.shards()[0].path()).unwrap();
        corpus.extend((0..4).map(|choice| chosen(choice, &shard)));
    }
    hold(&corpus, targets::shard);
}
