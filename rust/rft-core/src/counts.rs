//! What was read, kept and dropped, and why: read = kept + dropped, always.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value as Json, json};

use crate::error::{Error, Kind};
use crate::example::{Format, ROLES, Reason, RowError};
use crate::spec::{Part, Source, Spec, TrainOn};
use crate::store::Writer;
use crate::tokens::{Facts, Tokens};

/// Examples kept of each reason.
const NOTES: usize = 5;

/// Different sets of unused fields that are counted.
const MANY_FIELDS: usize = 256;

/// A dropped row to show.
#[derive(Clone, Debug)]
pub struct Note {
    /// File and line.
    pub place: String,
    /// What is wrong with it.
    pub text: String,
}

#[derive(Debug)]
struct SourceCounts {
    path: String,
    format: Format,
    evidence: String,
    read: u64,
    kept: u64,
    tokens: u64,
    trained: u64,
}

/// Counts of a preparation.
#[derive(Debug, Default)]
pub struct Counts {
    read: u64,
    kept: u64,
    dropped: BTreeMap<Reason, u64>,
    notes: BTreeMap<Reason, Vec<Note>>,
    sources: Vec<SourceCounts>,
    spelled: u64,
    straddling: u64,
    methods: BTreeMap<&'static str, u64>,
    /// Rows that hold a message of a role.
    roles: [u64; ROLES.len()],
    /// Rows by the fields of them that are not used.
    unused: Vec<(Arc<[String]>, u64)>,
    /// Rows that became several documents, and how many.
    split: (u64, u64),
    /// Reasoning that the template does not write: blocks, and rows with one.
    lost: (u64, u64),
    /// Rows with tools that the template does not write.
    tools_ignored: u64,
}

impl Counts {
    /// From here on rows are those of this file.
    pub fn begin_source(&mut self, source: &Source, format: Format, evidence: &str) {
        self.sources.push(SourceCounts {
            path: source.path.clone(),
            format,
            evidence: evidence.into(),
            read: 0,
            kept: 0,
            tokens: 0,
            trained: 0,
        });
    }

    /// Rows read so far.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// Counts a row that is kept, by its documents.
    pub fn keep(&mut self, documents: &[Tokens]) {
        let Some(first) = documents.first() else { return };
        self.read += 1;
        self.kept += 1;
        self.spelled += u64::from(first.spelled);
        self.straddling += documents.iter().map(|tokens| tokens.straddling).sum::<u64>();
        let method = first.method.map_or("raw text", |method| method.name());
        *self.methods.entry(method).or_default() += 1;
        let lost: u64 = documents.iter().map(|tokens| u64::from(tokens.lost)).sum();
        self.lost = (self.lost.0 + lost, self.lost.1 + u64::from(lost > 0));
        if documents.len() > 1 {
            self.split = (self.split.0 + 1, self.split.1 + documents.len() as u64);
        }
        self.tell(&first.facts);
        if let Some(source) = self.sources.last_mut() {
            source.read += 1;
            source.kept += 1;
            for tokens in documents {
                source.tokens += tokens.ids.len() as u64;
                source.trained += tokens.trained.iter().filter(|bit| **bit).count() as u64;
            }
        }
    }

    fn tell(&mut self, facts: &Facts) {
        for (index, rows) in self.roles.iter_mut().enumerate() {
            *rows += u64::from(facts.roles >> index & 1);
        }
        self.tools_ignored += u64::from(facts.tools_ignored);
        if facts.unused.is_empty() {
            return;
        }
        // Rows of a file have the same fields, mostly the very same list of them.
        let same = |(names, _): &(Arc<[String]>, u64)| Arc::ptr_eq(names, &facts.unused) || *names == facts.unused;
        match self.unused.iter().rposition(same) {
            Some(index) => self.unused[index].1 += 1,
            None if self.unused.len() < MANY_FIELDS => self.unused.push((facts.unused.clone(), 1)),
            None => {}
        }
    }

    /// Counts a row that is dropped.
    pub fn drop_row(&mut self, error: &RowError, note: Note) {
        self.read += 1;
        *self.dropped.entry(error.reason).or_default() += 1;
        if let Some(source) = self.sources.last_mut() {
            source.read += 1;
        }
        let notes = self.notes.entry(error.reason).or_default();
        if notes.len() < NOTES && !note.text.is_empty() {
            notes.push(note);
        }
    }

    /// For the manifest and the caller.
    pub fn to_json(&self, writer: &Writer, no_control_tokens: bool) -> Json {
        let dropped: BTreeMap<&str, u64> = self.dropped.iter().map(|(reason, n)| (reason.name(), *n)).collect();
        let notes = |notes: &Vec<Note>| notes.iter().map(|note| format!("{}: {}", note.place, note.text)).collect();
        let examples: BTreeMap<&str, Vec<String>> = self
            .notes
            .iter()
            .filter(|(_, list)| !list.is_empty())
            .map(|(reason, list)| (reason.name(), notes(list)))
            .collect();
        let sources: Vec<Json> = self
            .sources
            .iter()
            .map(|source| {
                json!({
                    "path": source.path,
                    "format": source.format.name(),
                    "evidence": source.evidence,
                    "read": source.read,
                    "kept": source.kept,
                    "tokens": source.tokens,
                    "trained_tokens": source.trained,
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
            "dropped": dropped,
            "dropped_examples": examples,
            "documents": writer.num_documents(),
            "tokens": writer.num_tokens(),
            "trained_tokens": writer.trained_tokens(),
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
        let dropped: Vec<String> = self.dropped.iter().map(|(reason, n)| format!("{n} {}", reason.name())).collect();
        let why = if dropped.is_empty() {
            String::new()
        } else {
            format!(": {} rows read, {}", self.read, dropped.join(", "))
        };
        let first = self.notes.values().flatten().next();
        let why = why + &first.map_or(String::new(), |note| format!(" (first: {}: {})", note.place, note.text));
        let elsewhere: u64 = [Reason::HeldOut, Reason::NotHeldOut].iter().filter_map(|r| self.dropped.get(r)).sum();
        if let Some(holdout) = &spec.holdout
            && self.read > 0
            && elsewhere == self.read
        {
            let (side, change) = match holdout.part {
                Part::Train => ("holds out all", "smaller"),
                Part::Eval => ("holds out none", "larger"),
            };
            let problem = format!("eval_fraction = {} {side} of the {} rows", holdout.fraction, self.read);
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
