//! What was read, kept and dropped, and why: read = kept + dropped, always.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::error::{Error, Kind, Result};
use crate::example::{Format, RowError};
use crate::spec::{Source, Spec, TrainOn};
use crate::store::Writer;
use crate::tokens::Tokens;

/// Examples kept of each reason.
const NOTES: usize = 5;

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
    path: String,
    format: String,
    evidence: String,
    read: u64,
    kept: u64,
    tokens: u64,
    trained: u64,
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
    spelled: u64,
    straddling: u64,
    methods: BTreeMap<String, u64>,
}

impl Counts {
    /// From here on rows are those of this file.
    pub fn begin_source(&mut self, source: &Source, format: Format, evidence: &str) {
        self.sources.push(SourceCounts {
            path: source.path.clone(),
            format: format.name().into(),
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

    /// Rows read of each source that was begun.
    pub fn rows_of_sources(&self) -> Vec<u64> {
        self.sources.iter().map(|source| source.read).collect()
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
    pub fn keep<'a>(&mut self, documents: impl Iterator<Item = &'a Tokens> + Clone, copies: u32) {
        let Some(first) = documents.clone().next() else { return };
        self.read += 1;
        self.kept += 1;
        self.repeats += u64::from(copies - 1);
        self.spelled += u64::from(first.spelled);
        self.straddling += documents.clone().map(|tokens| tokens.straddling).sum::<u64>();
        let method = first.method.map_or("raw text", |method| method.name());
        match self.methods.get_mut(method) {
            Some(count) => *count += 1,
            None => drop(self.methods.insert(method.into(), 1)),
        }
        if let Some(source) = self.sources.last_mut() {
            source.read += 1;
            source.kept += 1;
            for tokens in documents {
                source.tokens += u64::from(copies) * tokens.ids.len() as u64;
                let trained = tokens.trained.iter().filter(|bit| **bit).count();
                source.trained += u64::from(copies) * trained as u64;
            }
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
        if let Some(source) = self.sources.last_mut() {
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

    /// For the manifest and the caller.
    pub fn to_json(&self, writer: &Writer, no_control_tokens: bool) -> Json {
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
                })
            })
            .collect();
        json!({
            "read": self.read,
            "kept": self.kept,
            "dropped": self.dropped,
            "dropped_examples": examples,
            "documents": writer.num_documents(),
            "repeats": self.repeats,
            "duplicate_documents": self.duplicate_documents,
            "tokens": writer.num_tokens(),
            "trained_tokens": writer.trained_tokens(),
            "straddling_tokens": self.straddling,
            "control_token_rows": self.spelled,
            "mask_methods": self.methods,
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
        let remedy = match (self.read, &spec.train_on) {
            (0, _) => "check data.train: the files hold no rows".to_string(),
            (_, TrainOn::All) => "look at the rows dropped, and at data.on_error".to_string(),
            _ => "look at data.train_on and at the rows dropped; a template with {% generation %} tags trains only on what they hold".to_string(),
        };
        Error::new(Kind::Data, place, format!("no token to train on{why}"))
            .wanted("at least one row with a turn or a text to learn")
            .remedy(remedy)
    }
}
