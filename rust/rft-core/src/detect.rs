//! Which format a file's rows have, with the evidence, or what to write where none fits.

use serde_json::{Map, Value};

use crate::example::{Parser, parse_object};
use crate::format::Format;
use crate::readers;
use crate::row_error::RowError;
use crate::spec::Source;

type RowResult<T> = std::result::Result<T, RowError>;

/// The format of a file's first rows and a sentence that says why.
///
/// # Errors
/// What is there and what to write, where no format fits.
pub fn detect(rows: &[Map<String, Value>], source: &Source) -> std::result::Result<(Format, String), RowError> {
    check_fields(rows.first(), source)?;
    if let Some(row) = rows.first().filter(|_| source.fields.is_empty()) {
        refuse_preferences(row)?;
    }
    for format in Format::ALL {
        let Ok(parser) = Parser::new(format, source) else { continue };
        if let Some(evidence) = rows.first().and_then(|row| parser.evidence(row)) {
            let agree = rows.iter().filter(|row| parser.evidence(row).is_some()).count();
            let sample = match (agree, rows.len()) {
                (1, 1) => "the first row has".to_string(),
                (a, n) if a == n => format!("the first {n} rows have"),
                (a, n) => format!("{a} of the first {n} rows have"),
            };
            return Ok((format, format!("{sample} {evidence}")));
        }
    }
    Err(unknown_format(rows.first()))
}

/// Columns by which rows for other losses are known.
pub(crate) const OF_OTHER_LOSSES: [&str; 5] = ["chosen", "rejected", "label", "completions", "labels"];

/// Whether a value says good or bad, in any of the ways that files write it.
fn is_verdict(value: &Value) -> bool {
    match value {
        Value::Bool(_) => true,
        Value::Number(number) => matches!(number.as_i64(), Some(0 | 1)),
        Value::String(text) => matches!(text.to_lowercase().as_str(), "true" | "false" | "0" | "1"),
        _ => false,
    }
}

/// Fields without which a row is none of those that [`refuse_preferences`] refuses.
pub(crate) const TELLING: [&str; 3] = ["chosen", "completion", "completions"];

/// Rows for other losses must not be trained as if all of their answers were right.
pub(crate) fn refuse_preferences(row: &Map<String, Value>) -> RowResult<()> {
    let has = |name: &str| row.get(name).is_some_and(|value| !value.is_null());
    let plain = "format = \"prompt_completion\"";
    let (kind, fields, remedy) = if has("chosen") && has("rejected") {
        let chosen = if row["chosen"].is_array() && !has("prompt") {
            "format = \"messages\", fields = { messages = \"chosen\" }".to_string()
        } else {
            format!("{plain}, fields = {{ completion = \"chosen\" }}")
        };
        (
            "preference pairs",
            "\"chosen\" and \"rejected\"",
            format!("to train on the chosen answers alone, set {chosen}"),
        )
    } else if has("completion") && row.get("label").is_some_and(is_verdict) {
        let remedy = format!("take out the rows whose label is false, or set {plain} to train on all of them");
        ("answers marked as good or bad", "\"completion\" and a \"label\"", remedy)
    } else if row.get("completions").is_some_and(Value::is_array) && row.get("labels").is_some_and(Value::is_array) {
        let remedy = "convert the rows to {prompt, completion}".to_string();
        ("steps marked as right or wrong", "\"completions\" and \"labels\"", remedy)
    } else {
        return Ok(());
    };
    let problem = format!("the row has {fields}: {kind}, for a loss that this version does not have");
    Err(RowError::bad("", problem, "rows to learn by heart: chats, prompt and completion, or text").remedy(remedy))
}

/// The source's own field names must be fields of a format, and in the row.
fn check_fields(row: Option<&Map<String, Value>>, source: &Source) -> RowResult<()> {
    if source.fields.is_empty() {
        return Ok(());
    }
    if Format::ALL.into_iter().all(|format| Parser::new(format, source).is_err()) {
        let ours: Vec<String> = source.fields.keys().map(|ours| format!("{ours:?}")).collect();
        let names = |format: Format| {
            let names: Vec<&str> = format.fields().iter().map(|(name, _)| *name).collect();
            format!("{} ({})", format.name(), names.join(", "))
        };
        let formats: Vec<String> = Format::ALL.into_iter().map(names).collect();
        let problem = format!("[data.train.fields] names {}: no format has all of these", ours.join(", "));
        return Err(RowError::bad("", problem, format!("the fields of one format: {}", formats.join("; "))));
    }
    let Some(row) = row else { return Ok(()) };
    for (ours, theirs) in &source.fields {
        // These two are fields of a message, and tools and weights may be in some rows only.
        let optional =
            ["role", "content", "tools", "loss_weight", "system", "input", "label", "labels", "mask", "attention_mask"]
                .contains(&ours.as_str());
        if !optional && !row.contains_key(theirs) {
            let have: Vec<String> = row.keys().map(|key| format!("{key:?}")).collect();
            let problem = format!("no field {theirs:?}, which [data.train.fields] names as {ours}");
            return Err(RowError::bad("", problem, format!("one of the row's fields: {}", have.join(", "))));
        }
    }
    Ok(())
}

