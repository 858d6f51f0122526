//! What `prepare` is asked to do, as JSON from the caller.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, Kind, Result};
use crate::format::Format;
use crate::store::SHARD_BYTES;
use crate::tokenizer::unicode::Version;

/// Positions in a shard are 32 bits wide.
const MAX_SHARD_BYTES: u64 = 1 << 30;
/// More copies than this of a row are a mistake.
const MAX_WEIGHT: f64 = 1000.0;

/// Version of the on-disk format and of everything that decides what is written: part of every key.
pub const FORMAT_VERSION: u32 = 2;

/// The whole request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Must equal [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Files to read, in this order.
    pub sources: Vec<Source>,
    /// The tokenizer and what the model adds to it.
    pub tokenizer: TokenizerSpec,
    /// Chat template in Jinja, if there is one.
    #[serde(default)]
    pub template: Option<String>,
    /// Who renders it.
    #[serde(default)]
    pub renderer: RendererKind,
    /// Which turns are trained on.
    #[serde(default)]
    pub train_on: TrainOn,
    /// What becomes of reasoning in earlier turns that the template drops.
    #[serde(default)]
    pub thinking: Thinking,
    /// Whether the token that ends a turn is trained on.
    #[serde(default)]
    pub end_of_turn: EndOfTurn,
    /// What a bad row does.
    #[serde(default)]
    pub on_error: OnError,
    /// What control tokens spelled in a row become.
    #[serde(default)]
    pub control_tokens: ControlPolicy,
    /// Which side of a split by content hash is wanted.
    #[serde(default)]
    pub holdout: Option<Holdout>,
    /// Whether documents that were kept before are dropped.
    #[serde(default)]
    pub dedup: bool,
    /// Whether data sets are read side by side, each in proportion to its size; else one after another.
    #[serde(default)]
    pub interleave: bool,
    /// Seed of the choice of rows under a weight.
    #[serde(default)]
    pub seed: u64,
    /// Size at which a shard is closed.
    #[serde(default = "default_shard_bytes")]
    pub shard_bytes: u64,
    /// Threads; 0 = one for each core.
    #[serde(default)]
    pub threads: usize,
}

fn default_shard_bytes() -> u64 {
    SHARD_BYTES
}

fn default_weight() -> f64 {
    1.0
}

/// One file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Absolute path.
    pub path: String,
    /// A file inside the archive that `path` is.
    #[serde(default)]
    pub member: Option<String>,
    /// Where it has to be fetched from when its turn comes; `path` then only names it.
    #[serde(default)]
    pub remote: Option<Remote>,
    /// How messages call it; the path if left out.
    #[serde(default)]
    pub name: Option<String>,
    /// The kind of rows, or auto.
    #[serde(default)]
    pub format: FormatChoice,
    /// Field names, ours = theirs.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
    /// Role names, theirs = ours.
    #[serde(default)]
    pub roles: BTreeMap<String, String>,
    /// Files of one data set have the same number.
    #[serde(default)]
    pub set: u32,
    /// How often the data set's rows are used; of a fraction, that share of them is chosen.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Rows of the data set that are used at most: the first ones.
    #[serde(default)]
    pub max_rows: Option<u64>,
    /// xxh3-64 of the file's bytes as 16 hex digits, where the caller knows it; checked while reading.
    #[serde(default)]
    pub xxh3: Option<String>,
}

/// An object elsewhere, as it was when the request was made.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// `s3://`, `gs://`, `az://`, `https://`.
    pub url: String,
    /// Its length.
    pub bytes: u64,
    /// Its state as the store tells it; empty where it does not.
    #[serde(default)]
    pub etag: String,
    /// The folder that fetched files are kept in.
    pub cache: String,
    /// Bytes that this folder may hold.
    pub limit: u64,
}

impl Source {
    /// How often a row is used: the weight's whole part, and once more for the share of rows that its fraction says,
    /// chosen by the seed and the row's number in the data set.
    pub fn copies(&self, seed: u64, row: u64) -> u32 {
        let whole = self.weight.floor();
        let fraction = self.weight - whole;
        if fraction == 0.0 {
            return whole as u32;
        }
        let mut place = [0; 12];
        place[..4].copy_from_slice(&self.set.to_le_bytes());
        place[4..].copy_from_slice(&row.to_le_bytes());
        whole as u32 + u32::from(is_in_share(xxh3_64_with_seed(&place, seed), fraction))
    }

    /// The name of the file itself, whose ending may say what it is.
    pub fn file(&self) -> &str {
        self.member.as_deref().unwrap_or(&self.path)
    }

    /// The path, and the member's below it.
    pub fn place(&self) -> String {
        match &self.member {
            Some(member) => format!("{}/{member}", self.path),
            None => self.path.clone(),
        }
    }

    /// The name to show.
    pub fn shown(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.path)
    }
}

/// A format, or the wish to find it out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatChoice {
    /// Decided from the first rows.
    #[default]
    Auto,
    /// As named.
    Fixed(Format),
}

impl<'de> Deserialize<'de> for FormatChoice {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name == "auto" {
            return Ok(FormatChoice::Auto);
        }
        match Format::from_name(&name) {
            Some(format) => Ok(FormatChoice::Fixed(format)),
            None => Err(serde::de::Error::custom(format!("unknown format {name:?}"))),
        }
    }
}

