//! What was read, kept and dropped, and why: read = kept + dropped, always.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::error::{Error, Kind, Result};
use crate::example::ROLES;
use crate::format::Format;
use crate::row_error::{Reason, RowError};
use crate::said::ByRole;
use crate::spec::{Part, Source, Spec, TrainOn};
use crate::tokens::{Facts, Told};

/// Examples kept of each reason.
const NOTES: usize = 5;

/// Different sets of unused fields that are counted.
const MANY_FIELDS: usize = 256;

/// A dropped row to show.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Note {
    /// File and line.
    pub place: String,
    /// What is wrong with it.
    pub text: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct SourceCounts {
    /// Number of the source; its place here where files are read one after another.
    #[serde(default)]
    index: Option<usize>,
    path: String,
    format: String,
    evidence: String,
    read: u64,
    kept: u64,
    tokens: u64,
    trained: u64,
    /// Number of the data set.
    #[serde(default)]
    set: u32,
    /// Of the tokens, those that messages of each role say, those that the template adds to chats, and those of rows without roles.
    #[serde(default)]
    by_role: ByRole,
    #[serde(default)]
    template: u64,
    #[serde(default)]
    no_role: u64,
}

impl SourceCounts {
    fn tokens_by_role(&self) -> Option<BTreeMap<&'static str, u64>> {
        let named = ROLES.into_iter().zip(self.by_role);
        let all = named.chain([("template", self.template), ("no role", self.no_role)]);
        let by_role: BTreeMap<_, _> = all.filter(|(_, tokens)| *tokens > 0).collect();
        // What an unfinished set of an earlier version holds was not told by role.
        (by_role.values().sum::<u64>() == self.tokens).then_some(by_role)
    }
}

/// Counts of a preparation. Reasons and methods by name: all of it goes into the notes that a killed run leaves.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    read: u64,
    kept: u64,
    dropped: BTreeMap<String, u64>,
    notes: BTreeMap<String, Vec<Note>>,
    /// Rows written more than once, and how many times more, for the weight of their data set.
    repeats: u64,
    duplicate_documents: u64,
    sources: Vec<SourceCounts>,
    /// Which of them rows are counted for.
    #[serde(skip)]
    at: usize,
    spelled: u64,
    straddling: u64,
    methods: BTreeMap<String, u64>,
    /// Rows that hold a message of a role.
    roles: [u64; ROLES.len()],
    /// Rows by the fields of them that are not used.
    unused: Vec<(Vec<String>, u64)>,
    /// Rows that became several documents, and how many.
    split: (u64, u64),
    /// Reasoning that the template does not write: blocks, and rows with one.
    lost: (u64, u64),
    /// Rows with tools that the template does not write.
    tools_ignored: u64,
    /// Chats in which no control token ends what is trained on.
    unended: u64,
}

impl Counts {
    /// A source is read for the first time.
    pub fn begin_source(&mut self, index: usize, source: &Source, format: Format, evidence: &str) {
        self.sources.push(SourceCounts {
            index: Some(index),
            path: source.path.clone(),
            format: format.name().into(),
            evidence: evidence.into(),
            read: 0,
            kept: 0,
            tokens: 0,
            trained: 0,
            set: source.set,
            by_role: ByRole::default(),
            template: 0,
            no_role: 0,
        });
    }

    /// From here on rows are those of this source, which was begun.
    pub fn select_source(&mut self, index: usize) {
        let own = |(at, source): (usize, &SourceCounts)| source.index.unwrap_or(at) == index;
        self.at = self.sources.iter().enumerate().position(own).unwrap_or(self.sources.len());
    }

    /// Rows read so far.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// Number of each source that was begun, and rows read of it.
    pub fn rows_of_sources(&self) -> BTreeMap<usize, u64> {
        self.sources.iter().enumerate().map(|(at, source)| (source.index.unwrap_or(at), source.read)).collect()
    }

    /// For the note behind a shard.
    pub fn to_state(&self) -> Result<Json> {
        serde_json::to_value(self).map_err(|e| Error::new(Kind::Store, "counts", e))
    }

