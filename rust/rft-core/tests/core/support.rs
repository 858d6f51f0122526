//! A small tokenizer, templates, and sets made from rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rft_core::prepare::{Observer, Prepared, prepare};
use rft_core::spec::Spec;
use rft_core::store::{Begun, Document, Layout, SHARD_BYTES, Store, Writer};
use serde_json::{Value, json};

pub const EOS: u32 = 256;
pub const START: u32 = 257;
pub const STOP: u32 = 258;
pub const BOS: u32 = 259;
pub const VOCAB: u32 = 300;

/// ChatML as many models ship it: no generation tags.
pub const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// The same with tags.
pub const TAGGED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}";

/// The characters that stand for bytes in byte-level vocabularies.
fn byte_chars() -> Vec<char> {
    let direct = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    let pick = |b: u32| {
        let code = if direct(b) {
            b
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap()
    };
    (0..256).map(pick).collect()
}

/// Byte-level BPE: an id a byte, four control tokens, and the merges given (each makes one more token).
pub fn tokenizer_json(merges: &[(&str, &str)]) -> String {
    let mut vocab: BTreeMap<String, u32> =
        byte_chars().into_iter().zip(0..).map(|(c, id)| (c.to_string(), id)).collect();
    for (next, (left, right)) in (260..).zip(merges) {
        vocab.insert(format!("{left}{right}"), next);
    }
    let special = [("<|endoftext|>", EOS), ("<|im_start|>", START), ("<|im_end|>", STOP), ("<s>", BOS)];
    vocab.extend(special.iter().map(|(content, id)| (content.to_string(), *id)));
    let added: Vec<Value> = special
        .iter()
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let merges: Vec<[&str; 2]> = merges.iter().map(|(left, right)| [*left, *right]).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges},
    })
    .to_string()
}

/// A temporary folder with a file of rows in it and a request for them.
pub struct Case {
    pub folder: tempfile::TempDir,
    pub spec: Value,
}

impl Case {
    pub fn new(rows: &[Value], template: &str) -> Case {
        let text: Vec<String> = rows.iter().map(Value::to_string).collect();
        Case::of_bytes("rows.jsonl", text.join("\n").as_bytes(), template)
    }

    pub fn of_bytes(name: &str, bytes: &[u8], template: &str) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let spec = json!({
            "format_version": 2,
            "sources": [{"path": path, "name": name}],
            "tokenizer": {"json": tokenizer_json(&[]), "special": {"eos_token": "<|endoftext|>", "bos_token": "<s>"},
                "add_bos": false, "eos_id": EOS, "bos_id": BOS, "vocab_size": VOCAB},
            "template": template,
            "threads": 2,
        });
        Case { folder, spec }
    }

    pub fn with(mut self, key: &str, value: Value) -> Case {
        self.spec[key] = value;
        self
    }

    pub fn with_source(mut self, key: &str, value: Value) -> Case {
        self.spec["sources"][0][key] = value;
        self
    }

    pub fn with_tokenizer(mut self, key: &str, value: Value) -> Case {
        self.spec["tokenizer"][key] = value;
        self
    }

    pub fn parsed(&self) -> Spec {
        Spec::parse(&self.spec.to_string()).unwrap()
    }

    pub fn place(&self) -> PathBuf {
        self.folder.path().join("set")
    }

    pub fn run(&self) -> rft_core::Result<Value> {
        self.prepared().map(|made| made.counts)
    }

    pub fn prepared(&self) -> rft_core::Result<Prepared> {
        prepare(&self.parsed(), &self.place(), None, &mut Silent)
    }

    /// Counts and set of a preparation that must work.
    pub fn made(&self) -> (Value, Store) {
        let counts = self.run().unwrap_or_else(|e| panic!("{e}"));
        (counts, Store::open(&self.place()).unwrap())
    }
}

pub struct Silent;

impl Observer for Silent {
    fn progress(&mut self, _: u64, _: u64, _: u64) -> rft_core::Result<()> {
        Ok(())
    }
}

pub fn chat(turns: &[(&str, &str)]) -> Value {
    let messages: Vec<Value> = turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    json!({"messages": messages})
}

/// Text of ids, control tokens spelled out.
pub fn text(ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    for id in ids {
        match *id {
            EOS => bytes.extend(b"<|endoftext|>"),
            START => bytes.extend(b"<|im_start|>"),
            STOP => bytes.extend(b"<|im_end|>"),
            BOS => bytes.extend(b"<s>"),
            id => bytes.push(u8::try_from(id).unwrap_or(b'#')),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Ids and bits of a document.
pub fn document(store: &Store, index: usize) -> (Vec<u32>, Vec<bool>) {
    let range = store.range(index);
    (store.ids(range.clone()).to_vec(), range.map(|token| store.is_trained(token)).collect())
}

/// Decoded runs of trained tokens.
pub fn trained_text(store: &Store, index: usize) -> Vec<String> {
    let (ids, bits) = document(store, index);
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for (at, (id, bit)) in ids.iter().zip(&bits).enumerate() {
        if *bit {
            if at == 0 || !bits[at - 1] {
                runs.push(Vec::new());
            }
            runs.last_mut().unwrap().push(*id);
        }
    }
    runs.iter().map(|run| text(run)).collect()
}

/// Bits as runs.
pub fn runs(bits: &[bool]) -> Vec<[u32; 2]> {
    let mut runs: Vec<[u32; 2]> = Vec::new();
    for (at, _) in (0u32..).zip(bits).filter(|(_, bit)| **bit) {
        match runs.last_mut() {
            Some(last) if last[1] == at => last[1] += 1,
            _ => runs.push([at, at + 1]),
        }
    }
    runs
}

/// A set with documents of given ids and bits; every other one has weights, if there are any.
pub fn set_of(place: &Path, documents: &[(Vec<u32>, Vec<bool>)], weights: Option<f32>) -> Store {
    set_of_shards(place, documents, weights, SHARD_BYTES)
}

/// The same in shards of about `shard_bytes`.
pub fn set_of_shards(
    place: &Path,
    documents: &[(Vec<u32>, Vec<bool>)],
    weights: Option<f32>,
    shard_bytes: u64,
) -> Store {
    let layout = Layout {
        key: format!("{:032x}", 0xabcu128 << 96 | 7),
        vocab_size: 1 << 16,
        tokenizer: 1,
        template: 2,
        unicode: "16.0.0".into(),
        shard_bytes,
    };
    let Begun::Write(mut writer, _) = Writer::begin(place, layout, &mut || Ok(())).unwrap() else {
        return Store::open(place).unwrap();
    };
    for (index, (ids, trained)) in documents.iter().enumerate() {
        let own: Option<Vec<f32>> = weights.filter(|_| index % 2 == 1).map(|w| vec![w; ids.len()]);
        let document =
            Document { ids, trained: &runs(trained), weights: own.as_deref(), source: 0, line: index as u64 + 1 };
        writer.push(&document).unwrap();
        if writer.is_full() {
            writer.cut(json!({"documents": index + 1})).unwrap();
        }
    }
    writer.finish(Vec::new(), json!({}), json!({})).unwrap();
    Store::open(place).unwrap()
}
