//! One row -> [`Example`], in every dataset format. `format.rs` has the fields of each, `detect.rs` tells them apart.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::detect;
use crate::format::{EXTRA, Format};
use crate::jsonl::Layout;
use crate::lean::Names;
use crate::readers;
use crate::row_error::{Reason, RowError};
use crate::spec::{FormatChoice, Source};

/// A turn of a chat.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// system, developer, user, assistant or tool.
    pub role: String,
    /// All fields as the template sees them, `role` among them.
    pub fields: Map<String, Value>,
    /// Whether it is trained on, where the row says so.
    pub train: Option<bool>,
    /// Factor of its loss.
    pub weight: f32,
}

/// A conversation for the chat template.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    /// The turns.
    pub messages: Vec<Message>,
    /// What the template sees beside them: tools, documents, and so on.
    pub extra: Map<String, Value>,
}

/// What a row holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A conversation.
    Chat(Chat),
    /// Raw text that is read, then raw text that is learned.
    Pair(String, String),
    /// Raw texts one after another, each learned or only read. Control tokens in them are meant.
    Segments(Vec<(String, bool)>),
    /// Raw text, all of it learned.
    Text(String),
    /// Token ids, each learned or only read.
    Tokens(Vec<u32>, Vec<bool>),
}

/// A row, parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// What it holds.
    pub content: Content,
    /// Factor of its loss.
    pub weight: f32,
    /// Fields of the row that are not used.
    pub unused: Vec<String>,
}

type RowResult<T> = std::result::Result<T, RowError>;

/// What a message may be, as templates know it.
pub const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// What ShareGPT's kin call them.
const SHAREGPT_ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
    ("function_call", "assistant"),
    ("observation", "tool"),
    ("function", "tool"),
    ("function_response", "tool"),
];
pub(crate) const SKIP_HINT: &str = "fix the row, or skip bad rows with data.on_error = \"skip\"";

/// Reads rows of one format with one source's own names.
#[derive(Clone, Debug)]
pub struct Parser {
    format: Format,
    source: Source,
    lean: Option<Names>,
}

impl Parser {
    /// A parser; says which of the source's own field names the format does not have.
    pub fn new(format: Format, source: &Source) -> std::result::Result<Parser, String> {
        for ours in source.fields.keys() {
            if !format.fields().iter().any(|(name, _)| name == ours) {
                let known: Vec<&str> = format.fields().iter().map(|(name, _)| *name).collect();
                return Err(format!("format {} has no field {ours:?}; it has {}", format.name(), known.join(", ")));
            }
        }
        let mut parser = Parser { format, source: source.clone(), lean: None };
        parser.lean = parser.lean_names();
        Ok(parser)
    }

    /// The format that it reads.
    pub fn format(&self) -> Format {
        self.format
    }

