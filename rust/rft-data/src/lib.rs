//! The data engine from the command line: arguments in, `rft-core` called, lines or JSON out.
//!
//! `rft-data` and `rft data` are both [`run`].

#![warn(missing_docs)]

mod config;
mod export;
mod files;
mod look;
mod make;
mod model;
mod sets;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use rft_core::store::{Store, verify};
use rft_core::{Error, Kind, Result, visible};
use serde_json::json;

/// Called now and then by what takes long; its error ends it.
pub type Poll<'a> = &'a dyn Fn() -> Result<()>;

const ABOUT: &str = "The data engine of rft: rows in, tokenised and masked sets out, for rft and for other trainers.";
const AFTER: &str = "A CONFIG is the TOML that `rft train` takes: [model] path, revision, add_tokens, unicode, [data] and train.seed are read, the other \
tables are not (and it says so). Flags do in its place: --model DIR --data FILE.\n\
A SET is the folder of a prepared set, or its key, or the beginning of its key.\n\n\
Exit codes: 0 done; 1 failed, or a set is damaged; 2 wrong arguments, rows or files, or no such set.";
const PREPARE: &str = "Read the rows of a config's data sets, render chats, tokenise, mask, and write a prepared set for each of train and eval. \
The set's folder is named by a hash of everything that decides its content, so it is found at once when nothing changed, by `rft train` too. \
A run that was stopped is taken up behind its last complete shard.\n\n\
What needs Python is refused by name: hub ids that are not in the hub's cache, GGUF vocabularies, remote paths, rows from functions, and \
templates that minijinja does not know all the words of. `rft prepare` does these, and compares both template engines first.\n\n\
Examples:\n  rft-data prepare chat.toml\n  rft-data prepare --model models/SmolLM2 --data 'chats/*.jsonl' --set data.on_error=skip\n  \
rft-data prepare chat.toml --set data.train.0.max_rows=1000 --json";
const PACK: &str = "Pack a prepared set's documents into rows of --seq-len tokens and tell how full they are; with --to write the packs: \
input_ids, labels (-100 where nothing is to be learned, the first token of each document among them; not shifted), seq_lengths (of the \
documents in it). The same arguments give the same packs everywhere, also in `rft train` and in rft.data.open.\n\n\
Examples:\n  rft-data pack 3fa2 --seq-len 4096\n  rft-data pack 3fa2 --seq-len 4096 --packing bfd --to packed.parquet";
const STATS: &str = "Tell what a prepared set holds: documents and tokens, a histogram of lengths, tokens and trained share of each file, rows by role, \
and how full each way of packing would be at --seq-len.";
const CAT: &str = "Show documents as text with what is trained on: in green on a terminal, between \u{27e6} and \u{27e7} elsewhere. \
The model (or config) says how ids become text; it must be the one that the set was prepared for.\n\n\
Examples:\n  rft-data cat 3fa2 --model models/SmolLM2\n  rft-data cat 3fa2 chat.toml --from 100 --count 5 --json";

#[derive(Parser)]
#[command(disable_help_subcommand = true, version, about = ABOUT, after_help = AFTER)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tokenise, mask and store the data of a config
    #[command(long_about = PREPARE)]
    Prepare(Prepare),
    /// Pack a set into rows of a length, and tell how full they are or write them
    #[command(long_about = PACK)]
    Pack(Pack),
    /// Tell what a set holds: lengths, tokens by file, rows by role, fill by way of packing
    #[command(long_about = STATS)]
    Stats(Stats),
    /// Show documents of a set as text, with what is trained on
    #[command(long_about = CAT)]
    Cat(CatArguments),
    /// Show the prepared sets: documents, tokens, size, when each was last used, and what they were made from
    Ls(Ls),
    /// Read every byte of sets and say which file, section and block is damaged
    Verify(Verify),
    /// Write a set as Parquet or Arrow: input_ids, labels (-100 = not trained on), source, line
    Export(Export),
    /// Remove what is of no use: sets of other formats, damaged ones, unfinished ones
    Prune(Prune),
    /// Show what is read of a config, with every default
    Config(ShowConfig),
    /// Write a completion script: `rft-data completions bash > /etc/bash_completion.d/rft-data`
    Completions(Completions),
}