impl Parser {
    /// What in a row speaks for this format.
    fn evidence(&self, row: &Map<String, Value>) -> Option<String> {
        let string = |ours: &str| row.get(&self.name(ours, row)).is_some_and(Value::is_string);
        match self.format() {
            Format::Messages | Format::ShareGpt => {
                let name = self.name("messages", row);
                let first = row.get(&name)?.as_array()?.first()?.as_object()?;
                let (role, content) = (self.name("role", first), self.name("content", first));
                first.get(&role)?.as_str()?;
                if !first.contains_key(&content) && !first.contains_key("tool_calls") {
                    return None;
                }
                Some(format!("{name:?}, a list of {{{role}, {content}}}: chats through the chat template"))
            }
            Format::Alpaca => {
                let (ask, answer) = (self.name("instruction", row), self.name("output", row));
                (string("instruction") && string("output")).then(|| {
                    format!(
                        "{ask:?} and {answer:?}: user and assistant turns through the chat template \
                         (format = \"prompt_completion\" with [fields] prompt = {ask:?}, completion = {answer:?} trains on raw text)"
                    )
                })
            }
            Format::PromptCompletion => {
                let (prompt, completion) = (self.name("prompt", row), self.name("completion", row));
                let list = |name: &str| row.get(name).is_some_and(Value::is_array);
                if list(&prompt) && list(&completion) {
                    return Some(format!(
                        "{prompt:?} and {completion:?} as lists of messages: chats of which the completion is trained on"
                    ));
                }
                (string("prompt") && string("completion")).then(|| {
                    format!(
                        "{prompt:?} and {completion:?}: raw text without the chat template \
                         (format = \"alpaca\" with [fields] instruction = {prompt:?}, output = {completion:?} makes chats of them)"
                    )
                })
            }
            Format::Segments => {
                let name = self.name("segments", row);
                let first = row.get(&name)?.as_array()?.first()?.as_object()?;
                let (text, label) = (self.name("text", first), self.name("label", first));
                (first.get(&text)?.is_string() && first.get(&label)?.is_boolean()).then(|| {
                    format!("{name:?}, a list of {{{text}, {label}}}: raw text without the chat template, trained where {label} is true")
                })
            }
            Format::Tokens => {
                let name = self.name("input_ids", row);
                row.get(&name)?.as_array()?.first()?.as_i64()?;
                let trained = ["labels", "mask"].into_iter().map(|ours| self.name(ours, row));
                let trained: Vec<String> = trained.filter(|name| row.get(name).is_some_and(Value::is_array)).collect();
                Some(match trained.first() {
                    Some(labels) => format!("{name:?} and {labels:?}: tokens as they are"),
                    None => format!("{name:?}: tokens as they are, all of them trained on"),
                })
            }
            Format::Text => {
                string("text").then(|| format!("{:?}: plain text, all of it trained on", self.name("text", row)))
            }
        }
    }
}

fn unknown_format(row: Option<&Map<String, Value>>) -> RowError {
    let wanted = "\"messages\" (or \"conversations\"), \"instruction\" + \"output\", \"prompt\" + \"completion\", \"segments\", \"text\", or \"input_ids\"";
    let Some(row) = row else {
        return RowError::bad("", "no row to tell the format from", wanted);
    };
    let names: Vec<String> = row.keys().map(|key| format!("{key:?}")).collect();
    let problem = match names.len() {
        0 => "the row has no fields".to_string(),
        1 => format!("the row has the field {}: no known format", names[0]),
        _ => format!("the row has the fields {}: no known format", names.join(", ")),
    };
    let texts: Vec<&String> = row.iter().filter(|(_, value)| value.is_string()).map(|(key, _)| key).collect();
    let remedy = match texts.as_slice() {
        [] => "convert the rows to one of these".to_string(),
        [text] => format!("say which field is the text: [data.train.fields] text = {text:?}"),
        [first, second, ..] => {
            let (ask, answer) =
                (likely(&texts, &ASKING).unwrap_or(first), likely(&texts, &ANSWERING).unwrap_or(second));
            format!(
                "say what the fields are, under [data.train.fields]: instruction = {ask:?}, output = {answer:?} for chats through the template, or prompt = {ask:?}, completion = {answer:?} for raw text"
            )
        }
    };
    RowError::bad("", problem, wanted).remedy(remedy)
}

const ASKING: [&str; 6] = ["question", "problem", "query", "prompt", "instruction", "input"];
const ANSWERING: [&str; 7] = ["answer", "solution", "response", "completion", "output", "target", "canonical_solution"];

/// The first of the usual names that is there.
fn likely<'a>(texts: &[&'a String], names: &[&str]) -> Option<&'a String> {
    names.iter().find_map(|name| texts.iter().copied().find(|text| text == name))
}

/// A row for [`detect`], which must be a JSON object.
pub fn sample_row(bytes: &[u8]) -> RowResult<Map<String, Value>> {
    match readers::refusal(bytes) {
        Some(error) => Err(error),
        None => parse_object(bytes, &|_| false),
    }
}