impl Serialize for FormatChoice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            FormatChoice::Auto => "auto",
            FormatChoice::Fixed(format) => format.name(),
        })
    }
}

/// tokenizer.json and what the model adds to it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerSpec {
    /// Text of tokenizer.json.
    pub json: String,
    /// bos_token, eos_token, ... as the template sees them.
    #[serde(default)]
    pub special: BTreeMap<String, Option<String>>,
    /// Whether raw text starts with the begin-of-text token.
    #[serde(default)]
    pub add_bos: bool,
    /// End of text.
    pub eos_id: u32,
    /// Begin of text.
    #[serde(default)]
    pub bos_id: Option<u32>,
    /// Ids are below this.
    pub vocab_size: u32,
    /// Unicode tables of its split pattern, 16 or 17.
    #[serde(default)]
    pub unicode: Version,
}

/// Who renders chats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RendererKind {
    /// minijinja.
    #[default]
    Native,
    /// A function of the caller.
    Callback,
}

/// Which turns are trained on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrainOn {
    /// The turns of the assistant.
    #[default]
    Assistant,
    /// The last turn of the assistant.
    Last,
    /// Everything.
    All,
    /// The turns of these roles.
    Roles(Vec<String>),
}

impl<'de> Deserialize<'de> for TrainOn {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Given {
            Name(String),
            Roles(Vec<String>),
        }
        Ok(match Given::deserialize(deserializer)? {
            Given::Roles(roles) => TrainOn::Roles(roles),
            Given::Name(name) => match name.as_str() {
                "assistant" => TrainOn::Assistant,
                "last" => TrainOn::Last,
                "all" => TrainOn::All,
                _ => return Err(serde::de::Error::custom(format!("unknown train_on {name:?}"))),
            },
        })
    }
}

impl Serialize for TrainOn {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            TrainOn::Assistant => serializer.serialize_str("assistant"),
            TrainOn::Last => serializer.serialize_str("last"),
            TrainOn::All => serializer.serialize_str("all"),
            TrainOn::Roles(roles) => roles.serialize(serializer),
        }
    }
}

/// What becomes of reasoning in earlier turns that the template drops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Thinking {
    /// The chat becomes a document a turn, each with its own reasoning.
    #[default]
    Split,
    /// It is put back where it was.
    Keep,
    /// It is dropped, and counted.
    Template,
}

/// Whether the token that ends a turn is trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EndOfTurn {
    /// As the generation tags say; without tags it is.
    #[default]
    Auto,
    /// Also where the tags leave it out.
    Train,
    /// It is not.
    Mask,
}

/// What a bad row does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// Stops the preparation.
    #[default]
    Fail,
    /// Is counted and left out.
    Skip,
}

/// What control tokens spelled in a row become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlPolicy {
    /// Ordinary text.
    #[default]
    Text,
    /// Control tokens.
    Allow,
}

/// A split of the rows by content hash.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Holdout {
    /// Share of the rows that is held out, 0 <= fraction < 1.
    pub fraction: f64,
    /// Which side is wanted.
    pub part: Part,
}

/// A side of the split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Rows to train on.
    Train,
    /// Rows held out.
    Eval,
}

impl Holdout {
    /// Whether a row with this hash belongs to the wanted side.
    pub fn wants(&self, hash: u64) -> bool {
        is_in_share(hash, self.fraction) == (self.part == Part::Eval)
    }
}

/// Whether a hash, as a share of its range, lies below the fraction.
fn is_in_share(hash: u64, fraction: f64) -> bool {
    // 2^64 as f64
    (hash as f64) < fraction * 18_446_744_073_709_551_616.0
}

impl Spec {
    /// Threads to work with.
    pub fn num_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    /// Reads and checks a request.
    pub fn parse(json: &str) -> Result<Spec> {
        let bad = |problem: String| Error::new(Kind::Argument, "prepare", problem);
        let spec: Spec = serde_json::from_str(json).map_err(|e| bad(format!("the request is not valid: {e}")))?;
        if spec.format_version != FORMAT_VERSION {
            return Err(bad(format!("format_version is {}, this build writes {FORMAT_VERSION}", spec.format_version)));
        }
        if spec.sources.is_empty() {
            return Err(bad("no files to read".into()));
        }
        if spec.sources.len() > u32::MAX as usize {
            return Err(bad("more files than can be numbered".into()));
        }
        if !(1..=MAX_SHARD_BYTES).contains(&spec.shard_bytes) {
            return Err(bad(format!("shard_bytes {} is not in 1..={MAX_SHARD_BYTES}", spec.shard_bytes)));
        }
        if let Some(source) = spec.sources.iter().find(|source| !(source.weight >= 0.0 && source.weight <= MAX_WEIGHT))
        {
            return Err(bad(format!("weight {} is not in 0..={MAX_WEIGHT}", source.weight)));
        }
        if let Some(holdout) = &spec.holdout
            && !(0.0..1.0).contains(&holdout.fraction)
        {
            return Err(bad(format!("holdout fraction {} is not in [0, 1)", holdout.fraction)));
        }
        Ok(spec)
    }
}
