//! What a prepared set holds: `pack`, `stats` and `cat`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rft_core::plan::{Overlong, Packing, Plan, PlanOptions};
use rft_core::store::Store;
use rft_core::{Error, Kind, Result};
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use xxhash_rust::xxh3::xxh3_64;

use crate::sets::{self, counted, one_line};

/// Every way to pack.
pub const PACKINGS: [&str; 5] = ["stream", "bfd", "even", "sequential", "none"];

/// How a set becomes packs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens of a pack.
    pub seq_len: u32,
    /// stream, bfd, even, sequential, none.
    pub packing: String,
    /// split, truncate, drop, error.
    pub overlong: String,
    /// full, window, none.
    pub shuffle: String,
    /// Of the order.
    pub seed: u64,
    /// Of the order, from 0.
    pub epoch: u64,
}

/// The plan of a set under these options.
pub fn plan(store: Arc<Store>, options: &Options) -> Result<Plan> {
    let packing: Packing = options.packing.parse()?;
    let overlong: Overlong = options.overlong.parse()?;
    let (seed, epoch) = (options.seed, options.epoch);
    let shuffle = options.shuffle != "none";
    let made = PlanOptions { seq_len: options.seq_len, packing, overlong, seed, epoch, shuffle };
    if options.shuffle == "window" { Plan::windowed(store, made) } else { Plan::new(store, made) }
}

/// A plan in numbers.
pub fn facts(plan: &Plan, options: &Options) -> Value {
    let mut told = json!({
        "hash": plan.hash(), "seq_len": options.seq_len, "packing": options.packing, "overlong": options.overlong,
        "shuffle": options.shuffle, "seed": options.seed, "epoch": options.epoch, "packs": plan.num_packs(),
        "fill": (plan.fill() * 1e6).round() / 1e6, "tokens": plan.num_tokens(), "label_tokens": plan.num_label_tokens(),
    });
    for (name, count) in plan.counts().entries() {
        told[name] = count.into();
    }
    told
}

/// The same for people.
pub fn facts_lines(plan: &Plan, options: &Options) -> Vec<String> {
    let commas = sets::with_commas;
    let counts = plan.counts();
    let size =
        if options.packing == "none" { String::new() } else { format!(" of {}", commas(options.seq_len.into())) };
    let mut lines = vec![format!(
        "{}{size}, {:.2} % full · {}, {} · {}",
        counted(plan.num_packs() as u64, "pack"),
        100.0 * plan.fill(),
        counted(plan.num_tokens(), "token"),
        counted(plan.num_label_tokens(), "label"),
        counted(counts.documents, "document")
    )];
    let over = [
        (counts.split_documents, "split".to_string()),
        (counts.truncated_documents, format!("cut, {} lost", counted(counts.truncated_tokens, "token"))),
        (counts.dropped_documents, format!("left out, {}", counted(counts.dropped_tokens, "token"))),
    ];
    for (count, how) in over.into_iter().filter(|(count, _)| *count > 0) {
        lines.push(format!("{} over seq_len {how}", counted(count, "document")));
    }
    if counts.unlabelled_tokens > 0 {
        lines.push(format!("{} of pieces without a label left out", counted(counts.unlabelled_tokens, "token")));
    }
    lines.push(format!("plan {}", plan.hash()));
    lines
}

/// Lengths, tokens by data set and role, rows by role, and how full each way of packing is.
pub fn stats(store: &Arc<Store>, options: &Options) -> Result<Value> {
    let lengths: Vec<u32> = (0..store.num_documents()).map(|index| store.length(index)).collect();
    let mut sorted = lengths.clone();
    sorted.sort_unstable();
    let at = |share: f64| sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0);
    // Each bar ends at a power of two.
    let mut histogram: Vec<(u32, u32, u64, u64)> = Vec::new();
    for length in &sorted {
        let above = length.max(&1).checked_next_power_of_two().unwrap_or(u32::MAX);
        match histogram.last_mut() {
            Some((_, end, documents, tokens)) if *end == above => {
                *documents += 1;
                *tokens += u64::from(*length);
            }
            _ => histogram.push((above / 2 + 1, above, 1, u64::from(*length))),
        }
    }
    let bars: Vec<Value> = histogram
        .iter()
        .map(|(from, to, documents, tokens)| json!({"from": from, "to": to, "documents": documents, "tokens": tokens}))
        .collect();
    let fills: Vec<Value> = PACKINGS
        .iter()
        .map(|packing| {
            let plan = plan(store.clone(), &Options { packing: (*packing).into(), ..options.clone() })?;
            Ok(json!({"packing": packing, "packs": plan.num_packs(), "fill": (plan.fill() * 1e6).round() / 1e6}))
        })
        .collect::<Result<_>>()?;
    let manifest = store.manifest();
    Ok(json!({
        "key": manifest.key, "documents": manifest.documents, "tokens": manifest.tokens,
        "trained_tokens": manifest.trained_tokens,
        "lengths": {
            "mean": manifest.tokens as f64 / manifest.documents.max(1) as f64, "median": at(0.5), "p90": at(0.9),
            "p99": at(0.99), "longest": at(1.0), "histogram": bars,
        },
        "sources": manifest.counts["sources"], "sets": by_set(&manifest.counts["sources"]), "roles": manifest.counts["roles"], "seq_len": options.seq_len,
        "packings": fills,
    }))
}

