//! The folder of prepared sets: what is in it, and what may go.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rft_core::store::{Lock, MANIFEST, Manifest, PART};
use rft_core::{Error, Kind, Result};
use serde::Serialize;

/// Temporary files of a process that may still run are left alone for this long.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// `data.store`, or its default.
pub fn root(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        if !given.is_dir() {
            let problem = if given.exists() { "is no folder" } else { "does not exist" };
            return Err(Error::new(Kind::Argument, format!("--store {}", given.display()), problem));
        }
        return Ok(given.to_path_buf());
    }
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    let cache = cache
        .ok_or_else(|| Error::new(Kind::Argument, "--store", "not given, and there is no home folder to look in"))?;
    Ok(cache.join("rft").join("sets"))
}

/// The set of a path, a key or the beginning of one.
pub fn find(root: &Path, name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(name);
    if path.join(MANIFEST).is_file() {
        return Ok(path);
    }
    let found: Vec<PathBuf> = entries(root)?
        .into_iter()
        .filter(|entry| entry.is_dir() && name_of(entry).starts_with(name) && entry.join(MANIFEST).is_file())
        .collect();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] if !name.is_empty()
            && entries(root)?.iter().any(|entry| is_set_folder(entry) && name_of(entry).starts_with(name)) =>
        {
            Err(Error::new(Kind::Argument, name, "this set is not finished")
                .wanted("a prepared set")
                .remedy("prepare it again with the same config: it goes on behind what is there"))
        }
        [] => Err(Error::new(Kind::Argument, name, format!("no prepared set, here or in {}", root.display()))
            .wanted("the folder of a prepared set, or the beginning of its key")
            .remedy("`ls` shows the sets of a store; --store says where it is")),
        _ => Err(Error::new(Kind::Argument, name, format!("{} sets begin so in {}", found.len(), root.display()))
            .wanted("more digits of the key")),
    }
}

/// Whether a folder is called as sets are: by a key.
fn is_set_folder(path: &Path) -> bool {
    path.is_dir() && name_of(path).chars().all(|c| c.is_ascii_hexdigit())
}

/// A name in which nothing begins another line.
pub fn one_line(name: &str) -> String {
    name.replace('\n', "\\n").replace('\r', "\\r")
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn entries(root: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(root) {
        Ok(entries) => {
            let mut paths: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
            paths.sort();
            Ok(paths)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::io(root, "reading", &error)),
    }
}

/// What a folder in the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A set, as far as its manifest and the lengths of its files tell.
    Complete,
    /// Being written, or left by a run that was stopped.
    Unfinished,
    /// Of a format version that this build does not read.
    Older,
    /// Its manifest or its files are not what was written.
    Damaged,
}

/// A folder in the store.
#[derive(Clone, Debug, Serialize)]
pub struct Set {
    /// Content key; its name where the manifest cannot be read.
    pub key: String,
    /// Its folder.
    pub path: PathBuf,
    /// What it is.
    pub state: State,
    /// Documents in it.
    pub documents: u64,
    /// Tokens in it.
    pub tokens: u64,
    /// Tokens that are trained on.
    pub trained_tokens: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Seconds since it was last used.
    pub unused_seconds: u64,
    /// The files that it was made from.
    pub sources: Vec<String>,
}

impl Set {
    fn look(path: &Path) -> Set {
        let name = name_of(path);
        let bytes = files(path).iter().map(|(_, bytes)| bytes).sum();
        let used = fs::metadata(path).and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let unused = SystemTime::now().duration_since(used).unwrap_or_default().as_secs();
        let mut set = Set {
            key: name.trim_end_matches(PART).into(),
            path: path.to_path_buf(),
            state: State::Damaged,
            documents: 0,
            tokens: 0,
            trained_tokens: 0,
            bytes,
            unused_seconds: unused,
            sources: Vec::new(),
        };
        match Manifest::read(path) {
            Ok((manifest, _)) => {
                let whole = manifest
                    .shards
                    .iter()
                    .all(|shard| fs::metadata(path.join(&shard.file)).is_ok_and(|data| data.len() == shard.bytes));
                if whole {
                    set.state = State::Complete;
                }
                (set.documents, set.tokens) = (manifest.documents, manifest.tokens);
                set.trained_tokens = manifest.trained_tokens;
                set.sources = manifest.sources.iter().map(|source| source.path.clone()).collect();
                set.key = manifest.key;
            }
            Err(_) if Manifest::has_other_version(path) => set.state = State::Older,
            Err(_) => {}
        }
        if name.ends_with(PART) {
            set.state = State::Unfinished;
        }
        set
    }

