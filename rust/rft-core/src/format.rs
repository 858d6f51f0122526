//! The kinds of rows, and the fields that each reads. `example.rs` reads them, `detect.rs` tells them apart.

use crate::spec::Source;

/// What kind of rows a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `{"messages": [{"role", "content"}]}`.
    Messages,
    /// `{"conversations": [{"from", "value"}]}`.
    ShareGpt,
    /// `{"instruction", "input", "output"}`.
    Alpaca,
    /// `{"prompt", "completion"}`.
    PromptCompletion,
    /// `{"segments": [{"text", "label"}]}`.
    Segments,
    /// `{"text"}`.
    Text,
    /// `{"input_ids", "labels"}`.
    Tokens,
}

impl Format {
    pub(crate) const ALL: [Format; 7] = [
        Format::Messages,
        Format::ShareGpt,
        Format::Alpaca,
        Format::PromptCompletion,
        Format::Segments,
        Format::Text,
        Format::Tokens,
    ];

    /// The name in configs.
    pub fn name(self) -> &'static str {
        match self {
            Format::Messages => "messages",
            Format::ShareGpt => "sharegpt",
            Format::Alpaca => "alpaca",
            Format::PromptCompletion => "prompt_completion",
            Format::Segments => "segments",
            Format::Text => "text",
            Format::Tokens => "tokens",
        }
    }

    /// The format of a name.
    pub fn from_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Our field names, and what they are called where the config says nothing.
    pub(crate) fn fields(self) -> &'static [(&'static str, &'static [&'static str])] {
        const TOOLS: &[&str] = &["tools"];
        const WEIGHT: &[&str] = &["loss_weight"];
        match self {
            Format::Messages => &[
                ("messages", &["messages", "conversations", "conversation"]),
                ("role", &["role"]),
                ("content", &["content"]),
                ("tools", TOOLS),
                ("loss_weight", WEIGHT),
            ],
            Format::ShareGpt => &[
                ("messages", &["conversations", "conversation", "messages"]),
                ("role", &["from"]),
                ("content", &["value"]),
                ("system", &["system"]),
                ("tools", TOOLS),
                ("loss_weight", WEIGHT),
            ],
            Format::Alpaca => &[
                ("instruction", &["instruction"]),
                ("input", &["input"]),
                ("output", &["output", "response"]),
                ("system", &["system"]),
                ("loss_weight", WEIGHT),
            ],
            Format::PromptCompletion => {
                &[("prompt", &["prompt"]), ("completion", &["completion"]), ("tools", TOOLS), ("loss_weight", WEIGHT)]
            }
            Format::Segments => &[
                ("segments", &["segments"]),
                ("text", &["text"]),
                ("label", &["label", "train"]),
                ("loss_weight", WEIGHT),
            ],
            Format::Text => &[("text", &["text"]), ("loss_weight", WEIGHT)],
            Format::Tokens => &[
                ("input_ids", &["input_ids", "tokens"]),
                ("labels", &["labels"]),
                ("mask", &["loss_mask", "assistant_masks", "completion_mask"]),
                ("attention_mask", &["attention_mask"]),
                ("loss_weight", WEIGHT),
            ],
        }
    }

    /// What the row may call our field.
    pub(crate) fn names<'a>(self, ours: &str, source: &'a Source) -> Vec<&'a str> {
        match source.fields.get(ours) {
            Some(theirs) => vec![theirs],
            None => self.fields().iter().find(|(name, _)| *name == ours).map_or(vec![], |(_, names)| names.to_vec()),
        }
    }

    /// Names of the columns that rows of this format may have: what a file of columns is read for.
    pub(crate) fn columns(self, source: &Source) -> Vec<String> {
        let ours = self.fields().iter().map(|(ours, _)| *ours).filter(|ours| !OF_MESSAGES.contains(ours));
        let names = ours.flat_map(|ours| self.names(ours, source));
        names.chain(EXTRA).map(str::to_string).collect()
    }

    /// Those of them that may hold numbers, lists or objects: JSON, where a file has nothing but text.
    pub(crate) fn json_columns(self, source: &Source) -> Vec<String> {
        let ours = ["messages", "tools", "loss_weight", "segments", "input_ids", "labels", "mask", "attention_mask"]
            .into_iter();
        ours.flat_map(|ours| self.names(ours, source)).chain(EXTRA).map(str::to_string).collect()
    }

    /// Whether columns of these names can hold rows of this format.
    pub(crate) fn has_columns(self, source: &Source, names: &[String]) -> bool {
        let needed: &[&str] = match self {
            Format::Messages | Format::ShareGpt => &["messages"],
            Format::Alpaca => &["instruction", "output"],
            Format::PromptCompletion => &["prompt", "completion"],
            Format::Segments => &["segments"],
            Format::Text => &["text"],
            Format::Tokens => &["input_ids"],
        };
        needed.iter().all(|ours| self.names(ours, source).iter().any(|name| names.iter().any(|known| known == name)))
    }
}

/// Fields that are a message's, not the row's.
pub(crate) const OF_MESSAGES: [&str; 2] = ["role", "content"];
/// What templates may see of a row beside its messages and tools: see `Parser::extra`.
pub(crate) const EXTRA: [&str; 2] = ["documents", "chat_template_kwargs"];