/// Counts of each data set: the sums over its files. `tokens_by_role` is null in sets that were prepared before it was counted.
fn by_set(sources: &Value) -> Vec<Value> {
    let mut sets: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for source in sources.as_array().into_iter().flatten() {
        sets.entry(source["set"].as_u64().unwrap_or_default()).or_default().push(source);
    }
    let told = |(set, files): (u64, Vec<&Value>)| {
        let sum = |name: &str| files.iter().filter_map(|file| file[name].as_u64()).sum::<u64>();
        let mut by_role = Some(BTreeMap::<&str, u64>::new());
        for file in &files {
            match (&mut by_role, file["tokens_by_role"].as_object()) {
                (Some(sums), Some(own)) => {
                    own.iter().for_each(|(role, n)| *sums.entry(role).or_default() += n.as_u64().unwrap_or_default());
                }
                _ => by_role = None,
            }
        }
        json!({
            "set": set, "path": files[0]["path"], "files": files.len(), "read": sum("read"), "kept": sum("kept"),
            "tokens": sum("tokens"), "trained_tokens": sum("trained_tokens"), "tokens_by_role": by_role,
        })
    };
    sets.into_iter().map(told).collect()
}

/// Names of what tokens are counted by, in the order in which they are told.
const SAID_BY: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "template", "no role"];

/// Tokens by data set and role, a line a data set. `tokens`: of all.
fn role_lines(stats: &Value) -> Vec<String> {
    let sets = stats["sets"].as_array().map_or(&[][..], Vec::as_slice);
    let mut lines = Vec::new();
    for set in sets {
        let more = set["files"].as_u64().unwrap_or(1) - 1;
        let more = match more {
            0 => String::new(),
            1 => " and 1 more file".to_string(),
            more => format!(" and {} more files", sets::with_commas(more)),
        };
        lines.push(format!("tokens of {}{more}", one_line(set["path"].as_str().unwrap_or_default())));
        let Some(by_role) = set["tokens_by_role"].as_object() else {
            lines.push(
                "               not counted by role: the set was prepared by an earlier version; remove it with prune, and prepare it again"
                    .to_string(),
            );
            continue;
        };
        let all = set["tokens"].as_f64().unwrap_or(0.0).max(1.0);
        for (role, tokens) in SAID_BY.iter().filter_map(|role| Some((role, by_role.get(*role)?.as_u64()?))) {
            lines.push(format!("{:>14} {:>5.1} % {role}", sets::with_commas(tokens), 100.0 * tokens as f64 / all));
        }
    }
    lines
}

/// The same for people.
pub fn stats_lines(stats: &Value) -> Vec<String> {
    let number = |value: &Value| sets::with_commas(value.as_u64().unwrap_or_default());
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let share =
        |part: &Value, whole: &Value| 100.0 * part.as_f64().unwrap_or(0.0) / whole.as_f64().unwrap_or(1.0).max(1.0);
    let lengths = &stats["lengths"];
    let mut lines = vec![
        format!(
            "{}, {}, {:.1} % trained",
            counted(stats["documents"].as_u64().unwrap_or_default(), "document"),
            counted(stats["tokens"].as_u64().unwrap_or_default(), "token"),
            share(&stats["trained_tokens"], &stats["tokens"])
        ),
        format!(
            "lengths  mean {:.0}, median {}, 90 % up to {}, 99 % up to {}, longest {}",
            lengths["mean"].as_f64().unwrap_or(0.0),
            number(&lengths["median"]),
            number(&lengths["p90"]),
            number(&lengths["p99"]),
            number(&lengths["longest"])
        ),
    ];
    let bars = list(&lengths["histogram"]);
    let most = bars.iter().filter_map(|bar| bar["documents"].as_u64()).max().unwrap_or(1).max(1);
    for bar in &bars {
        let documents = bar["documents"].as_u64().unwrap_or_default();
        let drawn = "█".repeat((40 * documents).div_ceil(most) as usize);
        lines.push(format!(
            "{:>9} to {:>9}  {:>11}  {drawn}",
            number(&bar["from"]),
            number(&bar["to"]),
            number(&bar["documents"])
        ));
    }
    for source in list(&stats["sources"]) {
        lines.push(format!(
            "{:>14} tokens, {:>5.1} % trained, {} read ({})  {}",
            number(&source["tokens"]),
            share(&source["trained_tokens"], &source["tokens"]),
            counted(source["read"].as_u64().unwrap_or_default(), "row"),
            source["format"].as_str().unwrap_or_default(),
            one_line(source["path"].as_str().unwrap_or_default())
        ));
    }
    // Of the whole set, so before what is told of each data set.
    for (role, rows) in stats["roles"].as_object().into_iter().flatten() {
        lines.push(format!("{:>14} rows of all with a message of {role}", number(rows)));
    }
    lines.extend(role_lines(stats));
    for packing in list(&stats["packings"]) {
        lines.push(format!(
            "{:>14} packs of {}, {:6.2} % full: {}",
            number(&packing["packs"]),
            number(&stats["seq_len"]),
            100.0 * packing["fill"].as_f64().unwrap_or(0.0),
            packing["packing"].as_str().unwrap_or_default()
        ));
    }
    lines
}

