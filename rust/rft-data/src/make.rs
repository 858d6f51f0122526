//! `prepare`: a config's data sets as prepared sets, by the same core, into the same folders as `rft prepare`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rft_core::prepare::{Observer, prepare};
use rft_core::spec::{FORMAT_VERSION, Spec};
use rft_core::{Error, Kind, Result, key};
use serde_json::{Value, json};

use crate::config::{Config, Shuffle};
use crate::model::Model;
use crate::{Poll, files, sets};

/// Of a config, one part: `train` or `eval`.
pub struct Made {
    /// Which.
    pub part: &'static str,
    /// The set's folder.
    pub path: PathBuf,
    /// What was read, kept and dropped.
    pub counts: Value,
    /// Whether it was there.
    pub reused: bool,
    /// Rows that an earlier run, which was stopped, had done.
    pub resumed_rows: u64,
    /// How long it took.
    pub time: Duration,
}

/// The folder of prepared sets: `--store`, else that of the config, else the default. It is made where it is not there.
pub fn store_of(given: Option<&Path>, config: &Config) -> Result<PathBuf> {
    let folder = match (given, &config.data.store) {
        (Some(given), _) => given.to_path_buf(),
        (None, Some(store)) => config.path(store),
        (None, None) => sets::root(None)?,
    };
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "making the folder of prepared sets", &e))?;
    Ok(folder)
}

/// Prepares the training set and, where the config names one, the held-out set.
pub fn prepare_all(config: &Config, store: &Path, threads: usize, poll: Poll) -> Result<Vec<Made>> {
    if config.data.streaming {
        return Err(Error::new(Kind::Argument, "data.streaming", "prepares the data while it is trained on")
            .remedy("add --set data.streaming=false"));
    }
    let model = Model::read(config)?;
    let data = &config.data;
    let train = files::sources(config, &data.train, "data.train")?;
    let holdout =
        |part: &str| (data.eval_fraction > 0.0).then(|| json!({"fraction": data.eval_fraction, "part": part}));
    let mut made = vec![prepare_one("train", config, &model, &train, holdout("train"), store, threads, poll)?];
    if data.eval_fraction > 0.0 {
        made.push(prepare_one("eval", config, &model, &train, holdout("eval"), store, threads, poll)?);
    } else if !data.eval.is_empty() {
        let eval = files::sources(config, &data.eval, "data.eval")?;
        made.push(prepare_one("eval", config, &model, &eval, None, store, threads, poll)?);
    }
    Ok(made)
}

#[allow(clippy::too_many_arguments)]
fn prepare_one(
    part: &'static str,
    config: &Config,
    model: &Model,
    sources: &[Value],
    holdout: Option<Value>,
    store: &Path,
    threads: usize,
    poll: Poll,
) -> Result<Made> {
    let begun = Instant::now();
    let (data, tokenizer) = (&config.data, &model.tokenizer);
    let request = json!({
        "format_version": FORMAT_VERSION,
        "sources": sources,
        "tokenizer": {
            "json": tokenizer.json, "special": tokenizer.special, "add_bos": tokenizer.add_bos,
            "eos_id": tokenizer.eos_id, "bos_id": tokenizer.bos_id, "vocab_size": tokenizer.vocab_size,
            "unicode": tokenizer.unicode,
        },
        "template": model.template,
        "renderer": "native",
        "train_on": data.train_on,
        "thinking": data.thinking,
        "end_of_turn": data.end_of_turn,
        "on_error": data.on_error,
        "control_tokens": data.control_tokens,
        "holdout": holdout,
        "dedup": data.dedup,
        "interleave": data.shuffle == Shuffle::Window,
        "seed": config.seed,
        "threads": threads,
    });
    let mut spec = Spec::parse(&request.to_string())?;
    let hashes = key::hashes(&spec)?;
    for (source, hash) in spec.sources.iter_mut().zip(hashes) {
        source.xxh3 = Some(hash);
    }
    let path = store.join(key::of_spec(&spec)?.0);
    let mut bar = Bar::new(part, poll);
    let made = prepare(&spec, &path, None, &mut bar);
    bar.end();
    let made = made?;
    Ok(Made {
        part,
        path,
        counts: made.counts,
        reused: !made.written,
        resumed_rows: made.resumed_rows,
        time: begun.elapsed(),
    })
}

