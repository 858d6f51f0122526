//! The manifest: what a set holds, with sizes and hashes, and a hash of itself at its end.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::MANIFEST;
use crate::error::{Error, Kind, Result};
use crate::spec::FORMAT_VERSION;

const SELF_HASH: &str = ",\n  \"self_xxh3\": \"";

/// A pretty-printed JSON object with the hash of its text as its last entry.
pub(super) fn sealed(json: &str) -> String {
    let body = json.strip_suffix("\n}").unwrap_or(json);
    format!("{body}{SELF_HASH}{:016x}\"\n}}\n", xxh3_64(body.as_bytes()))
}

/// Whether a text is as [`sealed`] wrote it, to the last byte.
pub(super) fn check_seal(text: &str) -> std::result::Result<(), &'static str> {
    let at = text.rfind(SELF_HASH).ok_or("cut short")?;
    let end = format!("{SELF_HASH}{:016x}\"\n}}\n", xxh3_64(&text.as_bytes()[..at]));
    if text[at..] == end { Ok(()) } else { Err("damaged: its hash is not that of its text") }
}

/// One shard of the set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// File name in the set's folder.
    pub file: String,
    /// Length of the file.
    pub bytes: u64,
    /// xxh3-64 of the file, 16 hex digits.
    pub xxh3: String,
    /// Documents in it.
    pub documents: u64,
    /// Tokens in it.
    pub tokens: u64,
    /// Tokens with a trained bit.
    pub trained_tokens: u64,
    /// Whether its tokens have weights of their own.
    pub weights: bool,
}

/// A file that the set was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Path as it was read.
    pub path: String,
    /// Length of the file.
    pub bytes: u64,
    /// xxh3-64 of the file, 16 hex digits.
    pub xxh3: String,
}

/// What a set holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always "rft-store".
    pub format: String,
    /// Version of the layout.
    pub format_version: u32,
    /// Content key.
    pub key: String,
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens with a trained bit.
    pub trained_tokens: u64,
    /// Ids are below this.
    pub vocab_size: u32,
    /// Bytes of a token id: 2 or 4.
    pub token_bytes: u32,
    /// The shards, in order.
    pub shards: Vec<ShardRecord>,
    /// What the set was made from; origins count these.
    pub sources: Vec<SourceRecord>,
    /// What was read, kept and dropped.
    pub counts: serde_json::Value,
    /// What the key is the hash of.
    pub inputs: serde_json::Value,
}

impl Manifest {
    /// As written to disk, with the hash of itself at the end.
    pub fn to_text(&self) -> Result<String> {
        let body = serde_json::to_string_pretty(self)
            .map_err(|e| Error::new(Kind::Store, MANIFEST, format!("cannot be written: {e}")))?;
        Ok(sealed(&body))
    }

    /// Reads and checks a set's manifest.
    pub fn read(folder: &Path) -> Result<(Manifest, String)> {
        let path = folder.join(MANIFEST);
        let bytes = fs::read(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(Kind::Store, folder.display().to_string(), "no prepared set here: the manifest is missing")
                    .remedy("prepare the data again: `rft prepare` writes the set, or `rft train` does it first")
            }
            _ => Error::io(&path, "reading", &e),
        })?;
        let text = String::from_utf8(bytes).map_err(|_| broken(&path, "the manifest is damaged: it is no text"))?;
        let manifest = Manifest::parse(&text, &path)?;
        Ok((manifest, text))
    }

    /// Whether a folder holds the manifest of a set of another format version: whole, and not for this build.
    pub fn has_other_version(folder: &Path) -> bool {
        let Ok(text) = fs::read_to_string(folder.join(MANIFEST)) else { return false };
        let version =
            |text: &str| serde_json::from_str::<serde_json::Value>(text).ok()?.get("format_version")?.as_u64();
        check_seal(&text).is_ok() && version(&text).is_some_and(|version| version != u64::from(FORMAT_VERSION))
    }

    fn parse(text: &str, path: &Path) -> Result<Manifest> {
        let broken = |problem: &str| broken(path, problem);
        check_seal(text).map_err(|problem| broken(&format!("the manifest is {problem}")))?;
        // The version first: a newer layout may have fields that this build does not know.
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|e| broken(&format!("the manifest is no JSON: {e}")))?;
        let version = value.get("format_version").and_then(serde_json::Value::as_u64);
        if version != Some(u64::from(FORMAT_VERSION)) {
            let version = version.map_or("unknown".to_string(), |version| version.to_string());
            return Err(broken(&format!("format version {version}, this build reads version {FORMAT_VERSION}")));
        }
        serde_json::from_value(value).map_err(|e| broken(&format!("the manifest is not complete: {e}")))
    }
}

fn broken(path: &Path, problem: &str) -> Error {
    Error::new(Kind::Store, path.display().to_string(), problem)
        .remedy("delete this prepared set; it is made again from the data")
}