/// Documents as text, with what is trained on.
pub struct Cat<'a> {
    store: &'a Store,
    tokenizer: Tokenizer,
}

impl<'a> Cat<'a> {
    /// `json`: the text of the tokenizer.json that the set was made with.
    ///
    /// # Errors
    /// It is another one.
    pub fn new(store: &'a Store, json: &str, place: &Path) -> Result<Cat<'a>> {
        let own = store.shards().first().map(|shard| shard.header().tokenizer);
        if own.is_some_and(|own| own != xxh3_64(json.as_bytes())) {
            return Err(Error::new(
                Kind::Argument,
                place.display().to_string(),
                "the set was made with another tokenizer",
            )
            .remedy("give the model (and model.add_tokens) that it was prepared for"));
        }
        let tokenizer = json
            .parse::<Tokenizer>()
            .map_err(|e| Error::new(Kind::Tokenizer, place.display().to_string(), format!("cannot be read: {e}")))?;
        Ok(Cat { store, tokenizer })
    }

    /// Text and whether it is trained on, run by run.
    pub fn runs(&self, document: usize) -> Result<Vec<(String, bool)>> {
        let range = self.store.range(document);
        let ids = self.store.ids(range.clone()).to_vec();
        let text = |ids: &[u32]| {
            let decoded = self.tokenizer.decode(ids, false);
            decoded.map_err(|e| Error::new(Kind::Tokenizer, "tokenizer.json", e.to_string()))
        };
        let (mut runs, mut at) = (Vec::new(), 0);
        for run in self.store.trained_runs(range) {
            if run.start > at {
                runs.push((text(&ids[at..run.start])?, false));
            }
            at = run.end;
            runs.push((text(&ids[run])?, true));
        }
        if at < ids.len() {
            runs.push((text(&ids[at..])?, false));
        }
        Ok(runs)
    }

    /// A document for machines.
    pub fn json(&self, document: usize) -> Result<Value> {
        let runs: Vec<Value> =
            self.runs(document)?.into_iter().map(|(text, trained)| json!({"text": text, "trained": trained})).collect();
        let range = self.store.range(document);
        let (source, line) = self.store.origin(document);
        Ok(json!({
            "document": document, "source": source, "line": line, "tokens": range.len(),
            "trained_tokens": self.store.count_trained(range), "runs": runs,
        }))
    }

    /// A document for people: trained text between marks, or in colour.
    pub fn text(&self, document: usize, colour: bool) -> Result<String> {
        let (source, line) = self.store.origin(document);
        let range = self.store.range(document);
        let trained = self.store.count_trained(range.clone());
        let mut told =
            format!("document {document}: {} tokens, {trained} trained, from {source}:{line}\n", range.len());
        for (text, trained) in self.runs(document)? {
            let text = visible(&text);
            told += &match (trained, colour) {
                (true, true) => format!("\x1b[32m{text}\x1b[0m"),
                (false, true) => format!("\x1b[2m{text}\x1b[0m"),
                (true, false) => format!("⟦{text}⟧"),
                (false, false) => text,
            };
        }
        told.push('\n');
        Ok(told)
    }
}

/// Text without what would steer a terminal.
fn visible(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// The documents `from..from + count` of a set.
pub fn chosen(store: &Store, from: usize, count: usize) -> Result<Range<usize>> {
    let all = store.num_documents();
    if from >= all {
        return Err(Error::new(Kind::Argument, "--from", format!("document {from} of {all}")));
    }
    Ok(from..from.saturating_add(count).min(all))
}
