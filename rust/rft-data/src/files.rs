//! From the paths of a config to the files that are read, by the rules of python/rft/data/sources.py: files, globs, folders,
//! members of archives. What has to be fetched, and rows from functions, are Python's.

use std::path::{Path, PathBuf};

use rft_core::readers::members;
use rft_core::{Error, Kind, Result};
use serde_json::{Value, json};

use crate::config::{Config, SourceTable};

const JSON: [&str; 9] =
    [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"];
const CSV: [&str; 6] = [".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst"];
const PARQUET: [&str; 1] = [".parquet"];
const ARROW: [&str; 6] = [".arrow", ".arrow.gz", ".arrow.zst", ".feather", ".feather.gz", ".feather.zst"];
const ARCHIVE: [&str; 5] = [".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst"];
const TEXT: [&str; 3] = [".txt", ".txt.gz", ".txt.zst"];
/// What `datasets` and the hub put beside data.
const OF_DATASETS: [&str; 3] = ["dataset_info.json", "dataset_infos.json", "state.json"];
const WANTED: &str =
    "JSON lines (.jsonl, .json), CSV, Parquet, Arrow or text (.txt), plain, .gz or .zst, or a .zip or .tar of these";

fn wrong(place: &str, problem: String) -> Error {
    Error::new(Kind::Data, place, problem)
}

/// The sources of a request: every file of every data set, in the order of the config and then of their names.
pub fn sources(config: &Config, tables: &[SourceTable], table: &str) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for (number, source) in tables.iter().enumerate() {
        let place = format!("{table}.{number}.path");
        if source.rows.is_some() {
            return Err(wrong(&format!("{table}.{number}.rows"), "rows from a function need Python".into())
                .remedy("use `rft prepare`, or write the rows to a file"));
        }
        let spec = |path: &Path, member: Option<&str>| {
            let name = member.map(|member| format!("{}/{member}", path.display()));
            json!({
                "path": path, "member": member, "name": name, "format": source.format, "fields": source.fields,
                "roles": source.roles, "set": number, "weight": source.weight, "max_rows": source.max_rows,
            })
        };
        for path in files(config, &source.path, &place)? {
            if !ends(&name_of(&path), &ARCHIVE) {
                found.push(spec(&path, None));
                continue;
            }
            let mut names: Vec<String> = members(&path)?.into_iter().map(|member| member.name).collect();
            names.sort();
            names.retain(|name| !hidden(Path::new(name)));
            if let Some(nested) = names.iter().find(|name| ends(name, &ARCHIVE)) {
                let problem = format!("{}: member {nested:?} is an archive itself", path.display());
                return Err(wrong(&place, problem).remedy("unpack the outer one"));
            }
            let chosen = of_one_kind(names, &path.display().to_string(), &place)?;
            found.extend(chosen.iter().map(|member| spec(&path, Some(member))));
        }
    }
    Ok(found)
}

fn files(config: &Config, given: &str, place: &str) -> Result<Vec<PathBuf>> {
    if let Some((scheme, _)) = given.split_once("://") {
        return Err(wrong(place, format!("{given}: this program reads only this disk, not {scheme}://"))
            .remedy("use `rft prepare`, which fetches; or download it"));
    }
    let path = config.path(given);
    let whole = |path: &Path| path.canonicalize().map_err(|e| Error::io(path, "looking at", &e));
    if path.is_dir() {
        return of_folder(&path, place);
    }
    if path.is_file() {
        return Ok(vec![whole(&path)?]);
    }
    if given.contains(['*', '?', '[']) {
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::default() };
        let matched = glob::glob_with(&path.to_string_lossy(), options)
            .map_err(|e| wrong(place, format!("{given} is no pattern: {e}")))?;
        let mut found: Vec<PathBuf> =
            matched.flatten().filter(|path| path.is_file()).map(|path| whole(&path)).collect::<Result<_>>()?;
        found.sort();
        if found.is_empty() {
            return Err(wrong(place, format!("{given} matches no file")).wanted(WANTED));
        }
        return Ok(found);
    }
    let problem = match std::fs::symlink_metadata(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => format!("cannot be looked at: {error}"),
        Err(_) => "does not exist".into(),
        Ok(found) if found.is_symlink() && !path.exists() => "is a link to what does not exist".into(),
        Ok(_) => "is no ordinary file and no folder".into(),
    };
    Err(wrong(place, format!("{} {problem}", path.display())).wanted(WANTED))
}

fn of_folder(folder: &Path, place: &str) -> Result<Vec<PathBuf>> {
    if folder.join("dataset_dict.json").is_file() {
        return Err(
            wrong(place, format!("{} holds several splits", folder.display())).remedy("name one of its folders")
        );
    }
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).map_err(|e| Error::io(&next, "reading", &e))? {
            let path = entry.map_err(|e| Error::io(&next, "reading", &e))?.path();
            if hidden(path.strip_prefix(folder).unwrap_or(&path)) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.is_file() {
                found.push(path.canonicalize().map_err(|e| Error::io(&path, "looking at", &e))?);
            }
        }
    }
    found.sort();
    let names = found.iter().map(|path| path.display().to_string()).collect();
    Ok(of_one_kind(names, &folder.display().to_string(), place)?.into_iter().map(PathBuf::from).collect())
}

fn hidden(path: &Path) -> bool {
    path.components().any(|part| {
        let part = part.as_os_str().to_string_lossy();
        part.starts_with('.') || part == "__MACOSX"
    })
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn ends(name: &str, endings: &[&str]) -> bool {
    let name = name.to_lowercase();
    endings.iter().any(|ending| name.ends_with(ending))
}

/// A folder may hold one kind, so that nothing is read twice or left out unseen; texts count where there are no rows.
fn of_one_kind(mut names: Vec<String>, holder: &str, place: &str) -> Result<Vec<String>> {
    names.retain(|name| !OF_DATASETS.contains(&name_of(Path::new(name)).as_str()));
    let made = |name: &String| ends(name, &ARROW) && name_of(Path::new(name)).starts_with("cache-");
    if names.iter().any(|name| ends(name, &ARROW) && !made(name)) {
        // Results of `Dataset.map` beside the set itself.
        names.retain(|name| !made(name));
    }
    let kinds: [(&str, &[&str]); 5] =
        [("JSON", &JSON), ("CSV", &CSV), ("Parquet", &PARQUET), ("Arrow", &ARROW), ("archive", &ARCHIVE)];
    let mut found: Vec<(&str, Vec<String>)> = Vec::new();
    for (kind, endings) in kinds {
        let chosen: Vec<String> = names.iter().filter(|name| ends(name, endings)).cloned().collect();
        if !chosen.is_empty() {
            found.push((kind, chosen));
        }
    }
    if found.len() > 1 {
        let told: Vec<String> =
            found.iter().map(|(kind, chosen)| format!("{kind} ({})", name_of(Path::new(&chosen[0])))).collect();
        let problem = format!("{holder} holds files of several kinds: {}", told.join(" and "));
        return Err(wrong(place, problem).remedy("say which, with a pattern"));
    }
    if let Some((_, chosen)) = found.pop() {
        return Ok(chosen);
    }
    let texts: Vec<String> = names.into_iter().filter(|name| ends(name, &TEXT)).collect();
    if texts.is_empty() { Err(wrong(place, format!("{holder} holds no data files")).wanted(WANTED)) } else { Ok(texts) }
}
