//! Prepared sets from the command line: arguments in, `rft-core` called, lines or JSON out.
//!
//! `rft-data` and `rft data` are both [`run`].

#![warn(missing_docs)]

mod export;
mod sets;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use rft_core::store::verify;
use rft_core::{Error, Kind, Result, visible};
use serde_json::json;

/// Called now and then by what takes long; its error ends it.
pub type Poll<'a> = &'a dyn Fn() -> Result<()>;

#[derive(Parser)]
#[command(disable_help_subcommand = true, version, about = "Prepared sets: list, verify, export, remove.")]
#[command(after_help = "A SET is the folder of a prepared set, or its key, or the beginning of its key.\n\
Exit codes: 0 done; 1 failed, or a set is damaged; 2 wrong arguments, or no such set.")]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the prepared sets: documents, tokens, size, when each was last used, and what they were made from
    Ls(Ls),
    /// Read every byte of sets and say which file, section and block is damaged
    Verify(Verify),
    /// Write a set as Parquet or Arrow: input_ids, labels (-100 = not trained on), source, line
    Export(Export),
    /// Remove what is of no use: sets of other formats, damaged ones, unfinished ones
    Prune(Prune),
}

/// Where sets are looked for.
#[derive(Args)]
struct Root {
    /// Folder of prepared sets (data.store) [default: $XDG_CACHE_HOME/rft/sets, else ~/.cache/rft/sets]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// JSON in place of lines
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Ls {
    #[command(flatten)]
    root: Root,
}

#[derive(Args)]
struct Verify {
    /// The sets; all of the store if none is named
    #[arg(value_name = "SET")]
    sets: Vec<String>,
    #[command(flatten)]
    root: Root,
}

#[derive(Args)]
struct Export {
    /// The set
    #[arg(value_name = "SET")]
    set: String,
    /// The file to write; its ending says how: .parquet, or .arrow (Arrow IPC file format)
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Write over a file that is there
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    root: Root,
}

#[derive(Args)]
struct Prune {
    /// Sets to remove whatever their state
    #[arg(value_name = "SET")]
    sets: Vec<String>,
    /// Also sets not used for this many days
    #[arg(long, value_name = "DAYS")]
    older_than: Option<f64>,
    /// Also the least recently used sets, until the others take no more than this: 500M, 20G, 1.5T
    #[arg(long, value_name = "SIZE", value_parser = sets::parse_size)]
    max_size: Option<u64>,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    root: Root,
}

/// Runs one command line (without the program's name) and returns the exit code.
pub fn run(program: &str, arguments: &[String], out: &mut dyn Write, err: &mut dyn Write, poll: Poll) -> u8 {
    let words = [program.to_string()].into_iter().chain(arguments.iter().cloned());
    let name: &'static str = if program == "rft data" { "rft data" } else { "rft-data" };
    let parsed = CommandLine::try_parse_from_named(name, words);
    let result = match parsed {
        Ok(line) => line.command.call(out, poll),
        Err(usage) => {
            let wrong = usage.use_stderr();
            let _ = if wrong { write!(err, "{}", usage.render()) } else { write!(out, "{}", usage.render()) };
            return if wrong { 2 } else { 0 };
        }
    };
    match result {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => {
            let text = visible(&error.to_string());
            let mut lines = text.lines();
            let _ = writeln!(err, "error  {}", lines.next().unwrap_or_default());
            for line in lines {
                let _ = writeln!(err, "       {line}");
            }
            if matches!(error.kind, Kind::Full | Kind::Io) { 1 } else { 2 }
        }
    }
}

impl CommandLine {
    /// Parses under the name by which help shall call the program.
    fn try_parse_from_named(
        name: &'static str,
        words: impl Iterator<Item = String>,
    ) -> std::result::Result<CommandLine, clap::Error> {
        use clap::{CommandFactory, FromArgMatches};
        let matches = CommandLine::command().name(name).bin_name(name).try_get_matches_from(words)?;
        CommandLine::from_arg_matches(&matches)
    }
}

impl Command {
    /// Whether all is well.
    fn call(self, out: &mut dyn Write, poll: Poll) -> Result<bool> {
        match self {
            Command::Ls(ls) => list(&ls, out),
            Command::Verify(verify) => verify_sets(&verify, out, poll),
            Command::Export(export) => {
                let set = sets::find(&sets::root(export.root.store.as_deref())?, &export.set)?;
                let written = export::export(&set, &export.to, export.force, poll)?;
                if export.root.json {
                    put_json(out, &written)?;
                } else {
                    let rows = sets::with_commas(written.documents);
                    put(out, &format!("{}: {rows} documents, {}", export.to.display(), sets::size(written.bytes)))?;
                }
                Ok(true)
            }
            Command::Prune(prune) => prune_sets(&prune, out),
        }
    }
}

fn list(ls: &Ls, out: &mut dyn Write) -> Result<bool> {
    let found = sets::list(&sets::root(ls.root.store.as_deref())?)?;
    if ls.root.json {
        put_json(out, &found)?;
        return Ok(true);
    }
    for set in &found {
        put(out, &set.line())?;
    }
    if found.is_empty() {
        put(out, "no prepared sets")?;
    }
    Ok(true)
}

fn verify_sets(arguments: &Verify, out: &mut dyn Write, poll: Poll) -> Result<bool> {
    let root = || sets::root(arguments.root.store.as_deref());
    let places = if arguments.sets.is_empty() {
        let wanted = |set: &sets::Set| matches!(set.state, sets::State::Complete | sets::State::Damaged);
        sets::list(&root()?)?.into_iter().filter(wanted).map(|set| set.path).collect()
    } else {
        let find = |name: &String| match PathBuf::from(name) {
            // A folder that is no set is a finding, not a wrong argument.
            path if path.is_dir() => Ok(path),
            _ => sets::find(&root()?, name),
        };
        arguments.sets.iter().map(find).collect::<Result<Vec<_>>>()?
    };
    let (mut all, mut whole) = (Vec::new(), true);
    for place in places {
        poll()?;
        let found = verify(&place);
        let ok = found.problems.is_empty();
        whole &= ok;
        if arguments.root.json {
            let mut told = serde_json::to_value(&found).map_err(|e| Error::new(Kind::Argument, "json", e))?;
            told["set"] = json!(place);
            told["ok"] = json!(ok);
            all.push(told);
        } else if ok {
            let (documents, bytes) = (sets::with_commas(found.documents), sets::size(found.bytes));
            put(out, &format!("ok       {}: {documents} documents, {bytes} read", place.display()))?;
        } else {
            for problem in &found.problems {
                put(out, &format!("damaged  {}: {}", problem.file, problem.problem))?;
            }
        }
    }
    if arguments.root.json {
        put_json(out, &all)?;
    }
    Ok(whole)
}

fn prune_sets(arguments: &Prune, out: &mut dyn Write) -> Result<bool> {
    let root = sets::root(arguments.root.store.as_deref())?;
    let named = arguments.sets.iter().map(|name| sets::find(&root, name)).collect::<Result<Vec<_>>>()?;
    let wishes = sets::Wishes { named, older_than: arguments.older_than, max_size: arguments.max_size };
    let removed = sets::prune(&root, &wishes, arguments.dry_run)?;
    if arguments.root.json {
        put_json(out, &removed)?;
        return Ok(true);
    }
    let verb = if arguments.dry_run { "would remove" } else { "removed" };
    for one in &removed {
        let done = if one.kept.is_empty() { verb.to_string() } else { format!("kept ({})", one.kept) };
        put(out, &format!("{done}  {}  {}  {}", one.path.display(), sets::size(one.bytes), one.reason))?;
    }
    let gone = removed.iter().filter(|one| one.kept.is_empty());
    let (count, bytes) = gone.fold((0, 0), |(count, bytes), one| (count + 1, bytes + one.bytes));
    put(out, &format!("{verb} {count}, {}", sets::size(bytes)))?;
    Ok(true)
}

fn put(out: &mut dyn Write, line: &str) -> Result<()> {
    writeln!(out, "{}", visible(line)).map_err(|e| Error::new(Kind::Io, "standard output", e))
}

fn put_json<T: serde::Serialize>(out: &mut dyn Write, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::new(Kind::Argument, "json", e))?;
    writeln!(out, "{text}").map_err(|e| Error::new(Kind::Io, "standard output", e)) // as it is: it has its own escapes
}
