//! What a config says of data: `[model] path, revision, add_tokens, unicode`, `[data]`, and `train.seed`. The same file, names, types and
//! defaults as `rft` takes (a test compares them with its schema); all other tables are left unread, and that is told.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rft_core::plan::{Overlong, Packing};
use rft_core::spec::{ControlPolicy, EndOfTurn, FormatChoice, OnError, Thinking, TrainOn};
use rft_core::tokenizer::unicode::Version;
use rft_core::{Error, Kind, Result};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];
/// Keys of `[model]` that decide ids.
const MODEL_KEYS: [&str; 4] = ["path", "revision", "add_tokens", "unicode"];

/// Of `[model]` what decides ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelTable {
    /// A directory with a tokenizer, or a hub id whose files are in the hub's cache.
    pub path: String,
    /// Branch, tag or commit of a hub id.
    #[serde(default)]
    pub revision: Option<String>,
    /// New tokens.
    #[serde(default)]
    pub add_tokens: Vec<String>,
    /// Unicode tables of the tokenizer's split pattern.
    #[serde(default)]
    pub unicode: Version,
}

/// `[[data.train]]` and `[[data.eval]]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTable {
    /// File, glob or directory.
    pub path: String,
    /// A function of Python's: refused here.
    #[serde(default)]
    pub rows: Option<String>,
    /// The kind of rows.
    #[serde(default)]
    pub format: FormatChoice,
    /// Field names, ours = theirs.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
    /// Role names, theirs = ours.
    #[serde(default, deserialize_with = "role_names")]
    pub roles: BTreeMap<String, String>,
    /// How often its rows are used.
    #[serde(default = "one")]
    pub weight: f64,
    /// Only so many of its rows.
    #[serde(default)]
    pub max_rows: Option<u64>,
}

/// `[data]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataTable {
    /// Data sets to train on.
    pub train: Vec<SourceTable>,
    /// Held-out data sets.
    #[serde(default)]
    pub eval: Vec<SourceTable>,
    /// Share of the training rows that is held out.
    #[serde(default)]
    pub eval_fraction: f64,
    /// Tokens of a pack.
    #[serde(default)]
    pub seq_len: Option<u32>,
    /// How documents share packs.
    #[serde(default = "stream", deserialize_with = "named::<Packing, _>")]
    pub packing: String,
    /// What becomes of longer documents.
    #[serde(default = "split", deserialize_with = "named::<Overlong, _>")]
    pub overlong: String,
    /// Over what is shuffled.
    #[serde(default)]
    pub shuffle: Shuffle,
    /// Not prepared ahead: refused here.
    #[serde(default)]
    pub streaming: bool,
    /// What a bad row does.
    #[serde(default)]
    pub on_error: OnError,
    /// `model`, a file, or a built-in name.
    #[serde(default = "model")]
    pub template: String,
    /// Which turns are trained on.
    #[serde(default, deserialize_with = "train_on")]
    pub train_on: TrainOn,
    /// What becomes of reasoning in earlier turns.
    #[serde(default)]
    pub thinking: Thinking,
    /// Whether the token that ends a turn is trained on.
    #[serde(default)]
    pub end_of_turn: EndOfTurn,
    /// Whether repeated documents are dropped.
    #[serde(default)]
    pub dedup: bool,
    /// What control tokens spelled in a row become.
    #[serde(default)]
    pub control_tokens: ControlPolicy,
    /// Disk for fetched files: nothing is fetched here.
    #[serde(default = "hundred")]
    pub cache_gb: f64,
    /// Whether `rows` may run code.
    #[serde(default)]
    pub allow_code: bool,
    /// Folder of prepared sets.
    #[serde(default)]
    pub store: Option<String>,
}

/// Over what is shuffled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shuffle {
    /// The whole set.
    #[default]
    Full,
    /// Windows of it.
    Window,
}

/// All that is read of a config.
#[derive(Clone, Debug, Serialize)]
pub struct Config {
    /// Of `[model]`.
    pub model: ModelTable,
    /// `[data]`.
    pub data: DataTable,
    /// `train.seed`.
    pub seed: u64,
    /// Tables and keys that are there and were not read.
    pub ignored: Vec<String>,
    /// Where relative paths count from.
    #[serde(skip)]
    pub folder: PathBuf,
}