/// Where the data and the model are told.
#[derive(Args)]
struct Told {
    /// The TOML that `rft train` takes
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Directory of the model, in place of model.path
    #[arg(long, value_name = "DIR")]
    model: Option<String>,
    /// A file, pattern or folder of rows, in place of [[data.train]]; several times for several data sets
    #[arg(long, value_name = "PATH")]
    data: Vec<String>,
    /// Change a value of the config: data.template=chatml, data.train.0.weight=2
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl Told {
    fn given(&self) -> config::Given {
        config::Given {
            file: self.config.clone(),
            model: self.model.clone(),
            data: self.data.clone(),
            sets: self.sets.clone(),
        }
    }

    fn read(&self) -> Result<config::Config> {
        config::Config::read(&self.given())
    }
}

#[derive(Args)]
struct Prepare {
    #[command(flatten)]
    told: Told,
    /// Folder of prepared sets, in place of data.store [default: $XDG_CACHE_HOME/rft/sets, else ~/.cache/rft/sets]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Threads; 0 = one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// JSON in place of lines
    #[arg(long)]
    json: bool,
}

/// How documents become packs.
#[derive(Args)]
struct Packing {
    /// Tokens of a pack
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    seq_len: u32,
    /// What happens to longer documents
    #[arg(long, default_value = "split", value_parser = ["split", "truncate", "drop", "error"])]
    overlong: String,
    /// Over what is shuffled
    #[arg(long, default_value = "full", value_parser = ["full", "window", "none"])]
    shuffle: String,
    /// Of the order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Of the order, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    epoch: u64,
}

impl Packing {
    fn options(&self, packing: &str) -> look::Options {
        look::Options {
            seq_len: self.seq_len,
            packing: packing.into(),
            overlong: self.overlong.clone(),
            shuffle: self.shuffle.clone(),
            seed: self.seed,
            epoch: self.epoch,
        }
    }
}

#[derive(Args)]
struct Pack {
    /// The set
    #[arg(value_name = "SET")]
    set: String,
    /// How documents share packs
    #[arg(long, default_value = "stream", value_parser = look::PACKINGS)]
    packing: String,
    #[command(flatten)]
    how: Packing,
    /// Write the packs; the ending says how: .parquet, or .arrow (Arrow IPC file format)
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Write over a file that is there
    #[arg(long, requires = "to")]
    force: bool,
    #[command(flatten)]
    root: Root,
}

#[derive(Args)]
struct Stats {
    /// The set
    #[arg(value_name = "SET")]
    set: String,
    #[command(flatten)]
    how: Packing,
    #[command(flatten)]
    root: Root,
}

#[derive(Args)]
struct CatArguments {
    /// The set
    #[arg(value_name = "SET")]
    set: String,
    #[command(flatten)]
    told: Told,
    /// The first document, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: usize,
    /// How many
    #[arg(long, value_name = "N", default_value_t = 3)]
    count: usize,
    /// Folder of prepared sets
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// A JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ShowConfig {
    #[command(flatten)]
    told: Told,
    /// JSON in place of TOML
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Completions {
    /// The shell
    shell: Shell,
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
    #[arg(long, value_name = "DAYS", value_parser = sets::parse_days)]
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
        Ok(line) => line.command.call(name, out, err, poll),
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
    fn call(self, name: &'static str, out: &mut dyn Write, err: &mut dyn Write, poll: Poll) -> Result<bool> {
        match self {
            Command::Prepare(prepare) => prepare_sets(&prepare, out, err, poll),
            Command::Pack(pack) => pack_set(&pack, out, poll),
            Command::Stats(stats) => tell_stats(&stats, out),
            Command::Cat(cat) => show_documents(&cat, out),
            Command::Config(show) => show_config(&show, out, err),
            Command::Completions(wanted) => {
                use clap::CommandFactory;
                let mut script = Vec::new();
                clap_complete::generate(wanted.shell, &mut CommandLine::command(), name.replace(' ', "-"), &mut script);
                out.write_all(&script).map_err(|e| Error::new(Kind::Io, "standard output", e))?;
                Ok(true)
            }
            Command::Ls(ls) => list(&ls, out),
            Command::Verify(verify) => verify_sets(&verify, out, poll),
            Command::Export(export) => {
                let set = sets::find(&sets::root(export.root.store.as_deref())?, &export.set)?;
                let written = export::export(&set, &export.to, export.force, poll)?;
                if export.root.json {
                    put_json(out, &written)?;
                } else {
                    let rows = sets::counted(written.documents, "document");
                    put(out, &format!("{}: {rows}, {}", export.to.display(), sets::size(written.bytes)))?;
                }
                Ok(true)
            }
            Command::Prune(prune) => prune_sets(&prune, out),
        }
    }
}

/// Says which tables of a config were not read.
fn tell_ignored(config: &config::Config, err: &mut dyn Write) -> Result<()> {
    if config.ignored.is_empty() {
        return Ok(());
    }
    let told = format!("note     not read here, since they change no prepared set: {}", config.ignored.join(", "));
    writeln!(err, "{told}").map_err(|e| Error::new(Kind::Io, "standard error", e))
}

fn prepare_sets(arguments: &Prepare, out: &mut dyn Write, err: &mut dyn Write, poll: Poll) -> Result<bool> {
    let config = arguments.told.read()?;
    tell_ignored(&config, err)?;
    let store = make::store_of(arguments.store.as_deref(), &config)?;
    let made = make::prepare_all(&config, &store, arguments.threads, poll)?;
    if arguments.json {
        put_json(out, &made.iter().map(make::Made::json).collect::<Vec<_>>())?;
        return Ok(true);
    }
    for line in made.iter().flat_map(make::Made::lines) {
        put(out, &line)?;
    }
    Ok(true)
}

fn open(root: Option<&Path>, name: &str) -> Result<Arc<Store>> {
    let place = match PathBuf::from(name) {
        path if path.is_dir() => path,
        _ => sets::find(&sets::root(root)?, name)?,
    };
    Store::open(&place).map(Arc::new)
}

fn pack_set(arguments: &Pack, out: &mut dyn Write, poll: Poll) -> Result<bool> {
    let options = arguments.how.options(&arguments.packing);
    let plan = look::plan(open(arguments.root.store.as_deref(), &arguments.set)?, &options)?;
    let mut facts = look::facts(&plan, &options);
    let mut lines = look::facts_lines(&plan, &options);
    if let Some(to) = &arguments.to {
        let written = export::export_packs(&plan, to, arguments.force, poll)?;
        facts["file"] = json!(written.file);
        facts["bytes"] = json!(written.bytes);
        lines.push(format!(
            "{}: {}, {}",
            to.display(),
            sets::counted(written.documents, "pack"),
            sets::size(written.bytes)
        ));
    }
    if arguments.root.json {
        put_json(out, &facts)?;
        return Ok(true);
    }
    lines.iter().try_for_each(|line| put(out, line))?;
    Ok(true)
}

fn tell_stats(arguments: &Stats, out: &mut dyn Write) -> Result<bool> {
    let store = open(arguments.root.store.as_deref(), &arguments.set)?;
    let told = look::stats(&store, &arguments.how.options("stream"))?;
    if arguments.root.json {
        put_json(out, &told)?;
    } else {
        look::stats_lines(&told).iter().try_for_each(|line| put(out, line))?;
    }
    Ok(true)
}

fn show_documents(arguments: &CatArguments, out: &mut dyn Write) -> Result<bool> {
    let store = open(arguments.store.as_deref(), &arguments.set)?;
    let mut given = arguments.told.given();
    if given.file.is_none() && given.data.is_empty() {
        given.data.push("-".into()); // the rows are in the set
    }
    let config = config::Config::read(&given)?;
    let model = model::Model::read(&config)?;
    let cat = look::Cat::new(&store, &model.tokenizer.json, Path::new(&config.model.path))?;
    let colour = std::io::stdout().is_terminal();
    for document in look::chosen(&store, arguments.from, arguments.count)? {
        if arguments.json {
            put(out, &cat.json(document)?.to_string())?;
        } else {
            put(out, &cat.text(document, colour)?)?;
        }
    }
    Ok(true)
}

fn show_config(arguments: &ShowConfig, out: &mut dyn Write, err: &mut dyn Write) -> Result<bool> {
    let config = arguments.told.read()?;
    if arguments.json {
        put_json(out, &config)?;
        return Ok(true);
    }
    tell_ignored(&config, err)?;
    let told = json!({"model": config.model, "data": config.data, "train": {"seed": config.seed}});
    let failed = |e: String| Error::new(Kind::Argument, "toml", e);
    // TOML has no null: what is not set is left out.
    let table = toml::Value::try_from(without_nulls(told)).map_err(|e| failed(e.to_string()))?;
    put(out, toml::to_string_pretty(&table).map_err(|e| failed(e.to_string()))?.trim_end())?;
    Ok(true)
}

fn without_nulls(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Object(table) => {
            let kept = table.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(kept.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(list) => Value::Array(list.into_iter().map(without_nulls).collect()),
        other => other,
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
            let (documents, bytes) = (sets::counted(found.documents, "document"), sets::size(found.bytes));
            put(out, &format!("ok       {}: {documents}, {bytes} read", place.display()))?;
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
