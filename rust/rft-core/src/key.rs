//! The content key of a prepared set: everything that decides what is written, and nothing else.

use serde_json::{Value, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::error::{Error, Kind, Result};
use crate::readers;
use crate::spec::{FORMAT_VERSION, Source, Spec};
use crate::tokenizer::unicode::Version;

/// Version of the code that turns rows into tokens: raised when the same input gives other tokens or masks.
const CODE_VERSION: u32 = 3;

/// xxh3-64 as 16 hex digits.
pub fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// The hash of a source's file: the caller's, or taken here.
fn source_hash(source: &Source) -> Result<String> {
    match &source.xxh3 {
        Some(hash) => Ok(hash.clone()),
        None => readers::hash(source).map(|(hash, _)| hex(hash)),
    }
}

/// What goes into the key, one entry an input. Paths are not part of it: the same data elsewhere is the same data.
pub fn inputs(spec: &Spec, hashes: &[String]) -> Value {
    let sources: Vec<Value> = spec
        .sources
        .iter()
        .zip(hashes)
        .map(|(source, hash)| {
            json!({
                "content": hash,
                "read_as": readers::read_as(source),
                "format": source.format,
                "fields": source.fields,
                "roles": source.roles,
                "set": source.set,
                "weight": source.weight,
                "max_rows": source.max_rows,
            })
        })
        .collect();
    let tokenizer = &spec.tokenizer;
    let mut inputs = json!({
        "format_version": FORMAT_VERSION,
        "code_version": CODE_VERSION,
        "sources": sources,
        "tokenizer": hex(xxh3_64(tokenizer.json.as_bytes())),
        "special": tokenizer.special,
        "add_bos": tokenizer.add_bos,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id,
        "vocab_size": tokenizer.vocab_size,
        "template": spec.template.as_ref().map(|text| hex(xxh3_64(text.as_bytes()))),
        "renderer": spec.renderer,
        "train_on": spec.train_on,
        "thinking": spec.thinking,
        "end_of_turn": spec.end_of_turn,
        "on_error": spec.on_error,
        "control_tokens": spec.control_tokens,
        "holdout": spec.holdout,
        "dedup": spec.dedup,
        // Another seed is another set only where something is chosen by it.
        "seed": spec.sources.iter().any(|source| source.weight.fract() != 0.0).then_some(spec.seed),
        "shard_bytes": spec.shard_bytes,
    });
    if tokenizer.unicode != Version::default() {
        inputs["unicode"] = tokenizer.unicode.name().into();
    }
    if spec.interleave && spec.sources.iter().any(|source| source.set != spec.sources[0].set) {
        inputs["interleave"] = true.into();
    }
    inputs
}

/// The key of given inputs: 32 hex digits.
pub fn of_inputs(inputs: &Value) -> String {
    format!("{:032x}", xxh3_128(inputs.to_string().as_bytes()))
}

/// The hashes of all files; reads those that the caller gave none for.
pub fn hashes(spec: &Spec) -> Result<Vec<String>> {
    spec.sources.iter().map(source_hash).collect()
}

/// Key and inputs of a request; reads the files.
pub fn of_spec(spec: &Spec) -> Result<(String, Value)> {
    let inputs = inputs(spec, &hashes(spec)?);
    Ok((of_inputs(&inputs), inputs))
}

/// The hash that was found while reading must be the one in the key.
pub fn check(source: &Source, stated: &str, found: &str) -> Result<()> {
    if stated == found {
        return Ok(());
    }
    Err(Error::new(Kind::Data, source.shown(), "the file changed while it was read")
        .remedy("prepare again when nothing writes to it"))
}
