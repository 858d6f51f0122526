//! Looks at every byte of a set and says which part of which file is damaged.

use std::path::Path;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use super::layout::{BLOCK_BYTES, HEADER_BYTES};
use super::shard::Shard;
use super::{Manifest, Store};

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// What is wrong with it.
    pub problem: String,
}

/// What a look at a set found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verified {
    /// Content key; empty where the manifest cannot be read.
    pub key: String,
    /// Files looked at.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Documents, as the manifest says.
    pub documents: u64,
    /// Tokens, as the manifest says.
    pub tokens: u64,
    /// Everything that is wrong; empty for a set that is whole.
    pub problems: Vec<Problem>,
}

/// Checks the manifest's hash, and of each shard: length, hash of the whole file, header, footer, each section, each
/// block, the zeros between sections, and that all of it fits together. Whatever is wrong is a finding; a folder that is no
/// set, too.
pub fn verify(path: &Path) -> Verified {
    let (manifest, text) = match Manifest::read(path) {
        Ok(read) => read,
        Err(error) => {
            let problems = vec![Problem { file: error.place, problem: error.problem }];
            return Verified { files: 1, problems, ..Verified::default() };
        }
    };
    let mut found = Verified {
        key: manifest.key.clone(),
        files: 1 + manifest.shards.len(),
        bytes: text.len() as u64 + manifest.shards.iter().map(|record| record.bytes).sum::<u64>(),
        documents: manifest.documents,
        tokens: manifest.tokens,
        problems: Vec::new(),
    };
    for record in &manifest.shards {
        let file = path.join(&record.file);
        let mut tell = |problem: String| found.problems.push(Problem { file: file.display().to_string(), problem });
        match Shard::open(&file) {
            Err(error) => tell(error.problem),
            Ok(shard) => {
                let before = check_content(&shard, &mut tell);
                if !before && record.xxh3 != format!("{:016x}", shard.hash()) {
                    tell("its hash is not the one in the manifest".into());
                }
            }
        }
    }
    if found.problems.is_empty()
        && let Err(error) = Store::open_unhashed(path)
    {
        found.problems.push(Problem { file: error.place, problem: error.problem });
    }
    found
}

/// Sections, blocks and padding; whether anything was found.
fn check_content(shard: &Shard, tell: &mut impl FnMut(String)) -> bool {
    let (bytes, footer) = (shard.bytes(), shard.footer());
    let end = shard.header().footer_start as usize;
    let mut found = false;
    let mut padding = HEADER_BYTES;
    for entry in &footer.sections {
        let (start, stop) = (entry.start as usize, (entry.start + entry.bytes) as usize);
        if bytes[padding..start].iter().any(|byte| *byte != 0) {
            tell(format!("the padding before section {} is not zero", entry.name));
            found = true;
        }
        if xxh3_64(&bytes[start..stop]) != entry.xxh3 {
            tell(format!("section {} is not what was written", entry.name));
            found = true;
        }
        padding = stop;
    }
    if bytes[padding..end].iter().any(|byte| *byte != 0) {
        tell("the padding before the footer is not zero".into());
        found = true;
    }
    for (index, (block, hash)) in bytes[HEADER_BYTES..end].chunks(BLOCK_BYTES).zip(&footer.blocks).enumerate() {
        if xxh3_64(block) != *hash {
            let start = HEADER_BYTES + index * BLOCK_BYTES;
            tell(format!("bytes {start} to {} are not what was written", start + block.len()));
            found = true;
        }
    }
    found
}