    /// From such a note.
    pub fn from_state(state: Json) -> Result<Counts> {
        serde_json::from_value(state).map_err(|e| Error::new(Kind::Store, "the notes of an unfinished set", e))
    }

    /// Counts a row that is kept, by its documents; they are written `copies` times.
    pub fn keep<'a>(&mut self, documents: impl Iterator<Item = &'a Told> + Clone, copies: u32) {
        let Some(first) = documents.clone().next() else { return };
        self.read += 1;
        self.kept += 1;
        self.repeats += u64::from(copies - 1);
        self.spelled += u64::from(first.spelled);
        self.straddling += documents.clone().map(|document| document.straddling).sum::<u64>();
        let method = first.method.map_or("raw text", |method| method.name());
        match self.methods.get_mut(method) {
            Some(count) => *count += 1,
            None => drop(self.methods.insert(method.into(), 1)),
        }
        let lost: u64 = documents.clone().map(|document| u64::from(document.lost)).sum();
        self.lost = (self.lost.0 + lost, self.lost.1 + u64::from(lost > 0));
        let parts = documents.clone().count() as u64;
        if parts > 1 {
            self.split = (self.split.0 + 1, self.split.1 + parts);
        }
        self.tell(&first.facts);
        if let Some(source) = self.sources.get_mut(self.at) {
            source.read += 1;
            source.kept += 1;
            for document in documents {
                source.tokens += u64::from(copies) * document.tokens;
                source.trained += u64::from(copies) * document.trained;
                let Some(by_role) = document.by_role else {
                    source.no_role += u64::from(copies) * document.tokens;
                    continue;
                };
                source.by_role.iter_mut().zip(by_role).for_each(|(sum, tokens)| *sum += u64::from(copies) * tokens);
                source.template += u64::from(copies) * (document.tokens - by_role.iter().sum::<u64>());
            }
        }
    }

    fn tell(&mut self, facts: &Facts) {
        for (index, rows) in self.roles.iter_mut().enumerate() {
            *rows += u64::from(facts.roles >> index & 1);
        }
        self.tools_ignored += u64::from(facts.tools_ignored);
        self.unended += u64::from(facts.unended);
        if facts.unused.is_empty() {
            return;
        }
        // Rows of a file have the same fields, mostly the very same list of them.
        let same = |(names, _): &(Vec<String>, u64)| names[..] == facts.unused[..];
        match self.unused.iter().rposition(same) {
            Some(index) => self.unused[index].1 += 1,
            None if self.unused.len() < MANY_FIELDS => self.unused.push((facts.unused.to_vec(), 1)),
            None => {}
        }
    }

    /// Counts documents of a row that were kept before.
    pub fn drop_documents(&mut self, duplicates: usize) {
        self.duplicate_documents += duplicates as u64;
    }

    /// Counts a row that is dropped.
    pub fn drop_row(&mut self, error: &RowError, note: Note) {
        self.read += 1;
        let reason = error.reason.name();
        match self.dropped.get_mut(reason) {
            Some(count) => *count += 1,
            None => drop(self.dropped.insert(reason.into(), 1)),
        }
        if let Some(source) = self.sources.get_mut(self.at) {
            source.read += 1;
        }
        if note.text.is_empty() {
            return;
        }
        match self.notes.get_mut(reason) {
            Some(notes) if notes.len() >= NOTES => {}
            Some(notes) => notes.push(note),
            None => drop(self.notes.insert(reason.into(), vec![note])),
        }
    }

    /// For the manifest and the caller. `totals`: documents, tokens and trained tokens that were written.
    pub fn to_json(&self, totals: [u64; 3], no_control_tokens: bool) -> Json {
        let notes = |notes: &Vec<Note>| notes.iter().map(|note| format!("{}: {}", note.place, note.text)).collect();
        let examples: BTreeMap<&str, Vec<String>> =
            self.notes.iter().map(|(reason, list)| (reason.as_str(), notes(list))).collect();
        let sources: Vec<Json> = self
            .sources
            .iter()
            .map(|source| {
                json!({
                    "path": source.path,
                    "format": source.format,
                    "evidence": source.evidence,
                    "read": source.read,
                    "kept": source.kept,
                    "tokens": source.tokens,
                    "trained_tokens": source.trained,
                    "set": source.set,
                    "tokens_by_role": source.tokens_by_role(),
                })
            })
            .collect();
        let roles: BTreeMap<&str, u64> =
            ROLES.iter().zip(self.roles).filter(|(_, rows)| *rows > 0).map(|(role, rows)| (*role, rows)).collect();
        let mut unused: BTreeMap<&str, u64> = BTreeMap::new();
        for (names, rows) in &self.unused {
            for name in names.iter() {
                *unused.entry(name).or_default() += rows;
            }
        }
        json!({
            "read": self.read,
            "kept": self.kept,
            "dropped": self.dropped,
            "dropped_examples": examples,
            "empty_files": self.sources.iter().filter(|source| source.read == 0).count(),
            "documents": totals[0],
            "repeats": self.repeats,
            "duplicate_documents": self.duplicate_documents,
            "tokens": totals[1],
            "trained_tokens": totals[2],
            "straddling_tokens": self.straddling,
            "control_token_rows": self.spelled,
            "mask_methods": self.methods,
            "roles": roles,
            "unused_fields": unused,
            "split_rows": self.split.0,
            "documents_of_split_rows": self.split.1,
            "reasoning_lost": self.lost.0,
            "reasoning_lost_rows": self.lost.1,
            "tools_ignored_rows": self.tools_ignored,
            "unended_rows": self.unended,
            "no_control_tokens": no_control_tokens,
            "sources": sources,
        })
    }

    /// The error of a set in which nothing is trained on.
    pub fn nothing_trained(&self, spec: &Spec) -> Error {
        let place = match spec.sources.as_slice() {
            [source] => source.shown().to_string(),
            sources => format!("{} files", sources.len()),
        };
        let dropped: Vec<String> = self.dropped.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        let why = if dropped.is_empty() {
            String::new()
        } else {
            format!(": {} rows read, {}", self.read, dropped.join(", "))
        };
        let first = self.notes.values().flatten().next();
        let why = why + &first.map_or(String::new(), |note| format!(" (first: {}: {})", note.place, note.text));
        let rows_of = |reasons: &[Reason]| reasons.iter().filter_map(|r| self.dropped.get(r.name())).sum::<u64>();
        let elsewhere = rows_of(&[Reason::HeldOut, Reason::NotHeldOut]);
        let left_out = rows_of(&[Reason::NotSampled, Reason::OverMaxRows]);
        if left_out > 0 && left_out == self.read {
            return Error::new(Kind::Data, place, format!("none of the {} rows is chosen{why}", self.read))
                .wanted("at least one row")
                .remedy("raise the weight or max_rows of the data set");
        }
        if let Some(holdout) = &spec.holdout
            && elsewhere > 0
            && elsewhere + left_out == self.read
        {
            let (side, change) = match holdout.part {
                Part::Train => ("holds out all", "smaller"),
                Part::Eval => ("holds out none", "larger"),
            };
            let problem = format!("eval_fraction = {} {side} of the {elsewhere} rows", holdout.fraction);
            return Error::new(Kind::Data, place, problem)
                .wanted("rows on both sides")
                .remedy(format!("set a {change} data.eval_fraction, or name a file of its own under [[data.eval]]"));
        }
        let roles = match &spec.train_on {
            TrainOn::Roles(roles) => format!(" (now {})", roles.join(", ")),
            _ => String::new(),
        };
        let remedy = match (self.read, &spec.train_on) {
            (0, _) => "check data.train: the files hold no rows".to_string(),
            (_, TrainOn::All) => "look at the rows dropped, and at data.on_error".to_string(),
            _ => format!(
                "look at data.train_on{roles} and at the rows dropped; a template with {{% generation %}} tags trains only on what they hold"
            ),
        };
        Error::new(Kind::Data, place, format!("no token to train on{why}"))
            .wanted("at least one row with a turn or a text to learn")
            .remedy(remedy)
    }
}