    /// One row's bytes -> an example, or why not.
    pub fn parse(&self, bytes: &[u8], layout: Layout) -> RowResult<Example> {
        if layout == Layout::Text {
            let text = utf8(bytes)?;
            return Ok(Example { content: Content::Text(text.to_string()), weight: 1.0, unused: Vec::new() });
        }
        if let Some(error) = readers::refusal(bytes) {
            return Err(error);
        }
        let mut row = parse_object(bytes, &|name| self.uses(name))?;
        if self.is_detected() {
            // The first rows decided the format; any other row may be of a kind that must not be learned by heart.
            detect::refuse_preferences(&row)?;
        }
        let name = self.name("loss_weight", &row);
        let weight = take_weight(&mut row, name, "")?;
        let content = match self.format {
            Format::Messages | Format::ShareGpt => self.chat(&mut row)?,
            Format::Alpaca => self.alpaca(&mut row)?,
            Format::PromptCompletion => self.pair(&mut row)?,
            Format::Segments => self.segments(&mut row)?,
            Format::Text => Content::Text(self.text(&mut row, "text")?),
            Format::Tokens => self.tokens(&mut row)?,
        };
        let unused = row.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name).collect();
        Ok(Example { content, weight, unused })
    }

    /// What the row calls our field.
    pub(crate) fn name(&self, ours: &str, row: &Map<String, Value>) -> String {
        if let Some(theirs) = self.source.fields.get(ours) {
            return theirs.clone();
        }
        let names = self.format.fields().iter().find(|(name, _)| *name == ours).map_or(&[][..], |(_, names)| names);
        let present = names.iter().find(|name| row.contains_key(**name));
        present.or(names.first()).map_or(ours, |name| *name).to_string()
    }

    /// Whether nobody but the file's first rows said what its rows are.
    fn is_detected(&self) -> bool {
        self.source.format == FormatChoice::Auto && self.source.fields.is_empty()
    }

    /// The names of chat rows, for reading them without a tree.
    pub(crate) fn lean(&self) -> Option<&Names> {
        self.lean.as_ref()
    }

    fn lean_names(&self) -> Option<Names> {
        let (format, source) = (self.format, &self.source);
        if !matches!(format, Format::Messages | Format::ShareGpt) {
            return None;
        }
        let all = |ours: &str| -> Vec<String> { format.names(ours, source).into_iter().map(String::from).collect() };
        let mut telling = EXTRA.map(String::from).to_vec();
        telling.extend(["system", "tools", "loss_weight"].iter().flat_map(|ours| all(ours)));
        if self.is_detected() {
            telling.extend(detect::TELLING.map(String::from));
        }
        let words =
            source.roles.keys().map(String::as_str).chain(ROLES).chain(SHAREGPT_ROLES.map(|(theirs, _)| theirs));
        Some(Names {
            messages: all("messages"),
            roles: words.filter_map(|theirs| Some((theirs.to_string(), self.plain_role(theirs)?))).collect(),
            role: all("role").into_iter().next()?,
            content: all("content").into_iter().next()?,
            telling,
        })
    }

    /// The index of a role in [`ROLES`], where its message needs no more than its text.
    fn plain_role(&self, theirs: &str) -> Option<u8> {
        if theirs == "function_call" {
            return None; // Its text may be a call.
        }
        let role = self.role(theirs)?;
        ROLES.iter().position(|known| *known == role).map(|index| index as u8)
    }

    /// Whether a field of a row means something.
    fn uses(&self, name: &str) -> bool {
        let usual = |(ours, usual): &(&str, &[&str])| match self.source.fields.get(*ours) {
            Some(theirs) => theirs == name,
            None => usual.contains(&name),
        };
        self.format.fields().iter().any(usual) || EXTRA.contains(&name)
    }

    fn missing(&self, name: &str, row: &Map<String, Value>) -> RowError {
        let have: Vec<String> = row.keys().map(|key| format!("{key:?}")).collect();
        let have = if have.is_empty() { "no fields".to_string() } else { format!("the fields {}", have.join(", ")) };
        RowError::bad(
            "",
            format!("no field {name:?} (the row has {have})"),
            format!("rows of format {}", self.format.name()),
        )
        .remedy("name it in [data.train.fields], or set format")
    }

    /// A field that must be a string.
    fn text(&self, row: &mut Map<String, Value>, ours: &str) -> RowResult<String> {
        let name = self.name(ours, row);
        match row.remove(&name) {
            Some(Value::String(text)) => Ok(text),
            None => Err(self.missing(&name, row)),
            Some(other) => Err(RowError::bad(&name, kind_of(&other), "a string").remedy(SKIP_HINT)),
        }
    }

    /// A field that may be a string, null or absent.
    fn optional_text(&self, row: &mut Map<String, Value>, ours: &str) -> RowResult<String> {
        let name = self.name(ours, row);
        match row.remove(&name) {
            Some(Value::String(text)) => Ok(text),
            Some(Value::Null) | None => Ok(String::new()),
            Some(other) => Err(RowError::bad(&name, kind_of(&other), "a string, null or nothing").remedy(SKIP_HINT)),
        }
    }

    fn chat(&self, row: &mut Map<String, Value>) -> RowResult<Content> {
        let name = self.name("messages", row);
        let list = match row.remove(&name) {
            Some(Value::Array(list)) => list,
            Some(Value::Null) | None => return Err(self.missing(&name, row)),
            Some(other) => {
                let wanted = match self.format {
                    Format::ShareGpt => "a list of {from, value}",
                    _ => "a list of {role, content}",
                };
                return Err(RowError::bad(&name, kind_of(&other), wanted).remedy(SKIP_HINT));
            }
        };
        let mut messages = Vec::with_capacity(list.len() + 1);
        if self.format == Format::ShareGpt {
            let system = self.optional_text(row, "system")?;
            if !system.is_empty() {
                messages.push(plain_message("system", &system));
            }
        }
        for (index, value) in list.into_iter().enumerate() {
            messages.push(self.message(value, &format!("{name}[{index}]"))?);
        }
        Ok(Content::Chat(Chat { messages, extra: self.extra(row)? }))
    }

    fn message(&self, value: Value, place: &str) -> RowResult<Message> {
        let Value::Object(mut given) = value else {
            return Err(RowError::bad(place, kind_of(&value), "an object with a role and a content").remedy(SKIP_HINT));
        };
        let role_name = self.name("role", &given);
        let theirs = match given.remove(&role_name) {
            Some(Value::String(role)) => role,
            Some(other) => {
                return Err(
                    RowError::bad(format!("{place}.{role_name}"), kind_of(&other), "a string").remedy(SKIP_HINT)
                );
            }
            None => {
                return Err(RowError::bad(
                    place,
                    format!("no field {role_name:?}"),
                    "an object with a role and a content",
                )
                .remedy(SKIP_HINT));
            }
        };
        let role = self.role(&theirs).ok_or_else(|| {
            RowError::bad(
                format!("{place}.{role_name}"),
                format!("{theirs:?} is not a role"),
                "system, user, assistant or tool",
            )
            .remedy(format!(
                "fix the row, map the role with [data.train.roles] (\"{theirs}\" = \"assistant\"), or skip bad rows with data.on_error = \"skip\""
            ))
        })?;
        let train = match given.remove("train") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(train)) => Some(train),
            Some(other) => {
                return Err(RowError::bad(format!("{place}.train"), kind_of(&other), "true or false").remedy(SKIP_HINT));
            }
        };
        let train = match (train, take_openai_weight(&mut given, place)?) {
            (Some(true), Some(false)) => {
                let problem = "it says \"train\": true and \"weight\": 0";
                return Err(RowError::bad(place, problem, "one of the two").remedy(SKIP_HINT));
            }
            (None, Some(false)) => Some(false),
            (train, _) => train,
        };
        let weight = take_weight(&mut given, "loss_weight".into(), place)?;
        let content_name = self.name("content", &given);
        let says_more = says_more(&given);
        let content = match given.remove(&content_name) {
            Some(Value::Null) if !says_more => {
                let problem = format!("it is null, and the {role} message has no tool_calls");
                return Err(RowError::bad(
                    format!("{place}.{content_name}"),
                    problem,
                    "a string or a list of text parts",
                )
                .remedy(SKIP_HINT));
            }
            Some(content) => Some(flat_content(content, &format!("{place}.{content_name}"))?),
            None if says_more => None,
            None => {
                return Err(RowError::bad(
                    place,
                    format!("no field {content_name:?}"),
                    "an object with a role and a content",
                )
                .remedy(SKIP_HINT));
            }
        };
        let mut fields = Map::new();
        fields.insert("role".into(), Value::String(role.clone()));
        if let Some(content) = content {
            fields.insert("content".into(), content);
        }
        if theirs == "function_call" && role == "assistant" {
            call_of_text(&mut fields);
        }
        // Tables fill every column: a field without a value is none.
        fields.extend(given.into_iter().filter(|(_, value)| !value.is_null()));
        alias_reasoning(&mut fields);
        Ok(Message { role, fields, train, weight })
    }

    fn role(&self, theirs: &str) -> Option<String> {
        if let Some(role) = self.source.roles.get(theirs) {
            return Some(role.clone());
        }
        if ROLES.contains(&theirs) {
            return Some(theirs.to_string());
        }
        if self.format != Format::ShareGpt {
            return None;
        }
        SHAREGPT_ROLES.iter().find(|(known, _)| *known == theirs).map(|(_, role)| role.to_string())
    }

    fn alpaca(&self, row: &mut Map<String, Value>) -> RowResult<Content> {
        let mut user = self.text(row, "instruction")?;
        let input = self.optional_text(row, "input")?;
        let output = self.text(row, "output")?;
        let system = self.optional_text(row, "system")?;
        if output.trim().is_empty() {
            return Err(RowError::new(Reason::Empty, self.name("output", row), "nothing to learn"));
        }
        if !input.is_empty() {
            user.push_str("\n\n");
            user.push_str(&input);
        }
        let mut messages = Vec::with_capacity(3);
        if !system.is_empty() {
            messages.push(plain_message("system", &system));
        }
        messages.push(plain_message("user", &user));
        messages.push(plain_message("assistant", &output));
        Ok(Content::Chat(Chat { messages, extra: Map::new() }))
    }

    fn pair(&self, row: &mut Map<String, Value>) -> RowResult<Content> {
        let (prompt_name, completion_name) = (self.name("prompt", row), self.name("completion", row));
        if row.get(&prompt_name).is_some_and(Value::is_array) && row.get(&completion_name).is_some_and(Value::is_array)
        {
            return self.chat_pair(row, &prompt_name, &completion_name);
        }
        let prompt = self.text(row, "prompt")?;
        let completion = self.text(row, "completion")?;
        if completion.is_empty() {
            return Err(RowError::new(Reason::Empty, completion_name, "nothing to learn"));
        }
        Ok(Content::Pair(prompt, completion))
    }

    /// Prompt and completion as lists of messages: one chat of which only the completion is trained on.
    fn chat_pair(&self, row: &mut Map<String, Value>, prompt: &str, completion: &str) -> RowResult<Content> {
        let mut messages = Vec::new();
        for (name, learned) in [(prompt, false), (completion, true)] {
            let Some(Value::Array(list)) = row.remove(name) else { continue };
            for (index, value) in list.into_iter().enumerate() {
                let mut message = self.message(value, &format!("{name}[{index}]"))?;
                if !learned {
                    message.train = Some(false);
                }
                messages.push(message);
            }
        }
        Ok(Content::Chat(Chat { messages, extra: self.extra(row)? }))
    }

    /// What the template sees beside the messages. Tools may be JSON in a string.
    fn extra(&self, row: &mut Map<String, Value>) -> RowResult<Map<String, Value>> {
        let mut extra = Map::new();
        let name = self.name("tools", row);
        match row.remove(&name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.trim().is_empty() => {}
            Some(Value::String(text)) => match serde_json::from_str(&text) {
                Ok(tools @ Value::Array(_)) => {
                    extra.insert("tools".into(), tools);
                }
                _ => {
                    return Err(
                        RowError::bad(&name, "a string that is no JSON list", "a list of tools").remedy(SKIP_HINT)
                    );
                }
            },
            Some(tools @ Value::Array(_)) => {
                extra.insert("tools".into(), tools);
            }
            Some(other) => return Err(RowError::bad(&name, kind_of(&other), "a list of tools").remedy(SKIP_HINT)),
        }
        if extra.get("tools").is_some_and(|tools| tools.as_array().is_some_and(Vec::is_empty)) {
            extra.remove("tools");
        }
        if let Some(documents @ Value::Array(_)) = row.remove("documents") {
            extra.insert("documents".into(), documents);
        }
        if let Some(Value::Object(options)) = row.remove("chat_template_kwargs") {
            extra.extend(options);
        }
        Ok(extra)
    }
}

