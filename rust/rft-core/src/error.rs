//! One error type: what failed, where, what was given, what is wanted, what to do.

use std::fmt;
use std::io;
use std::path::Path;

/// What kind of thing failed; the binding hands it on as a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A row or a file of the user's data.
    Data,
    /// A chat template, or a chat it does not take.
    Template,
    /// A tokenizer.json.
    Tokenizer,
    /// A prepared set on disk.
    Store,
    /// Reading or writing failed.
    Io,
    /// The disk is full.
    Full,
    /// An argument of a call, so a fault of the caller.
    Argument,
}

impl Kind {
    /// The word that Python sees.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Data => "data",
            Kind::Template => "template",
            Kind::Tokenizer => "tokenizer",
            Kind::Store => "store",
            Kind::Io => "io",
            Kind::Full => "full",
            Kind::Argument => "argument",
        }
    }
}

/// An error that is told to the user as one block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.line())]
pub struct Error {
    /// What kind of thing failed.
    pub kind: Kind,
    /// Place or subject: `train.jsonl:412, field "messages[1].role"`.
    pub place: String,
    /// What was given or happened.
    pub problem: String,
    /// What is accepted; may be empty.
    pub wanted: String,
    /// The next thing to try; may be empty.
    pub remedy: String,
}

/// The text with what a terminal would obey, or what would reorder or hide text, as its number; line ends and tabs are left.
/// Names of files and words from data reach the terminal through here.
pub fn visible(text: &str) -> String {
    let unsafe_to_show = |c: char| match c {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{feff}' => true,
        '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}' => true,
        _ => c.is_control(),
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c as u32 {
            _ if !unsafe_to_show(c) => out.push(c),
            code @ 0..0x100 => out.push_str(&format!("\\x{code:02x}")),
            code => out.push_str(&format!("\\u{code:04x}")),
        }
    }
    out
}

/// Result of the core.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with its place and problem; see [`Error::wanted`] and [`Error::remedy`] for the rest.
    pub fn new(kind: Kind, place: impl Into<String>, problem: impl fmt::Display) -> Self {
        Error { kind, place: place.into(), problem: problem.to_string(), wanted: String::new(), remedy: String::new() }
    }

    /// Says what is accepted.
    pub fn wanted(mut self, wanted: impl Into<String>) -> Self {
        self.wanted = wanted.into();
        self
    }

    /// Says what to do.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    /// An input/output failure at a path; a full disk is a kind of its own.
    pub fn io(path: &Path, doing: &str, error: &io::Error) -> Self {
        let place = path.display().to_string();
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                let problem = format!("no space left while {doing} ({error})");
                Error::new(Kind::Full, place, problem)
                    .remedy("free some space, or set data.store to a folder on another disk")
            }
            io::ErrorKind::NotFound => Error::new(Kind::Io, place, "no such file or folder"),
            _ => Error::new(Kind::Io, place, format!("{doing} failed: {error}")),
        }
    }

    fn line(&self) -> String {
        let mut text = match self.place.as_str() {
            "" => self.problem.clone(),
            place => format!("{place}: {}", self.problem),
        };
        for (name, part) in [("wanted", &self.wanted), ("do", &self.remedy)] {
            if !part.is_empty() {
                text.push_str(&format!("\n{name}: {part}"));
            }
        }
        text
    }
}