    /// For people: key, numbers, age, sources.
    pub fn line(&self) -> String {
        let held = match self.state {
            State::Complete => {
                format!("{:>11} documents  {:>14} tokens", with_commas(self.documents), with_commas(self.tokens))
            }
            State::Unfinished => "unfinished".into(),
            State::Older => "of another format version".into(),
            State::Damaged => "damaged".into(),
        };
        let names: Vec<String> = self.sources.iter().map(|source| one_line(&name_of(Path::new(source)))).collect();
        let sources = match names.as_slice() {
            [] => String::new(),
            [one] => format!("  {one}"),
            [first, rest @ ..] => format!("  {first} and {} more", rest.len()),
        };
        let key = self.key.get(..12).unwrap_or(&self.key);
        format!("{key}  {held}  {:>9}  used {} ago{sources}", size(self.bytes), age(self.unused_seconds))
    }
}

/// Files of a folder with their lengths.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok().filter(|data| data.is_file())?.len())))
        .collect()
}

/// The sets of a store, finished or not.
pub fn list(root: &Path) -> Result<Vec<Set>> {
    let is_set = |path: &PathBuf| path.is_dir() && (path.join(MANIFEST).exists() || name_of(path).ends_with(PART));
    Ok(entries(root)?.iter().filter(|path| is_set(path)).map(|path| Set::look(path)).collect())
}

/// What shall go besides what is of no use.
pub struct Wishes {
    /// Sets, by their folders.
    pub named: Vec<PathBuf>,
    /// Sets not used for this many days.
    pub older_than: Option<f64>,
    /// Bytes that the others may take.
    pub max_size: Option<u64>,
}

/// Something that was removed, or would be.
#[derive(Clone, Debug, Serialize)]
pub struct Removed {
    /// What it was.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// Why.
    pub reason: String,
    /// Why it stays nevertheless; empty if it went.
    pub kept: String,
}

/// Removes what is of no use and what is wished. Sets that a process is writing stay. `max_size` counts what is left then.
pub fn prune(root: &Path, wishes: &Wishes, dry_run: bool) -> Result<Vec<Removed>> {
    let mut sets = list(root)?;
    // A set may be named by a folder that is elsewhere.
    let elsewhere = |path: &&PathBuf| !sets.iter().any(|set| same_place(path, &set.path));
    let more: Vec<Set> = wishes.named.iter().filter(elsewhere).map(|path| Set::look(path)).collect();
    sets.sort_by_key(|set| std::cmp::Reverse(set.unused_seconds));
    let reason = |set: &Set| {
        let days = set.unused_seconds as f64 / DAY.as_secs_f64();
        Some(match set.state {
            _ if wishes.named.iter().any(|path| same_place(path, &set.path)) => "as asked".to_string(),
            State::Unfinished => "unfinished".into(),
            State::Older => "of another format version".into(),
            State::Damaged => "damaged".into(),
            State::Complete if wishes.older_than.is_some_and(|most| days > most) => {
                format!("not used for {}", age(set.unused_seconds))
            }
            State::Complete => return None,
        })
    };
    let mut gone = Vec::new();
    let mut left = Vec::new();
    for set in sets.iter().chain(&more) {
        match reason(set) {
            Some(reason) => gone.push(remove_set(&set.path, set.bytes, reason, dry_run)?),
            None => left.push(set),
        }
    }
    // What goes anyway makes room first.
    let held: u64 = left.iter().map(|set| set.bytes).sum();
    let mut over = wishes.max_size.map_or(0, |most| held.saturating_sub(most));
    for set in left {
        if over == 0 {
            break;
        }
        let removed = remove_set(&set.path, set.bytes, "over --max-size".into(), dry_run)?;
        if removed.kept.is_empty() {
            over = over.saturating_sub(set.bytes);
        }
        gone.push(removed);
    }
    for path in entries(root)? {
        let name = name_of(&path);
        let old =
            fs::metadata(&path).and_then(|data| data.modified()).is_ok_and(|at| at.elapsed().is_ok_and(|t| t > DAY));
        if name.contains(".tmp-") && old {
            let bytes = match fs::metadata(&path) {
                Ok(data) if data.is_file() => data.len(),
                _ => files(&path).iter().map(|(_, bytes)| bytes).sum(),
            };
            gone.push(remove_set(&path, bytes, "left by a process that died".into(), dry_run)?);
        }
    }
    Ok(gone)
}