impl Parser {
    fn segments(&self, row: &mut Map<String, Value>) -> RowResult<Content> {
        let name = self.name("segments", row);
        let list = match row.remove(&name) {
            Some(Value::Array(list)) => list,
            Some(Value::Null) | None => return Err(self.missing(&name, row)),
            Some(other) => {
                return Err(RowError::bad(&name, kind_of(&other), "a list of {text, label}").remedy(SKIP_HINT));
            }
        };
        let mut segments = Vec::with_capacity(list.len());
        for (index, segment) in list.into_iter().enumerate() {
            let place = format!("{name}[{index}]");
            let wanted = "{\"text\": a string, \"label\": true (learned) or false (read)}";
            let Value::Object(mut segment) = segment else {
                return Err(RowError::bad(place, kind_of(&segment), wanted).remedy(SKIP_HINT));
            };
            let (text, label) = (self.name("text", &segment), self.name("label", &segment));
            match (segment.remove(&text), segment.remove(&label)) {
                (Some(Value::String(text)), Some(Value::Bool(label))) => {
                    if segment.get("train").and_then(Value::as_bool).is_some_and(|train| train != label) {
                        let problem = format!("it says \"label\": {label} and \"train\": {}", !label);
                        return Err(RowError::bad(place, problem, wanted).remedy(SKIP_HINT));
                    }
                    segments.push((text, label));
                }
                (Some(Value::String(_)), other) => {
                    let problem = other.map_or("it is missing", |other| kind_of(&other));
                    return Err(RowError::bad(format!("{place}.{label}"), problem, wanted).remedy(SKIP_HINT));
                }
                (other, _) => {
                    let problem = other.map_or("it is missing", |other| kind_of(&other));
                    return Err(RowError::bad(format!("{place}.{text}"), problem, wanted).remedy(SKIP_HINT));
                }
            }
        }
        if segments.iter().all(|(text, _)| text.is_empty()) {
            return Err(RowError::new(Reason::Empty, name, "no text"));
        }
        Ok(Content::Segments(segments))
    }