fn one() -> f64 {
    1.0
}

fn hundred() -> f64 {
    100.0
}

fn stream() -> String {
    "stream".into()
}

fn split() -> String {
    "split".into()
}

fn model() -> String {
    "model".into()
}

fn named<'de, T: FromStr<Err = Error>, D: Deserializer<'de>>(from: D) -> std::result::Result<String, D::Error> {
    let name = String::deserialize(from)?;
    name.parse::<T>().map(|_| ()).map_err(|e| D::Error::custom(format!("{}; wanted: {}", e.problem, e.wanted)))?;
    Ok(name)
}

fn check_role<E: serde::de::Error>(role: &str) -> std::result::Result<(), E> {
    if ROLES.contains(&role) { Ok(()) } else { Err(E::custom(format!("{role:?} is no role: {}", ROLES.join(", ")))) }
}

fn role_names<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<BTreeMap<String, String>, D::Error> {
    let roles = BTreeMap::<String, String>::deserialize(from)?;
    roles.values().try_for_each(|role| check_role(role))?;
    Ok(roles)
}

fn train_on<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<TrainOn, D::Error> {
    let given = TrainOn::deserialize(from)?;
    if let TrainOn::Roles(roles) = &given {
        roles.iter().try_for_each(|role| check_role(role))?;
    }
    Ok(given)
}

/// Where a config comes from: a file, or flags.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// The TOML.
    pub file: Option<PathBuf>,
    /// `--model`.
    pub model: Option<String>,
    /// `--data`, in place of `[[data.train]]`.
    pub data: Vec<String>,
    /// `key=value`, in TOML.
    pub sets: Vec<String>,
}

impl Config {
    /// Reads what was given.
    ///
    /// # Errors
    /// No TOML; a key of `[data]` that is not known, of another type, or missing.
    pub fn read(given: &Given) -> Result<Config> {
        let (mut table, place, folder) = match &given.file {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "reading", &e))?;
                let table = text.trim_start_matches('\u{feff}').parse::<Table>();
                let table = table.map_err(|e| wrong(&path.display().to_string(), e.to_string().trim_end()))?;
                let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                (table, path.display().to_string(), folder.unwrap_or(Path::new(".")).to_path_buf())
            }
            None => (Table::new(), "arguments".to_string(), PathBuf::from(".")),
        };
        let here = std::env::current_dir().map_err(|e| Error::io(Path::new("."), "looking at", &e))?;
        let folder = here.join(folder);
        if let Some(model) = &given.model {
            let local = here.join(model);
            let path = if local.is_dir() { local.display().to_string() } else { model.clone() };
            put(&mut table, "model.path", Value::String(path))?;
        }
        if !given.data.is_empty() {
            let source = |path: &String| {
                let path = if path.contains("://") { path.clone() } else { here.join(path).display().to_string() };
                Value::Table(Table::from_iter([("path".to_string(), Value::String(path))]))
            };
            put(&mut table, "data.train", Value::Array(given.data.iter().map(source).collect()))?;
        }
        for text in &given.sets {
            let (key, value) = text.split_once('=').ok_or_else(|| wrong("--set", format!("{text:?} has no value")))?;
            let parsed = format!("value = {value}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
            put(&mut table, key.trim(), parsed.unwrap_or_else(|| Value::String(value.trim().into())))?;
        }
        Config::of_table(table, &place, folder)
    }

    fn of_table(mut table: Table, place: &str, folder: PathBuf) -> Result<Config> {
        let mut ignored = Vec::new();
        let mut model = take_table(&mut table, "model", place)?;
        for key in model.keys().filter(|key| !MODEL_KEYS.contains(&key.as_str())).cloned().collect::<Vec<_>>() {
            model.remove(&key);
            ignored.push(format!("model.{key}"));
        }
        let data = take_table(&mut table, "data", place)?;
        let seed = match table.get("train").and_then(|train| train.get("seed")) {
            None => 0,
            Some(Value::Integer(seed)) if *seed >= 0 => *seed as u64,
            Some(_) => return Err(wrong(&format!("{place}, train.seed"), "is no whole number of at least 0")),
        };
        ignored.extend(table.keys().filter(|name| *name != "train").map(|name| format!("[{name}]")));
        let of_train = table.get("train").and_then(Value::as_table).into_iter().flatten();
        ignored.extend(of_train.filter(|(name, _)| *name != "seed").map(|(name, _)| format!("train.{name}")));
        let config = Config {
            model: decoded(model, place, "[model]")?,
            data: decoded(data, place, "[data]")?,
            seed,
            ignored,
            folder,
        };
        config.check(place)?;
        Ok(config)
    }

    fn check(&self, place: &str) -> Result<()> {
        let data = &self.data;
        let bad = |key: &str, problem: &str| Err(wrong(&format!("{place}, {key}"), problem));
        if data.train.is_empty() {
            return bad("data.train", "names no data set");
        }
        if !(0.0..1.0).contains(&data.eval_fraction) {
            return bad("data.eval_fraction", "is not in [0, 1)");
        }
        if data.eval_fraction > 0.0 && !data.eval.is_empty() {
            return bad("data.eval_fraction", "and [[data.eval]] both say which rows are held out: keep one");
        }
        if data.seq_len.is_some_and(|length| !(2..=1 << 24).contains(&length)) {
            return bad("data.seq_len", "is not in 2..=2^24");
        }
        if data.cache_gb <= 0.0 || data.cache_gb.is_nan() {
            return bad("data.cache_gb", "is not above 0");
        }
        for source in data.train.iter().chain(&data.eval) {
            if !(source.weight > 0.0 && source.weight <= 1000.0) {
                return bad("weight", "is not above 0 and at most 1000");
            }
            if source.max_rows == Some(0) {
                return bad("max_rows", "starts at 1");
            }
        }
        Ok(())
    }

    /// A path of the config as it counts from its folder.
    pub fn path(&self, given: &str) -> PathBuf {
        let home = || std::env::var_os("HOME").map(PathBuf::from);
        match given.strip_prefix("~/").and_then(|rest| Some(home()?.join(rest))) {
            Some(path) => path,
            None => self.folder.join(given),
        }
    }
}