impl Made {
    /// For people.
    pub fn lines(&self) -> Vec<String> {
        let number = |name: &str| self.counts[name].as_u64().unwrap_or_default();
        let commas = |name: &str| sets::with_commas(number(name));
        let dropped: Vec<String> = self.counts["dropped"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(reason, rows)| format!("{reason} {}", sets::with_commas(rows.as_u64().unwrap_or_default())))
            .collect();
        let lost = number("read") - number("kept");
        let why = if dropped.is_empty() { String::new() } else { format!(" ({})", dropped.join(", ")) };
        let share = 100.0 * number("trained_tokens") as f64 / number("tokens").max(1) as f64;
        let how = match (self.reused, self.resumed_rows) {
            (true, _) => "prepared before".to_string(),
            (false, 0) => format!("{:.1} s", self.time.as_secs_f64()),
            (false, rows) => {
                format!("{:.1} s, behind {} done before", self.time.as_secs_f64(), sets::counted(rows, "row"))
            }
        };
        let mut lines = vec![
            format!(
                "{:<8} {}: {} kept, {} dropped{why} · {}, {share:.0} % trained · {how}",
                self.part,
                sets::counted(number("read"), "row"),
                commas("kept"),
                sets::with_commas(lost),
                sets::counted(number("tokens"), "token")
            ),
            format!("{:<8} {}", "set", self.path.display()),
        ];
        if number("empty_files") > 0 {
            lines.push(format!("{:<8} {} without a row", "note", sets::counted(number("empty_files"), "file")));
        }
        if let Some(reason) = self.counts["slow_tokenizer"].as_str() {
            lines.push(format!(
                "{:<8} the tokenizers library does the work, many times slower, because {reason}",
                "note"
            ));
        }
        lines
    }

    /// For machines.
    pub fn json(&self) -> Value {
        let mut told = self.counts.clone();
        told["part"] = self.part.into();
        told["store"] = json!(self.path);
        told["key"] = json!(self.path.file_name().unwrap_or_default().to_string_lossy());
        told["reused"] = self.reused.into();
        told["seconds"] = json!((self.time.as_secs_f64() * 1000.0).round() / 1000.0);
        told
    }
}

/// A line on a terminal: how much is done, at what rate, and when it will be through.
struct Bar<'a> {
    part: &'static str,
    poll: Poll<'a>,
    begun: Instant,
    /// Bytes that were done when it began: those of an earlier run.
    first: Option<u64>,
    shown: Option<Instant>,
    terminal: bool,
}

impl<'a> Bar<'a> {
    fn new(part: &'static str, poll: Poll<'a>) -> Bar<'a> {
        let terminal = std::io::stderr().is_terminal();
        Bar { part, poll, begun: Instant::now(), first: None, shown: None, terminal }
    }

    fn end(&self) {
        if self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// The words of a bar.
fn words(done: u64, total: u64, rows: u64, first: u64, time: Duration) -> String {
    let share = 100.0 * done as f64 / total.max(1) as f64;
    let rate = done.saturating_sub(first) as f64 / time.as_secs_f64().max(1e-9);
    let left = (total.saturating_sub(done) as f64 / rate.max(1.0)) as u64;
    format!(
        "{share:3.0} %  {} of {}  {}  {:.1} MB/s  left {}:{:02}",
        sets::size(done),
        sets::size(total),
        sets::counted(rows, "row"),
        rate / 1e6,
        left / 60,
        left % 60
    )
}

impl Observer for Bar<'_> {
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> Result<()> {
        let first = *self.first.get_or_insert(bytes_read);
        let due = self.shown.map_or(Duration::from_millis(300), |_| Duration::from_millis(200));
        if self.terminal && self.shown.unwrap_or(self.begun).elapsed() > due {
            let text = words(bytes_read, bytes_total, rows, first, self.begun.elapsed());
            let _ = write!(std::io::stderr(), "\r\x1b[K{:<8} {text}", self.part);
            self.shown = Some(Instant::now());
        }
        (self.poll)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_tells_share_rate_and_time_left_of_this_run_alone() {
        let told = words(30_000_000, 120_000_000, 1234, 10_000_000, Duration::from_secs(2));
        assert_eq!(told, " 25 %  30.0 MB of 120.0 MB  1,234 rows  10.0 MB/s  left 0:09");
    }
}