    /// Ids of a tokenizer of the user's own run: what transformers' collators take, labels not shifted.
    fn tokens(&self, row: &mut Map<String, Value>) -> RowResult<Content> {
        let ids_name = self.name("input_ids", row);
        let Some(ids) = numbers(row, &ids_name)? else { return Err(self.missing(&ids_name, row)) };
        let mut list = |ours: &str| -> RowResult<Option<(String, Vec<i64>)>> {
            let name = self.name(ours, row);
            let Some(list) = numbers(row, &name)? else { return Ok(None) };
            if list.len() == ids.len() {
                return Ok(Some((name, list)));
            }
            let problem = format!("it has {} entries, and {ids_name} has {}", list.len(), ids.len());
            Err(RowError::bad(name, problem, "an entry a token").remedy(SKIP_HINT))
        };
        let (labels, mask, attention) = (list("labels")?, list("mask")?, list("attention_mask")?);
        let (mut kept, mut trained) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
        for (index, id) in ids.iter().enumerate() {
            if attention.as_ref().is_some_and(|(_, list)| list[index] == 0) {
                continue; // Filled up by whoever made the row.
            }
            let Ok(id) = u32::try_from(*id) else {
                let problem = format!("{id} is no token id");
                return Err(RowError::bad(format!("{ids_name}[{index}]"), problem, "ids from 0 up").remedy(SKIP_HINT));
            };
            let mut learned = true;
            if let Some((name, list)) = &labels {
                learned = list[index] != -100;
                if learned && list[index] != i64::from(id) {
                    let problem = format!("{} is neither -100 nor the token at its place ({id})", list[index]);
                    return Err(RowError::bad(
                        format!("{name}[{index}]"),
                        problem,
                        "labels as transformers takes them",
                    )
                    .remedy(
                        "do not shift labels: rft shifts them itself; or skip bad rows with data.on_error = \"skip\"",
                    ));
                }
            }
            learned &= mask.as_ref().is_none_or(|(_, list)| list[index] != 0);
            kept.push(id);
            trained.push(learned);
        }
        if kept.is_empty() {
            return Err(RowError::new(Reason::Empty, ids_name, "no tokens"));
        }
        Ok(Content::Tokens(kept, trained))
    }
}