fn wrong(place: &str, problem: impl std::fmt::Display) -> Error {
    Error::new(Kind::Argument, place, problem)
}

fn take_table(table: &mut Table, name: &str, place: &str) -> Result<Table> {
    match table.remove(name) {
        Some(Value::Table(found)) => Ok(found),
        Some(_) => Err(wrong(&format!("{place}, {name}"), "is no table")),
        None => Ok(Table::new()),
    }
}

fn decoded<T: DeserializeOwned>(table: Table, place: &str, name: &str) -> Result<T> {
    Value::Table(table).try_into().map_err(|e: toml::de::Error| {
        let told = e.message().replace("missing field", "there is no key").replace("unknown field", "unknown key");
        let error = wrong(&format!("{place}, {name}"), told);
        match name {
            "[model]" => error
                .wanted("the model whose tokenizer the data is for")
                .remedy("give --model DIR, or a CONFIG that holds [model] path"),
            _ => error,
        }
    })
}

/// Sets a dotted key; a number goes into a list.
fn put(table: &mut Table, key: &str, value: Value) -> Result<()> {
    let missing = || wrong(&format!("--set {key}"), "goes through a value that is no table");
    let parts: Vec<&str> = key.split('.').collect();
    let Some((last, path)) = parts.split_last().filter(|(last, _)| !last.is_empty()) else {
        return Err(wrong("--set", "there is no key"));
    };
    let mut at = table;
    let mut path = path.iter();
    while let Some(part) = path.next() {
        let inner = at.entry(*part).or_insert_with(|| Value::Table(Table::new()));
        at = match inner {
            Value::Table(inner) => inner,
            Value::Array(items) => {
                let index = path.next().and_then(|part| part.parse::<usize>().ok());
                index.and_then(|index| items.get_mut(index)?.as_table_mut()).ok_or_else(missing)?
            }
            _ => return Err(missing()),
        };
    }
    at.insert((*last).into(), value);
    Ok(())
}