fn same_place(one: &Path, other: &Path) -> bool {
    matches!((fs::canonicalize(one), fs::canonicalize(other)), (Ok(one), Ok(other)) if one == other)
}

fn remove_set(path: &Path, bytes: u64, reason: String, dry_run: bool) -> Result<Removed> {
    let place = path.with_file_name(name_of(path).trim_end_matches(PART));
    let mut removed = Removed { path: path.to_path_buf(), bytes, reason, kept: String::new() };
    let Some(_lock) = Lock::try_take(&place)? else {
        removed.kept = "a process is writing it".into();
        return Ok(removed);
    };
    if !dry_run {
        let gone = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        gone.map_err(|e| Error::io(path, "removing it", &e))?;
    }
    Ok(removed)
}

/// `500M`, `20G`, `1.5T`, or bytes; units of 1000.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let text = text.trim();
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let factor = match unit.to_ascii_uppercase().trim_end_matches('B') {
        "" => 1e0,
        "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        _ => return Err(format!("{unit:?} is no unit: use K, M, G or T")),
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number >= 0.0 && number * factor < 1e18 => Ok((number * factor) as u64),
        _ => Err("not a size: 500M, 20G, 1.5T".into()),
    }
}

/// Days, from 0 on.
pub fn parse_days(text: &str) -> std::result::Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(days) if days >= 0.0 && days.is_finite() => Ok(days),
        _ => Err("not a number of days: 0.5, 30".into()),
    }
}

/// `1 row`, `1,200 rows`. `noun` takes an s.
pub fn counted(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", with_commas(number), if number == 1 { "" } else { "s" })
}

/// Bytes for people; units of 1000.
pub fn size(bytes: u64) -> String {
    for (unit, factor) in [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)] {
        if bytes as f64 >= factor {
            return format!("{:.1} {unit}", bytes as f64 / factor);
        }
    }
    format!("{bytes} B")
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// 1234567 -> 1,234,567.
pub fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(parse_size("500M"), Ok(500_000_000));
        assert_eq!(parse_size("1.5 tb"), Ok(1_500_000_000_000));
        assert_eq!(parse_size("17"), Ok(17));
        assert!(["nan", "-1", "inf", "x", ""].iter().all(|text| parse_days(text).is_err()));
        assert_eq!((parse_days("0"), parse_days(" 1.5")), (Ok(0.0), Ok(1.5)));
        assert_eq!([0, 1, 2000].map(|n| counted(n, "row")), ["0 rows", "1 row", "2,000 rows"]);
        assert!(["", "G", "-1G", "5X", "1e40", "nan"].iter().all(|text| parse_size(text).is_err()));
        assert_eq!((size(999), size(1500), size(2_000_000_000)), ("999 B".into(), "1.5 kB".into(), "2.0 GB".into()));
        assert_eq!((with_commas(7), with_commas(1_234_567)), ("7".into(), "1,234,567".into()));
    }
}