/// A list of whole numbers (or of true and false, as 1 and 0); none where the field is missing or null.
fn numbers(row: &mut Map<String, Value>, name: &str) -> RowResult<Option<Vec<i64>>> {
    let list = match row.remove(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(RowError::bad(name, kind_of(&other), "a list of whole numbers").remedy(SKIP_HINT)),
    };
    let number = |(index, value): (usize, &Value)| match value {
        Value::Bool(flag) => Ok(i64::from(*flag)),
        value => value.as_i64().ok_or_else(|| {
            RowError::bad(format!("{name}[{index}]"), format!("{} is no whole number", kind_of(value)), "whole numbers")
                .remedy(SKIP_HINT)
        }),
    };
    list.iter().enumerate().map(number).collect::<RowResult<Vec<i64>>>().map(Some)
}

/// Whether a message says something beside its content: calls of tools, or reasoning.
fn says_more(message: &Map<String, Value>) -> bool {
    let calls = message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    let thought = |name: &&str| message.get(*name).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty());
    calls || ["reasoning_content", "thinking", "reasoning"].iter().any(thought)
}

fn utf8(bytes: &[u8]) -> RowResult<&str> {
    std::str::from_utf8(bytes).map_err(|e| {
        RowError::bad("", format!("not UTF-8 at byte {} of the line", e.valid_up_to()), "text in UTF-8")
            .remedy("convert the file to UTF-8, or skip bad rows with data.on_error = \"skip\"")
    })
}

/// A row as a JSON object. A field that is nested too deeply for a tree is left out where nothing uses it.
pub(crate) fn parse_object(bytes: &[u8], uses: &dyn Fn(&str) -> bool) -> RowResult<Map<String, Value>> {
    let text = utf8(bytes)?;
    match serde_json::from_str(text) {
        Err(e) if e.to_string().starts_with("recursion limit") => {
            let fields: BTreeMap<String, Box<RawValue>> = match serde_json::from_str(text) {
                Ok(fields) => fields,
                Err(_) => {
                    return Err(
                        RowError::bad("", "the row is nested too deeply", "a JSON object a line").remedy(SKIP_HINT)
                    );
                }
            };
            let mut row = Map::new();
            for (name, raw) in fields {
                match serde_json::from_str(raw.get()) {
                    Ok(value) => {
                        row.insert(name, value);
                    }
                    Err(_) if uses(&name) => {
                        return Err(RowError::bad(name, "it is nested over 128 levels deep", "less").remedy(SKIP_HINT));
                    }
                    Err(_) => {}
                }
            }
            Ok(row)
        }
        Ok(Value::Object(row)) => Ok(row),
        Ok(other) => {
            Err(RowError::bad("", kind_of(&other).replacen("it", "the row", 1), "a JSON object").remedy(SKIP_HINT))
        }
        Err(e) => {
            if let Some(text) = without_nan(text, uses)? {
                return parse_object(text.as_bytes(), uses);
            }
            let what = e.to_string();
            // serde_json ends with " at line 1 column N"; the line is always 1 here and only confuses.
            let what = what.split(" at line ").next().unwrap_or(&what);
            let problem = format!("not valid JSON: {what} at column {}", e.column());
            Err(RowError::bad("", problem, "a JSON object a line").remedy(SKIP_HINT))
        }
    }
}

/// The row with null for each NaN and Infinity that stands in a field which nothing uses: Python writes them, and JSON has
/// none. None where there is none.
///
/// # Errors
/// A used field holds one.
fn without_nan(text: &str, uses: &dyn Fn(&str) -> bool) -> RowResult<Option<String>> {
    const NUMBERS: [&str; 4] = ["NaN", "-NaN", "Infinity", "-Infinity"];
    let (bytes, mut at, mut depth) = (text.as_bytes(), 0, 0usize);
    // The last string at the top level before a colon, as it stands.
    let (mut string, mut key) = (0..0, 0..0);
    let (mut made, mut done) = (String::new(), 0);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => {
                let start = at;
                at += 1;
                while bytes.get(at).is_some_and(|byte| *byte != b'"') {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                string = start..(at + 1).min(bytes.len());
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b':' if depth == 1 => key = string.clone(),
            b'N' | b'I' | b'-' => {
                let found = NUMBERS.iter().find(|number| bytes[at..].starts_with(number.as_bytes()));
                if let Some(number) = found {
                    let name: String =
                        text.get(key.clone()).and_then(|raw| serde_json::from_str(raw).ok()).unwrap_or_default();
                    if uses(&name) {
                        let problem = format!("{number} is in it, which JSON does not have");
                        return Err(RowError::bad(name, problem, "numbers of JSON, or null").remedy(SKIP_HINT));
                    }
                    made.push_str(&text[done..at]);
                    made.push_str("null");
                    at += number.len();
                    done = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    Ok((done > 0).then(|| made + &text[done..]))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "it is null",
        Value::Bool(_) => "it is true or false",
        Value::Number(_) => "it is a number",
        Value::String(_) => "it is a string",
        Value::Array(_) => "it is a list",
        Value::Object(_) => "it is an object",
    }
}

fn take_weight(fields: &mut Map<String, Value>, name: String, place: &str) -> RowResult<f32> {
    match fields.remove(&name) {
        None | Some(Value::Null) => Ok(1.0),
        Some(value) => match value.as_f64() {
            // A weight that is not 0 must not become 0 in 32 bits: then the row would be left out.
            Some(weight) if weight > 0.0 && weight as f32 == 0.0 => {
                let field = if place.is_empty() { name } else { format!("{place}.{name}") };
                let problem = format!("{value} is too small: in 32 bits it is 0");
                Err(RowError::bad(field, problem, "0, or a weight that matters").remedy(SKIP_HINT))
            }
            Some(weight) if weight >= 0.0 && (weight as f32).is_finite() => Ok(weight as f32),
            _ => {
                let field = if place.is_empty() { name } else { format!("{place}.{name}") };
                Err(RowError::bad(field, format!("{value} is not a weight"), "a number from 0 up").remedy(SKIP_HINT))
            }
        },
    }
}

/// OpenAI's `weight` of a message, 0 or 1: whether it is trained on. What is no number is the template's.
fn take_openai_weight(fields: &mut Map<String, Value>, place: &str) -> RowResult<Option<bool>> {
    let Some(Value::Number(number)) = fields.get("weight") else { return Ok(None) };
    let train = match number.as_f64() {
        Some(0.0) => false,
        Some(1.0) => true,
        _ => {
            let problem = format!("{number} is neither 0 (not trained on) nor 1");
            return Err(RowError::bad(format!("{place}.weight"), problem, "0 or 1; any factor as \"loss_weight\"")
                .remedy(SKIP_HINT));
        }
    };
    fields.remove("weight");
    Ok(Some(train))
}

/// A list of text parts becomes the text that templates make of it; other parts are refused.
fn flat_content(content: Value, place: &str) -> RowResult<Value> {
    match content {
        Value::String(_) | Value::Null => Ok(content),
        Value::Array(parts) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                match part {
                    Value::String(piece) => text.push_str(piece),
                    Value::Object(part) => match (part.get("type"), part.get("text")) {
                        (None, Some(Value::String(piece))) => text.push_str(piece),
                        (Some(Value::String(kind)), Some(Value::String(piece))) if kind == "text" => {
                            text.push_str(piece);
                        }
                        (kind, _) => {
                            let kind = kind.map_or("no type".to_string(), |kind| format!("type {kind}"));
                            return Err(RowError::bad(format!("{place}[{index}]"), kind, "parts of type \"text\"")
                                .remedy(SKIP_HINT));
                        }
                    },
                    other => {
                        return Err(RowError::bad(
                            format!("{place}[{index}]"),
                            kind_of(other),
                            "parts of type \"text\"",
                        )
                        .remedy(SKIP_HINT));
                    }
                }
            }
            Ok(Value::String(text))
        }
        other => Err(RowError::bad(place, kind_of(&other), "a string or a list of text parts").remedy(SKIP_HINT)),
    }
}

pub(crate) fn plain_message(role: &str, content: &str) -> Message {
    let mut fields = Map::new();
    fields.insert("role".into(), role.into());
    fields.insert("content".into(), content.into());
    Message { role: role.into(), fields, train: None, weight: 1.0 }
}

/// ShareGPT's `function_call` turns hold `{"name", "arguments"}` as text: they become a tool call.
fn call_of_text(fields: &mut Map<String, Value>) {
    let Some(Value::String(text)) = fields.get("content") else { return };
    let Ok(Value::Object(call)) = serde_json::from_str::<Value>(text) else { return };
    if !call.contains_key("name") {
        return;
    }
    fields.insert("content".into(), Value::String(String::new()));
    fields.insert("tool_calls".into(), json!([{"type": "function", "function": call}]));
}

/// `transformers` hands reasoning to templates under all names that they use.
fn alias_reasoning(fields: &mut Map<String, Value>) {
    let found = ["reasoning_content", "thinking", "reasoning"]
        .iter()
        .find_map(|name| fields.get(*name).filter(|value| !value.is_null()))
        .cloned();
    if let Some(reasoning) = found {
        if !fields.contains_key("thinking") {
            fields.insert("thinking".into(), reasoning.clone());
        }
        fields.insert("reasoning_content".into(), reasoning);
    }
}
